"""The KL penalty between policy and reference: estimators, rewards, terms of the loss, controllers.

The objective is E[score - kl_coef * sum_t k1_t] over sampled responses (Ziegler et al. 2019, arXiv:1909.08593, eq. 2),
with k1_t = logprobs_t - ref_logprobs_t. The mean of k1_t over the tokens that the policy can choose in a state is that
state's KL(policy, reference), KL_t. The best policy is reference * exp(score / kl_coef) / Z.

Legend: B rows, R response columns; logprobs and ref_logprobs are of the sampled tokens, at the sampling temperature
(detail P1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarlhf.algorithms.interface import Metrics, Outputs, State
from megarlhf.algorithms.masked import last_valid, masked_sum, variance
from megarlhf.batch import Experience, Rollout, Scores, Signals

ScorePosition = Literal["last", "last_valid"]


@dataclass(frozen=True)
class KLConfig:
    """The KL penalty (details P8 and P11); the 2019 original's values in brackets."""

    coef: float = 0.05  # [0.15] the coefficient; its initial value if adaptive
    controller: Literal["fixed", "adaptive"] = "fixed"  # [adaptive]
    target: float = 6.0  # [6] adaptive: nats a response
    horizon: int = 10_000  # [10000] adaptive: responses; the larger, the slower
    # [reward] reward: a part of the rewards, so that a token's advantage has the KL of later states too; loss: a term
    # of the loss, with the gradient of each state's own KL alone
    place: Literal["reward", "loss"] = "reward"
    # [k1] in the reward, k1: of the sampled tokens; exact: later states' KL over the whole vocabulary, which has less
    # variance, at the cost of two more head GEMMs a step. In the loss, exact, k2 or k3 (`loss_estimate`); exact costs a
    # forward pass of the reference and 6 more head GEMMs an update.
    estimator: str = "k1"

    def __post_init__(self):
        known = {"reward": ("k1", "exact"), "loss": ("k2", "k3", "exact")}[self.place]
        if self.estimator not in known:
            why = {
                ("reward", "k2"): " is biased: its best policy is not that of the KL penalty",
                ("reward", "k3"): " is biased: its best policy is not that of the KL penalty",
                ("loss", "k1"): " has no gradient on average",
            }.get((self.place, self.estimator), " does not exist")
            choice = f"{', '.join(known[:-1])} or {known[-1]}"
            raise ValueError(f"estimator: {self.estimator} in the {self.place}{why}; use {choice}")
        if self.coef < 0:
            raise ValueError(f"coef: must not be negative, not {self.coef}")
        for name in ("target", "horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")

    @property
    def exact_reward(self) -> bool:
        return self.estimator == "exact" and self.place == "reward"

    @property
    def exact_loss(self) -> bool:
        return self.estimator == "exact" and self.place == "loss"


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = logprobs - ref_logprobs, (B, R) -> (B, R): an unbiased estimate of KL(policy, reference) at each token
    (Schulman 2020, "Approximating KL divergence")."""
    return logprobs - ref_logprobs


def own_correction(logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """The term that a token's advantage needs beyond GAE if the rewards hold the exact KL, (B, R) -> (B, R):

        -kl_coef * (k1_t - KL_t); 0 outside the mask

    The gradient of the objective weights grad log pi(token t) with score - kl_coef * sum_{u >= t} k1_u. Given the
    tokens up to u - 1, k1_u has the mean KL_u. For later tokens u > t, KL_u instead of k1_u keeps the expected gradient
    and reduces its variance. For u = t it does not: KL_t does not depend on the sampled token, so it is a baseline, and
    the penalty would not act on the token that caused it. GAE gives a token's own reward the weight 1 for every gamma
    and lam, so this term has the weight 1. Its mean is 0, so the returns that a critic learns do not need it.
    """
    return torch.where(mask, -kl_coef * (kl_estimate(logprobs, ref_logprobs) - kl), 0)


def penalised_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, score_position: ScorePosition
) -> Tensor:
    """scores (B,), kl (B, R): k1, or the exact KL of each token's distribution -> (B, R) rewards

        rewards = -kl_coef * kl, plus the score at its position; 0 outside the mask

    (detail P8). With the exact KL the advantages need `own_correction`. `last` is the last column, as in the original,
    and needs responses of the fixed length; `last_valid` is the last token that counts, the same for such responses.
    """
    if score_position == "last":
        assert mask[:, -1].all(), "score_position 'last' with a response that ends before the last column"
        position = torch.zeros_like(mask)
        position[:, -1] = True
    else:
        position = last_valid(mask)
    return torch.where(mask, -kl_coef * kl, 0) + torch.where(position, scores[:, None], 0)


def loss_estimate(outputs: Outputs, rows: Experience, config: KLConfig) -> Tensor:
    """(B, R) KL penalties of the tokens as a term of the loss, with a gradient (Schulman 2020), of
    x = outputs["logprobs"] - ref_logprobs:

        k2 = x^2 / 2: on samples of the policy its expected gradient is that of each state's KL(policy, reference)
        k3 = e^-x - 1 + x: its expected gradient is that of KL(reference, policy), though its mean is KL(policy,
             reference)

    and of outputs["kl"]:

        exact: each state's KL(policy, reference) over the whole vocabulary, which k2 estimates

    None has the gradient through later states, which k1 in the reward has.
    """
    if config.estimator == "exact":
        return torch.where(rows.mask, outputs["kl"], 0)
    x = torch.where(rows.mask, outputs["logprobs"] - rows.ref_logprobs, 0)
    return 0.5 * x**2 if config.estimator == "k2" else (-x).exp() - 1 + x


def signals(config: KLConfig) -> frozenset[str]:
    """The signals that the penalty needs beside log-probs (`OnlineAlgorithm.signals`)."""
    return frozenset({"kl"} if config.exact_reward else ())


def restored(state: State, config: KLConfig) -> State:
    """A saved state, with the coefficient of `config` if that is fixed: a resumed run may have another one."""
    return state | {"kl_coef": config.coef} if config.controller == "fixed" else state


def token_kl(signals: Signals, config: KLConfig) -> Tensor:
    """(B, R): the KL of each token's distribution, exact or estimated by k1."""
    return signals.kl if config.exact_reward else kl_estimate(signals.logprobs, signals.ref_logprobs)


def rewards(
    scores: Scores, signals: Signals, mask: Tensor, *, kl_coef: float, config: KLConfig, score_position: ScorePosition
) -> tuple[Tensor, Tensor]:
    """(B, R) rewards of scores and penalty, and (B, R) corrections of the advantages: `own_correction` with the exact
    KL, 0 with k1."""
    kl = token_kl(signals, config)
    if config.place == "loss":
        kl_coef = 0.0
    found = penalised_rewards(scores.scores, kl, mask, kl_coef=kl_coef, score_position=score_position)
    found = found + torch.where(mask, scores.token_scores, 0)
    if not config.exact_reward:
        return found, torch.zeros_like(found)
    return found, own_correction(signals.logprobs, signals.ref_logprobs, kl, mask, kl_coef=kl_coef)


def objective(rollout: Rollout, scores: Scores, signals: Signals, *, kl_coef: float, config: KLConfig) -> Metrics:
    """Metrics of the policy that sampled the batch: means over responses of sums over tokens (lm-human-preferences
    train_policy.py, `record_step_stats`). objective/kl is of k1 for every estimator of the penalty; its global mean is
    the input of `next_kl_coef`. objective/entropy is that of whole responses, -sum_j logprobs."""
    mask = rollout.mask
    count = torch.ones_like(scores.scores).sum()
    score, non_score = scores.total.sum(), -masked_sum(kl_coef * token_kl(signals, config), mask)
    exact = {} if signals.kl is None else {"objective/kl_exact": (masked_sum(signals.kl, mask), count)}
    return {
        **exact,
        "objective/kl": (masked_sum(kl_estimate(signals.logprobs, signals.ref_logprobs), mask), count),
        "objective/entropy": (-masked_sum(signals.logprobs, mask), count),
        "objective/scores": (score, count),
        "objective/scores_var": variance(scores.total, torch.ones_like(scores.scores, dtype=torch.bool)),
        "objective/non_score_reward": (non_score, count),
        "objective/scores_total": (score + non_score, count),
        "objective/response_length": (mask.sum(), count),
    }


def next_kl_coef(kl_coef: float, kl: float, config: KLConfig, *, batch_size: int) -> float:
    """The coefficient for the next batch. Fixed: the same. Adaptive (detail P11; Ziegler et al. 2019, section 2.2):

        error = clip(kl / target - 1, -0.2, 0.2),   kl_coef * (1 + error * batch_size / horizon)

    `kl` is the mean over the *global* batch of the sum over tokens, `objective/kl`, and `batch_size` its number of
    responses. With each rank's own mean, the ranks' coefficients would differ. A KL that is not finite does not change
    the coefficient; a finite one does, even if the batch is refused.
    """
    if config.controller == "fixed" or not math.isfinite(kl):
        return kl_coef
    error = min(0.2, max(-0.2, kl / config.target - 1))
    return kl_coef * (1 + error * batch_size / config.horizon)
