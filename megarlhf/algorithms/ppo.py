"""PPO on responses (Ziegler et al. 2019, arXiv:1909.08593; Schulman et al. 2017, arXiv:1707.06347).

    experience = make_experience(rollout, scores, signals, kl_coef=..., config=...)     once a batch
    minibatch  = whiten_minibatch(part of experience, config=..., group=...)            once a minibatch
    policy_loss, value_loss                                                             once a micro-batch

`algorithm(config)` combines these for the loop.
Legend: B rows, S tokens a row, P prompt columns, R = S - P response columns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms import kl
from megarlhf.algorithms.advantages import gae, lengthwise_lambda
from megarlhf.algorithms.interface import Metrics, OnlineAlgorithm, Outputs, Update
from megarlhf.algorithms.kl import KLConfig, ScorePosition
from megarlhf.algorithms.masked import inverse_deviation, masked_sum, variance, whiten
from megarlhf.algorithms.policy_loss import PolicyLossConfig, importance_weights, policy_loss
from megarlhf.algorithms.shaping import ShapingConfig, shaped
from megarlhf.batch import CriticExperience, Rollout, Scores, Signals


@dataclass(frozen=True)
class PPOConfig(PolicyLossConfig):
    """The options of PPO; the 2019 original's values in brackets. Of the policy's loss it has
    surrogate clip and clip_range 0.2; the other options are later inventions."""

    kl: KLConfig = field(default_factory=KLConfig)
    gamma: float = 1.0  # [1] discount (P6)
    lam: float = 0.95  # [0.95] of GAE (P6)
    # The advantages' lambda is 1 - 1 / (this x the response's tokens), `lam` the values' alone. VAPO: 0.05 and 1
    lam_lengthwise: float | None = None
    score_position: ScorePosition = "last_valid"  # [last] the token that gets the score
    whiten_rewards: bool = False  # [true] per minibatch, the mean kept (P9)
    whiten_advantages: bool = True  # [true] per minibatch (P9)
    clip_range_value: float = 0.2  # [0.2] of the value (P10)
    vf_coef: float = 0.1  # [0.1] weight of the value loss (P10)
    critic_warmup: int = 0  # [0] steps at the start in which the critic learns alone
    shaping: ShapingConfig = field(default_factory=ShapingConfig)

    def __post_init__(self):
        super().__post_init__()
        if self.ratio != "token":
            raise ValueError(
                f"ratio: {self.ratio} is of whole responses, but PPO's advantages are of tokens; use token"
            )
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be between 0 and 1, not {getattr(self, name)}")
        if self.lam_lengthwise is not None and self.lam_lengthwise <= 0:
            raise ValueError(f"lam_lengthwise: must be positive, not {self.lam_lengthwise}")
        if self.critic_warmup < 0:
            raise ValueError(f"critic_warmup: must not be negative, not {self.critic_warmup}")
        for name in ("clip_range_value", "vf_coef"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")


OPENAI_2019 = PPOConfig(
    kl=KLConfig(coef=0.15, controller="adaptive", target=6.0, horizon=10_000),
    score_position="last",
    whiten_rewards=True,
)


def algorithm(config: PPOConfig) -> OnlineAlgorithm:
    """PPO for the loop: a policy, and a critic with an update of its own."""
    loss = partial(policy_loss, config=config, kl=config.kl, name="ppo")
    updates = {
        "actor": Update(loss, {"with_entropy": True}, exact_kl=config.kl.exact_loss),
        "critic": Update(partial(value_loss, config=config), prefix="ppo/val/"),
    }
    alone = {"critic": updates["critic"]}
    return OnlineAlgorithm(
        make_experience=lambda batch, state, group: make_experience(
            batch.rollout, batch.scores, batch.signals, kl_coef=state["kl_coef"], config=config
        ),
        updates=lambda step: alone if step < config.critic_warmup else updates,
        objective=lambda batch, state: kl.objective(
            batch.rollout, batch.scores, batch.signals, kl_coef=state["kl_coef"], config=config.kl
        ),
        minibatch=lambda rows, group: whiten_minibatch(rows, config=config, group=group),
        signals=frozenset({"values"}) | kl.signals(config.kl),
        state={"kl_coef": config.kl.coef},
        restore=partial(kl.restored, config=config.kl),
        adapt=lambda state, values, batch_size: {
            "kl_coef": kl.next_kl_coef(state["kl_coef"], values["objective/kl"], config.kl, batch_size=batch_size)
        },
        min_response_length=config.shaping.overlong_buffer + 1,
        fixed_length=config.score_position == "last",
        all_tokens=config.kl.estimator == "exact",
        token_mean=config.normalization == "token",
    )


def make_experience(
    rollout: Rollout, scores: Scores, signals: Signals, *, kl_coef: float, config: PPOConfig
) -> CriticExperience:
    """Credit: rewards from scores and KL penalty (P8), advantages and returns by GAE (P6), of the whole batch and not
    whitened: see `whiten_minibatch`. Pure; rows are independent, so any part of a batch may be given."""
    mask = rollout.mask
    scores = shaped(scores, mask, config.shaping)
    rewards, correction = kl.rewards(
        scores, signals, mask, kl_coef=kl_coef, config=config.kl, score_position=config.score_position
    )
    advantages, returns = _credit(rewards, signals.values, mask, config)
    weights = None
    if config.importance is not None:
        weights = importance_weights(signals.logprobs, rollout.logprobs, mask, config.importance)
    return CriticExperience(
        tokens=rollout.tokens,
        mask=mask,
        segments=rollout.segments,
        experts=rollout.experts,
        prompt_len=rollout.prompt_len,
        logprobs=signals.logprobs,
        values=signals.values,
        rewards=rewards,
        advantages=advantages + correction,
        returns=returns,
        correction=correction,
        weights=weights,
        ref_logprobs=signals.ref_logprobs if config.kl.place == "loss" else None,
        kl_coef=kl_coef,
    )


def _credit(rewards: Tensor, values: Tensor, mask: Tensor, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Advantages for the policy and returns for the critic, (B, R) each."""
    advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
    if config.lam_lengthwise is not None:
        lam = lengthwise_lambda(mask, alpha=config.lam_lengthwise)
        advantages, _ = gae(rewards, values, mask, gamma=config.gamma, lam=lam)
    return advantages, returns


def whiten_minibatch(
    minibatch: CriticExperience, *, config: PPOConfig, group: dist.ProcessGroup | None = None
) -> CriticExperience:
    """The minibatch of one update with its rewards and advantages whitened (detail P9), to be cut into micro-batches
    afterwards. `group`: the data-parallel ranks that hold the rest of the minibatch.

    The original's order (lm-human-preferences train_policy.py, `loss`): rewards are whitened with their mean kept, GAE
    computes advantages *and returns* of the whitened rewards, and the advantages are whitened. So with `whiten_rewards`
    the critic learns the returns of whitened rewards, whose scale changes with the minibatch.

    A token's own correction (`kl.own_correction`) is a part of its reward that is added after GAE. Whitening divides
    rewards by their deviation and shifts all of them alike, so the correction is divided by the same deviation.
    """
    rewards, advantages, returns = minibatch.rewards, minibatch.advantages, minibatch.returns
    if config.whiten_rewards:
        rewards = whiten(rewards, minibatch.mask, shift_mean=False, group=group)
        advantages, returns = _credit(rewards, minibatch.values, minibatch.mask, config)
        scale = inverse_deviation(minibatch.rewards, minibatch.mask, group=group)
        advantages = advantages + scale * minibatch.correction
    if config.whiten_advantages:
        advantages = whiten(advantages, minibatch.mask, group=group)
    return dataclasses.replace(minibatch, rewards=rewards, advantages=advantages, returns=returns)


def value_loss(outputs: Outputs, rows: CriticExperience, *, config: PPOConfig) -> tuple[Tensor, Tensor, Metrics]:
    """The value loss clipped like the policy's (detail P10; lm-human-preferences train_policy.py, `loss`):

        vf_coef * sum_{b,j} mask * 0.5 * max((v - returns)^2, (clip(v, V - c, V + c) - returns)^2)

    outputs["values"] (B, R), differentiable: v; rows.values: V, those of the rollout; c = clip_range_value. Returns
    (sum, number of tokens, metrics). ppo/loss/value is without vf_coef; ppo/val/mean and var are of V, vpred and
    vpred_var of v.
    """
    mask, count = rows.mask, rows.mask.sum()
    values, old, returns = torch.where(mask, outputs["values"], 0), rows.values, rows.returns
    clipped = torch.clamp(values, old - config.clip_range_value, old + config.clip_range_value)
    plain_error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    total = masked_sum(0.5 * torch.maximum(plain_error, clipped_error), mask)
    metrics: Metrics = {
        "ppo/loss/value": (total, count),
        "ppo/val/clipfrac": (masked_sum((clipped_error > plain_error).float(), mask), count),
        "ppo/val/error": (masked_sum(plain_error, mask), count),
        "ppo/val/vpred": (masked_sum(values, mask), count),
        "ppo/val/vpred_var": variance(values, mask),
        "ppo/val/mean": (masked_sum(old, mask), count),
        "ppo/val/var": variance(old, mask),
        "ppo/returns/mean": (masked_sum(returns, mask), count),
        "ppo/returns/var": variance(returns, mask),
    }
    return config.vf_coef * total, count, metrics
