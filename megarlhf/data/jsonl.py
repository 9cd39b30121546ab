"""JSONL files that people wrote: one object a line, malformed lines reported and, up to a fraction, skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megarlhf.config import UserError

T = TypeVar("T")


class Records:
    """One pass over a file. `num_lines` (blank ones not counted) and `bad`, (line number, reason) of the malformed
    lines, are complete when `read` is exhausted."""

    def __init__(self, path: str, *, max_bad_fraction: float):
        self.path = path
        self.max_bad_fraction = max_bad_fraction
        self.num_lines = 0
        self.bad: list[tuple[int, str]] = []

    def read(self, convert: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
        """(line number, convert(object)) of every line. A ValueError from `convert` says what is wrong with the line; a
        UserError stops, with the place in front: it is about the program's set-up, not about this line alone.

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
        if len(self.bad) > self.max_bad_fraction * self.num_lines:
            line, reason = self.bad[0]
            raise UserError(
                f"{self.path}:{line}: {reason}; {len(self.bad)} of {self.num_lines} lines are malformed, more than "
                f"max_bad_fraction {self.max_bad_fraction:g} allows; mend them or raise it"
            )


def string(row: dict[str, Any], key: str) -> str:
    """row[key], a string; ValueError says why not."""
    if key not in row:
        raise ValueError(f"no key '{key}' (found: {', '.join(row)})")
    if not isinstance(row[key], str):
        raise ValueError(f"'{key}' must be a string, not {type(row[key]).__name__}")
    try:
        row[key].encode()
    except UnicodeEncodeError:  # JSON can say "\ud800"; tokenizers cannot take it
        raise ValueError(f"'{key}' has half a surrogate pair")
    return row[key]


def places(path: str, what: str, lines: list[tuple[int, str]]) -> str:
    """How many `lines`, (number, reason or ""), had what trouble, and where the first few are; "" for none."""
    if not lines:
        return ""
    shown = [f"{path}:{line}{reason and ': ' + reason}" for line, reason in lines[:3]]
    return f"{len(lines)} {what} ({', '.join(shown)}{', ...' if len(lines) > 3 else ''})"


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line; as bytes, so that a wrong one spoils its own line only."""
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the examples ({error.strerror}); give an existing JSONL file")


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
