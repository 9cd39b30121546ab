"""`megarlhf ilql`: a policy with a value head and Q heads from responses with rewards, the offline loop on them.

It starts from an SFT model with new heads, or continues an ILQL model with its own. Its checkpoints hold an actor.
`megarlhf generate` uses the actor's Q heads (sampler.q_beta); every other program reads it as a plain policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarlhf import config
from megarlhf.algorithms.ilql import ILQLConfig, ilql
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.files import paths
from megarlhf.data.rewarded import RewardedDataConfig, RewardedLoader, load_rewarded
from megarlhf.models.locate import has_q_heads
from megarlhf.train import data_set
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig

HEADS = ("value_head.", "q_heads.")


@dataclass(frozen=True, kw_only=True)
class ILQLRunConfig(OfflineRunConfig):
    """One section for each thing it configures. model.checkpoint: an SFT or an ILQL model."""

    data: RewardedDataConfig
    ilql: ILQLConfig = field(default_factory=ILQLConfig)


@dataclass(frozen=True, kw_only=True)
class Plan(data_set.Plan):
    fresh: tuple[str, ...]  # heads that model.checkpoint does not have


def check(settings: ILQLRunConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    start = data_set.find(settings, world_size, role="actor")
    load = partial(load_rewarded, tokenizer=start.tokenizer, config=settings.data, cache=start.cache)
    examples, validation, notes = data_set.read(settings.data, load)
    if settings.data.normalize:
        mean, std = examples.moments
        if std <= 1e-12 * (1 + abs(mean)):
            raise UserError(
                f"data.normalize: all rewards of {', '.join(paths(settings.data.train))} are {mean:g}; give responses "
                "of different rewards, or normalize: false"
            )
        examples = examples.normalized(mean, std)
        validation = validation and validation.normalized(mean, std)
        notes.append(f"rewards are normalised: (reward - {mean:.6g}) / {std:.6g}")
    fresh = fresh_heads(start.source)
    if start.source is not None:
        notes.append(f"{start.source}: " + ("has no Q heads; new ones" if fresh else "its value and Q heads are kept"))
    total = data_set.total_steps(settings, examples)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation, fresh=fresh
    )


def fresh_heads(source: Path | None) -> tuple[str, ...]:
    """The heads that a run from the model directory `source` starts anew: both, or none if it is an ILQL model."""
    return () if source is not None and has_q_heads(source) else HEADS


def prepare(settings: ILQLRunConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    actor = data_set.trained(settings, plan, topology, "actor", kind="actor_q", fresh=plan.fresh)
    return data_set.prepared(settings, plan, topology, ilql(settings.ilql), {"actor": actor}, RewardedLoader)


PROGRAM = Program((ILQLRunConfig,), partial(config.load, ILQLRunConfig), check, training(prepare))
