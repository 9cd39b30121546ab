"""Files that a run writes beside its checkpoints. They survive kills, and a disk that is full for a while.

A small file is replaced as a whole (`replace`). A file that grows is only appended to (`Appender`); when a run resumes,
the lines of the steps that it repeats are dropped (`keep_until`), so that each step is there once.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megarlhf.config import UserError

LIMIT = 2**26  # bytes that wait in memory for room on the disk


def replace(path: Path, text: str) -> None:
    """Write `text` to `path`, which at every moment holds the old text or the new one. Raises UserError."""
    with _replaced(path) as file:
        file.write(text.encode())


def keep_until(path: Path, step: int) -> None:
    """Drop from a JSONL file, if there is one, the lines whose "step" is later than `step`, and malformed lines: the
    last one may have been cut short by a kill. At step 0 a run begins, and nothing is kept. Raises UserError.

    The file is replaced even if all lines stay: a process that still has it open no longer writes into it.
    """
    if not path.exists():
        return
    with _replaced(path) as target, path.open("rb") as source:
        target.writelines(line for line in source if step > 0 and _step_of(line) <= step)


def last_step(path: Path) -> int:
    """The step of the last complete line of a JSONL file; -1 if there is none."""
    try:
        with path.open("rb") as file:
            steps = [step for line in file if (step := _step_of(line)) < float("inf")]
    except OSError:
        return -1
    return int(steps[-1]) if steps else -1


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); make room or mend the file system, and start again"
        )


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can do that
            raise
    finally:
        os.close(descriptor)


class Appender:
    """A file to which complete records are appended. Records that may not be on the disk yet are kept in memory. Those
    that cannot be written wait in order. Those written since the last `fsync` are written again if an `fsync` fails,
    because the system may then have dropped them. Beyond LIMIT bytes records are dropped and counted in `lost`.

    An existing file is opened at once; a new one is created by the first flush, since that, too, needs room on the
    disk. A file that was created in between is another process's and is not changed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lost = 0
        self._kept = bytearray()  # may not be on the disk yet
        self._written = 0  # bytes of it that were handed to the system
        self._start = 0  # its offset in the file
        self._failed = False  # the last fsync
        self._file: int | None = None
        with suppress(FileNotFoundError, NotADirectoryError):
            self._file = os.open(path, os.O_WRONLY)
            self._start = os.fstat(self._file).st_size

    def write(self, record: bytes) -> None:
        """Append `record` at the next `flush`."""
        if len(self._kept) + len(record) > LIMIT and not self._failed:
            self._forget()
        if len(self._kept) + len(record) > LIMIT:
            self.lost += 1
        else:
            self._kept += record

    def flush(self, *, sync: bool = False) -> OSError | None:
        """Hand pending records to the system; with `sync`, and after a failed `fsync`, write them to the disk. Returns
        an error instead of raising it."""
        try:
            if self._file is None and self._kept:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                sync_directory(self.path.parent)
            while self._written < len(self._kept):  # a full disk takes a part
                self._written += os.pwrite(self._file, self._kept[self._written :], self._start + self._written)
            if (sync or self._failed) and self._file is not None:
                self._sync()
        except OSError as error:
            return error
        return None

    def close(self) -> OSError | None:
        """Flush and close; records that cannot be written now are lost."""
        error = self.flush(sync=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return error

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError:
            self._written, self._failed = 0, True
            raise
        self._failed = False
        self._forget()

    def _forget(self) -> None:
        """Drop from memory the bytes that were handed to the system."""
        self._start += self._written
        del self._kept[: self._written]
        self._written = 0
