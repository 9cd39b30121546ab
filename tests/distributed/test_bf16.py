"""bfloat16, the default of programs, for every family: training follows fp32, the sampler agrees with the trainer
within the gate's tolerance, and training can go on from a checkpoint of fp32 weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megarlhf import checkpoint
from megarlhf.algorithms.supervised import sft_loss
from megarlhf.batch import Signals
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.experience import gate
from megarlhf.experience.gate import GateConfig
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, FALCON, GEMMA, GEMMA2, GPT2, LLAMA, NEOX, OLMO2, examples, layout, share
from tests.distributed.test_sampler import P, R, make_prompts

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX, "falcon": FALCON, "gemma": GEMMA,
            "gemma2": GEMMA2, "olmo2": OLMO2, "window": dataclasses.replace(LLAMA, sliding_window=5)}  # fmt: skip


def train(cases):
    """[(family, dtype, ParallelConfig fields)] -> the losses of three updates, and what the gate measures before and
    after them."""
    results = []
    for family, dtype, sizes in cases:
        architecture = dataclasses.replace(FAMILIES[family], init_std=0.1)  # logits that rounding can change
        with layout(**sizes) as topology:
            engine = build("actor", architecture, topology, micro_batch_tokens=48, dtype=dtype, optimizer=ADAM,
                           total_steps=3, seed=7)  # fmt: skip
            kinds = {parameter.dtype for module in engine.modules for parameter in module.parameters()}
            assert kinds == {engine.config.params_dtype}, kinds
            fresh = measure(engine)
            losses = [engine.step(share(examples(seed=step), topology), sft_loss)["loss"].value for step in range(3)]
            results.append((losses, fresh, measure(engine)))
    return results


def measure(engine):
    if engine.config.params_dtype == torch.float32:
        return {}
    sampler = Sampler(engine, SamplerConfig(response_length=R, micro_batch_size=4), prompt_length=P, seed=1)
    rollout = sampler.sample(make_prompts(8))
    logprobs = engine.forward(rollout)["logprobs"]
    signals = Signals(logprobs=logprobs, ref_logprobs=logprobs, values=logprobs)
    return gate.run_gate(rollout, signals, actor=engine, at_start=True, temperature=1.0, config=GateConfig())


CASES = {
    1: [(family, {}) for family in FAMILIES],
    4: [
        ("gpt2", dict(tensor=2, pipeline=2)),  # tied embeddings at both ends
        ("llama", dict(tensor=2, sequence=True)),
    ],
}


@pytest.fixture(scope="module")
def exact(ranks):
    (results,) = ranks.run(1, train, [(family, "fp32", {}) for family in FAMILIES])
    return {family: losses for family, (losses, *_) in zip(FAMILIES, results, strict=True)}


@pytest.mark.parametrize("world_size", CASES)
def test_training_follows_fp32_and_the_sampler_the_trainer(ranks, exact, world_size):
    for answer in ranks.run(world_size, train, [(family, "bf16", sizes) for family, sizes in CASES[world_size]]):
        for (family, sizes), (losses, fresh, trained) in zip(CASES[world_size], answer, strict=True):
            assert losses == pytest.approx(exact[family], rel=5e-3), (family, sizes)
            assert trained["gate/sampler"] < 0.01, (family, sizes, trained)
            if world_size == 1:  # two roundings in the same places; logits rounded to bfloat16 would give 2e-3
                assert fresh["gate/sampler"] < 5e-4, (family, fresh)


def go_on(directory, family):
    """Losses of two updates from the same fp32 checkpoint, in fp32 and in bf16."""
    losses = []
    with layout() as topology:
        engine = build("actor", FAMILIES[family], topology, micro_batch_tokens=96, dtype="fp32", seed=1)
        checkpoints = Checkpoints(Path(directory), CheckpointConfig())
        checkpoints.save(1, {"actor": engine}, {}, FAMILIES[family].save)
        for dtype in ("fp32", "bf16"):
            engine = build("actor", FAMILIES[family], topology, micro_batch_tokens=96, dtype=dtype, optimizer=ADAM,
                           total_steps=2, awaits_checkpoint=True)  # fmt: skip
            checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=True)
            losses.append([engine.step(examples(seed=step), sft_loss)["loss"].value for step in range(2)])
    return losses


def test_a_checkpoint_of_fp32_weights_is_gone_on_with(ranks, tmp_path):
    ((exact, rounded),) = ranks.run(1, go_on, tmp_path, "gpt2")
    assert rounded == pytest.approx(exact, rel=5e-3) and exact[0] != exact[1]
