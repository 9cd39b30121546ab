"""`megarlhf prm`: a process reward model from solutions with labelled steps, the offline loop on them.

It starts from an SFT model with a new scalar head, whose output at a step's end is the logit of the step being right.
Its checkpoints hold a reward model, which scores responses as a source with `steps` (experience/scorer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megarlhf import checkpoint, config
from megarlhf.algorithms.process_reward import process_reward_model
from megarlhf.cluster.parallel import Topology
from megarlhf.data.steps import StepDataConfig, StepExamples, StepLoader, load_steps
from megarlhf.train import offline, setup
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig


@dataclass(frozen=True, kw_only=True)
class ProcessRewardConfig(OfflineRunConfig):
    """One section for each thing it configures. model.checkpoint: the SFT model."""

    data: StepDataConfig


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: StepExamples
    validation: StepExamples | None


def check(settings: ProcessRewardConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    settings.training.check_batch(settings.parallel, world_size)
    start = setup.find(settings, length=settings.data.max_length, role="reward")
    setup.check_memory(settings, start.architecture, world_size, length=settings.data.max_length)
    examples, report = load_steps(settings.data.train, start.tokenizer, settings.data)
    notes, validation = [report.summary()], None
    if settings.data.validation is not None:
        validation, report = load_steps(settings.data.validation, start.tokenizer, settings.data)
        notes.append(report.summary())
    total = settings.training.total_steps(len(examples))
    settings.optimizer.check_steps(total)
    return Plan(start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation)


def prepare(settings: ProcessRewardConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    from megarlhf.models.build import build

    start, total = plan.start, plan.total_steps
    options = setup.model_options(settings, trains=True, total_steps=total)
    engine = build("reward", start.architecture, topology, **options)
    if start.resume_from is not None:
        checkpoint.load(engine, start.resume_from / "reward", weights_only=False)
    elif start.source is not None:
        checkpoint.load(engine, start.source, weights_only=True, fresh=("value_head.",))
    loader = partial(StepLoader, **setup.loader_options(settings, start, topology))

    def loop(checkpoints, log, write_files):
        offline.train(
            process_reward_model(), {"reward": engine}, loader(plan.training),
            loader(plan.validation) if plan.validation is not None else None,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write_files,
        )  # fmt: skip

    banner = {"steps": f"{total} of {settings.training.global_batch_size} solutions"}
    return Prepared({"reward": engine}, engine.steps, loop, banner)


PROGRAM = Program((ProcessRewardConfig,), partial(config.load, ProcessRewardConfig), check, training(prepare))
