"""The penalty that holds the policy near the reference: estimators, rewards, controllers.

Legend: B rows, R response columns; logprobs and ref_logprobs are of the sampled tokens, at the sampling temperature
(detail P1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarlhf.algorithms.masked import last_valid

Estimator = Literal["k1", "k2", "k3"]  # of sampled tokens
ScorePosition = Literal["last", "last_valid"]


@dataclass(frozen=True)
class KLConfig:
    """The KL penalty (details P8 and P11); the 2019 original's values in brackets."""

    coef: float = 0.05  # [0.15] the coefficient, to begin with if adaptive
    controller: Literal["fixed", "adaptive"] = "fixed"  # [adaptive]
    target: float = 6.0  # [6] adaptive: nats a response
    horizon: int = 10_000  # [10000] adaptive: responses; the larger, the slower
    # [k1] of the penalty per token; exact: over the whole vocabulary, at the cost of two more head GEMMs a step
    estimator: Literal["k1", "k2", "k3", "exact"] = "k1"

    def __post_init__(self):
        if self.coef < 0:
            raise ValueError(f"coef: must not be negative, not {self.coef}")
        for name in ("target", "horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Estimator = "k1") -> Tensor:
    """An estimate of KL(policy, reference) at each token, (B, R) -> (B, R); with d = logprobs - ref_logprobs

        k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d

    k1 and k3 are unbiased, k2 and k3 never negative (Schulman 2020, "Approximating KL divergence").
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference  # expm1: exp(-d) - 1 would lose all of k3 ~ d^2 / 2 at small d


def penalised_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, score_position: ScorePosition
) -> Tensor:
    """scores (B,), kl (B, R): an estimate or the exact KL of each token's distribution -> (B, R) rewards

        rewards = -kl_coef * kl, plus the score at its position; 0 outside the mask

    (detail P8; Ziegler et al. 2019, arXiv:1909.08593, eq. 2). `last` is the last column, as in the original, and needs
    responses of the fixed length; `last_valid` the last token that counts, which is the same for those.
    """
    if score_position == "last":
        assert mask[:, -1].all(), "score_position 'last' with a response that ends before the last column"
        position = torch.zeros_like(mask)
        position[:, -1] = True
    else:
        position = last_valid(mask)
    return torch.where(mask, -kl_coef * kl, 0) + torch.where(position, scores[:, None], 0)


def next_kl_coef(kl_coef: float, kl: float, config: KLConfig, *, batch_size: int) -> float:
    """The coefficient for the next batch. Fixed: the same. Adaptive (detail P11; Ziegler et al. 2019, section 2.2):

        error = clip(kl / target - 1, -0.2, 0.2),   kl_coef * (1 + error * batch_size / horizon)

    `kl` is the mean over the *global* batch of the sum over tokens, `objective/kl`, and `batch_size` its number of
    responses. Were it each rank's own, the ranks' coefficients would drift apart.
    """
    if config.controller == "fixed":
        return kl_coef
    error = min(0.2, max(-0.2, kl / config.target - 1))
    return kl_coef * (1 + error * batch_size / config.horizon)
