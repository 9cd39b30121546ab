"""The files behind a name in the configuration, and their lines: JSONL, plain or compressed by gzip; Parquet; Arrow
files and the directories of Hugging Face's `datasets`.

Legend: a source is what one name stands for: a file, the files of a pattern, or a directory of `datasets`. Its lines
are those of its files, one after the other; of Parquet and Arrow files, the rows.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import glob
import gzip
import hashlib
import importlib.util
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megarlhf.config import UserError, open_file

LONGEST = 2**26  # bytes of a line; a longer line is an error
CHUNK = 2**20  # bytes of the lines that a rank converts at once
GZIP = b"\x1f\x8b"
TABLES = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow"}


@dataclass(frozen=True)
class Span:
    """Some lines of a file."""

    file: int = 0  # its number in the source
    first: int = 1  # the first line's number
    count: int | None = None  # None: all others
    offset: int = 0  # bytes before the first line, unpacked; rows have none


@dataclass(frozen=True)
class Source:
    """What a name stands for."""

    name: str
    files: tuple[str, ...]

    def place(self, line: int, starts: tuple[int, ...]) -> str:
        """Where the `line` of the source is, for messages. `starts`: the lines before each file."""
        file = max(number for number, start in enumerate(starts) if start < line or number == 0)
        return f"{self.files[file]}:{'row ' if kind_of(self.files[file]) else ''}{line - starts[file]}"


def find(name: str) -> Source:
    """The files that `name` stands for, in the order of their names. Raises UserError if there is none."""
    if os.path.isdir(name):
        return Source(name, _of_datasets(Path(name)))
    if not os.path.exists(name) and glob.has_magic(name):
        files = tuple(sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path)))
        if not files:
            raise UserError(f"{name}: no file has a name of this pattern; correct it")
        return Source(name, files)
    return Source(name, (name,))


def _of_datasets(directory: Path) -> tuple[str, ...]:
    """The files of a directory that `Dataset.save_to_disk` wrote: its state.json names them."""
    if (directory / "dataset_dict.json").is_file():
        found = sorted(path.parent.name for path in directory.glob("*/state.json"))
        example = directory / (found[0] if found else "train")
        raise UserError(f"{directory}: holds several splits ({', '.join(found)}); name one of them, such as {example}")
    state = directory / "state.json"
    if not state.is_file():
        raise UserError(
            f"{directory}: cannot read the examples (a directory); give a file, a pattern such as "
            f"{directory / '*.jsonl'}, or a directory that save_to_disk of Hugging Face's datasets wrote"
        )
    try:
        content = json.loads(state.read_bytes())
        names, chosen = [file["filename"] for file in content["_data_files"]], content.get("_indices_data_files")
        if not names or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            raise KeyError("_data_files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{state}: is not that of a data set ({type(error).__name__}: {error}); save the data set again"
        )
    if chosen:
        raise UserError(
            f"{directory}: is a selection of rows that only datasets can read; save it with a newer version"
        )
    return tuple(str(directory / name) for name in names)


def kind_of(path: str) -> str | None:
    """Parquet or Arrow, None for lines of text. Raises UserError if the file cannot be read."""
    with _opened(path) as file:
        start = file.read(6)
    return next((kind for mark, kind in TABLES.items() if start.startswith(mark)), None)


class Reader:
    """The lines of a file. Read its parts in their order: going back in a gzip file starts again at its beginning."""

    def __init__(self, path: str):
        self.path = path
        self._text: BinaryIO | None = None
        self.kind = kind_of(path)

    def lines(self, span: Span) -> Iterator[tuple[int, bytes | dict[str, Any] | ValueError]]:
        """(number, line as bytes, or row, or what is wrong with the row) of each. As bytes, so that invalid UTF-8
        affects its own line only."""
        return self._rows(span) if self.kind else self._lines(span)

    def _lines(self, span: Span) -> Iterator[tuple[int, bytes]]:
        if self._text is None:
            self._text = _text(self.path)
        file, number = self._text, span.first
        with _reading(self.path):
            file.seek(span.offset)
            while span.count is None or number < span.first + span.count:
                line = file.readline(LONGEST)
                if not line:
                    return
                if number == 1:
                    _refuse_other_formats(self.path, line)
                if len(line) == LONGEST:
                    raise _too_long(self.path, number)
                yield number, line
                number += 1

    def _rows(self, span: Span) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
        number = 1
        with _reading(self.path):
            for batch in _batches(self.path, self.kind, span.first - 1):
                if isinstance(batch, int):  # rows that are skipped unread
                    number += batch
                    continue
                yield from _within(batch, number, span)
                number += batch.num_rows
                if span.count is not None and number >= span.first + span.count:
                    return

    def close(self) -> None:
        if self._text is not None:
            self._text.close()
            self._text = None


def _within(batch: Any, number: int, span: Span) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """The rows of `batch`, whose first has this `number`, that are in `span`."""
    start = max(0, span.first - number)
    stop = batch.num_rows if span.count is None else min(batch.num_rows, span.first + span.count - number)
    part = batch.slice(start, max(0, stop - start))
    try:
        rows = part.to_pylist()
    except (ValueError, OverflowError):  # a text that is not UTF-8, a date after the year 9999
        rows = [_row(part, index) for index in range(part.num_rows)]
    for index, row in enumerate(rows, start=number + start):
        if isinstance(row, ValueError):
            yield index, row
        else:
            yield index, {name: _plain(value) for name, value in row.items() if value is not None}


def _row(batch: Any, index: int) -> dict[str, Any] | ValueError:
    """A row, or which of its values Python does not have."""
    found = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            found[name] = column[index].as_py()
        except (ValueError, OverflowError) as error:
            return ValueError(f"'{name}' cannot be read ({error})")
    return found


def _batches(path: str, kind: str, skip: int) -> Iterator[Any]:
    """The record batches of a file; in the place of those that the first `skip` rows fill, their number of rows."""
    if kind == "Parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    yield rows
                    continue
                skip = 0
                yield from file.iter_batches(batch_size=256, row_groups=[group])
        return
    import pyarrow

    with pyarrow.memory_map(path) as mapped:
        if mapped.read(6) == b"ARROW1":
            mapped.seek(0)
            file = pyarrow.ipc.open_file(mapped)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            mapped.seek(0)
            batches = iter(pyarrow.ipc.open_stream(mapped))
        for batch in batches:
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                yield batch.num_rows
            else:
                skip = 0
                yield batch


def _plain(value: Any) -> Any:
    """A value of a table as JSON would have it. A column's null is an absent key, and so is a null in a struct, since
    all rows of a table have all keys; a null in a list stays."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)):
        return str(value)
    return value


# ------------------------------------------------------------------------------------------------ index


def index(path: str) -> dict[str, Any]:
    """{"digest": of the file's bytes, "lines": their number, "spans": [[first, count, offset], ...] of about `CHUNK`
    bytes each}."""
    kind, digest = kind_of(path), hashlib.sha256()
    with _opened(path) as file, _reading(path):
        if kind or file.read(2) == GZIP:
            file.seek(0)
            while block := file.read(CHUNK):
                digest.update(block)
            spans = _spans_of_rows(path, kind) if kind else _spans_of_lines(path, None)
        else:
            spans = _spans_of_lines(path, digest)
    return {"digest": digest.hexdigest(), "lines": sum(count for _, count, _ in spans), "spans": spans}


def _spans_of_lines(path: str, digest: Any) -> list[list[int]]:
    spans, first, offset = [], 1, 0
    with _text(path) as file, _reading(path):
        while block := file.read(CHUNK):
            if first == 1:
                _refuse_other_formats(path, block.partition(b"\n")[0] + b"\n")
            pieces = [block]
            if not block.endswith(b"\n"):
                pieces.append(file.readline(LONGEST))
            count = sum(piece.count(b"\n") for piece in pieces) + (not pieces[-1].endswith(b"\n"))
            if len(pieces[-1]) == LONGEST:
                raise _too_long(path, first + count - 1)
            spans.append([first, count, offset])
            first += count
            offset += sum(map(len, pieces))
            if digest is not None:
                for piece in pieces:
                    digest.update(piece)
    return spans


def _spans_of_rows(path: str, kind: str) -> list[list[int]]:
    """Whole batches together as long as they are small, large ones in parts."""
    spans, first = [], 1
    sizes = (
        _groups(path) if kind == "Parquet" else ((batch.num_rows, batch.nbytes) for batch in _batches(path, kind, 0))
    )
    rows, size = 0, 0
    for more, bytes_ in sizes:
        if rows and size + bytes_ > CHUNK:
            spans.append([first, rows, 0])
            first, rows, size = first + rows, 0, 0
        part = max(1, more * CHUNK // max(1, bytes_))
        while more > part:
            spans.append([first, part, 0])
            first, more, bytes_ = first + part, more - part, bytes_ - bytes_ * part // more
        rows, size = rows + more, size + bytes_
    return spans + ([[first, rows, 0]] if rows else [])


def _groups(path: str) -> Iterator[tuple[int, int]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            yield found.num_rows, found.total_byte_size


# ------------------------------------------------------------------------------------------------ opening


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """What goes wrong in reading `path` becomes a UserError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: is a damaged gzip file ({error}); copy or compress it again")
    except Exception as error:
        if type(error).__module__.startswith("pyarrow"):
            raise UserError(f"{path}: is a damaged or unknown {kind_of(path)} file ({error}); write it again")
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise UserError(f"{path}: cannot read the examples ({reason}); copy the file to another disk")
        raise


def _opened(path: str) -> BinaryIO:
    return open_file(path, "the examples", "give an existing file of JSONL, gzip, Parquet or Arrow, or a pattern")


def _text(path: str) -> BinaryIO:
    """The lines of a JSONL file, unpacked."""
    file = _opened(path)
    if file.read(2) == GZIP:
        file.close()
        return gzip.open(path, "rb")
    file.seek(0)
    return file


def check_installed(source: Source) -> None:
    """Refuse (UserError) a file whose reader is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        for path in source.files:
            if (kind := kind_of(path)) is not None:
                raise UserError(
                    f"{path}: is a file of {kind}, whose reader is not installed; pip install 'megarlhf[arrow]', or "
                    "export it as one JSON object a line"
                )


def _too_long(path: str, line: int) -> UserError:
    return UserError(f"{path}:{line}: a line of more than {LONGEST} bytes; give a JSONL file")


def _refuse_other_formats(path: str, line: bytes) -> None:
    """Refuse (UserError) files of other formats, recognised by the beginning of their first `line`."""
    for start, kind, remedy in _FORMATS:
        if line.startswith(start):
            raise UserError(f"{path}: is {kind}, not JSONL; {remedy}")
    if line.strip() == b"[" or line.replace(b" ", b"").startswith(b"[{"):
        raise UserError(f"{path}:1: is a JSON array, not JSONL; write each object on a line of its own (jq -c '.[]')")
    if line.strip() == b"{":
        raise UserError(f"{path}:1: not JSON (an object over several lines); write each on its own line (jq -c .)")


_EXPORT = "export it as one JSON object a line"
_FORMATS = (
    (GZIP, "compressed by gzip twice", "unpack it with gunzip"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it with unxz"),
    (b"BZh", "compressed by bzip2", "unpack it with bunzip2"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with unzstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"PAR1", "a compressed Parquet file", "unpack it with gunzip"),
    (b"ARROW1", "a compressed Arrow file", "unpack it with gunzip"),
    (b"Obj\x01", "an Avro file", _EXPORT),
    (b"SQLite format 3", "an SQLite database", _EXPORT),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8"),
)
