"""The objects in the lines of data files. Malformed lines are reported and, up to a fraction, skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megarlhf.config import UserError
from megarlhf.data.sources import Reader, Source, Span, check_installed, find

T = TypeVar("T")
SHOWN = 3  # lines of a kind that messages name


@dataclass(frozen=True)
class Lines:
    """Some lines of a source: how many, and the first few."""

    count: int = 0
    first: tuple[tuple[int, str], ...] = ()  # (number of the line in the source, what is wrong with it or "")

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Lines:
        numbers = tuple(numbers)
        return cls(len(numbers), tuple((number, "") for number in numbers[:SHOWN]))

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.count + other.count, (*self.first, *other.first)[:SHOWN])

    def placed(self, source: Source, starts: tuple[int, ...]) -> Places:
        shown = (f"{source.place(line, starts)}{reason and ': ' + reason}" for line, reason in self.first)
        return Places(self.count, tuple(shown))


@dataclass(frozen=True)
class Places:
    """Some lines of data files: how many, and the first few as "file:line" or "file:line: reason"."""

    count: int = 0
    first: tuple[str, ...] = ()

    def said(self, what: str) -> str:
        """For a report: their number, `what` happened to them, and the first few; "" without lines."""
        if not self.count:
            return ""
        return f"{self.count} {what} ({', '.join(self.first)}{', ...' if self.count > len(self.first) else ''})"


class Records:
    """One pass over the lines of a source, or over those of a `span`. `num_lines` (blank ones not counted), `bad` (the
    malformed ones) and `starts` (lines before each file; with a span they are given) are complete when `read` is
    exhausted."""

    def __init__(
        self,
        name: str | Source,
        *,
        span: Span | None = None,
        starts: tuple[int, ...] | None = None,
        readers: dict[int, Reader] | None = None,  # the last span's, by the number of the file
    ):
        self.source = find(name) if isinstance(name, str) else name
        check_installed(self.source)
        self.span, self.starts = span, starts or ()
        self.num_lines, self.bad = 0, Lines()
        self._readers = {} if readers is None else readers

    def read(self, convert: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
        """(number of the line in the source, convert(object)) of every line. A ValueError from `convert` marks the line
        as malformed. A UserError is about the program's set-up: it is raised again with the line's place in front."""
        for line, given in self._lines():
            if isinstance(given, bytes) and not given.strip():
                continue
            self.num_lines += 1
            try:
                if isinstance(given, ValueError):
                    raise given
                value = convert(_parse(given) if isinstance(given, bytes) else given)
            except UserError as error:
                raise UserError(f"{self.source.place(line, self.starts)}: {error}")
            except ValueError as error:
                self.bad += Lines(1, ((line, " ".join(str(error).split())[:200]),))
                continue
            yield line, value

    def _lines(self) -> Iterator[tuple[int, bytes | dict[str, Any] | ValueError]]:
        if self.span is not None:
            number = self.span.file
            if number not in self._readers:
                for reader in self._readers.values():  # there may be more files than a process may have open
                    reader.close()
                self._readers.clear()
                self._readers[number] = Reader(self.source.files[number])
            for line, given in self._readers[number].lines(self.span):
                yield self.starts[number] + line, given
            return
        self.starts, line = (), 0
        for path in self.source.files:
            self.starts, before = (*self.starts, line), line
            reader = Reader(path)
            for number, given in reader.lines(Span()):
                line = before + number
                yield line, given
            reader.close()


def read_all(name: str, convert: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
    """As `Records.read`, for a program that refuses (UserError, at the end) any malformed line."""
    records = Records(name)
    yield from records.read(convert)
    check_bad(records.bad.placed(records.source, records.starts), records.num_lines, None)


def check_bad(bad: Places, num_lines: int, most: float | None) -> None:
    """Refuse (UserError) more malformed lines than the fraction `most`, which max_bad_fraction sets; None: a program
    without that key, which refuses any."""
    if bad.count <= (most or 0) * num_lines:
        return
    if most is None:
        raise UserError(f"{bad.first[0]}; {bad.count} lines are malformed; mend them")
    raise UserError(
        f"{bad.first[0]}; {bad.count} of {num_lines} lines are malformed, more than max_bad_fraction {most:g} allows; "
        "mend them or raise it"
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


def dumped(value: Any) -> bytes:
    """JSON for a value of a line. ValueError for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="surrogatepass")
    except TypeError as error:  # bytes in a table, say
        raise ValueError(f"a value that JSON does not have ({error}); write it as text")
    except ValueError:
        raise ValueError("a number is NaN or infinite, which JSON does not have; write null")


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
