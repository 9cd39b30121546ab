"""Losses that train a policy on single responses, each marked good or bad.

Legend: B rows of this rank, R columns, h = log policy(y|x) - log reference(y|x) of a row, summed over its response, b
is `beta`, z0 the baseline of the whole minibatch. Rows without a counted token (those that pad an evaluation batch) are
not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms.interface import Forwards, Metrics, OfflineAlgorithm, Outputs
from megarlhf.algorithms.masked import masked_sum, row_sums
from megarlhf.batch import Ratings

RatingLossName = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True)
class KTOConfig:
    """The loss. docs/preferences.md has the formulas."""

    # kto: Ethayarajh et al. 2024, arXiv:2402.01306; apo_zero_unpaired: the same with z0 = 0
    loss: RatingLossName = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0  # of good responses
    undesirable_weight: float = 1.0  # of bad responses

    def __post_init__(self):
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")


def kto(config: KTOConfig) -> OfflineAlgorithm:
    """Training on marked responses for the loop. Its models are "actor", the trained one, and "reference"."""
    return OfflineAlgorithm(
        partial(kto_loss, config=config),
        prepare=partial(prepare, config=config),
        referenced=lambda rows: [rows, rows.mismatched] if config.loss == "kto" else [rows],
        mixes_rows=config.loss == "kto",
        derived=partial(margins, config=config),
    )


def derangement(prompts: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """(N,) ids of the rows' prompts -> (N,) the row whose response each row's prompt is put before: a permutation
    without fixed points, with as few pairs of equal prompts as there can be. None if N < 2.

    The rows are sorted by prompt, in the order in which the prompts first appear, and rotated by the size of the
    largest group: none of up to N / 2 equal prompts meets itself. It is a function of the rows' order alone.
    """
    prompts = np.asarray(prompts)
    if len(prompts) < 2:
        return None
    _, first, group = np.unique(prompts, return_index=True, return_inverse=True)
    order = np.argsort(first[group], kind="stable")
    shift = int(np.bincount(group).max())
    if shift == len(prompts):
        shift = 1
    found = np.empty(len(prompts), np.int64)
    found[order] = np.roll(order, -shift)
    return found


def prepare(rows: Ratings, models: Forwards, group: dist.ProcessGroup | None, *, config: KTOConfig) -> Ratings:
    """The rows with the reference's log-probs and with z0, the mean of h over mismatched prompts and responses of the
    minibatch, at least 0: an estimate of KL(policy, reference) (arXiv:2402.01306). Both passes are without
    gradients. One z0 for all ranks of `group`; it is clamped after it is averaged. Collective."""
    rows = replace(rows, ref_logprobs=row_sums(models["reference"](rows)["logprobs"], rows.mask))
    if config.loss != "kto":
        return rows
    pairs = rows.mismatched
    policy, reference = (row_sums(models[name](pairs)["logprobs"], pairs.mask) for name in ("actor", "reference"))
    counted = pairs.mask.any(1).to(policy.device)
    total, count = masked_sum(policy - reference, counted), counted.sum().double()
    packed = torch.stack([total, count])
    if group is not None:
        dist.all_reduce(packed, group=group)
    total, count = packed.tolist()
    return replace(rows, baseline=_positive(total / count) if count else 0.0)


def _positive(value: float) -> float:
    """max(0, value), and NaN as it is, so that the loop sees it."""
    return 0.0 if value < 0 else value


def kto_loss(outputs: Outputs, rows: Ratings, *, config: KTOConfig) -> tuple[Tensor, Tensor, Metrics]:
    """The sum over rows of w_d (1 - sigmoid(b (h - z0))) for good ones, and of w_u (1 - sigmoid(b (z0 - h))) for bad
    ones.

    outputs["logprobs"] (B, R), differentiable; rows as `prepare` gives them. Returns (sum, number of rows, metrics).
    `accuracy` is the share of rows with h > z0 if good and h < z0 if bad, where h = z0 counts half.
    """
    counted, good = rows.mask.any(1), rows.labels
    logprobs = row_sums(outputs["logprobs"], rows.mask)
    ratios = logprobs - rows.ref_logprobs
    lead = torch.where(good, 1, -1) * (ratios - rows.baseline)
    weights = torch.where(good, config.desirable_weight, config.undesirable_weight)
    losses = weights * torch.sigmoid(-config.beta * lead)
    total, count = masked_sum(losses, counted), counted.sum()
    metrics: Metrics = {
        "loss": (total, count),
        "accuracy": (masked_sum((lead > 0).double() + 0.5 * (lead == 0), counted), count),
        "baseline": (rows.baseline * count, count),
    }
    for name, those in (("chosen", counted & good), ("rejected", counted & ~good)):
        metrics[f"logprobs_sum/{name}"] = masked_sum(logprobs.detach(), those), those.sum()
        metrics[f"logratios_sum/{name}"] = masked_sum(ratios.detach(), those), those.sum()
    return total.float(), count, metrics


def margins(values: dict[str, float], *, config: KTOConfig) -> dict[str, float]:
    """b times the difference of the mean log-ratios of good and bad responses."""
    found = [values.get(f"logratios_sum/{name}") for name in ("chosen", "rejected")]
    return {} if None in found else {"margins": config.beta * (found[0] - found[1])}
