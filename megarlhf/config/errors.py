"""Mistakes of the user: one line each."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO


class UserError(ValueError):
    """A mistake the user can mend. `megarlhf` prints it as one line, without a traceback, and exits with status 2."""

    def __init__(self, message: str):
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(message.split()))
        super().__init__(cut(line, 4000))


class UnknownKeyError(UserError):
    """A key that the configuration of this program does not have; perhaps the file is for another one."""


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a misspelt name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


def open_file(path: str | Path, what: str, remedy: str) -> BinaryIO:
    """Open a file to read it. Raises UserError if it is not a file: opening a pipe would wait for its other end."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
        reason = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device, not a file"
    except OSError as error:
        reason = error.strerror
    except ValueError as error:  # null characters and the like
        reason = str(error)
    raise UserError(f"{cut(str(path), 300)}: cannot read {what} ({reason}); {remedy}")


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def show(value: Any) -> str:
    try:
        return cut(repr(value), 100)
    except ValueError:
        return "a number of thousands of digits"
