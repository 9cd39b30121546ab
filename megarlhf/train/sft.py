"""`megarlhf sft`: supervised fine-tuning, the offline loop on given text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megarlhf import checkpoint, config
from megarlhf.algorithms import supervised
from megarlhf.cluster.parallel import Topology
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples, SFTDataConfig, load_sft
from megarlhf.train import offline, setup
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineRunConfig):
    """One section for each thing it configures."""

    data: SFTDataConfig


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: Examples
    validation: Examples | None


def check(settings: SFTConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    settings.training.check_batch(settings.parallel, world_size)
    start = setup.find(settings, length=settings.data.max_length, role="actor")
    setup.check_memory(settings, start.architecture, world_size, length=settings.data.max_length)
    examples, report = load_sft(settings.data.train, start.tokenizer, settings.data)
    notes, validation = [report.summary()], None
    if settings.data.validation is not None:
        validation, report = load_sft(settings.data.validation, start.tokenizer, settings.data)
        notes.append(report.summary())
    total = settings.training.total_steps(examples.epoch_rows)
    settings.optimizer.check_steps(total)
    return Plan(start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation)


def prepare(settings: SFTConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    from megarlhf.models.build import build

    start, total = plan.start, plan.total_steps
    options = setup.model_options(settings, trains=True, total_steps=total)
    engine = build("actor", start.architecture, topology, **options)
    if start.resume_from is not None:
        checkpoint.load(engine, start.resume_from / "actor", weights_only=False)
    elif start.source is not None:
        checkpoint.load(engine, start.source, weights_only=True)
    loader = partial(Loader, **setup.loader_options(settings, start, topology))

    def loop(checkpoints, log, write_files):
        offline.train(
            supervised.sft(), {"actor": engine}, loader(plan.training),
            loader(plan.validation) if plan.validation is not None else None,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write_files,
        )  # fmt: skip

    banner = {"steps": f"{total} of {settings.training.global_batch_size} rows"}
    return Prepared({"actor": engine}, engine.steps, loop, banner)


PROGRAM = Program((SFTConfig,), partial(config.load, SFTConfig), check, training(prepare))
