"""The step directories of a run: their names, the newest, publication and removal.

step_00000100            complete, once it has this name
step_00000100.partial    being written
step_00000100.replaced   complete, while a new one is renamed to its name
step_00000100.removing   being removed
latest                   the name of the newest complete one, and the hash of its checksums.json in a second line,
                         which may be left out if the name is written by hand
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megarlhf.checkpoint import checksums
from megarlhf.config import UserError

LATEST = "latest"
STATE = "state.json"
PARTIAL, REPLACED, REMOVING = ".partial", ".replaced", ".removing"
_NAME = re.compile(r"step_(\d+)")


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def number(step_directory: Path) -> int:
    """The step of a step directory, by its name."""
    return int(_NAME.match(step_directory.name)[1])


def given(directory: Path, step: int) -> Path:
    """The complete step directory of `step`. Raises UserError, with those that there are."""
    path = path_of(directory, step)
    if found := _whole(path):
        return found
    steps = ", ".join(str(number(path)) for path in complete(directory)) or "none"
    raise UserError(f"checkpoint.step: {directory} has no complete checkpoint of step {step}; there are: {steps}")


def complete(directory: Path) -> list[Path]:
    """The complete step directories, from the oldest on."""
    found = [(int(match[1]), path) for path in directory.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if is_complete(path)]


def is_complete(path: Path) -> bool:
    return (path / STATE).is_file()


def pointed(directory: Path) -> Path | None:
    """The step directory that `latest` names, which may not exist; None without `latest`."""
    pointer = directory / LATEST
    remedy = "write the name of a complete step directory into it"
    try:
        text = pointer.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{pointer}: cannot be read ({getattr(error, 'strerror', None) or 'not text'}); {remedy}")
    name, _, digest = text.partition("\n")
    name, digest = name.strip(), digest.removesuffix("\n")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{pointer}: names {name[:80]!r}, which is no step directory; {remedy}")
    path = directory / name
    if digest and path.is_dir() and checksums.own(path) not in (None, digest):
        raise UserError(f"{pointer}: its second line is not the hash in {path / checksums.FILE}; {remedy}")
    return path


def latest(directory: Path) -> Path | None:
    """The step directory to resume from: the one that `latest` names, or the newest if there is no `latest`."""
    path = pointed(directory)
    if path is None:
        return next(reversed(complete(directory)), None)
    if found := _whole(path):
        return found
    raise UserError(
        f"{directory / LATEST}: names '{path.name[:80]}', which is not a complete checkpoint; write the name of a "
        "complete step directory into it, or remove it to go on from the newest"
    )


def _whole(path: Path) -> Path | None:
    """A step directory if it is complete. It was put aside if a kill came just before the new one was renamed."""
    return next(filter(is_complete, (path, path.with_name(path.name + REPLACED))), None)


def best(directory: Path) -> Path | None:
    """The step directory with the best model so far, as the latest one names it: what counts changes with `latest`, at
    one moment. None if that names none. Raises UserError if it is not there."""
    newest = latest(directory)
    path = newest and _best_of(newest)
    if path is None or (found := _whole(path)):
        return path and found
    raise UserError(f"{newest / STATE}: names step {path.name} as the best, which is not a complete checkpoint")


def _best_of(step_directory: Path) -> Path | None:
    step = read_state(step_directory).get("best")
    return path_of(step_directory.parent, step) if type(step) is int and step > 0 else None


def publish(partial: Path, final: Path, own_hash: str) -> None:
    """Rename `partial`, which is on the disk, to `final`, then write its name into `latest`. A kill at any moment
    leaves a complete directory that `latest` (above) finds."""
    aside = final.with_name(final.name + REPLACED)
    if final.exists():  # the same step, saved before the run resumed from an earlier one
        with contextlib.suppress(UserError):
            if pointed(final.parent) == final:
                _point(final.parent, f"{final.name}\n")  # the hash of the old and of the new one differ
        remove(aside)
        os.replace(final, aside)
    os.replace(partial, final)
    _point(final.parent, f"{final.name}\n{own_hash}\n")
    remove(aside)


def point(step_directory: Path) -> None:
    """Let `latest` name a complete step directory."""
    _point(step_directory.parent, f"{step_directory.name}\n{checksums.own(step_directory) or ''}\n")


def _point(directory: Path, text: str) -> None:
    temporary = directory / (LATEST + PARTIAL)
    temporary.write_text(text)
    sync(temporary)
    os.replace(temporary, directory / LATEST)
    sync(directory)


def remove(path: Path) -> None:
    """Remove a step directory; a kill meanwhile leaves a name with REMOVING."""
    if path.exists():
        doomed = path.with_name(path.name.split(".")[0] + REMOVING)
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove the leftovers of killed or failed saves and removals, which may fill the disk."""
    for path in directory.glob(f"step_*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if is_complete(final):
            remove(path)
        else:  # killed just before the new one was renamed
            with contextlib.suppress(OSError):
                os.replace(path, final)
    for suffix in (PARTIAL, REMOVING):
        for path in directory.glob(f"step_*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def retire(newest: Path, keep: int) -> None:
    """Keep the newest `keep` complete directories, and the best one as each of them knows it (which is one more at
    most), so that a run may go on from any of them. Those after `newest` were saved before the run resumed from an
    earlier step; they are neither counted nor removed before the run reaches their step."""
    mine = [path for path in complete(newest.parent) if path.name <= newest.name]
    best = set()
    for path in mine[-keep:]:
        with contextlib.suppress(UserError):  # damaged: of the others, then
            best.add(_best_of(path))
    for path in mine[:-keep]:
        if path not in best:
            remove(path)


def read_state(step_directory: Path) -> dict[str, Any]:
    """The content of state.json: what was saved as `state`, with `step`."""
    path = step_directory / STATE
    try:
        state = json.loads(path.read_text())
        if isinstance(state, dict) and type(state.get("step")) is int and state["step"] >= 0:
            return state
        reason = "it has no 'step'"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
    raise UserError(f"{path}: missing or damaged ({reason}); resume from another step directory")


def sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
