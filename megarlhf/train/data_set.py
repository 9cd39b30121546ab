"""What the programs over a data set share (`megarlhf sft`, `reward`, `prm`, `ilql`, `dpo`, `kto`): reading it before
the start, the model that learns from it, and the offline loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarlhf.algorithms.interface import OfflineAlgorithm
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster.parallel import Topology
from megarlhf.data.files import RowsConfig
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.log import Log
from megarlhf.train import memory, offline, setup
from megarlhf.train.program import Prepared, WriteFiles
from megarlhf.train.settings import OfflineRunConfig
from megarlhf.train.setup import Start

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: Examples
    validation: Examples | None


def find(settings: OfflineRunConfig, world_size: int, *, role: str, together: int = 1) -> Start:
    """Where the program starts from. `role`: the model in this run's checkpoints; `together`: adjacent rows that stay
    on one rank. Refuses (UserError) a batch, a model or sizes that cannot work, on every rank alike."""
    training, length = settings.training, settings.data.max_length
    training.check_batch(settings.parallel, world_size, together=together)
    start = setup.find(settings, length=length, role=role)
    memory.check_sizes(
        start.architecture,
        settings.parallel,
        dtype=settings.model.dtype,
        rows=training.global_batch_size // settings.parallel.data(world_size),
        micro_batch_tokens=settings.micro_batch_tokens,
        length=length,
    )
    return start


def read(
    data: RowsConfig, load: Callable[..., tuple[Examples, Any]], **for_training: Any
) -> tuple[Examples, Examples | None, list[str]]:
    """Training and held-out rows, by `load(files, **options)`, and a note on the lines of each. `for_training`: options
    of the training rows alone."""
    examples, report = load(data.train, **for_training)
    notes, validation = [report.summary()], None
    if data.validation is not None:
        validation, report = load(data.validation)
        notes.append(report.summary())
    return examples, validation, notes


def total_steps(settings: OfflineRunConfig, examples: Examples) -> int:
    """Updates of the run. Refuses (UserError) a schedule, or steps to profile, that do not fit in them."""
    total = settings.training.total_steps(examples.epoch_rows)
    settings.optimizer.check_steps(total)
    settings.log.check_steps(total)
    return total


def trained(
    settings: OfflineRunConfig,
    plan: setup.Plan,
    topology: Topology,
    role: str,
    *,
    kind: str | None = None,
    fresh: tuple[str, ...] = (),
    started: Callable[[Engine], None] | None = None,
) -> Engine:
    """The model that learns: as the run saved it, from model.checkpoint, or from random weights. `role`: its name in
    checkpoints; `kind`: its role in models.build.build, if another; `fresh`: prefixes of weights that model.checkpoint
    lacks; `started`: as in `setup.load`. Collective."""
    from megarlhf.models.build import build

    options = setup.model_options(settings, trains=True, total_steps=plan.total_steps)
    engine = build(kind or role, plan.start.architecture, topology, **options)
    setup.load(engine, settings, plan.start, role, fresh=fresh, started=started)
    return engine


def prepared(
    settings: OfflineRunConfig,
    plan: Plan,
    topology: Topology,
    algorithm: OfflineAlgorithm,
    models: Mapping[str, Engine | offline.Forward],
    make_loader: Callable[..., Loader],
    *,
    banner: Mapping[str, str] | None = None,
    unit: str = "rows",
    notes: tuple[str, ...] = (),
    write_more: WriteFiles = lambda step_directory: None,
    adjust: Callable[[int, Log], None] = lambda step, log: None,
) -> Prepared:
    """The offline loop over the plan's data. `models`: the trained one comes first; `unit`: of the batch, for the
    banner; `write_more`: as in `Prepared`; `adjust`: as in `offline.train`."""
    role, engine = next(iter(models.items()))
    training, validation = loaders(settings, plan, topology, make_loader)

    def loop(checkpoints: Checkpoints, log: Log, write_files: WriteFiles) -> None:
        offline.train(
            algorithm, models, training, validation,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write_files, adjust=adjust,
        )  # fmt: skip

    steps = f"{plan.total_steps} of {settings.training.global_batch_size} {unit}"
    return Prepared({role: engine}, engine.steps, loop, {**(banner or {}), "steps": steps}, notes, write_more)


def loaders(
    settings: OfflineRunConfig, plan: Plan, topology: Topology, make_loader: Callable[..., Loader]
) -> tuple[Loader, Loader | None]:
    """Of the training and of the held-out rows."""
    options = dict(
        global_batch=settings.training.global_batch_size,
        dp_rank=topology.data_rank,
        dp_size=topology.data_size,
        seed=settings.seed,
        pad_id=plan.start.tokenizer.pad_id,
    )
    training = make_loader(plan.training, **options)
    return training, None if plan.validation is None else make_loader(plan.validation, **options)
