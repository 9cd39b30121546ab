"""The inputs of the golden arrays (tests/unit/goldens/make_online.py) as our dataclasses: 12 ragged responses in three
groups of four. What stands outside the mask is NaN, and six more columns are padding."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.policy_loss import policy_loss
from megarlhf.batch import Batch, Experience, Rollout, Scores, Signals


def load(name):
    with np.load(Path(__file__).parent / "unit" / "goldens" / f"online_{name}.npz") as file:
        return {key: torch.tensor(file[key]) for key in file}


GIVEN = load("inputs")
ROWS, COLUMNS = GIVEN["mask"].shape
LIMIT = int(GIVEN["limit"])  # our responses have so many columns
MASK = torch.nn.functional.pad(GIVEN["mask"], (0, LIMIT - COLUMNS))
SEQUENCES = dict(tokens=torch.zeros(ROWS, 1 + LIMIT, dtype=torch.int64), mask=MASK, prompt_len=1)
NO_KL = KLConfig(coef=0.0)
ASYMMETRIC = dict(clip_range=0.2, clip_range_high=0.28)


def wide(values, outside=math.nan):
    """(B, COLUMNS) or (B,) -> (B, LIMIT), `outside` outside the mask."""
    values = values[:, None].expand(ROWS, LIMIT) if values.dim() == 1 else values
    values = torch.nn.functional.pad(values, (0, LIMIT - values.shape[1]))
    return torch.where(MASK, values, outside)


def batch_of(**extra):
    signals = Signals(wide(GIVEN["old"]), wide(GIVEN["ref"]), wide(GIVEN["values"]))
    ids = {name: GIVEN["group_ids"] for name in ("sequence_ids", "prompt_ids", "group_ids")}
    rollout = Rollout(**SEQUENCES, **ids, logprobs=wide(GIVEN["sampler"]))
    weights = tuple(GIVEN["weights"].tolist())
    scores = Scores(GIVEN["scores"], MASK, MASK[:, 0], by_source=GIVEN["by_source"], weights=weights)
    return Batch(rollout, scores, signals, extra)


def loss_of(config, *, advantages, weights=None, kl=NO_KL):
    """(loss, gradients by log-probs and entropy, metrics)."""
    rows = Experience(
        **SEQUENCES, logprobs=wide(GIVEN["old"]), advantages=wide(advantages, 0.0), weights=weights,
        ref_logprobs=wide(GIVEN["ref"]), kl_coef=kl.coef,
    )  # fmt: skip
    outputs = {name: wide(GIVEN[of]).requires_grad_() for name, of in (("logprobs", "new"), ("entropy", "entropy"))}
    total, count, metrics = policy_loss(outputs, rows, config=config, kl=kl, name="x")
    gradients = torch.autograd.grad(total / count, list(outputs.values()), allow_unused=True)
    return (total / count).detach(), *gradients, metrics
