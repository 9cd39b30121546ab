"""Work that processes share through a directory: each takes tasks that nobody has and writes their results.

A claim is a file. It saves double work and is needed for nothing else: results are the same whoever makes them, and
appear by renaming. So the claim of a process that is gone may be taken over, and two processes that take it both do no
harm. Works on network file systems, which need not lock, nor have the clocks of the nodes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ABANDONED = 60.0  # seconds without a sign of life, after which others take over
PAUSE = 0.05


def share(
    directory: Path,
    tasks: Sequence[str],
    done: Callable[[str], bool],
    make: Callable[[str], None],
    *,
    look: Callable[[], None] = lambda: None,
    name: Callable[[str], str] = lambda task: task,
) -> None:
    """Return when every task is `done`. Those that no process has claimed are made here, by `make(task)`, in their
    order from this rank's own beginning on. `look`: called before the tasks are gone through; `name`: of a task's
    files."""
    first = beginning(len(tasks))
    left, pause = [*tasks[first:], *tasks[:first]], PAUSE
    while True:
        look()
        made, others = False, []
        for task in left:
            if done(task):
                continue
            with _claimed(directory / name(task)) as mine:
                if not mine:
                    others.append(task)
                elif not done(task):
                    make(task)
                    made = True
                    look()
        left = others
        if not left:
            return
        if made:
            pause = PAUSE
            continue
        for task in left:
            _release_abandoned(directory / name(task))
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def beginning(number: int) -> int:
    """Which of `number` tasks this rank looks at first. If all ranks began with the first one, each would ask the file
    system about every task that another has at the moment: as often as there are ranks, for each task."""
    for rank, size in _RANKS:
        place, ranks = os.environ.get(rank, ""), os.environ.get(size, "")
        if place.isdigit() and ranks.isdigit() and int(place) < int(ranks):
            return number * int(place) // int(ranks)
    return 0


_RANKS = (  # this rank and their number, as launchers tell them
    ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)  # fmt: skip


def unique(name: str) -> str:
    """A name that no other process uses."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(unique(path.name))
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_directory(directory: Path) -> None:
    """A rename in it survives a crash of the machine."""
    with contextlib.suppress(OSError):
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _claim(path: Path) -> Path:
    return path.with_name(f"{path.name}.claim")


@contextlib.contextmanager
def _claimed(path: Path):
    """Whether this process has the task now; nobody else has it until the end."""
    claim = _claim(path)
    try:
        number = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        yield False
        return
    os.write(number, f"{socket.gethostname()} {os.getpid()}".encode())
    os.close(number)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(claim, ended), daemon=True).start()
    try:
        yield True
    finally:
        ended.set()
        claim.unlink(missing_ok=True)


def _beat(claim: Path, ended: threading.Event) -> None:
    """Signs of life from a process that works long."""
    while not ended.wait(ABANDONED / 6):
        with contextlib.suppress(OSError):
            os.utime(claim)


def _release_abandoned(path: Path) -> None:
    """Remove the claim of a process that is gone: dead on this machine, or silent for long."""
    claim = _claim(path)
    try:
        host, _, number = claim.read_text().partition(" ")
        gone = host == socket.gethostname() and number.isdigit() and not _alive(int(number))
        if gone or _now(claim.parent) - claim.stat().st_mtime > ABANDONED:
            claim.unlink(missing_ok=True)
    except FileNotFoundError:
        pass


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _now(directory: Path) -> float:
    """The time by the clock of the file system."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime
