"""A run directory belongs to one job: the lease on it, which rank 0 holds.

RUN/lease.json names its holder. Its modification time is the time of its last renewal, by the clock of the file system,
which is the same for all. A second job is refused. It takes the lease over in two cases: the first job is known to be
gone; or the lease was not renewed for LIMIT seconds, nor while the second job watched it. A holder that was stopped for
so long (`scontrol suspend`, a machine cut off) notices before it writes again (`verify`).

Files are created exclusively (O_EXCL), which all usual file systems support; neither links nor locks are needed.
Whether a process of the lease still lives is read from /proc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarlhf import config, console
from megarlhf.config import UserError

NAME = "lease.json"
LIMIT = 120.0  # seconds without a renewal after which a lease may be taken over
RENEWAL = 5.0  # seconds between renewals


@dataclass(frozen=True)
class Holder:
    """The holder of a lease."""

    token: str  # different for every holder
    job: str | None  # Slurm's id
    restart: int  # how often Slurm has restarted this job
    host: str
    pid: int
    started: int | None  # when this process started, in clock ticks since the machine did
    machine: str  # where pids are comparable: this boot of this machine, this PID namespace
    since: float  # seconds since the epoch

    @staticmethod
    def here() -> Holder:
        """This process."""
        token = secrets.token_hex(8)
        try:
            machine = (
                f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
            )
        except OSError:  # not Linux: like no other
            machine = token
        return Holder(
            token=token,
            job=os.environ.get("SLURM_JOB_ID"),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            machine=machine,
            since=round(time.time(), 3),
        )

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{job}pid {self.pid} on {self.host}, since {since}"


class Lease:
    """A lease on `run`, once `acquire` has returned."""

    def __init__(self, run: Path):
        self.run, self.path = run, run / NAME
        self.holder = Holder.here()
        self.renewed = 0.0  # when it was ours for sure, on this machine's clock
        self.lost: str | None = None  # why it is not ours any more
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Take the lease and keep renewing it in a thread.

        Raises UserError if another job has it. Where that job may still live and cannot be asked, this waits for its
        next renewal, or for LIMIT seconds without one, and always for two intervals between renewals.
        """
        watched: tuple[float, float] | None = None  # its last renewal, and since when we have seen no other
        taken_from = ""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            while not self._create():
                if (found := self._read()) is None:
                    time.sleep(0.1)  # it has just been released
                    continue
                holder, renewed = found
                age = self._now() - renewed
                gone = self._gone(holder)
                # not on one look: clocks jump, and a machine that comes back from a suspension renews in a moment
                if age > LIMIT and watched is not None and _clock() - watched[1] > 2 * RENEWAL:
                    gone = gone or f"it was not renewed for {age:.0f} s"
                if gone is not None:
                    if self._remove(holder.token, renewed):
                        taken_from = f"{self.run}: taken over from {holder}: {gone}"
                    continue
                stale = age > LIMIT and (watched is None or renewed == watched[0])
                if (holder.machine == self.holder.machine and not stale) or (watched and renewed > watched[0]):
                    raise UserError(
                        f"run: {self.run} belongs to another job that still runs ({holder}); wait until it ends, or "
                        "give another run directory"
                    )
                if watched is None:
                    watched = (renewed, _clock())
                    _say(f"{self.run}: waiting to see whether its job still runs ({holder}), at most {LIMIT:.0f} s")
                time.sleep(1)
        except OSError as error:
            raise UserError(
                f"run: {self.run} cannot be written ({error.strerror or error}); make room, mend the file system or "
                "give another directory"
            )
        if taken_from:
            _say(taken_from)
        self._clean()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def verify(self) -> None:
        """Raises UserError if the lease was taken over. Costs nothing if that cannot have happened."""
        if self.lost is None and _clock() - self.renewed > LIMIT / 2:
            self._renew()  # this process was stopped, or the file system hung
        if self.lost is not None:
            raise UserError(self.lost)

    def release(self) -> None:
        """Remove the lease file, if it is still ours. Waits a moment for another job that has just claimed it."""
        self._ended.set()
        token, end = self.holder.token, _clock() + 2
        with self._lock, contextlib.suppress(OSError):
            while not self._remove(token) and _clock() < end:
                if (found := self._read()) is None or found[0].token != token:
                    return

    def _keep(self) -> None:
        while self.lost is None and not self._ended.wait(RENEWAL):
            self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            now = _clock()
            with contextlib.suppress(OSError):  # a file system that does not answer: not renewed
                found = self._read()
                if found is None and self._create():  # the lease file was removed
                    return
                if found is None or found[0].token != self.holder.token:
                    by = f" by {found[0]}" if found else ""
                    self.lost = f"run: {self.run} was taken over{by} while this job stood still; it stops here"
                    return
                os.utime(self.path)
                self.renewed = now

    def _create(self) -> bool:
        """Create the lease; False if there is one already."""
        now = _clock()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, json.dumps(dataclasses.asdict(self.holder)).encode() + b"\n")
        except OSError:
            self.path.unlink()  # its holder would be unknown
            raise
        finally:
            os.close(file)
        self.renewed = now
        return True

    def _read(self) -> tuple[Holder, float] | None:
        """The holder and the time of the last renewal. Only the time if the lease is damaged or being written."""
        try:
            with self.path.open() as file:
                renewed = os.fstat(file.fileno()).st_mtime
                text = file.read()
        except FileNotFoundError:
            return None
        try:
            holder = config.from_dict(Holder, json.loads(text), str(self.path))
            if holder.token.isalnum():
                return holder, renewed
        except (ValueError, TypeError, AttributeError):
            pass
        return Holder("damaged", None, 0, "an unknown host", 0, None, "", renewed), renewed

    def _gone(self, holder: Holder) -> str | None:
        """Why that holder cannot be alive, if that is known."""
        own = self.holder
        if holder.job is not None and holder.job == own.job and holder.restart < own.restart:
            return "the job was queued again"
        if holder.machine == own.machine and _started(holder.pid) != holder.started and not _hidden(holder.pid):
            return "that process has ended"
        return None

    def _remove(self, token: str, renewed: float | None = None) -> bool:
        """Remove the lease with this token, last renewed at `renewed`; False if it is not this one any more, or if
        another job is removing it. Only the job that creates the claim file may remove the lease. The claim of a job
        that was killed meanwhile stays; of the jobs that find it old, only the one that creates the next claim may
        remove the lease. Claims have no effect after the lease is removed, because no other has its token."""
        claim = self.path.with_name(f"{NAME}.{token}.claim")
        while True:
            began = _clock()
            try:
                os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                break
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):
                    if self._now() - claim.stat().st_mtime > LIMIT:
                        claim = claim.with_name(claim.name + "+")
                        continue
                time.sleep(0.01)
                return False
        try:
            found = self._read()
            if found is None or found[0].token != token or renewed not in (None, found[1]):
                return False
            if _clock() - began > LIMIT / 2:  # the file system hung: another job may have the next claim
                return False
            self.path.unlink()
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove the files of jobs that were killed in the middle of `_remove` or `_now`."""
        with contextlib.suppress(OSError):
            now = self._now()
            for debris in self.run.glob(f"{NAME}.*"):
                if now - debris.stat().st_mtime > LIMIT:
                    debris.unlink()

    def _now(self) -> float:
        """The file system's clock."""
        with tempfile.TemporaryFile(dir=self.run, prefix=f"{NAME}.clock") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime


_held: Lease | None = None


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the lease on `run`; for rank 0. Raises UserError if another job has it."""
    global _held
    assert _held is None
    lease = Lease(run)
    lease.acquire()
    _held = lease
    try:
        yield
    finally:
        release()


def verify() -> None:
    """Call it before anything is written to the run directory; on all ranks but 0 nothing happens. Raises UserError if
    another job has taken the directory over."""
    if _held is not None:
        _held.verify()


def release() -> None:
    """Release the lease, if this process has one; also for code that ends the process without unwinding."""
    global _held
    lease, _held = _held, None
    if lease is not None:
        lease.release()


def _started(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the machine did. None if there is no such process,
    or if it has ended and its parent has not waited for it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])  # field 22 of proc(5)


def _hidden(pid: int) -> bool:
    """Whether this is a live process of another user: /proc may be mounted so that it hides them."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _clock() -> float:
    """Seconds; on Linux of a clock that runs on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _say(message: str) -> None:
    console.say(f"  {message}")
