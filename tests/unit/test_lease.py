"""A run directory belongs to one job: real processes that want the same one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarlhf.cluster import lease
from megarlhf.cluster.lease import Lease
from megarlhf.config import UserError
from tests.ranks import ROOT

# Holds the lease until a line comes on standard input; then says whether it still had it.
HOLDER = """
import sys
from pathlib import Path
from megarlhf.cluster import lease
from megarlhf.config import UserError
try:
    with lease.held(Path(sys.argv[1])):
        print("held", flush=True)
        while sys.stdin.readline() == "verify\\n":
            lease.verify()
            print("verified", flush=True)
except UserError as error:
    print(f"error: {error}", flush=True)
"""
# Wants it again and again, together with others; a line for each time that it got it.
RIVAL = """
import os, sys, time
from pathlib import Path
from megarlhf.cluster.lease import Lease
from megarlhf.config import UserError
directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
start = float(sys.stdin.readline())
for number in range(rounds):
    run = directory / str(number)
    while time.monotonic() < start + number / 100:  # all in the same moment
        pass
    try:
        Lease(run).acquire()
        print(f"held {number}", flush=True)
    except UserError:
        pass
print("done", flush=True)
sys.stdin.readline()
"""


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**outer, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def ask(holder: subprocess.Popen, question: str) -> str:
    holder.stdin.write(question + "\n")
    holder.stdin.flush()
    return holder.stdout.readline().strip()


def finish(holder: subprocess.Popen) -> tuple[str, str]:
    return holder.communicate("end\n", timeout=60)


def age(run: Path, seconds: float, **changes: object) -> None:
    """Make the lease look as if it was last renewed so long ago, by somebody else."""
    path = run / lease.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}) + "\n")
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def holder(tmp_path):
    process = start(HOLDER, tmp_path / "run", SLURM_JOB_ID="71")
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_job_is_refused(holder, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    out, _ = finish(start(HOLDER, tmp_path / "run"))
    (line,) = out.splitlines()
    assert line.startswith(f"error: run: {tmp_path / 'run'} belongs to another job that still runs (job 71, pid ")
    assert f"pid {holder.pid} on " in line and ", since 20" in line
    assert sorted(tmp_path.rglob("*.json*")) == sorted(before)
    assert ask(holder, "verify") == "verified"
    assert finish(holder) == ("", "") and not list((tmp_path / "run").iterdir())  # given back
    assert finish(start(HOLDER, tmp_path / "run")) == ("held\n", "")


def test_a_killed_holder_is_followed_at_once(holder, tmp_path):
    holder.kill()
    holder.wait()
    out, err = finish(start(HOLDER, tmp_path / "run"))
    assert out == "held\n"
    assert f"taken over from job 71, pid {holder.pid} on " in err and "that process has ended" in err


def test_a_pid_that_another_process_has_now(holder, tmp_path):
    age(tmp_path / "run", 0, started=1)  # the holder's pid lives, but started at another time
    out, err = finish(start(HOLDER, tmp_path / "run"))
    assert out == "held\n" and "that process has ended" in err


def test_a_requeued_job_goes_on_at_once(holder, tmp_path):
    age(tmp_path / "run", 0, machine="another", host="node7")
    out, err = finish(start(HOLDER, tmp_path / "run", SLURM_JOB_ID="71", SLURM_RESTART_COUNT="1"))
    assert out == "held\n" and "on node7" in err and "the job was queued again" in err


def test_a_job_on_another_machine(tmp_path):
    """It cannot be asked: it lives if it renews its lease, and is gone if it has not done so for two minutes."""
    run = tmp_path / "run"
    with lease.held(run):
        age(run, 0, machine="another", host="node7", pid=4711)
        out, err = finish(start(HOLDER, run))
        assert "waiting to see whether its job still runs" in err
        assert out.startswith("error: run: ") and "pid 4711 on node7" in out
        age(run, lease.LIMIT + 60, machine="another", host="node7", token="another")
        out, err = finish(start(HOLDER, run))
        assert out == "held\n" and "on node7" in err and "it was not renewed for " in err
        assert "waiting to see whether its job still runs" in err  # not on one look


def test_a_holder_that_comes_back_while_it_is_watched_keeps_its_lease(tmp_path):
    """Its machine was suspended for longer than the limit and goes on in this moment."""
    with lease.held(tmp_path):
        age(tmp_path, lease.LIMIT + 60, machine="another", host="node7")
        second = start(HOLDER, tmp_path)
        assert "waiting to see whether its job still runs" in second.stderr.readline()
        os.utime(tmp_path / lease.NAME)
        out, _ = finish(second)
        assert out.startswith("error: run: ") and "on node7" in out
        lease.verify()


def test_a_holder_that_stood_still_stops(holder, tmp_path):
    holder.send_signal(signal.SIGSTOP)
    age(tmp_path / "run", lease.LIMIT + 60)
    second = start(HOLDER, tmp_path / "run", SLURM_JOB_ID="72")
    assert second.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGCONT)
    for _ in range(600):
        if (last := ask(holder, "verify")) != "verified":
            break
        time.sleep(0.1)
    assert last.startswith(f"error: run: {tmp_path / 'run'} was taken over by job 72, pid {second.pid} on ")
    assert holder.wait(60) == 0
    assert ask(second, "verify") == "verified"  # its lease is still there
    finish(second)


def test_a_damaged_lease(tmp_path):
    odd = json.dumps({**dataclasses.asdict(lease.Holder.here()), "token": "../x", "machine": "another"})
    for text in ("", "{", "[1]", odd, "\x00" * 100):
        (tmp_path / lease.NAME).write_text(text)
        holder, _ = Lease(tmp_path)._read()
        assert (holder.token, holder.machine) == ("damaged", "")
    os.utime(tmp_path / lease.NAME, (0, 0))
    with lease.held(tmp_path):
        lease.verify()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for run in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/x"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be written"), lease.held(run):
            pass


def until(moment: int, work: Callable[[], None]) -> Callable[[], None]:
    """Run `work` in a thread, up to the `moment`-th line of `_remove`. The result runs the rest."""
    reached, resume = threading.Event(), threading.Event()
    left = moment

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not Lease._remove.__code__:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            reached.set()
            resume.wait()
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            work()
        finally:
            reached.set()

    def finish() -> None:
        resume.set()
        thread.join()

    thread = threading.Thread(target=run)
    thread.start()
    reached.wait()
    return finish


def test_one_takes_over_from_an_old_claim(tmp_path):
    """A job was killed in the middle of a takeover. Two others go on from there, and stand still wherever you like: one
    alone removes the lease, what it creates then stays, and nobody is kept out for ever."""
    for first, second in itertools.product(range(3, 12), range(6, 24)):
        run = tmp_path / f"{first} {second}"
        run.mkdir()
        abandoned, winners = Lease(run), []
        assert abandoned._create()
        token = abandoned.holder.token
        old = run / f"{lease.NAME}.{token}.claim"
        old.touch()
        os.utime(old, (0, 0))

        def take_over(run=run, token=token, winners=winners) -> None:
            rival = Lease(run)
            for _ in range(3):
                if rival._remove(token) and rival._create():
                    winners.append(rival)

        slow = until(first, take_over)
        fast = until(second, take_over)
        slow()
        fast()
        take_over()
        (winner,) = winners
        assert winner._read()[0] == winner.holder, (first, second)


def test_a_release_outlives_the_claim_of_another_job(tmp_path):
    """Another job looks whether it may remove the lease, finds that it may not, and withdraws its claim."""
    holder = Lease(tmp_path)
    holder.acquire()
    claim = tmp_path / f"{lease.NAME}.{holder.holder.token}.claim"
    claim.touch()
    other = threading.Timer(0.2, claim.unlink)
    other.start()
    holder.release()
    other.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left_by", [None, "a process that is gone", "a job that is gone"])
def test_one_of_many_wins(tmp_path, left_by):
    rounds = 2 if left_by == "a job that is gone" else 200  # each of these is watched for a while
    rivals = []
    for number in range(rounds):
        run = tmp_path / str(number)
        run.mkdir()
        if left_by:
            abandoned = Lease(run)
            assert abandoned._create()
            if left_by == "a process that is gone":
                age(run, 0, started=1)
            else:
                age(run, lease.LIMIT + 60, machine="another")
    try:
        rivals = [start(RIVAL, tmp_path, rounds) for _ in range(4)]
        for rival in rivals:
            assert rival.stdout.readline() == "ready\n"
        begin = time.monotonic() + 0.5
        for rival in rivals:
            rival.stdin.write(f"{begin}\n")
            rival.stdin.flush()
        # nobody ends before all are done: the leases of a process that has ended are free
        wins = [line.strip() for rival in rivals for line in iter(rival.stdout.readline, "done\n")]
    finally:
        for rival in rivals:
            rival.kill()
    assert sorted(wins) == sorted(f"held {number}" for number in range(rounds))
