"""The interface between loops and algorithms. Each algorithm is an instance of a class below, made by another file of
this directory; `train/online.py` and `train/offline.py` import this file alone.

Legend: B rows of a data-parallel rank, R response columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megarlhf.batch import Batch, Experience, Prompts, Rollout, Scores, Sequences, Stage
from megarlhf.config import UserError
from megarlhf.metrics import Metric

Outputs = dict[str, Tensor]  # of a head, (B, R) each
Metrics = dict[str, tuple[Tensor, Tensor] | Metric]
Loss = Callable[[Outputs, Any], tuple[Tensor, Tensor, Metrics]]  # (outputs, rows) -> (sum, count, metrics)
Forwards = dict[str, Callable[[Sequences], Outputs]]  # model -> its outputs for rows, without gradients
State = dict[str, float]  # numbers that change from batch to batch; saved with every checkpoint


class Actions(Protocol):
    """The actions of an algorithm within a step (train/actions.py). All methods are collective."""

    step: int  # from 0
    group: dist.ProcessGroup  # the data-parallel ranks
    rank: int  # among them

    def prompts(self) -> Prompts:
        """The next batch of prompts; every call draws another."""

    def sample(self, prompts: Prompts) -> Rollout:
        """Responses to them."""

    def greedy(self, prompts: Prompts) -> Rollout:
        """The most probable response to each of them, one a prompt. For algorithms with `greedy`."""

    def score(self, rollout: Rollout) -> Scores:
        """Their scores by the reward sources."""

    def gathered(self, rows: Stage) -> Stage:
        """The rows of all data-parallel ranks, in the order of the global batch."""

    def evaluate(self, rollout: Rollout, scores: Scores, **extra: Tensor) -> Batch:
        """The batch, with the signals that the algorithm asks for."""

    def average(self, decay: float) -> None:
        """Move the averaged model's weights towards the actor's: decay * own + (1 - decay) * the actor's."""


def collect_once(act: Actions) -> Batch:
    """One batch of prompts, sampled once."""
    rollout = act.sample(act.prompts())
    return act.evaluate(rollout, act.score(rollout))


@dataclass(frozen=True)
class Update:
    """One optimizer update of one model on a minibatch."""

    loss: Loss
    outputs: dict[str, bool] = field(default_factory=dict)  # read by the loss beyond log-probs: with_entropy
    prefix: str = ""  # of the engine's own metrics: grad_norm, lr, skipped


@dataclass(frozen=True)
class OnlineAlgorithm:
    """An algorithm that learns from its policy's samples. Its functions are pure, except those with `Actions` or a
    process group, which are collective."""

    # credit of this rank's rows; the process group is for moments of the global batch
    make_experience: Callable[[Batch, State, dist.ProcessGroup], Experience]
    updates: Callable[[int], dict[str, Update]]  # step -> {model: its update of each minibatch}, in this order
    # metrics of every batch, refused ones included; objective/scores and objective/kl (k1) among them, but none of the
    # state's names
    objective: Callable[[Batch, State], Metrics]
    # computations over all rows of a minibatch, on all ranks of the group: whitening
    minibatch: Callable[[Experience, dist.ProcessGroup], Experience] = lambda rows, group: rows
    collect: Callable[[Actions], Batch] = collect_once
    signals: frozenset[str] = frozenset()  # beside log-probs: values (of a critic), kl (exact, per token)
    state: State = field(default_factory=dict)  # at the start of a run
    # a saved state -> the state to continue with under this configuration
    restore: Callable[[State], State] = lambda state: state
    # (state, the batch's metrics, its number of responses) -> the state for the next batch
    adapt: Callable[[State, dict[str, float], int], State] = lambda state, values, batch_size: state
    after_update: Callable[[Actions], None] = lambda act: None  # of the actor
    after_batch: Callable[[Actions], None] = lambda act: None  # that was learned from
    group_size: int = 1  # minimum of samples a prompt
    min_response_length: int = 1  # the longest response allowed must be at least so long
    fixed_length: bool = False  # only for responses that do not end at EOS
    all_tokens: bool = False  # only for responses sampled from all tokens: no top_k, top_p or greedy
    greedy: bool = False  # calls Actions.greedy
    token_mean: bool = True  # its loss is a mean over tokens, to which others such as pretraining text can be added


def share_trunk(algorithm: OnlineAlgorithm) -> OnlineAlgorithm:
    """`algorithm` with the critic's head on the actor's trunk: one backward pass of the sum of both losses. Raises
    UserError for losses that cannot be added."""
    if not algorithm.token_mean or "actor" not in algorithm.updates(0):
        raise UserError(
            "critic.kind: a shared critic learns with the policy, as a mean over tokens; use a separate one with "
            "critic_warmup, or with a normalization other than token"
        )

    def updates(step: int) -> dict[str, Update]:
        both = algorithm.updates(step)
        actor, critic = both["actor"], both["critic"]
        return {"actor": replace(actor, loss=lambda outputs, rows: _sum(actor.loss, critic.loss, outputs, rows))}

    return replace(algorithm, updates=updates)


def _sum(first: Loss, second: Loss, outputs: Outputs, rows: Any) -> tuple[Tensor, Tensor, Metrics]:
    total, count, metrics = first(outputs, rows)
    more, _, others = second(outputs, rows)
    total = total + more
    return total, count, {**metrics, **others, "ppo/loss/total": (total, count)}


def averaged(algorithm: OnlineAlgorithm, decay: float) -> OnlineAlgorithm:
    """`algorithm` with a moving average of the actor's weights, the model `average`, which follows each update."""

    def after_update(act: Actions) -> None:
        algorithm.after_update(act)
        act.average(decay)

    return replace(algorithm, after_update=after_update)


@dataclass(frozen=True)
class OfflineAlgorithm:
    """An algorithm that learns from a data set."""

    loss: Loss
    # (this rank's rows, the forward passes of all models by name, the data-parallel ranks) -> the rows for the loss:
    # computations over the whole minibatch, or with a reference's outputs, before the split into micro-batches.
    # Collective.
    prepare: Callable[[Any, Forwards, dist.ProcessGroup], Sequences] = lambda rows, models, group: rows
    derived: Callable[[dict[str, float]], dict[str, float]] = lambda values: {}  # from the held-out means: perplexity
    # what `prepare` gives to the model "reference" for these rows, so that it can be computed beforehand; None: it
    # needs no reference
    referenced: Callable[[Any], list[Sequences]] | None = None
    mixes_rows: bool = False  # these rows depend on which rows are in one global minibatch
