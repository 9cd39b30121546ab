"""`megarlhf sft`: supervised fine-tuning, the offline loop on given text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from megarlhf import checkpoint, config
from megarlhf.algorithms.supervised import sft_loss
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import launch
from megarlhf.cluster.parallel import ParallelConfig, Topology
from megarlhf.cluster.slurm import JobConfig
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples, SFTDataConfig, load_sft
from megarlhf.log import Log
from megarlhf.models.spec import ModelConfig
from megarlhf.optim import OptimizerConfig
from megarlhf.train import offline, setup
from megarlhf.train.setup import Start
from megarlhf.train.state import LogConfig, TrainingConfig


@dataclass(frozen=True)
class SFTConfig:
    """One section for each thing it configures."""

    run: str  # directory of this run: checkpoints, metrics, the resolved configuration
    model: ModelConfig
    data: SFTDataConfig
    tokenizer: str | None = None  # default: the one that came with model.checkpoint
    seed: int = 0  # initial weights, dropout and the order of the data
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self):
        config.check_seed(self.seed)


@dataclass(frozen=True)
class Plan:
    """A checked configuration: everything that can be had without a process group."""

    start: Start
    training: Examples
    validation: Examples | None
    total_steps: int
    notes: tuple[str, ...]


def main(path: str, overrides: list[str]) -> None:
    settings = config.load(SFTConfig, path, overrides)
    rendezvous = launch.resolve()
    plan = check(settings, rendezvous.world_size)
    setup.execute(run, settings, plan, rendezvous, total_steps=plan.total_steps)


def check(settings: SFTConfig, world_size: int) -> Plan:
    """Refuse (UserError) whatever cannot work, on every rank alike, before anything is allocated."""
    settings.training.check(settings.parallel, world_size)
    start = setup.find(settings, length=settings.data.max_length, role="actor")
    setup.check_memory(settings, start.architecture, world_size)
    training, report = load_sft(settings.data.train, start.tokenizer, settings.data)
    notes, validation = [report.summary()], None
    if settings.data.validation is not None:
        validation, report = load_sft(settings.data.validation, start.tokenizer, settings.data)
        notes.append(report.summary())
    total = settings.training.total_steps(len(training))
    settings.optimizer.check(total)
    return Plan(start, training, validation, total, tuple(notes))


def run(settings: SFTConfig, plan: Plan, topology: Topology) -> None:
    """Build, load, train. Collective."""
    from megarlhf.models.build import build

    start, total = plan.start, plan.total_steps
    options = setup.model_options(settings, trains=True, total_steps=total)
    engine = build("actor", start.architecture, topology, **options)
    if start.resume_from is not None:
        checkpoint.load(engine, start.resume_from / "actor", weights_only=False)
    elif start.source is not None:
        checkpoint.load(engine, start.source, weights_only=True)

    def loader(examples: Examples) -> Loader:
        return Loader(
            examples,
            global_batch=settings.training.global_batch_size,
            dp_rank=topology.data_rank,
            dp_size=topology.data_size,
            seed=settings.seed,
            pad_id=start.tokenizer.pad_id,
            pad_multiple=setup.pad_multiple(settings.parallel),
        )

    steps = {"steps": f"{total} of {settings.training.global_batch_size} rows"}
    setup.announce(settings, start, topology, steps, list(plan.notes))
    directory = Path(settings.run)
    with Log(
        directory, enabled=topology.rank == 0, start=engine.steps, total=total, unit="step", wandb=settings.log.wandb
    ) as log:
        offline.train(
            engine,
            "actor",
            sft_loss,
            loader(plan.training),
            loader(plan.validation) if plan.validation is not None else None,
            checkpoints=Checkpoints(directory, settings.checkpoint),
            log=log,
            settings=settings,
            write_files=setup.files_writer(settings, start, ("actor",), log),
            derived=perplexity,
        )


def perplexity(values: dict[str, float]) -> dict[str, float]:
    """exp of the mean negative log-likelihood a token."""
    return {"perplexity": math.exp(min(values["loss"], 700))}
