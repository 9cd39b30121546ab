"""Removal of tables that no job has used for long. Whoever has written a table looks for them.

A job marks a table as used when it opens it, and again at each checkpoint. So a table that was not marked for `DAYS` is
not in use: also on NFS, where a file that another node has mapped must not be removed. Jobs that may only read a cache
cannot mark it.

A table goes by one rename, so nobody finds half of one. A job marks a table before it reads it, and a table that was
marked just before the rename gets its name again. Who cannot mark it any more makes it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from megarlhf import console
from megarlhf.data.shares import unique
from megarlhf.data.stored import META

DAYS = 30
MARK = "used"  # in a table: its time is that of the last use
_SUFFIX = ".unused"
# of this cache; the user may have other things beside them
_NAMES = re.compile(r"(?P<table>[a-z]+-[0-9a-f]{32})(?P<parts>\.building)?(\..*\.unused)?")


def touch(table: Path) -> bool:
    """Mark a table as used. Returns whether it is there."""
    try:
        os.utime(table / MARK)
    except FileNotFoundError:
        with contextlib.suppress(OSError):  # there is no table, or it may only be read
            (table / MARK).touch()
    except OSError:  # it may only be read
        pass
    return (table / META).is_file()


def remove(written: Path) -> None:
    """Remove from its cache what was not used for DAYS before the table `written` was. Nothing fails: what cannot be
    removed stays."""
    with contextlib.suppress(OSError):
        now = (written / META).stat().st_mtime  # by the clock of the file system, as the marks
        found = sorted(written.parent.iterdir())
        if removed := [path.name for path in found if _removed(path, now)]:
            console.say(f"  data_cache: {written.parent}: {', '.join(removed)} not used for {DAYS} days, removed")


def _removed(path: Path, now: float) -> bool:
    """Remove a directory of the cache if it is not in use. Returns whether it did."""
    found = _NAMES.fullmatch(path.name)
    try:
        if found is None or now - _last_use(path) < DAYS * 86400:
            return False
    except OSError:  # another process was faster
        return False
    aside = path.with_name(unique(found["table"] + (found["parts"] or "")) + _SUFFIX)
    try:
        os.rename(path, aside)
    except OSError:  # another process was faster, or the directory is another user's
        return False
    try:
        if now - _last_use(aside) < DAYS * 86400:  # marked since we looked
            os.rename(aside, path)
            return False
    except OSError:  # another process has made the table again
        pass
    shutil.rmtree(aside, ignore_errors=True)
    return not aside.exists()


def _last_use(path: Path) -> float:
    """When a table was marked, or made; when a part of one that is not finished was made. Raises OSError."""
    times = [path.stat().st_mtime]
    for name in (MARK, META):
        with contextlib.suppress(FileNotFoundError):
            times.append((path / name).stat().st_mtime)
    return max(times)
