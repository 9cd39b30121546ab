"""The frozen reference of programs that learn from a data set: its log-probs, computed in the run or cached.

A cache is a directory with the log-prob of every counted token of every row that the reference reads in a run. Rows are
found by their content (tokens and mask), so a cached model takes the place of a model that is run. The file
reference.json says what the cache was made of (the reference's weights, by their checksums, and the tokens of the data)
and how many rows it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.algorithms.interface import OfflineAlgorithm, Outputs
from megarlhf.batch import Sequences
from megarlhf.checkpoint import checksums
from megarlhf.checkpoint.loading import raise_together
from megarlhf.cluster import backend, watchdog
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.data.tokenizer import check_same
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig
from megarlhf.train import offline, setup
from megarlhf.train.program import Prepared
from megarlhf.train.settings import OfflineRunConfig
from megarlhf.train.setup import Start

if TYPE_CHECKING:
    from megarlhf.engine import Engine

FILE = "reference.json"  # of a cache, and of a step directory
FORMAT = 2


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model that the policy is compared with."""

    checkpoint: str | None = None  # default: model.checkpoint, where the policy starts
    cache: str | None = None  # directory of its log-probs, made if it does not exist; default: computed in the run


@dataclass(frozen=True, kw_only=True)
class ReferencedRunConfig(OfflineRunConfig):
    """The sections of programs that compare a policy with a reference."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"))


@dataclass(frozen=True)
class Reference:
    """Where the reference comes from."""

    source: Path | None  # model directory; None: the same random weights as the policy's
    weights: str | None  # hash of the weights; None: not known, since the model has no checksums
    content: dict[str, Any]  # what a cache is made of
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: Examples
    validation: Examples | None
    algorithm: OfflineAlgorithm
    reference: Reference | None  # None: the loss has none


# ------------------------------------------------------------------------------------------------ before the start


def check(
    settings: ReferencedRunConfig,
    start: Start,
    algorithm: OfflineAlgorithm,
    data: tuple[Examples, Examples | None],
    total_steps: int,
    *,
    loss: str,
) -> Reference | None:
    """Refuse (UserError) a reference or a cache that cannot be used, on every rank alike. `loss`: the name of the loss
    for messages."""
    config = settings.reference
    if algorithm.referenced is None:
        if config != ReferenceConfig():
            raise UserError(f"reference: the loss {loss} has no reference; remove this section, or change the loss")
        return None
    if settings.model.dropout:
        raise UserError(
            "model.dropout: must be 0: it would change the policy's log-probs and not the reference's; use "
            "optimizer.weight_decay or fewer steps against overfitting"
        )
    source = find_model(config.checkpoint) if config.checkpoint is not None else start.source
    if config.checkpoint is not None and Architecture.load(source) != start.architecture:
        raise UserError(
            f"reference.checkpoint: {config.checkpoint} has another architecture than the policy; give one of the same"
        )
    notes = []
    if config.checkpoint is not None:
        tokenizer = find_tokenizer(config.checkpoint)
        notes.append(
            check_same(start.tokenizer, f"reference.checkpoint: {config.checkpoint}", tokenizer, "reference model")
        )
    weights = f"random, seed {settings.seed}" if source is None else weights_of(source)
    content = {
        "format": FORMAT,
        "reference": weights,
        "dtype": settings.model.dtype,
        "max_length": settings.data.max_length,
        "training": content_of(data[0], complete=algorithm.mixes_rows),
        "validation": content_of(data[1], complete=algorithm.mixes_rows),
        # which rows are compared with which others depends on the order of the data
        "order": None,
    }
    if algorithm.mixes_rows:
        repeats = [[part.num_groups, part.weight] for part in data[0].parts]
        content["order"] = [settings.seed, settings.training.global_batch_size, total_steps, repeats]
    if start.resume_from is not None:
        notes.append(check_resumed(start.resume_from, source, weights))
    if config.cache is not None:
        if source is None or weights is None:
            raise UserError(
                "reference.cache: is found by the checksums of the reference, and "
                + (f"{source} has no {checksums.FILE}; convert it again" if source else "random weights have none")
                + ", or remove reference.cache"
            )
        setup.check_writable(config.cache, "reference.cache")
        if Path(config.cache).exists():
            check_cache(Path(config.cache), content)
    return Reference(source, weights, content, tuple(filter(None, notes)))


def weights_of(directory: Path) -> str | None:
    """A hash of a model's weights, from its checksums; None if it has none."""
    found = checksums.find(directory)
    if found is None:
        return None
    root, files = found
    inside = directory.resolve()
    own = {
        str((root / name).relative_to(inside)): value.sha256
        for name, value in files.items()
        if inside in (root / name).parents
    }
    return hashlib.sha256(json.dumps(sorted(own.items())).encode()).hexdigest()


def content_of(data: Examples | None, *, complete: bool) -> str | None:
    """A hash of the tokens and masks of a data set. `complete`: of all its arrays, since others decide which rows are
    put together."""
    if data is None:
        return None
    names = ("tokens", "mask", "offsets")
    if complete:
        names = tuple(found.name for found in fields(data) if isinstance(getattr(data, found.name), np.ndarray))
    digest = hashlib.sha256()
    for name in names:
        values = getattr(data, name)
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values))
    return digest.hexdigest()


def check_resumed(step_directory: Path, source: Path | None, weights: str | None) -> str | None:
    """Refuse (UserError) to go on with another reference than the run began with. Returns a note if that is not known:
    a model without checksums may have moved, so its path alone does not tell."""
    path = step_directory / FILE
    if not path.is_file():
        return None
    before = _json(path, "use another step directory")
    if before.get("weights") is None:
        began = before.get("source")
        return (
            f"the reference that this run began with ({began or 'its path was not recorded'}) had no {checksums.FILE}, "
            f"so whether {source or 'the random weights'} is the same is not checked"
        )
    if before["weights"] != weights:
        why = "is not" if weights is not None else f"has no {checksums.FILE}, so it is not known to be"
        raise UserError(
            f"reference.checkpoint: {source or 'the random weights'} {why} the reference that this run began with "
            f"({path}); give that model again, or a new run directory"
        )
    return None


def check_cache(directory: Path, content: dict[str, Any]) -> None:
    """Refuse (UserError) a cache that was made of anything else, or is damaged."""
    remedy = "remove it, and the run makes it again, or give another directory"
    if not (directory / FILE).is_file():
        raise UserError(f"reference.cache: {directory} exists and is no cache ({FILE} is missing); give another one")
    found = _json(directory / FILE, f"reference.cache: {remedy}")
    differs = [name for name, value in content.items() if found.get(name) != value]
    if differs:
        names = {
            "reference": "another reference",
            "training": "other data.train",
            "validation": "other data.validation",
            "order": "another order of the data (seed, training.global_batch_size, steps or weights of files)",
            "format": "another version of megarlhf",
        }
        what = ", ".join(names.get(name, f"another {name}") for name in differs)
        raise UserError(f"reference.cache: {directory} was made with {what}; {remedy}")
    damage = checksums.damage(directory)
    if damage is None and checksums.find(directory) is None:
        damage = f"{directory / checksums.FILE}: is missing"
    if damage:
        where = damage.split(f": {checksums.DAMAGED}")[0]
        raise UserError(f"reference.cache: {directory} is damaged ({where}); {remedy}")


def _json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
    except (OSError, ValueError, RecursionError):
        pass
    raise UserError(f"{path}: damaged; {remedy}")


# ------------------------------------------------------------------------------------------------ in the run


def prepare(
    settings: ReferencedRunConfig,
    plan: Plan,
    topology: Topology,
    *,
    make_loader: Callable[..., Loader],
    banner: dict[str, str],
) -> Prepared:
    """Build and load the policy and its reference. Collective."""
    from megarlhf.models.build import build

    start, total, reference = plan.start, plan.total_steps, plan.reference
    options = setup.loader_options(settings, start, topology)
    training = make_loader(plan.training, **options)
    validation = None if plan.validation is None else make_loader(plan.validation, **options)
    others: dict[str, Engine | Cached] = {}
    if reference is not None:
        others["reference"] = frozen(settings, plan, topology, training, validation)
    actor = build(
        "actor", start.architecture, topology, **setup.model_options(settings, trains=True, total_steps=total)
    )
    if start.resume_from is not None:
        checkpoint.load(actor, start.resume_from / "actor", weights_only=False)
    elif start.source is not None:
        checkpoint.load(actor, start.source, weights_only=True)

    def loop(checkpoints, log, write_files):
        def write(directory: Path) -> None:
            write_files(directory)
            if reference is not None:
                source = None if reference.source is None else str(reference.source.resolve())
                (directory / FILE).write_text(json.dumps({"weights": reference.weights, "source": source}) + "\n")

        offline.train(
            plan.algorithm, {"actor": actor, **others}, training, validation,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write,
        )  # fmt: skip

    lines = dict(banner)
    if reference is not None:
        where = str(reference.source or f"random weights (seed {settings.seed})")
        lines["reference"] = where + (f", cached in {settings.reference.cache}" if settings.reference.cache else "")
    lines["steps"] = f"{total} of {settings.training.global_batch_size} rows"
    return Prepared({"actor": actor}, actor.steps, loop, lines, () if reference is None else reference.notes)


def frozen(
    settings: ReferencedRunConfig, plan: Plan, topology: Topology, training: Loader, validation: Loader | None
) -> Engine | Cached:
    """The reference, or its cached outputs. It has no optimizer, and starts from its own weights in resumed runs too.
    Collective."""
    from megarlhf.models.build import build

    start, total, cache = plan.start, plan.total_steps, settings.reference.cache
    if cache is not None:
        there = [False]

        def look() -> None:
            there[0] = Path(cache).exists()
            if there[0]:
                check_cache(Path(cache), plan.reference.content)  # another job may have made it since the start

        together(Path(cache), look if topology.rank == 0 else None)
        dist.broadcast_object_list(there, src=0)
        if there[0]:
            return Cached.read(Path(cache), topology)
    options = setup.model_options(settings, trains=False, total_steps=total)
    options["awaits_checkpoint"] = plan.reference.source is not None
    engine = build("reference", start.architecture, topology, **options)
    if plan.reference.source is not None:
        checkpoint.load(engine, plan.reference.source, weights_only=True)
    if cache is None:
        return engine
    write_cache(Path(cache), engine, plan.reference.content, batches(plan, training, validation))
    return Cached.read(Path(cache), topology)


def batches(plan: Plan, training: Loader, validation: Loader | None) -> Iterator[Sequences]:
    """Everything that the reference reads in the run, this rank's part: the whole data, or the minibatches of each step
    if what is read depends on them."""
    mixed = plan.algorithm.mixes_rows
    parts = [map(training.batch, range(plan.total_steps)) if mixed else training.epoch_batches()]
    if validation is not None:
        parts.append(validation.epoch_batches())
    for batch in chain(*parts):
        yield from plan.algorithm.referenced(batch)


def write_cache(directory: Path, engine: Engine, content: dict[str, Any], parts: Iterable[Sequences]) -> None:
    """Run the reference over `parts` and write what it says about each row once. The directory gets its name when it is
    complete. If another job makes the same cache meanwhile, that one stays. Collective. Raises UserError, on all ranks
    alike, if it cannot be written, or if the other job's cache has another content."""
    topology = engine.topology
    name = [uuid.uuid4().hex if topology.rank == 0 else None]  # jobs that make the same cache do not meet
    dist.broadcast_object_list(name, src=0)
    unfinished = directory.with_name(f"{directory.name}.unfinished-{name[0]}")
    try:
        together(directory, partial(unfinished.mkdir, parents=True) if topology.rank == 0 else None)
        together(directory, partial(_look, unfinished))  # before the reference reads the data, which may take hours
        known, mine = compute(engine, parts)
        together(directory, partial(_write_part, unfinished, topology, mine))
        complete = partial(_complete, unfinished, directory, {**content, "rows": known})
        together(directory, complete if topology.rank == 0 else None)
    finally:
        if topology.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # it is there only after a failure, or if another is used


def compute(engine: Engine, parts: Iterable[Sequences]) -> tuple[int, dict[bytes, np.ndarray]]:
    """(number of rows of all ranks, log-probs of the rows that this data-parallel rank writes, by their keys).
    Collective."""
    topology = engine.topology
    known: set[bytes] = set()
    mine: dict[bytes, np.ndarray] = {}
    for number, rows in enumerate(parts, start=1):
        watchdog.phase("reference", number)
        keys = keys_of(rows)
        everyone: list[list[bytes]] = [[]] * topology.data_size
        dist.all_gather_object(everyone, keys, group=topology.data_group)
        new: dict[bytes, int] = {}  # the first rank that has it
        for rank, found in enumerate(everyone):
            for key in found:
                if key and key not in known:
                    new.setdefault(key, rank)
        if not new:
            continue
        known |= new.keys()
        logprobs = engine.forward(rows)["logprobs"].float().cpu()
        for key, values, counts in zip(keys, logprobs, rows.mask, strict=True):
            if new.get(key) == topology.data_rank:
                mine[key] = values[counts].numpy()
    return len(known), mine


def together(directory: Path, work: Callable[[], Any] | None) -> None:
    """Do `work` for the cache `directory`; None on ranks without any. Collective. Raises UserError, on all ranks alike,
    if it fails on one."""
    failure = None
    try:
        if work is not None:
            work()
    except UserError as error:
        failure = str(error)
    except OSError as error:
        failure = (
            f"reference.cache: {_this_rank()} cannot make {directory} ({error.strerror or error}); mount the same file "
            "system with room for it on every node, or give another directory"
        )
    raise_together(failure)


def _this_rank() -> str:
    return f"rank {dist.get_rank()} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"


def _look(directory: Path) -> None:
    os.listdir(directory.parent)  # makes a network file system refresh its cache
    os.listdir(directory)


def _write_part(unfinished: Path, topology: Topology, mine: dict[bytes, np.ndarray]) -> None:
    if topology.tensor_rank or topology.pipeline_rank:
        return
    order = sorted(mine)
    name = f"{topology.data_rank:05d}"
    np.save(unfinished / f"{name}.keys.npy", np.array(order, "S64"))
    np.save(unfinished / f"{name}.lengths.npy", np.array([len(mine[key]) for key in order], np.int64))
    empty = np.zeros(0, np.float32)
    np.save(unfinished / f"{name}.logprobs.npy", np.concatenate([empty, *(mine[key] for key in order)]))


def _complete(unfinished: Path, directory: Path, content: dict[str, Any]) -> None:
    """Give the cache its name, or check the one that another job has made meanwhile."""
    (unfinished / FILE).write_text(json.dumps(content, indent=1) + "\n")
    checksums.write(unfinished, {})
    checkpoint.steps.sync_tree(unfinished)
    try:
        os.rename(unfinished, directory)
    except OSError:
        if not directory.exists():
            raise
        check_cache(directory, content)


def keys_of(rows: Sequences) -> list[bytes]:
    """The key of each row, the SHA-256 of its tokens and its mask; empty for a row without a counted token."""
    segments = torch.ones_like(rows.tokens) if rows.segments is None else rows.segments
    keys = []
    for tokens, mask, real in zip(rows.tokens.numpy(), rows.mask.numpy(), segments.numpy() > 0, strict=True):
        if not mask.any():
            keys.append(b"")
            continue
        digest = hashlib.sha256(tokens[real].astype("<i8").tobytes())
        digest.update(np.packbits(mask[real[-len(mask) :]]).tobytes())
        keys.append(digest.hexdigest().encode())
    return keys


class Cached:
    """The outputs of a reference that were computed before."""

    def __init__(self, directory: Path, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], topology: Topology):
        self.directory, self.parts, self.topology = directory, parts, topology

    @classmethod
    def read(cls, directory: Path, topology: Topology) -> Cached:
        """All parts, whatever layout wrote them. Log-probs stay on the disk until they are read. Collective. Raises
        UserError, on all ranks alike, if a rank does not see all that rank 0 sees."""
        parts, content = [], {}
        with contextlib.suppress(OSError, ValueError, EOFError, UserError):  # then it does not see all
            os.listdir(directory.parent)  # makes a network file system refresh its cache
            content = _json(directory / FILE, "")
            for path in sorted(directory.glob("*.keys.npy")):
                name = path.name.removesuffix(".keys.npy")
                lengths = np.load(directory / f"{name}.lengths.npy")
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                parts.append((np.load(path), offsets, np.load(directory / f"{name}.logprobs.npy", mmap_mode="r")))
        rows = sum(len(keys) for keys, _, _ in parts)
        everyone: list[dict[str, Any]] = [{}] * topology.world_size
        dist.all_gather_object(everyone, content)
        unseen, wanted = None, everyone[0].get("rows")
        if content != everyone[0] or rows != wanted:
            unseen = (
                f"reference.cache: {_this_rank()} does not see all of {directory} ({rows} of {wanted} rows, or another "
                f"{FILE}); mount the same file system on every node, or exclude this one"
            )
        raise_together(unseen)
        return cls(directory, parts, topology)

    def forward(self, batch: Sequences) -> Outputs:
        """As `Engine.forward` of the reference: log-probs (B, R) float32, 0 where a token does not count."""
        found = torch.zeros(batch.mask.shape)
        for row, key in enumerate(keys_of(batch)):
            if key:
                found[row, batch.mask[row]] = torch.from_numpy(np.array(self._find(key)))
        return {"logprobs": found.to(backend.device())}

    def _find(self, key: bytes) -> np.ndarray:
        for keys, offsets, logprobs in self.parts:
            place = int(np.searchsorted(keys, key))
            if place < len(keys) and keys[place] == key:
                return logprobs[offsets[place] : offsets[place + 1]]
        raise UserError(f"reference.cache: {self.directory} lacks a row of this run; remove it, and it is made again")
