"""Whether all ranks, and all jobs of a run, read the same data."""

from __future__ import annotations

import json
from pathlib import Path

from megarlhf.data.cache import Cache

FILE = "data.json"  # of a step directory: a hash of the files behind each name


def save(cache: Cache, step_directory: Path) -> None:
    """Write what `changed` reads."""
    (step_directory / FILE).write_text(json.dumps(cache.contents, indent=1) + "\n")


def changed(cache: Cache, step_directory: Path) -> str | None:
    """Why a run cannot go on with these data files: they are not those with which it was saved, so its batches would be
    others. None: it can. Names that only one of the two has are changes of the configuration, which are reported."""
    path = step_directory / FILE
    if not path.is_file():
        return None
    try:
        before = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return f"{path}: damaged ({type(error).__name__}); resume from another step directory"
    for name, content in cache.contents.items():
        if before.get(name, content) != content:
            return (
                f"{name}: has changed since {step_directory} was saved; restore it, or give a new run directory with "
                "this run as model.checkpoint"
            )
    return None


def differs(cache: Cache, contents: dict[str, str], here: str) -> str | None:
    """Which data file has another content on this rank (`here`, for the message) than on rank 0, which has read
    `contents`; None: none has."""
    for name, content in cache.contents.items():
        if content != contents.get(name):
            return (
                f"{here}: {name} has another content than on rank 0; mount the same file system on every node, or wait "
                "until the file is complete"
            )
    return None
