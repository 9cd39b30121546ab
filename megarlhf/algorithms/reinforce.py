"""Policy gradients without a critic: REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms",
eq. 11), and with other advantages and losses REINFORCE++, RLOO, GRPO, Dr. GRPO, DAPO, GSPO, CISPO, GDPO and ReMax.
train/presets.py has the published values; docs/algorithms.md compares them.

Legend: B rows, R response columns, G samples a prompt (a group), K reward sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms import kl
from megarlhf.algorithms.advantages import gae, group_advantages, varies
from megarlhf.algorithms.dynamic import collect_varied
from megarlhf.algorithms.interface import Actions, Metrics, OnlineAlgorithm, State, Update
from megarlhf.algorithms.kl import KLConfig, ScorePosition
from megarlhf.algorithms.masked import masked_sum, whiten
from megarlhf.algorithms.policy_loss import PolicyLossConfig, importance_weights, policy_loss
from megarlhf.algorithms.shaping import ShapingConfig, shaped
from megarlhf.batch import Batch, Experience, Scores

GROUPED = ("rloo", "grpo", "dr_grpo", "gdpo")


@dataclass(frozen=True)
class ReinforceConfig(PolicyLossConfig):
    """The options of policy gradients without a critic."""

    # s: a response's score less, with the KL in the reward, its penalty.
    # reinforce: the discounted rewards from a token on, less the baseline; rloo: s - the mean of the group's others;
    # grpo: (s - the group's mean) / (its standard deviation + eps); dr_grpo: s - the group's mean; gdpo: grpo of each
    # source, weighted and added; remax: s - that of the greedy response
    advantage: Literal["reinforce", "rloo", "grpo", "dr_grpo", "gdpo", "remax"] = "reinforce"
    surrogate: Literal["clip", "cispo", "none"] = "none"
    kl: KLConfig = field(default_factory=KLConfig)
    gamma: float = 1.0  # discount; of reinforce
    baseline: Literal["moving", "none"] = "moving"  # of reinforce: the mean of past batches' undiscounted rewards
    baseline_decay: float = 0.9  # of the moving average, per batch
    eps: float = 1e-6  # of grpo and gdpo
    whiten_advantages: bool = False  # subtract the mean over the whole batch's tokens, divide by their deviation
    score_position: ScorePosition = "last_valid"  # of reinforce: the token that gets the score
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    # Sample up to so many batches of prompts for one batch of groups whose scores differ (dynamic.py); 0: any groups
    dynamic_rounds: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: must be between 0 and 1, not {self.gamma}")
        if not 0 <= self.baseline_decay < 1:
            raise ValueError(f"baseline_decay: must be at least 0 and below 1, not {self.baseline_decay}")
        if self.eps < 0:
            raise ValueError(f"eps: must not be negative, not {self.eps}")
        if self.dynamic_rounds < 0:
            raise ValueError(f"dynamic_rounds: must not be negative, not {self.dynamic_rounds}")
        if self.advantage != "reinforce" and (self.gamma != 1 or self.score_position != "last_valid"):
            raise ValueError(
                f"advantage: {self.advantage} gives all tokens of a response one advantage, so gamma must be 1 and "
                "score_position last_valid"
            )
        if self.ratio != "token" and (self.advantage == "reinforce" or self.kl.exact_reward):
            raise ValueError(
                f"ratio: {self.ratio} is of whole responses, but advantage reinforce and the exact KL in the reward "
                "differ between tokens, and would lead to another policy; use ratio token"
            )
        if self.ratio == "sequence" and self.kl.place == "loss" and self.kl.coef:
            raise ValueError(
                "ratio: sequence has the gradients of a response's tokens added, and a KL in the loss their mean; use "
                "sequence_mean, or kl.place reward"
            )
        if self.advantage == "gdpo" and self.shaping != ShapingConfig():
            raise ValueError("shaping: changes the whole score, but gdpo reads each source's; make it a source")
        if self.dynamic_rounds and self.advantage not in GROUPED:
            raise ValueError(f"dynamic_rounds: {self.advantage} does not compare responses; use {', '.join(GROUPED)}")
        if self.advantage == "gdpo" and self.kl.place == "reward" and self.kl.coef:
            raise ValueError(
                "advantage: gdpo scales the sources each, so a KL in the reward has no scale; set kl.place loss"
            )

    @property
    def moving(self) -> bool:
        return self.advantage == "reinforce" and self.baseline == "moving"


def algorithm(config: ReinforceConfig) -> OnlineAlgorithm:
    """The algorithm for the loop: a policy alone."""
    loss = partial(policy_loss, config=config, kl=config.kl, name="reinforce")
    updates = {"actor": Update(loss, {"with_entropy": True}, exact_kl=config.kl.exact_loss)}
    return OnlineAlgorithm(
        make_experience=partial(make_experience, config=config),
        updates=lambda step: updates,
        objective=partial(objective, config=config),
        collect=partial(collect, config=config),
        signals=kl.signals(config.kl),
        state={"kl_coef": config.kl.coef, "baseline": 0.0, "baseline_weight": 0.0},
        restore=partial(restored, config=config),
        adapt=partial(adapt, config=config),
        group_size=2 if config.advantage in GROUPED else 1,
        min_response_length=config.shaping.overlong_buffer + 1,
        fixed_length=config.score_position == "last",
        all_tokens=True,
        token_mean=config.normalization == "token",
        greedy=config.advantage == "remax",
    )


def collect(act: Actions, *, config: ReinforceConfig) -> Batch:
    """A batch; for remax, with the scores of greedy responses in `extra`."""
    if config.dynamic_rounds:
        rollout, scores, found = collect_varied(act, config.dynamic_rounds)
        return act.evaluate(rollout, scores, **{k: torch.full_like(scores.scores, v) for k, v in found.items()})
    prompts = act.prompts()
    rollout = act.sample(prompts)
    scores, extra = act.score(rollout), {}
    if config.advantage == "remax":
        greedy = act.greedy(prompts)
        found = shaped(act.score(greedy), greedy.mask, config.shaping).total
        extra["greedy"] = found.repeat_interleave(len(rollout) // len(prompts))
    return act.evaluate(rollout, scores, **extra)


def make_experience(
    batch: Batch, state: State, group: dist.ProcessGroup | None, *, config: ReinforceConfig
) -> Experience:
    """The rows with advantages (B, R), and what the loss needs beside them. Rows of a group are on one rank. Collective
    with `whiten_advantages`."""
    rollout, signals, mask = batch.rollout, batch.signals, batch.rollout.mask
    scores = shaped(batch.scores, mask, config.shaping)
    advantages = torch.where(mask, _advantages(batch, scores, state, config), 0)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask, group=group)
    weights = None
    if config.importance is not None:
        weights = importance_weights(signals.logprobs, rollout.logprobs, mask, config.importance)
    return Experience(
        tokens=rollout.tokens,
        mask=mask,
        segments=rollout.segments,
        experts=rollout.experts,
        prompt_len=rollout.prompt_len,
        logprobs=signals.logprobs,
        advantages=advantages,
        weights=weights,
        ref_logprobs=signals.ref_logprobs if config.kl.place == "loss" else None,
        kl_coef=state["kl_coef"],
    )


def _advantages(batch: Batch, scores: Scores, state: State, config: ReinforceConfig) -> Tensor:
    """(B, R), or (B, 1) for all tokens of a response."""
    mask, group_ids = batch.rollout.mask, batch.rollout.group_ids
    rewards, correction = kl.rewards(
        scores, batch.signals, mask, kl_coef=state["kl_coef"], config=config.kl, score_position=config.score_position
    )
    if config.advantage == "reinforce":
        returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=config.gamma, lam=1.0)  # without values
        return returns - state["baseline"] + correction
    if config.advantage == "gdpo":
        # A response that is not accepted has the penalty of scoring in the place of each source's score.
        columns = torch.where(scores.accepted[:, None], scores.by_source, scores.scores[:, None]).unbind(1)
        relative = partial(group_advantages, group_ids=group_ids, deviation=True, eps=config.eps)
        found = sum(weight * relative(column)[0] for column, weight in zip(columns, scores.weights, strict=True))
        return found[:, None]
    total = torch.where(mask, rewards, 0).sum(1)
    if config.advantage == "remax":
        return (total - batch.extra["greedy"])[:, None] + correction
    found, weight = group_advantages(
        total, group_ids, leave_one_out=config.advantage == "rloo", deviation=config.advantage == "grpo", eps=config.eps
    )
    return found[:, None] + weight[:, None] * correction


def objective(batch: Batch, state: State, *, config: ReinforceConfig) -> Metrics:
    """Metrics of the policy that sampled the batch; groups/varied is the share of responses whose group's scores
    differ, groups/rounds the number of batches that were sampled for this one, groups/score the mean score of them
    all, groups/greedy that of the greedy responses."""
    found = kl.objective(batch.rollout, batch.scores, batch.signals, kl_coef=state["kl_coef"], config=config.kl)
    count = torch.ones_like(batch.scores.scores).sum()
    if config.advantage in GROUPED:
        found["groups/varied"] = (varies(batch.scores.total, batch.rollout.group_ids).sum(), count)
    for name, values in batch.extra.items():  # of `collect`
        found[f"groups/{name}"] = (values.sum(), count)
    if config.shaping != ShapingConfig():
        loss = batch.scores.scores - shaped(batch.scores, batch.rollout.mask, config.shaping).scores
        found["objective/length_penalty"] = (loss.sum(), count)
    if config.importance is not None:
        gap = (batch.signals.logprobs - batch.rollout.logprobs).exp()
        found["objective/importance"] = (masked_sum(gap, batch.rollout.mask), batch.rollout.mask.sum())
    return found


def restored(state: State, *, config: ReinforceConfig) -> State:
    """A saved state -> the state to continue with under `config`."""
    forget = {} if config.moving else {"baseline": 0.0, "baseline_weight": 0.0}
    return kl.restored(state, config.kl) | forget


def adapt(state: State, values: dict[str, float], batch_size: int, *, config: ReinforceConfig) -> State:
    """The next batch's KL coefficient and baseline. The average has no bias from its start at 0: it is divided by the
    total weight of the batches so far."""
    coef = kl.next_kl_coef(state["kl_coef"], values["objective/kl"], config.kl, batch_size=batch_size)
    baseline, weight = state["baseline"], state["baseline_weight"]
    learned = "reinforce/loss/policy" in values  # a batch that the guard refused may have any score
    if config.moving and learned:
        seen = values["objective/scores_total" if config.kl.place == "reward" else "objective/scores"]
        seen -= values.get("objective/length_penalty", 0.0)
        decay, before = config.baseline_decay, weight
        weight = decay * before + 1 - decay
        baseline = (decay * before * baseline + (1 - decay) * seen) / weight
    return {"kl_coef": coef, "baseline": baseline, "baseline_weight": weight}
