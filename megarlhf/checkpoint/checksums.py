"""checksums.json of a checkpoint directory: the size and the SHA-256 of every other file in it, and of itself.

    {"files": {"actor/__0_0.distcp": {"bytes": 1806318, "sha256": "..."}, ...}, "sha256": "..."}

The last value is the SHA-256 of the file without it. Large files are hashed while they are written (`HashedFile`), so
no file is read a second time for its hash. SHA-256 because `sha256sum` can check it anywhere and certificates of
conversions have it too; a core with SHA instructions does about 1.5 GB/s. In exchange torch's zip files have no CRC-32,
which loading does not check (`without_crc`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megarlhf.config import UserError

FILE = "checksums.json"
DATA = ".distcp"  # the files that hold tensors; all others are small
DAMAGED = "the checkpoint is damaged; use another one, such as another step directory of its run"
_BLOCK = 2**20


@dataclass(frozen=True)
class Checksum:
    """The size and hash of a file."""

    bytes: int
    sha256: str


class HashedFile:
    """A file open for writing from its start to its end, with the checksum of what was written."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.bytes = 0
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.bytes += self.file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.file.flush()

    def checksum(self) -> Checksum:
        return Checksum(self.bytes, self._hash.hexdigest())


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """torch.save writes no CRC-32 into its zip files: loading does not check it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write(root: Path, known: dict[str, Checksum]) -> str:
    """Write checksums.json for all files under `root` and return its own hash. `known`: those that were hashed while
    they were written, by their paths in `root`; the others are small, were written a moment ago and are read."""
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert known.keys() <= set(names), known.keys() - set(names)
    files = {name: known.get(name) or _of(root / name) for name in names if name != FILE}
    text, own = _text(files)
    (root / FILE).write_text(text)
    return own


def own(root: Path) -> str | None:
    """The hash that checksums.json has of itself; None without such a file."""
    files = _read(root)
    return None if files is None else _text(files)[1]


def find(directory: Path) -> tuple[Path, dict[str, Checksum]] | None:
    """(root, files) for a checkpoint directory, or for a model directory in one: then the files of the model and the
    existing small ones of the checkpoint. None if they have no checksums. Raises UserError for a damaged
    checksums.json."""
    directory = directory.resolve()  # a link to a model must not hide the checkpoint that it is in
    files = _read(directory)
    if files is not None:
        return directory, files
    files = _read(directory.parent) or {}
    prefix = f"{directory.name}/"
    if not any(name.startswith(prefix) for name in files):
        return None
    root = directory.parent
    return root, {
        name: value
        for name, value in files.items()
        if name.startswith(prefix) or (not name.endswith(DATA) and (root / name).exists())
    }


def damage(directory: Path, *, small: bool = False, rank: int = 0, size: int = 1) -> str | None:
    """A description of the first damaged file of `directory`, or None. `small`: check small files alone. Each of `size`
    ranks checks its share, of about equally many bytes."""
    try:
        found = find(directory)
    except UserError as error:
        return str(error)
    if found is None:
        return None
    root, files = found
    mine, loads = [], [0] * size
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += files[name].bytes
        if least == rank and not (small and name.endswith(DATA)):
            mine.append(name)
    with ThreadPoolExecutor(2) as pool:  # hashlib and the disk work side by side
        results = pool.map(lambda name: _compare(root / name, files[name]), mine)
        return next(filter(None, results), None)


def verify_directory(directory: Path, *, small: bool = False) -> str:
    """Raise `damage` on one process as a UserError; else return a note on the checked files."""
    text = damage(directory, small=small)
    if text:
        raise UserError(text)
    found = find(directory)
    return missing(directory) if found is None else f"{len(found[1])} files are as {FILE} says"


def missing(directory: Path) -> str:
    return f"{directory} has no {FILE}, so damage to its files would not be noticed"


def _read(root: Path) -> dict[str, Checksum] | None:
    path = root / FILE
    try:
        text = path.read_text()
        files = {str(name): Checksum(**value) for name, value in json.loads(text)["files"].items()}
        if _text(files)[0] == text:
            return files
        reason = "it is not what was written"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {DAMAGED}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        reason = "it holds no checksums"
    raise UserError(f"{path}: {reason}: {DAMAGED}; if its other files are good, removing it loads them unchecked")


def _text(files: dict[str, Checksum]) -> tuple[str, str]:
    """(content of checksums.json, its own hash)."""
    content = {"files": {name: asdict(value) for name, value in files.items()}}
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": own}, indent=1) + "\n", own


def _compare(path: Path, expected: Checksum) -> str | None:
    try:
        status = path.stat()
        if status.st_size != expected.bytes:
            return f"{path}: has {status.st_size} of {expected.bytes} bytes: {DAMAGED}"
        # A model that several engines start from is read once.
        if _remembered(path, status.st_size, status.st_mtime_ns) != expected:
            return f"{path}: is not what was written, by its checksum in {FILE}: {DAMAGED}"
    except FileNotFoundError:
        return f"{path}: is missing: {DAMAGED}"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror}): {DAMAGED}"
    return None


@functools.lru_cache(maxsize=4096)
def _remembered(path: Path, size: int, modified: int) -> Checksum:
    return _of(path)


def _of(path: Path) -> Checksum:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
        return Checksum(os.fstat(file.fileno()).st_size, digest.hexdigest())


def weights_of(directory: Path) -> str | None:
    """A hash of a model's weights, from its checksums; None if it has none."""
    found = find(directory)
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
