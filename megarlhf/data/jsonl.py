"""JSONL data files: one object a line. Malformed lines are reported and, up to a fraction, skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megarlhf.config import UserError, open_file

T = TypeVar("T")
LONGEST = 2**26  # bytes of a line; a longer line is an error


class Records:
    """One pass over a file. `num_lines` (blank ones not counted) and `bad`, (line number, reason) of the malformed
    lines, are complete when `read` is exhausted. `max_bad_fraction` None: a program without that key, which refuses
    any malformed line."""

    def __init__(self, path: str, *, max_bad_fraction: float | None):
        self.path = path
        self.max_bad_fraction = max_bad_fraction
        self.num_lines = 0
        self.bad: list[tuple[int, str]] = []

    def read(self, convert: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
        """(line number, convert(object)) of every line. A ValueError from `convert` marks the line as malformed. A
        UserError is about the program's set-up: it is raised again with the line's place in front.

        Raises UserError at the end if more than `max_bad_fraction` of the lines are malformed.
        """
        for line, text in _lines(self.path):
            if not text.strip():
                continue
            self.num_lines += 1
            try:
                value = convert(_parse(text))
            except UserError as error:
                raise UserError(f"{self.path}:{line}: {error}")
            except ValueError as error:
                self.bad.append((line, " ".join(str(error).split())[:200]))
                continue
            yield line, value
        if len(self.bad) > (self.max_bad_fraction or 0) * self.num_lines:
            line, reason = self.bad[0]
            if self.max_bad_fraction is None:
                raise UserError(f"{self.path}:{line}: {reason}; {len(self.bad)} lines are malformed; mend them")
            raise UserError(
                f"{self.path}:{line}: {reason}; {len(self.bad)} of {self.num_lines} lines are malformed, more than "
                f"max_bad_fraction {self.max_bad_fraction:g} allows; mend them or raise it"
            )


def string(row: dict[str, Any], key: str) -> str:
    """row[key], which must be a string; else ValueError."""
    if key not in row:
        raise ValueError(f"no key '{key}' (found: {', '.join(row)})")
    if not isinstance(row[key], str):
        raise ValueError(f"'{key}' must be a string, not {type(row[key]).__name__}")
    try:
        row[key].encode()
    except UnicodeEncodeError:  # JSON can contain "\ud800"; tokenizers cannot encode it
        raise ValueError(f"'{key}' has half a surrogate pair")
    return row[key]


def places(path: str, what: str, lines: list[tuple[int, str]]) -> str:
    """The number of `lines`, (number, reason or ""), `what` happened to them, and the first few; "" without lines."""
    if not lines:
        return ""
    shown = [f"{path}:{line}{reason and ': ' + reason}" for line, reason in lines[:3]]
    return f"{len(lines)} {what} ({', '.join(shown)}{', ...' if len(lines) > 3 else ''})"


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line; as bytes, so that invalid UTF-8 affects its own line only."""
    with open_file(path, "the examples", "give an existing JSONL file") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), start=1):
                if number == 1:
                    _refuse_other_formats(path, line)
                if len(line) == LONGEST:
                    raise UserError(f"{path}:{number}: a line of more than {LONGEST} bytes; give a JSONL file")
                yield number, line
        except OSError as error:
            raise UserError(f"{path}: cannot read the examples ({error.strerror}); copy the file to another disk")


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
    (b"\x1f\x8b", "compressed by gzip", "unpack it with gunzip"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it with unxz"),
    (b"BZh", "compressed by bzip2", "unpack it with bunzip2"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with unzstd"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"PAR1", "a Parquet file", _EXPORT),
    (b"ARROW1", "an Arrow file", _EXPORT),
    (b"Obj\x01", "an Avro file", _EXPORT),
    (b"SQLite format 3", "an SQLite database", _EXPORT),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8"),
)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})")
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)")
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, not {type(row).__name__}")
    return row
