"""`megarlhf ilql`: a policy with a value head and Q heads from responses with rewards, the offline loop on them.

It starts from an SFT model with new heads, or continues an ILQL model with its own. Its checkpoints hold an actor.
`megarlhf generate` uses the actor's Q heads (sampler.q_beta); every other program reads it as a plain policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarlhf import checkpoint, config
from megarlhf.algorithms.ilql import ILQLConfig, ilql
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.files import paths
from megarlhf.data.rewarded import RewardedDataConfig, RewardedExamples, RewardedLoader, load_rewarded
from megarlhf.models.locate import has_q_heads
from megarlhf.train import offline, setup
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig

HEADS = ("value_head.", "q_heads.")


@dataclass(frozen=True, kw_only=True)
class ILQLRunConfig(OfflineRunConfig):
    """One section for each thing it configures. model.checkpoint: an SFT or an ILQL model."""

    data: RewardedDataConfig
    ilql: ILQLConfig = field(default_factory=ILQLConfig)


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: RewardedExamples
    validation: RewardedExamples | None
    fresh: tuple[str, ...]  # heads that model.checkpoint does not have


def check(settings: ILQLRunConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    settings.training.check_batch(settings.parallel, world_size)
    start = setup.find(settings, length=settings.data.max_length, role="actor")
    setup.check_memory(settings, start.architecture, world_size, length=settings.data.max_length)
    examples, report = load_rewarded(settings.data.train, start.tokenizer, settings.data)
    notes, validation = [report.summary()], None
    if settings.data.validation is not None:
        validation, report = load_rewarded(settings.data.validation, start.tokenizer, settings.data)
        notes.append(report.summary())
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
    total = settings.training.total_steps(examples.epoch_rows)
    settings.optimizer.check_steps(total)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation, fresh=fresh
    )


def fresh_heads(source: Path | None) -> tuple[str, ...]:
    """The heads that a run from the model directory `source` starts anew: both, or none if it is an ILQL model."""
    return () if source is not None and has_q_heads(source) else HEADS


def prepare(settings: ILQLRunConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    from megarlhf.models.build import build

    start, total = plan.start, plan.total_steps
    options = setup.model_options(settings, trains=True, total_steps=total)
    engine = build("actor_q", start.architecture, topology, **options)
    if start.resume_from is not None:
        checkpoint.load(engine, start.resume_from / "actor", weights_only=False)
    elif start.source is not None:
        checkpoint.load(engine, start.source, weights_only=True, fresh=plan.fresh)
    loader = partial(RewardedLoader, **setup.loader_options(settings, start, topology))

    def loop(checkpoints, log, write_files):
        offline.train(
            ilql(settings.ilql), {"actor": engine}, loader(plan.training),
            loader(plan.validation) if plan.validation is not None else None,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write_files,
        )  # fmt: skip

    banner = {"steps": f"{total} of {settings.training.global_batch_size} rows"}
    return Prepared({"actor": engine}, engine.steps, loop, banner)


PROGRAM = Program((ILQLRunConfig,), partial(config.load, ILQLRunConfig), check, training(prepare))
