"""The cached log-probs of a frozen reference.

A cache is a directory with the log-prob of every counted token of every row that the reference reads in a run. Rows are
found by their content (tokens and mask), so a cached model takes the place of a model that is run. The file
reference.json says what the cache was made of (train/reference.py) and how many rows it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.algorithms.interface import Outputs
from megarlhf.batch import Sequences
from megarlhf.checkpoint import checksums
from megarlhf.checkpoint.loading import raise_together
from megarlhf.cluster import backend, watchdog
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError

if TYPE_CHECKING:
    from megarlhf.engine import Engine

FILE = "reference.json"  # of a cache, and of a step directory
FORMAT = 2


def check_cache(directory: Path, content: dict[str, Any]) -> None:
    """Refuse (UserError) a cache that was made of anything else, or is damaged."""
    remedy = "remove it, and the run makes it again, or give another directory"
    if not (directory / FILE).is_file():
        raise UserError(f"reference.cache: {directory} exists and is no cache ({FILE} is missing); give another one")
    found = read_json(directory / FILE, f"reference.cache: {remedy}")
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


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, with the remedy, if it is damaged."""
    try:
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            return value
    except (OSError, ValueError, RecursionError):
        pass
    raise UserError(f"{path}: damaged; {remedy}")


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
            content = read_json(directory / FILE, "")
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
