"""JSONL files that programs write: refused before the work if they cannot be written, complete or absent after it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarlhf.config import UserError


def check_out(given: str, sources: Sequence[str], what: str) -> None:
    """Refuse (UserError) a file `out` that cannot be written, or that is one of the program's inputs `sources`: files
    of `what`."""
    out = Path(given)
    parent = out.absolute().parent
    try:
        if not parent.is_dir():
            raise UserError(f"out: {out} must be a file in a directory that exists; create {parent}")
        if out.exists() and not out.is_file():
            raise UserError(f"out: {out} is not a file; give the name of one")
        if out.exists() and any(Path(source).exists() and out.samefile(source) for source in sources):
            raise UserError(f"out: {out} is the file of the {what}, which it would replace; give another")
        with contextlib.suppress(FileNotFoundError):
            _partial(out).stat()  # is its name too long?
        with tempfile.TemporaryFile(dir=parent):
            pass
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"out: {given[:300]} cannot be written ({getattr(error, 'strerror', None) or error}); give another"
        )


def write(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Write the file atomically, a line at a time. Returns the number of lines. Raises UserError."""
    count = 0
    with _replacing(path) as file:
        for line in lines:
            file.write(_dumped(line) + "\n")
            count += 1
    return count


def _dumped(line: dict[str, Any]) -> str:
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write as an escape alone
        return json.dumps(line)
    return text


def write_text(path: Path, text: str) -> None:
    """Write the file atomically. Raises UserError."""
    with _replacing(path) as file:
        file.write(text)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` at the end; without an end nothing changes."""
    partial = _partial(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"out: {path} cannot be written ({error.strerror}); make room and start again")
    except UserError:  # of the lines
        partial.unlink(missing_ok=True)
        raise


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
