"""Common parts of the readers and writers of all formats.

A reader has `specs`, the tensors by name, and `read(name)`. A writer is made from the specs of all tensors. Several
processes can write together, each with a writer of its own: tensors of one `unit` must come from one process, in order;
at the end each one calls `close`, and one of them `finish` with what all the calls of `close` returned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from megarlhf.config import UserError
from megarlhf.models.spec import Shape

SHARD_BYTES = 5_000_000_000


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """For reading foreign settings: a missing value or one of a wrong type raises a UserError that begins with `where`.
    A ValueError's own text is made for users ("key: what; remedy")."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing; restore the file")
    except ValueError as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}")
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{where}: a setting is of another kind than expected ({said}); restore the file")


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def reserve(file: BinaryIO, nbytes: int) -> None:
    """Take the disk space of a file at once: writing is faster on the file systems that can, and a full disk shows at
    the start."""
    if nbytes:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def flush(file: BinaryIO, start: int) -> None:
    """Let the disk begin with what was written to `file` since `start`, in the background; only a later fsync waits for
    it. (Linux starts writing pages that are not needed any more.)"""
    file.flush()
    os.posix_fadvise(file.fileno(), start, file.tell() - start, os.POSIX_FADV_DONTNEED)


class Reader(Protocol):
    specs: dict[str, Spec]

    def read(self, name: str) -> Tensor: ...


def read_together(reader: Reader, names: Sequence[str]) -> list[Tensor]:
    """The tensors `names`, behind each other in memory if the reader can do that and their dtypes are equal."""
    specs = [reader.specs[name] for name in names]
    if len(names) < 2 or not hasattr(reader, "read_into") or len({spec.dtype for spec in specs}) > 1:
        return [reader.read(name) for name in names]
    memory = torch.empty(sum(spec.numel for spec in specs), dtype=specs[0].dtype)
    parts = memory.split([spec.numel for spec in specs])
    tensors = [part.view(spec.shape) for part, spec in zip(parts, specs, strict=True)]
    for name, tensor in zip(names, tensors, strict=True):
        reader.read_into(name, tensor)
    return tensors


class Writer(Protocol):
    def unit(self, name: str) -> Hashable: ...
    def write(self, name: str, tensor: Tensor) -> None: ...
    def close(self) -> Any: ...
    def finish(self, written: list[Any]) -> None: ...


@contextlib.contextmanager
def lock(path: Path, *, certain: bool = False) -> Iterator[None]:
    """Hold the file `path`, made for it and removed at the end; UserError if another process does. The lock of a
    process that dies is released. On a file system without locks it holds nothing, or raises OSError if `certain`."""
    while True:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise UserError(f"{path}: another process holds it; wait for that one")
                if certain or error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
            try:
                if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    continue  # the previous holder removed it meanwhile, and another process made a new one
            except FileNotFoundError:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def completed(target: Path, progressed: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A directory to write in that gets the name `target` once the body succeeds and every file is on the disk.
    `progressed`: called after each file that is. UserError if `target` has something in it, or if another conversion is
    writing it."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(target.with_name(f".{target.name}.lock")))
        except UserError:
            raise UserError(f"{target}: another conversion is writing it; wait for that one, or choose another target")
        yield from _completed(target, progressed)


def _completed(target: Path, progressed: Callable[[], None]) -> Iterator[Path]:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists already; choose another target or remove it")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir()
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                    progressed()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
