"""This run's place in its Slurm job: when the job ends, which signals ask it to stop, and whether it may be requeued.

    USR1 (`#SBATCH --signal=USR1@...`, `scancel -s USR1 JOB`), or the job's end is near: save, leave, be requeued
    TERM (`scancel -s TERM JOB`; `scancel`, `scontrol requeue` and preemption send it, and KILL some 30 s later):
        save, leave

A signal only sets a flag (signals.py). At the next safe point, the end of a step, all ranks agree on it, save together
and leave. The batch script requeues the job (examples/slurm/), since a container may have no scontrol. It looks for the
file that it has named in MEGARLHF_REQUEUE. The file is absent until the ranks have met and empty after that; a reason
in it asks for another attempt. Without Slurm the signals work the same, and a new start of the program continues the
run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf import config, console
from megarlhf.cluster import backend, launch, signals
from megarlhf.config import UserError

STARTS = "starts.json"  # in the run directory: where the attempts of its last jobs began, and how they failed
TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h: stopped early, to be started again by hand


@dataclass(frozen=True)
class JobConfig:
    """The options of a run in a job. Times in minutes."""

    margin_minutes: float = 3.0  # to spare at the job's end, beyond the longest recent step and save
    max_requeues: int = 100  # by the run itself; Slurm's own, after a node failure, count too
    hang_minutes: float = 30.0  # no progress for this long ends the run; longer than any phase of a healthy step
    # Between the first and the last rank's start. From a new image some nodes import for minutes longer than others.
    # From the first minute on the log names the ranks that have not come.
    join_minutes: float = 15.0

    def __post_init__(self):
        for name in ("margin_minutes", "max_requeues"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")
        for name in ("hang_minutes", "join_minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")


class Job:
    """Decides at each safe point whether a loop goes on. Make it when the first step is known; only `leave` is
    collective."""

    def __init__(self, config: JobConfig, run: Path, step: int):
        """`step`: updates done so far. Raises UserError (on rank 0, for all) when two attempts of this job that began
        there have failed."""
        self.config = config
        self.why = signals.STAY
        self.end = None  # seconds since the epoch
        self.steps: collections.deque[float] = collections.deque(maxlen=100)  # recent durations, saves included
        self.since = time.monotonic()
        if dist.get_rank() == 0:
            self.end = end_of_job()
            _count_start(run, step)

    def leave(self, save_seconds: float) -> bool:
        """Whether all ranks save and leave now; the same on all. Call it once a step, at its end. One all-reduce of a
        number.

        `save_seconds`: how long a save takes.
        """
        now = time.monotonic()
        self.steps.append(now - self.since)
        self.since = now
        wish = signals.asked()
        if self.end is not None:
            needed = max(self.steps) + save_seconds + 60 * self.config.margin_minutes
            if time.time() + needed > self.end:
                wish = max(wish, signals.REQUEUE)
        agreed = torch.tensor(wish, device=backend.device())
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        self.why = int(agreed)
        return self.why != signals.STAY

    def close(self, step: int, total: int) -> None:
        """After the last save. A run that leaves early asks for a requeue, or prints how to continue, and exits
        here."""
        if self.why == signals.STAY or step == total:
            return
        requeued = self.why == signals.REQUEUE and may_requeue(self.config)
        if dist.get_rank() == 0:
            reason = "the job's end is near, or USR1 came" if self.why == signals.REQUEUE else "TERM came"
            after = request_requeue(reason, self.config) if requeued else "\n  it goes on when it is started again"
            text = f"megarlhf: {reason}: saved and left after step {step} of {total}{after}"
            console.say(text)
        raise SystemExit(0 if requeued else TEMPORARY_FAILURE)


def end_of_job() -> float | None:
    """When the time limit ends this job, in seconds since the epoch; None outside Slurm or without a limit.

    From `scontrol`, which knows changed limits, otherwise from the environment, as it was at the start.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["scontrol", "show", "job", "-o", job],
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"}, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        found = re.search(r" EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown.stdout)
        if found:
            return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def may_requeue(config: JobConfig) -> bool:
    """Whether a batch script requeues this job, and has not yet done so as often as it may."""
    return "MEGARLHF_REQUEUE" in os.environ and _restarts() < config.max_requeues


def take_over() -> None:
    """Tell the batch script that from now on the run itself decides whether it wants another attempt."""
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ["MEGARLHF_REQUEUE"]).touch()


def request_requeue(reason: str, config: JobConfig, run: Path | None = None, failure: str | None = None) -> str:
    """Ask the batch script for another attempt. Returns what to add to the message about it. Any rank may call it.

    `failure` describes a failure without what differs between attempts (process ids, nodes). It is recorded in `run`.
    There is no further attempt when attempts in a row have ended with the same failure: two in the same step, or three
    before the first step.
    """
    if "MEGARLHF_REQUEUE" not in os.environ:
        return ""
    if not may_requeue(config):
        return f"\n  not requeued: that was done {_restarts()} times (job.max_requeues)"
    try:
        if run is not None and failure is not None and _repeats(run, failure):
            return f"\n  not requeued: the attempt before ended alike ({failure}); find out why and submit it again"
        Path(os.environ["MEGARLHF_REQUEUE"]).write_text(reason + "\n")
    except OSError as error:
        return f"\n  not requeued: {error}"
    return f"\n  the job is requeued (restart {_restarts() + 1} of at most {config.max_requeues})"


def incomplete_nodes(present: Iterable[str]) -> str:
    """Nodes of this Slurm step on which not all tasks are `present` (one node name a task), for a message; "" outside
    Slurm."""
    try:
        nodes = launch.expand_nodes(os.environ["SLURM_STEP_NODELIST"])
        counts = launch.tasks_per_node(os.environ, "SLURM_STEP_TASKS_PER_NODE")
    except (KeyError, UserError):
        return ""
    there = collections.Counter(present)
    late = [f"{node} ({there[node]} of {n})" for node, n in zip(nodes, counts, strict=False) if there[node] < n]
    return f"; nodes with ranks missing: {', '.join(late)}"


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


@dataclass(frozen=True)
class _Record:
    """The entry of one job in starts.json. Attempts are numbered as Slurm counts restarts."""

    attempt: int = -1  # the last one that came to its loop
    step: int = -1  # after which that began
    failures: int = 0  # number of the attempts from that step that failed
    failed: int = -1  # the last attempt that failed
    what: str = ""  # how
    alike: int = 0  # number of attempts in a row that failed in that way


def _count_start(run: Path, step: int) -> None:
    """Record in `run` that this attempt begins after `step`, and refuse it if two that began there have failed. What
    Slurm ends and requeues itself, as a preemption does, is no failure."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    record = _read_records(run).get(job, _Record())
    failures = record.failures if record.step == step else 0
    if failures >= 2:
        raise UserError(
            f"{run}: job {job} made no progress twice: two attempts that began after step {step} failed before their "
            "first new checkpoint; find out why from their messages, give it checkpoint.every fewer steps, and submit "
            "it again"
        )
    _write_record(run, job, replace(record, attempt=_restarts(), step=step, failures=failures))


def _repeats(run: Path, failure: str) -> bool:
    """Record `failure` as that of this attempt; whether too many attempts in a row have recorded the same. A failure
    after a TERM counts too: srun sends TERM to the other ranks when one has crashed."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    record = _read_records(run).get(job, _Record())
    if record.failed != _restarts():  # else another rank has recorded it
        again = record.failed == _restarts() - 1 and record.what == failure
        record = replace(
            record, failures=record.failures + (record.attempt == _restarts()),
            failed=_restarts(), what=failure, alike=record.alike + 1 if again else 1,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk, say; then there is one attempt more
            _write_record(run, job, record)
    return record.alike >= (2 if re.search(r" in step \d+$", failure) else 3)


def _read_records(run: Path) -> dict[str, _Record]:
    """The records by job: a job that fails before it has the lease may write beside the one that has it."""
    try:
        records = json.loads((run / STARTS).read_text())
        return {job: config.from_dict(_Record, record, str(run / STARTS)) for job, record in records.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, UserError):
        return {}


def _write_record(run: Path, job: str, record: _Record) -> None:
    run.mkdir(parents=True, exist_ok=True)
    others = [(other, value) for other, value in _read_records(run).items() if other != job]
    kept = {name: asdict(value) for name, value in [*others[-7:], (job, record)]}
    temporary = run / f"{STARTS}.partial-{os.getpid()}"  # several ranks may report the same failure
    temporary.write_text(json.dumps(kept) + "\n")
    os.replace(temporary, run / STARTS)
