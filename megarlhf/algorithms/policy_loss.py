"""The loss of a policy on sampled responses: surrogates, ratios, penalties and normalisations as named switches.

    loss = normalised sum of   w surrogate(A, r) + kl_coef k(logprobs, reference) - entropy_coef H

docs/algorithms.md says which published algorithm has which switches.
Legend: B rows, R response columns, A advantages, r ratio of the policies, w importance weights, H entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarlhf.algorithms.interface import Metrics, Outputs
from megarlhf.algorithms.kl import KLConfig, loss_estimate
from megarlhf.algorithms.masked import masked_sum, variance
from megarlhf.batch import Experience
from megarlhf.metrics import Max, Min

LARGEST = 20.0  # log-ratio, in nats: beyond it exp would overflow, and turn a clipped token's gradient into NaN


@dataclass(frozen=True)
class ImportanceConfig:
    """The correction for a sampler whose probabilities differ from the trainer's: w = exp(logprobs - sampler's), a
    constant of the loss."""

    level: Literal["token", "sequence"] = "token"  # sequence: the product over the response
    mode: Literal["truncate", "mask"] = "truncate"  # truncate: at most `high`; mask: 0 outside [low, high]
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self):
        if self.high < 1:
            raise ValueError(f"high: must be at least 1, the weight of equal probabilities, not {self.high}")
        if not 0 <= self.low <= 1:
            raise ValueError(f"low: must be between 0 and 1, not {self.low}")
        if self.low and self.mode == "truncate":
            raise ValueError("low: is for mode mask; truncate has an upper bound alone")


@dataclass(frozen=True)
class PolicyLossConfig:
    """The options of a policy's loss."""

    # clip: max(-A r, -A clip(r)) (Schulman et al. 2017, arXiv:1707.06347, eq. 7); cispo: -clip(r) A logprobs, the
    # clipped ratio without gradient (MiniMax 2025, arXiv:2506.13585, eq. 4); none: -A r
    surrogate: Literal["clip", "cispo", "none"] = "clip"
    clip_range: float = 0.2  # r is clipped to [1 - clip_range, 1 + clip_range_high]; with cispo, 1: no lower bound
    clip_range_high: float | None = None  # default: clip_range
    dual_clip: float | None = None  # where A < 0, the loss is at most -A times this (Ye et al. 2020, arXiv:1912.09729)
    # r of a token; sequence: of the whole response, for all of its tokens; sequence_mean: its geometric mean over the
    # tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7)
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    # token: the mean over tokens; sequence: over responses of their mean; sequence_sum: over responses of their sum;
    # constant: the same, divided by the longest response allowed (Dr. GRPO). Always over the whole minibatch.
    normalization: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    entropy_coef: float = 0.0  # of the entropy of each token's distribution, which is maximised
    importance: ImportanceConfig | None = None

    def __post_init__(self):
        if not 0 < self.clip_range < 1 and (self.clip_range, self.surrogate) != (1, "cispo"):
            raise ValueError(f"clip_range: must be above 0 and below 1, or 1 with cispo, not {self.clip_range}")
        if self.clip_range_high is not None and self.clip_range_high <= 0:
            raise ValueError(f"clip_range_high: must be positive, not {self.clip_range_high}")
        if self.entropy_coef < 0:
            raise ValueError(f"entropy_coef: must not be negative, not {self.entropy_coef}")
        if self.ratio == "sequence" and self.normalization != "sequence":
            raise ValueError(
                "normalization: must be sequence with ratio sequence, which already is of all tokens of a response; "
                f"{self.normalization} would weight a response by its length once more"
            )
        if self.dual_clip is not None and (self.surrogate != "clip" or self.dual_clip < 1 + self.high):
            raise ValueError(
                f"dual_clip: must be at least 1 + clip_range_high = {1 + self.high:g}, with surrogate clip, not "
                f"{self.dual_clip:g} with {self.surrogate}"
            )

    @property
    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


def policy_loss(
    outputs: Outputs, rows: Experience, *, config: PolicyLossConfig, kl: KLConfig, name: str
) -> tuple[Tensor, Tensor, Metrics]:
    """(sum, count, metrics) of the loss; sum / count over the global minibatch is its value. outputs["logprobs"] and
    ["entropy"] (B, R), differentiable, of the policy being trained; the entropy may be left out where it is not in the
    loss. The metrics begin with `name`:

    approxkl is mean(0.5 * (logprobs - old logprobs)^2), clipfrac the share of tokens whose clipped term is in force,
    dualfrac that of those bounded by `dual_clip`.
    """
    mask, tokens = rows.mask, rows.mask.sum()
    difference = torch.where(mask, outputs["logprobs"] - rows.logprobs, 0)
    ratio = _log_ratio(difference, mask, config.ratio).exp()
    losses, bound, dual = _surrogate(outputs["logprobs"], rows.advantages, ratio, config)
    if rows.weights is not None:
        losses = losses * rows.weights
    metrics: Metrics = {
        f"{name}/policy/approxkl": (masked_sum(0.5 * difference**2, mask), tokens),
        f"{name}/policy/clipfrac": (masked_sum(bound.float(), mask), tokens),
        f"{name}/policy/ratio_mean": (masked_sum(ratio, mask), tokens),
        f"{name}/policy/ratio_var": variance(ratio.expand_as(difference), mask),
        f"{name}/policy/ratio_max": Max(torch.where(mask, ratio, -torch.inf).max()),
        f"{name}/policy/ratio_min": Min(torch.where(mask, ratio, torch.inf).min()),
    }
    if "entropy" in outputs:
        metrics[f"{name}/policy/entropy"] = (masked_sum(outputs["entropy"], mask), tokens)
    if config.dual_clip is not None:
        metrics[f"{name}/policy/dualfrac"] = (masked_sum(dual.float(), mask), tokens)
    if rows.weights is not None:
        metrics[f"{name}/policy/weight_mean"] = (masked_sum(rows.weights, mask), tokens)
        metrics[f"{name}/policy/weight_zero"] = (masked_sum((rows.weights == 0).float(), mask), tokens)
    metrics[f"{name}/loss/policy"] = normalised(losses, mask, config.normalization)
    if kl.place == "loss":
        penalty = loss_estimate(outputs, rows, kl)
        metrics[f"{name}/loss/kl"] = normalised(penalty, mask, config.normalization)
        losses = losses + rows.kl_coef * penalty
    if config.entropy_coef:
        losses = losses - config.entropy_coef * outputs["entropy"]
    return *normalised(losses, mask, config.normalization), metrics


def normalised(values: Tensor, mask: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """(B, R) losses of tokens -> (sum, count) whose quotient over the global minibatch is the loss."""
    if how == "token":
        return masked_sum(values, mask), mask.sum()
    if how == "sequence":
        values = values / mask.sum(1, keepdim=True).clamp(min=1)
    elif how == "constant":
        values = values / mask.shape[1]
    return masked_sum(values, mask), mask.any(1).sum()


def importance_weights(logprobs: Tensor, sampled: Tensor, mask: Tensor, config: ImportanceConfig) -> Tensor:
    """(B, R) weights of tokens that a sampler drew with the log-probs `sampled` (B, R), for a trainer that gives them
    `logprobs`."""
    difference = torch.where(mask, logprobs - sampled, 0)
    weights = _log_ratio(difference, mask, config.level).exp().expand_as(difference)
    if config.mode == "truncate":
        return weights.clamp(max=config.high)
    return torch.where((weights >= config.low) & (weights <= config.high), weights, 0)


def _log_ratio(difference: Tensor, mask: Tensor, how: str) -> Tensor:
    """(B, R) differences of log-probs, 0 outside the mask -> (B, R), or (B, 1) for whole responses."""
    if how == "sequence":
        difference = difference.sum(1, keepdim=True)
    elif how == "sequence_mean":
        difference = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return difference.clamp(-LARGEST, LARGEST)


def _surrogate(
    logprobs: Tensor, advantages: Tensor, ratio: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, R) losses of tokens, and where a clipped term and where the dual bound is in force."""
    plain = -advantages * ratio
    nowhere = torch.zeros_like(plain, dtype=torch.bool)
    if config.surrogate == "none":
        return plain, nowhere, nowhere
    limited = ratio.clamp(1 - config.clip_range, 1 + config.high)
    if config.surrogate == "cispo":
        return -advantages * limited.detach() * logprobs, (limited != ratio).expand_as(plain), nowhere
    clipped = -advantages * limited
    losses, bound = torch.maximum(plain, clipped), clipped > plain
    if config.dual_clip is None:
        return losses, bound, nowhere
    most = -advantages * config.dual_clip
    dual = (advantages < 0) & (losses > most)
    return torch.where(dual, most, losses), bound & ~dual, dual
