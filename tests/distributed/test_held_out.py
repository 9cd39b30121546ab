"""Responses to held-out prompts: the same in calls of any size, which ranks with different limits agree on."""

import dataclasses

import numpy as np
import torch

from megarlhf import config
from megarlhf.data.prompts import PromptSet
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.held_out import respond
from megarlhf.experience.sampler import SamplerConfig
from megarlhf.models.build import build
from megarlhf.train import score, scoring
from tests.distributed.layouts import LLAMA, layout
from tests.scoring import train_tokenizer

PROMPTS, SAMPLES, SLOTS = 11, 2, 3


def answered(path, limits):
    """(calls' rows, scores and lengths) for each tuple of the ranks' limits"""
    tokenizer, found = load_tokenizer(path), []
    ids = [np.arange(10, 13 + row % 4) for row in range(PROMPTS)]
    prompts = PromptSet(ids, [tokenizer.decode(row.tolist()) for row in ids], [b"{}"] * PROMPTS)
    sources = config.from_dict(score.ScoringConfig, {"sources": [{"verify": "regex", "pattern": "e"}]}, "test")
    draw = SamplerConfig(response_length=6, stop_at_eos=True, samples_per_prompt=SAMPLES, micro_batch_size=SLOTS)
    with layout() as topology:
        architecture = dataclasses.replace(LLAMA, vocab_size=300)
        engine = build("actor", architecture, topology, micro_batch_tokens=64, dtype="fp32", seed=3)
        scorer = scoring.build_scorer(
            sources, topology, tokenizer, micro_batch_tokens=64, dtype="fp32", records=prompts.records
        )
        for limit in limits:
            calls = []
            result = respond(
                engine, scorer, prompts, draw, length=8, source=None, seed=1, eos_id=2, most_rows=limit[topology.rank],
                on_batch=lambda rollout, _, calls=calls: calls.append(len(rollout.mask)),
            )  # fmt: skip
            found.append((calls, result))
    return found


def test_ranks_agree_on_how_much_they_score_at_once(ranks, tmp_path):
    path = train_tokenizer(tmp_path / "tokenizer")
    # 6 prompts a rank; 4 rounds of 3 slots are 12 responses; a prompt's 2 are never divided
    limits = [(10**6, 10**6), (10**6, 7), (3, 10**6), (1, 1)]
    sizes = [[12], [6, 6], [2] * 6, [2] * 6]
    for found in ranks.run(2, answered, path, limits):
        assert [calls for calls, _ in found] == sizes
        assert all(torch.equal(result, found[0][1]) for _, result in found) and found[0][1].shape == (11, 2, 2)
