"""The steps of every program before its loop: find the model, check it against the layout, start the cluster, print the
banner."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megarlhf import checkpoint, config, console, records, trackers
from megarlhf.checkpoint import Checkpoints, checksums, steps
from megarlhf.checkpoint.loading import raise_together
from megarlhf.cluster import backend, job_checks, lease, parallel, signals, watchdog
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.cache import Cache
from megarlhf.data.tokenizer import Tokenizer, check_same, check_vocabulary, load_tokenizer
from megarlhf.log import Log
from megarlhf.models import adapters, mixture
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.model_config import ModelConfig
from megarlhf.models.spec import Architecture, check_layout, check_length
from megarlhf.train import exporting, going_back, resuming, same_data
from megarlhf.train.settings import RUN_FILE, RanksConfig, RunConfig

if TYPE_CHECKING:
    from megarlhf.engine import Engine

P = TypeVar("P", bound="Plan")


@dataclass(frozen=True)
class Start:
    """Where a program starts from, found and checked without a process group."""

    architecture: Architecture
    tokenizer: Tokenizer
    source: Path | None  # model directory with the initial weights; None: random ones
    resume_from: Path | None  # step directory of the run to resume
    cache: Cache  # of the tokenized data
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked configuration of a program that trains, and all that can be prepared without a process group. Each
    program adds its data."""

    start: Start
    total_steps: int
    notes: tuple[str, ...] = ()
    # why a run that saved this step directory trains no further, although steps are left; None: it does
    stopped: Callable[[Path], str | None] = lambda step_directory: None


def find(settings: RunConfig, *, length: int, key: str = "data.max_length", role: str) -> Start:
    """The model, tokenizer and checkpoint that `settings` (run, model, tokenizer, parallel, checkpoint) start from.

    `length`: tokens of the longest row, which `key` sets; `role`: the model in this run's checkpoints that has the
    architecture.
    Refuses (UserError) a configuration that cannot work, on every rank alike, before anything is allocated.
    """
    model: ModelConfig = settings.model
    if model.checkpoint is not None:
        source = find_model(model.checkpoint)
        checksums.verify_directory(source, small=True)
        adapters.check(source)
        architecture = Architecture.load(source)
        if model.lora is not None and model.lora.checkpoint is not None:
            adapters.check_given(find_model(model.lora.checkpoint, role), model.lora, source)
        tokenizer_path = settings.tokenizer or find_tokenizer(model.checkpoint)
    else:
        source, architecture, tokenizer_path = None, model.architecture, settings.tokenizer
    if tokenizer_path is None:
        raise UserError("tokenizer: the model comes without one; give a Hugging Face directory or a .model file")
    check_layout(architecture, settings.parallel)
    mixture.check_model(architecture, model, settings.parallel, rl=settings.samples)
    if model.lora is not None:
        adapters.check_targets(model.lora, architecture)
        if model.lora.quantization == "nf4":
            adapters.check_blocks(architecture, settings.parallel.tensor)
    check_length(architecture, length, key)
    model.check_layers(architecture)
    tokenizer = load_tokenizer(tokenizer_path, settings.chat_template)
    check_vocabulary(tokenizer, architecture.vocab_size)
    check_writable(settings.run)
    trackers.check(settings.log.trackers)
    if settings.checkpoint.export_hf:
        exporting.check(architecture, role)
    resume_from, notes = resuming.find(settings, architecture, tokenizer, source, role=role)
    cache = Cache(settings.data_cache or own_cache(settings))
    return Start(architecture, tokenizer, source, resume_from, cache, notes)


def own_cache(settings: RunConfig) -> Path:
    """Where the tokenized data are without data_cache."""
    return Path(settings.run) / "data"


def check_lora_compared(settings: Any) -> None:
    """Refuse (UserError) adapters with dropout where log-probs are compared with those of another pass, and a
    reference on the host (`settings.reference`) that is the policy itself."""
    if settings.model.lora is None:
        return
    if settings.model.lora.dropout:
        raise UserError(
            "model.lora.dropout: must be 0: it would make the policy's log-probs others than those it is compared with"
        )
    if settings.reference.on_host and settings.reference.checkpoint is None:
        raise UserError(
            "reference.on_host: with model.lora the reference is the policy without its adapters, which takes no "
            "memory; remove the key"
        )


def find_fitting(start: Start, path: str, key: str, *, role: str, model: str) -> tuple[Path, str | None]:
    """The model directory of `role` in `path`, and a note if something was not checked. `key`: what gives the path;
    `model`: what it is, for messages. Refuses (UserError) another architecture or tokenizer than the start's."""
    source = find_model(path, role)
    adapters.check(source)
    if Architecture.load(source) != start.architecture:
        raise UserError(f"{key}: {path} has another architecture than model.checkpoint; give one of the same")
    return source, check_same(start.tokenizer, f"{key}: {path}", find_tokenizer(path), model)


def check_writable(path: str, key: str = "run") -> None:
    """Refuse (UserError) an empty path, and a directory in which no file can be created; in its first existing parent
    if it does not exist. `key`: what gives the path."""
    if not path.strip():
        what = " for the checkpoints and metrics of this run" if key == "run" else ""
        raise UserError(f"{key}: is empty; name a directory{what}")
    try:
        with tempfile.TemporaryFile(dir=existing(Path(path))):
            pass
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{key}: {path[:300]} cannot be written ({why}); give another directory")


def existing(path: Path) -> Path:
    """`path`, or its first parent that exists. Raises OSError if that cannot be determined."""
    path = path.absolute()
    try:
        path.stat()
    except FileNotFoundError:
        return existing(path.parent)
    return path


def cluster(rendezvous: Rendezvous, settings: RanksConfig, directory: str | Path) -> Topology:
    """Run the checks of a job's start and make megatron's process groups; `directory` is one that all nodes share.
    Collective; imports megatron."""
    backend.install()
    store = backend.open_store(rendezvous, settings.job.join_minutes)
    watchdog.start(rendezvous, store, settings.job, Path(directory))
    signals.remember()
    job_checks.reach(rendezvous, store)
    backend.join(rendezvous, store, timeout_minutes=2 * settings.job.hang_minutes)  # the watchdog reports first
    job_checks.compare(rendezvous, config.dump(settings))
    return parallel.start(settings.parallel)


def execute(run: Callable[[Any, P, Topology], None], settings: RunConfig, plan: P, rendezvous: Rendezvous) -> None:
    """Run a program that trains: `run(settings, plan, topology)`, unless all its steps are done. Collective.

    Meanwhile this job holds the lease on the run directory (cluster/lease.py). Raises UserError, on rank 0 for all, if
    another job holds it.
    """
    topology = cluster(rendezvous, settings, settings.run)
    with lease.held(Path(settings.run)) if topology.rank == 0 else contextlib.nullcontext():
        if topology.rank == 0:
            Checkpoints(Path(settings.run), settings.checkpoint).sweep()
        plan = agree(settings, plan, rendezvous)  # before models are built, but under the lease
        settings = going_back.applied(settings, plan.start.resume_from, topology)
        if not is_finished(settings, plan, topology):
            run(settings, plan, topology)


def agree(settings: RunConfig, plan: P, rendezvous: Rendezvous) -> P:
    """`plan`, resuming from the step directory that rank 0 finds now: another rank may have seen an older state of the
    run directory, and the job before may have saved since. Collective. Raises UserError, on all ranks alike, if a rank
    does not see that step directory, or has read other data than rank 0 or than the run that is resumed."""
    box = [resuming.latest(settings), plan.start.cache.contents] if rendezvous.rank == 0 else [None, None]
    dist.broadcast_object_list(box, src=0)
    chosen, contents = box
    unseen = same_data.differs(plan.start.cache, contents, f"rank {rendezvous.rank} on {rendezvous.node}")
    if chosen is not None:
        with contextlib.suppress(OSError):
            os.listdir(chosen.parent)  # makes a network file system refresh its cache
        if not steps.is_complete(chosen):
            unseen = (
                f"rank {rendezvous.rank} on {rendezvous.node}: {chosen.absolute()}, from which rank 0 resumes, is not "
                "there; mount the same file system on every node, or exclude this one"
            )
        unseen = unseen or same_data.changed(plan.start.cache, chosen)
    raise_together(unseen)
    notes = plan.start.notes
    if chosen is not None and chosen != plan.start.resume_from:
        notes = (
            f"resuming {settings.run} after step {checkpoint.read_state(chosen)['step']}, which was saved meanwhile",
        )
    return replace(plan, start=replace(plan.start, resume_from=chosen, notes=notes))


def is_finished(settings: RunConfig, plan: Plan, topology: Topology) -> bool:
    """Whether the run was over before it started; then rank 0 prints this and the remedy."""
    start, total = plan.start, plan.total_steps
    if start.resume_from is None:
        return False
    done, why = checkpoint.read_state(start.resume_from)["step"], plan.stopped(start.resume_from)
    if done < total and why is None:
        return False
    if topology.rank == 0:
        for note in start.notes:
            console.say(f"  {note}")
        said = f"and the configuration asks for {total}", "training.steps (or training.epochs)"
        if done < total:
            said = f"then stopped, since {why}", "evaluation.patience"
        console.say(
            f"megarlhf: {settings.run} has done {done} steps, {said[0]}: nothing is left to do; its model is "
            f"{start.resume_from}; for more steps raise {said[1]}, to train anew give another run directory"
        )
    return True


def model_options(settings: RunConfig, *, trains: bool, total_steps: int) -> dict[str, Any]:
    """The arguments of `models.build.build` that the sections give."""
    return dict(
        micro_batch_tokens=settings.micro_batch_tokens,
        dtype=settings.model.dtype,
        optimizer=settings.optimizer if trains else None,
        total_steps=total_steps,
        dropout=settings.model.dropout,
        recompute=settings.model.recompute,
        trained_layers=settings.model.trained_layers if trains else None,
        seed=settings.seed,
        awaits_checkpoint=settings.model.checkpoint is not None,
        adapters=settings.model.lora if trains else None,
        router=replace(settings.model.experts, train_router=trains_router(settings)) if trains else None,
    )


def trains_router(settings: RunConfig) -> bool:
    """Whether the routers of a mixture of experts learn: in RL not, unless the configuration says so."""
    return mixture.trains_router(settings.model.experts, rl=settings.samples)


def load(
    engine: Engine,
    settings: RunConfig,
    start: Start,
    role: str,
    *,
    source: Path | None = None,
    fresh: tuple[str, ...] = (),
    started: Callable[[Engine], None] | None = None,
) -> None:
    """Load a model that this run trains: what it starts from, or its checkpoint if the run is resumed. A model with
    adapters has both: checkpoints do not hold the base.

    `role`: its name in checkpoints; `source`: the model directory that it starts from, default that of
    model.checkpoint; `fresh`: names of new weights begin so; `started`: called with the model as it starts, also in a
    resumed run. Collective. Raises UserError if the base is not that of the checkpoint.
    """
    source, resumed, lora = source or start.source, start.resume_from, settings.model.lora
    if source is not None and (resumed is None or lora is not None or started is not None):
        adapters.load(engine, source, fresh=fresh)
        if lora is not None and lora.checkpoint is not None and role in ("actor", "reward"):
            adapters.take(engine, find_model(lora.checkpoint, role))
    if started is not None:
        started(engine)
    if resumed is not None:
        adapters.check_resumed(engine.base, resumed / role)
        checkpoint.load(engine, resumed / role, weights_only=False)


def files_writer(settings: RunConfig, start: Start, models: dict[str, Engine], log: Log) -> Callable[[Path], None]:
    """A function that adds files to a step directory before its final rename: the resolved configuration, tokenizer,
    architectures and the bases of adapters, and the files with which a converted model is converted back (hf_*.json:
    megarlhf/convert). It first writes the lines of `log` to the disk."""
    origin = start.source or (start.resume_from / next(iter(models)) if start.resume_from else None)
    kept = {path.name: path.read_bytes() for path in origin.glob("hf_*.json")} if origin else {}

    def write(directory: Path) -> None:
        lease.verify()  # the save took a while
        log.sync()
        (directory / RUN_FILE).write_text(config.dump(settings))
        same_data.save(start.cache, directory)
        start.cache.keep()
        start.tokenizer.save(directory / "tokenizer")
        for role, engine in models.items():
            start.architecture.save(directory / role)
            if engine.base is not None:
                engine.base.save(directory / role)
            for name, content in kept.items():
                (directory / role / name).write_bytes(content)

    return write


def announce(settings: RunConfig, start: Start, topology: Topology, lines: dict[str, str], notes: list[str]) -> None:
    """Write run.yaml into the run directory and a banner to stderr. Global rank 0 only."""
    if topology.rank != 0:
        return
    from megarlhf.models.build import DTYPES  # megatron is imported by now

    lease.verify()  # building the models took a while; files of the run are replaced from here on
    run = Path(settings.run)
    run.mkdir(parents=True, exist_ok=True)
    records.replace(run / RUN_FILE, config.dump(settings))
    sizes, architecture = settings.parallel, start.architecture
    banner = {
        "run": settings.run,
        "model": f"{architecture.family}, {architecture.num_parameters / 1e6:,.1f}M parameters, {settings.model.dtype}"
        f", from {settings.model.checkpoint or f'random weights (seed {settings.seed})'}",
        "layout": f"tensor {sizes.tensor}{' + sequence' if sizes.sequence else ''} x pipeline {sizes.pipeline} x data "
        f"{topology.data_size}{', distributed optimizer' if sizes.distributed_optimizer else ''}",
        **backend.describe(DTYPES[settings.model.dtype]),
        **lines,
    }
    if (lora := settings.model.lora) is not None:
        banner["adapters"] = f"rank {lora.rank}, scale {lora.scale:.4g}, on {', '.join(lora.targets)}" + (
            f", from {lora.checkpoint}" if lora.checkpoint else ""
        )
    for name, value in banner.items():
        console.say(f"  {name:<22} {value}")
    remarks = backend.remarks(DTYPES[settings.model.dtype], "model.dtype")
    for note in (*settings.training.budget(settings.longest_row)[1], *notes, *start.notes, *remarks):
        console.say(f"  {note}")
