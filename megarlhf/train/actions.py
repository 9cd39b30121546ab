"""The models of an online program, and the actions with which an algorithm collects a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms.interface import State, Update
from megarlhf.algorithms.supervised import ptx_loss
from megarlhf.batch import Batch, Experience, Prompts, Rollout, Scores, Stage
from megarlhf.cluster import backend
from megarlhf.cluster.offload import Offloaded
from megarlhf.cluster.residency import Parts
from megarlhf.data.loader import Loader
from megarlhf.data.prompts import PromptLoader
from megarlhf.models.hydra import Hydra
from megarlhf.train.clock import Clock
from megarlhf.train.evaluation import Best, Evaluation

if TYPE_CHECKING:
    from megarlhf.engine import Engine, Part
    from megarlhf.experience.sampler import Sampler
    from megarlhf.experience.scorer import Scorer


@dataclass
class Models:
    """The models and data sources of a step."""

    actor: Engine
    critic: Engine | None  # None: no values, or those of a head on the actor's trunk
    reference: Engine | Hydra
    sampler: Sampler
    scorer: Scorer
    prompts: PromptLoader
    evaluation: Evaluation
    text: Pretraining | None = None
    average: Engine | None = None  # follows the actor
    greedy: Sampler | None = None  # of the most probable responses

    @property
    def saved(self) -> dict[str, Engine]:
        """The models that are in checkpoints, by role."""
        models = {"actor": self.actor, "critic": self.critic, "average": self.average}
        return {role: engine for role, engine in models.items() if engine is not None}

    @property
    def engines(self) -> dict[str, Engine | Hydra]:
        """All models by name, with those that score."""
        judges = {f"reward {k}": model for k, model in self.scorer.models.items()}
        return self.saved | {"reference": self.reference} | judges

    @property
    def offloaded(self) -> list[Offloaded]:
        """What is kept in host memory."""
        return [part for engine in self.engines.values() for part in engine.offloaded.values()]

    @property
    def counted(self) -> Parts:
        """What `cluster.residency` counts of them."""
        from megarlhf.cluster import gradients

        parts = {
            (name, kind): partial(_bytes_of, engine, kind)
            for name, engine in self.engines.items()
            for kind in ("weights", "optimizer")
        }
        return parts | {("all", "gradients"): gradients.resident, ("sampler", "caches"): self.sampler.resident}

    def inputs(
        self, role: str, update: Update, minibatch: Experience, temperature: float
    ) -> tuple[Experience, list[Part], dict[str, Any]]:
        """What an update of a model takes: the rows, further batches, and options of its head. Collective."""
        from megarlhf.experience.rollout import compared

        if role != "actor":
            return minibatch, [], dict(update.outputs)
        more = [] if self.text is None else self.text.parts(self.actor, minibatch)
        options: dict[str, Any] = {**update.outputs, "temperature": temperature}
        if update.exact_kl:
            minibatch, extra, _ = compared(minibatch, self.reference, temperature=temperature)
            options |= extra
        return minibatch, more, options


def _bytes_of(engine: Engine | Hydra, kind: str) -> int:
    return engine.resident().get(kind, 0)


@dataclass(frozen=True)
class Pretraining:
    """Pretraining text whose loss is added to the policy's (PPO-ptx)."""

    loader: Loader
    coef: float

    def parts(self, actor: Engine, minibatch: Experience) -> list[Part]:
        """The next batch of text; a function of the number of updates. Collective."""
        batch = self.loader.batch(actor.steps)
        counts = torch.tensor([minibatch.mask.sum(), batch.mask.sum()], dtype=torch.float64, device=backend.device())
        dist.all_reduce(counts, group=actor.topology.data_group)
        return [(batch, partial(ptx_loss, scale=self.coef * (counts[0] / counts[1]).item()), {})]


@dataclass
class Progress:
    """The loop's state beside weights and optimizers; saved with every checkpoint."""

    algorithm: str = "ppo"  # the one that has this state
    step: int = 0  # steps done: the key of the order of minibatches
    drawn: int = 0  # batches of prompts drawn: the data cursor, and the key of the sampled tokens
    state: State = field(default_factory=dict)  # of the algorithm
    scorer: dict[str, float] = field(default_factory=dict)  # running normalisation of the sources
    refused: int = 0  # consecutive batches that were refused (guard.py)
    best: Best = field(default_factory=Best)  # of the evaluations on held-out prompts


class Actions:
    """`algorithms.interface.Actions` for one step."""

    def __init__(
        self, models: Models, progress: Progress, clock: Clock, *, temperature: float, signals: frozenset[str]
    ):
        self.models, self.progress, self.clock = models, progress, clock
        self.temperature, self.signals = temperature, signals
        self.step, self.topology = progress.step, models.actor.topology
        self.group, self.rank = self.topology.data_group, self.topology.data_rank

    def prompts(self) -> Prompts:
        self.clock.enter("sample")
        prompts = self.models.prompts.batch(self.progress.drawn)
        self.progress.drawn += 1
        return prompts

    def sample(self, prompts: Prompts) -> Rollout:
        self.clock.enter("sample")
        return self.models.sampler.sample(prompts)

    def greedy(self, prompts: Prompts) -> Rollout:
        self.clock.enter("sample")
        return self.models.greedy.sample(prompts)

    def score(self, rollout: Rollout) -> Scores:
        self.clock.enter("score")
        scores = self.models.scorer.score(rollout)
        self.progress.scorer = self.models.scorer.state
        return scores

    def gathered(self, rows: Stage) -> Stage:
        from megarlhf.experience.rollout import gather

        return gather(rows, self.topology)

    def evaluate(self, rollout: Rollout, scores: Scores, **extra: Tensor) -> Batch:
        """Log-probs at the sampling temperature (detail P1) and the other signals."""
        from megarlhf.experience.rollout import evaluate

        self.clock.enter("evaluate")
        models = self.models
        signals = evaluate(
            rollout, actor=models.actor, reference=models.reference, critic=models.critic,
            temperature=self.temperature, signals=self.signals,
        )  # fmt: skip
        return Batch(rollout, scores, signals, extra)

    def average(self, decay: float) -> None:
        self.models.average.follow(self.models.actor, decay)
