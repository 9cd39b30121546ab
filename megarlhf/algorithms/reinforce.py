"""REINFORCE on responses (Williams 1992, "Simple statistical gradient-following algorithms", eq. 11): no critic.

    A_t = sum_{u >= t} gamma^(u - t) r_u - b,   r: scores and KL penalty (algorithms/kl.py)

The baseline b is a moving average over batches of the mean of a response's undiscounted rewards.

Legend: B rows, R response columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms import kl
from megarlhf.algorithms.advantages import gae
from megarlhf.algorithms.interface import Metrics, OnlineAlgorithm, Outputs, State, Update
from megarlhf.algorithms.kl import KLConfig, ScorePosition
from megarlhf.algorithms.masked import masked_sum, whiten
from megarlhf.batch import Batch, Experience
from megarlhf.metrics import Max


@dataclass(frozen=True)
class ReinforceConfig:
    """The options of REINFORCE."""

    kl: KLConfig = field(default_factory=KLConfig)
    gamma: float = 1.0  # discount
    baseline: Literal["moving", "none"] = "moving"
    baseline_decay: float = 0.9  # of the moving average, per batch
    whiten_advantages: bool = False  # per minibatch
    score_position: ScorePosition = "last_valid"  # the token that gets the score

    def __post_init__(self):
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: must be between 0 and 1, not {self.gamma}")
        if not 0 <= self.baseline_decay < 1:
            raise ValueError(f"baseline_decay: must be at least 0 and below 1, not {self.baseline_decay}")


def algorithm(config: ReinforceConfig) -> OnlineAlgorithm:
    """REINFORCE for the loop: a policy alone."""
    updates = {"actor": Update(policy_loss, {"with_entropy": True})}
    return OnlineAlgorithm(
        make_experience=partial(make_experience, config=config),
        updates=lambda step: updates,
        objective=lambda batch, state: kl.objective(
            batch.rollout, batch.scores, batch.signals, kl_coef=state["kl_coef"], config=config.kl
        ),
        minibatch=partial(whiten_minibatch, config=config),
        signals=kl.signals(config.kl),
        state={"kl_coef": config.kl.coef, "baseline": 0.0, "baseline_weight": 0.0},
        restore=partial(restored, config=config),
        adapt=partial(adapt, config=config),
        fixed_length=config.score_position == "last",
    )


def make_experience(batch: Batch, state: State, *, config: ReinforceConfig) -> Experience:
    """Advantages: discounted returns of every token less the baseline, (B, R). Pure; rows are independent."""
    rollout, mask = batch.rollout, batch.rollout.mask
    rewards, correction = kl.rewards(
        batch.scores, batch.signals, mask, kl_coef=state["kl_coef"], config=config.kl,
        score_position=config.score_position,
    )  # fmt: skip
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=config.gamma, lam=1.0)  # without values
    return Experience(
        tokens=rollout.tokens,
        mask=mask,
        segments=rollout.segments,
        prompt_len=rollout.prompt_len,
        logprobs=batch.signals.logprobs,
        advantages=torch.where(mask, returns - state["baseline"] + correction, 0),
    )


def whiten_minibatch(rows: Experience, group: dist.ProcessGroup | None, *, config: ReinforceConfig) -> Experience:
    """The minibatch, with its advantages whitened if the configuration asks for it."""
    if not config.whiten_advantages:
        return rows
    return replace(rows, advantages=whiten(rows.advantages, rows.mask, group=group))


def policy_loss(outputs: Outputs, rows: Experience) -> tuple[Tensor, Tensor, Metrics]:
    """sum_{b,j} mask * -A exp(logprobs - old logprobs): in the first update of a batch its gradient is REINFORCE's,
    -A grad logprobs; in later ones the ratio is the importance weight of the old policy's samples. outputs["logprobs"]
    (B, R), differentiable. Returns (sum, number of tokens, metrics)."""
    mask, count = rows.mask, rows.mask.sum()
    difference = torch.where(mask, outputs["logprobs"] - rows.logprobs, 0)
    total = masked_sum(-rows.advantages * difference.exp(), mask)
    return total, count, {
        "reinforce/loss/policy": (total, count),
        "reinforce/policy/approxkl": (masked_sum(0.5 * difference**2, mask), count),
        "reinforce/policy/ratio_max": Max(torch.where(mask, difference.exp(), 0).max()),
        "reinforce/policy/entropy": (masked_sum(outputs["entropy"], mask), count),
    }  # fmt: skip


def restored(state: State, *, config: ReinforceConfig) -> State:
    """A saved state -> the state to continue with under `config`."""
    forget = {"baseline": 0.0, "baseline_weight": 0.0} if config.baseline == "none" else {}
    return kl.restored(state, config.kl) | forget


def adapt(state: State, values: dict[str, float], batch_size: int, *, config: ReinforceConfig) -> State:
    """The next batch's KL coefficient and baseline. The average has no bias from its start at 0: it is divided by the
    total weight of the batches so far."""
    coef = kl.next_kl_coef(state["kl_coef"], values["objective/kl"], config.kl, batch_size=batch_size)
    baseline, weight, seen = state["baseline"], state["baseline_weight"], values["objective/scores_total"]
    learned = "reinforce/loss/policy" in values  # a batch that the guard refused may have any score
    if config.baseline == "moving" and learned:
        decay, before = config.baseline_decay, weight
        weight = decay * before + 1 - decay
        baseline = (decay * before * baseline + (1 - decay) * seen) / weight
    return {"kl_coef": coef, "baseline": baseline, "baseline_weight": weight}
