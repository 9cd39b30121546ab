"""Tables on disk: the parts that are being made, and finished ones, which are memory-mapped."""

from __future__ import annotations

import json
import mmap
import os
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from megarlhf.config import UserError
from megarlhf.data.jsonl import Lines
from megarlhf.data.shares import unique
from megarlhf.data.tables import Table

META = "table.json"
BLOCK = 2**22  # bytes that are read, or items that are written, at once


class Writer:
    """An .npy file of a 1-D array that is written block by block."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.size, self.checksum = path, dtype, 0, 0
        self._file = open(path, "wb")  # noqa: SIM115, closed by `close`
        self._header()

    def _header(self) -> None:
        """numpy leaves room in it for a larger size."""
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, block: np.ndarray) -> None:
        data = np.ascontiguousarray(block, self.dtype).view(np.uint8)
        self._file.write(data)
        self.checksum = zlib.crc32(data, self.checksum)
        self.size += len(block)

    def close(self) -> dict[str, int]:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"size": self.size, "crc32": self.checksum, "bytes": self.path.stat().st_size}


class DamagedPart(Exception):
    """A file of a part was lost in a crash."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.path = path


def save_part(part: Table, path: Path) -> None:
    """It appears complete, or not at all."""
    meta = {"counts": part.counts, "notes": {name: [lines.count, lines.first] for name, lines in part.notes.items()}}
    text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    temporary = path.with_name(unique(path.name))
    with temporary.open("wb") as file:
        np.savez(file, **{f"column.{name}": values for name, values in part.columns.items()}, meta=text)
    os.replace(temporary, path)


def load_part(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Of a part; the zip format has checksums."""
    try:
        with np.load(path) as found:
            meta = json.loads(found["meta"].tobytes())
            return meta, {name.removeprefix("column."): found[name] for name in found.files if name != "meta"}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, EOFError):
        raise DamagedPart(path)


def saved_lines(saved: list[Any]) -> Lines:
    """As JSON keeps them."""
    return Lines(saved[0], tuple((line, reason) for line, reason in saved[1]))


def opened(directory: Path, starts: tuple[int, ...]) -> Table:
    """A finished table. Raises UserError, naming the file, if one is not as it was written."""

    def damaged(path: Path, why: Any) -> UserError:
        return UserError(f"{path}: the tokenized data are damaged ({why}); remove {directory}, and they are made again")

    try:
        meta = json.loads((directory / META).read_bytes())
        files = {name: (one["size"], one["crc32"], one["bytes"]) for name, one in meta["files"].items()}
        counts, notes = meta["counts"], {name: saved_lines(one) for name, one in meta["notes"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise damaged(directory / META, f"{type(error).__name__}: {error}")
    columns = {}
    for name, (size, checksum, num_bytes) in files.items():
        path = directory / f"{name}.npy"
        try:
            if path.stat().st_size != num_bytes:
                raise damaged(path, f"it has {path.stat().st_size} bytes, not {num_bytes}")
            columns[name] = mapped(path)
            if len(columns[name]) != size or _checksum(path, columns[name].nbytes) != checksum:
                raise damaged(path, "its checksum is another")
        except (OSError, ValueError) as error:
            raise error if isinstance(error, UserError) else damaged(path, error)
    return Table(columns, counts, notes, starts)


def _checksum(path: Path, size: int) -> int:
    """Of the last `size` bytes. Read, not mapped, so that they are not this process's memory."""
    found, block = 0, memoryview(bytearray(BLOCK))
    with path.open("rb") as file:
        file.seek(-size, os.SEEK_END)
        while count := file.readinto(block):
            found = zlib.crc32(block[:count], found)
    return found


def mapped(path: Path) -> np.ndarray:
    """The array of an .npy file; without the class np.memmap, whose slices cost much."""
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if not len(found):
        return np.array(found)
    _mappings.add(found._mmap)
    return np.asarray(found)


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def release() -> None:
    """Take the pages of tables that were read out of this process's memory; they stay in the node's, as long as it has
    room. Otherwise all that was ever read would count as the process's, and as a limit of a job counts it."""
    for mapping in _mappings:
        mapping.madvise(mmap.MADV_DONTNEED)
