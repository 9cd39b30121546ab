"""A run's bookkeeping of its Slurm job: starts without progress, bounded requeues, the nodes that lack ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarlhf.cluster import signals, slurm
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME", "MEGARLHF_REQUEUE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/no/such")  # a scontrol without its slurm.conf asks for twenty seconds
    return monkeypatch


def attempt(job, run: Path, number: int, step: int | None, failure: str | None) -> str:
    """The `number`-th attempt of the job, which begins after `step`, if it comes so far; what the failure's message
    ends with."""
    job.setenv("SLURM_RESTART_COUNT", str(number))
    job.setenv("MEGARLHF_REQUEUE", str(run.parent / "requeue"))
    if step is not None:
        slurm._count_start(run, step)
    return slurm.request_requeue("why", JobConfig(), run, failure) if failure else ""


def test_two_failures_without_progress_are_the_last(job, tmp_path):
    run = tmp_path / "run"
    job.setenv("SLURM_JOB_ID", "71")
    story = [(0, "a"), (4, "b"), (None, "c"), (None, "d"), (4, None), (4, None), (4, None), (4, "e")]
    for number, (step, failure) in enumerate(story):
        attempt(job, run, number, step, failure)
    with pytest.raises(UserError, match="job 71 made no progress twice: two attempts that began after step 4 failed"):
        attempt(job, run, len(story), 4, None)
    attempt(job, run, len(story), 5, None)
    job.setenv("SLURM_JOB_ID", "72")  # submitted anew
    attempt(job, run, 0, 4, None)
    job.delenv("SLURM_JOB_ID")  # nothing to do with Slurm
    for _ in range(4):
        attempt(job, tmp_path / "other", 0, 0, "f")
    assert not (tmp_path / "other").exists()


def test_what_slurm_ends_is_no_failure(job, tmp_path):
    """Preempted again and again before the first checkpoint, without a failure that a rank has seen."""
    job.setenv("SLURM_JOB_ID", "71")
    for number in range(6):
        attempt(job, tmp_path / "run", number, 0, None)


def test_a_crash_counts_although_srun_sends_term_to_the_other_ranks(job, tmp_path):
    job.setenv("SLURM_JOB_ID", "71")
    job.setattr(signals, "_asked", signals.END)
    for number in range(2):
        attempt(job, tmp_path / "run", number, 4, "rank 0 was lost in step 5")
    with pytest.raises(UserError, match="job 71 made no progress twice"):
        attempt(job, tmp_path / "run", 2, 4, None)


def test_another_job_that_fails_leaves_the_record_alone(job, tmp_path):
    """One that has not got the run directory yet, or never gets it."""
    run = tmp_path / "run"
    for number in range(2):
        for name in ("71", "72"):
            job.setenv("SLURM_JOB_ID", name)
            attempt(job, run, number, 4 if name == "71" else None, f"{name} failed {number}")
    job.setenv("SLURM_JOB_ID", "71")
    with pytest.raises(UserError, match="job 71 made no progress twice"):
        attempt(job, run, 2, 4, None)
    for number in range(20):
        job.setenv("SLURM_JOB_ID", str(100 + number))
        attempt(job, run, 0, 4, None)
    assert len(json.loads((run / slurm.STARTS).read_text())) == 8  # the last ones


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"71": 3}', '{"job": "71", "steps": [4, 4]}', '{"71": {"step": "x"}}']
)
def test_a_damaged_record_counts_for_nothing(job, tmp_path, content):
    (tmp_path / slurm.STARTS).write_text(content)
    job.setenv("SLURM_JOB_ID", "71")
    assert "the job is requeued" in attempt(job, tmp_path, 0, 4, "killed in step 5")


def test_requeues_are_bounded_and_asked_for_in_a_file(job, tmp_path):
    config = JobConfig(max_requeues=2)
    assert slurm.request_requeue("why", config) == ""  # no batch script that would
    job.setenv("MEGARLHF_REQUEUE", str(tmp_path / "requeue"))
    job.setenv("SLURM_RESTART_COUNT", "1")
    assert slurm.request_requeue("why", config) == "\n  the job is requeued (restart 2 of at most 2)"
    assert (tmp_path / "requeue").read_text() == "why\n"
    (tmp_path / "requeue").unlink()
    job.setenv("SLURM_RESTART_COUNT", "2")
    assert "not requeued: that was done 2 times" in slurm.request_requeue("why", config)
    assert not (tmp_path / "requeue").exists()


def test_a_failure_that_repeats_is_not_tried_again(job, tmp_path):
    """Twice the same in a row, three times before the first step; other ranks of one attempt may report it, too."""
    config, run, request = JobConfig(), tmp_path / "run", tmp_path / "requeue"
    job.setenv("SLURM_JOB_ID", "71")
    job.setenv("MEGARLHF_REQUEUE", str(request))
    story = [("killed in step 3", True), ("killed in step 5", True), ("killed in step 5", False), (None, True),
             ("killed in step 5", True), ("killed in step 5", False), ("lost before the first step", True),
             ("lost before the first step", True), ("lost before the first step", False)]  # fmt: skip
    for attempt, (failure, goes_on) in enumerate(story):
        job.setenv("SLURM_RESTART_COUNT", str(attempt))
        slurm.take_over()
        assert request.read_text() == ""
        slurm._count_start(run, attempt)
        for _ in range(2):
            text = slurm.request_requeue("why", config, run, failure)
            assert ("the job is requeued" in text) == goes_on == bool(request.read_text())
        assert goes_on or f"the attempt before ended alike ({failure})" in text
        request.unlink()
    assert [path.name for path in run.iterdir()] == [slurm.STARTS]


def test_the_end_of_a_job(job):
    assert slurm.end_of_job() is None
    job.setenv("SLURM_JOB_ID", "71")
    assert slurm.end_of_job() is None
    job.setenv("SLURM_JOB_END_TIME", "1800000000")  # where scontrol does not answer
    assert slurm.end_of_job() == 1.8e9


def test_nodes_with_ranks_missing(job):
    assert slurm.incomplete_nodes(["node1"]) == ""
    job.setenv("SLURM_STEP_NODELIST", "node[1-3]")
    job.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2),1")
    here = ["node1", "node1", "node2"]
    assert slurm.incomplete_nodes(here) == "; nodes with ranks missing: node2 (1 of 2), node3 (0 of 1)"


def commands(root: Path, **scripts: str) -> None:
    """Executables below `root`."""
    for path, lines in scripts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"#!/bin/sh\n{lines}\n")
        (root / path).chmod(0o755)


def run_script(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """run.sh in `root`, with the commands in its bin."""
    return subprocess.run(
        [shutil.which("bash", path="/bin:/usr/bin"), ROOT / "examples/slurm/run.sh", "sft", "x.yaml", "seed=1"],
        cwd=root,
        env={"PATH": f"{root}/bin:/bin:/usr/bin", "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "node1", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "{root}/.venv/bin/python"),
        ({"CONTAINER_IMAGE": "image.sqsh"}, "python3"),  # the checkout's .venv is none of the container's
        ({"CONTAINER_IMAGE": "image.sqsh", "MEGARLHF_PYTHON": "/opt/python"}, "/opt/python"),
        ({"MEGARLHF_PYTHON": "/opt/python"}, "/opt/python"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_which_python_a_job_starts(tmp_path, environment, expected):
    """run.sh up to srun, which here is a command that prints what it is given."""
    commands(tmp_path, **{".venv/bin/python": "", "bin/srun": 'printf "%s\\n" "$@" --container-image='})
    (tmp_path / "x.yaml").touch()
    done = run_script(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    command = words[words.index("-m") - 1 : -1]
    assert command == [expected.format(root=tmp_path), "-m", "megarlhf", "sft", "--config", "x.yaml", "seed=1"]
    assert ("--container-image=image.sqsh" in words) == ("CONTAINER_IMAGE" in environment)


def test_the_script_reads_the_limit_of_requeues(tmp_path):
    """However YAML writes it; and it leaves other jobs' files alone."""
    commands(tmp_path, **{"bin/srun": "exit 137", "bin/squeue": "echo RUNNING", "bin/scontrol": "exit 0"})
    for job, days in ((8, 20), (9, 31)):
        (tmp_path / f".requeue-{job}").touch()
        os.utime(tmp_path / f".requeue-{job}", (time.time() - 86400 * days,) * 2)
    for text, restarts, goes_on in (
        ("job:\n  max_requeues: 3", 3, False), ("job:\n  max_requeues: 3", 2, True),
        ("job: {max_requeues: 3}", 3, False), ("job: {hang_minutes: 5, 'max_requeues': 3}", 3, False),
        ("# max_requeues: 3", 3, True), ("job.max_requeues: 13  # 3", 12, True), ("job.max_requeues: 13", 13, False),
    ):  # fmt: skip
        (tmp_path / "x.yaml").write_text(text + "\n")
        (tmp_path / ".requeue-7").unlink(missing_ok=True)
        done = run_script(tmp_path, SLURM_RESTART_COUNT=str(restarts))
        assert ("== requeue: a rank was killed" in done.stdout) == goes_on, (text, done)
        assert goes_on or f"the job was restarted {restarts} times" in done.stdout
    assert (tmp_path / ".requeue-8").exists() and not (tmp_path / ".requeue-9").exists()


def test_the_script_says_why_it_gives_up(tmp_path):
    """A rank that is killed while it starts: the first time may be an accident, the second is none."""
    commands(tmp_path, **{"bin/srun": "exit 137", "bin/squeue": "echo RUNNING", "bin/scontrol": "exit 0"})
    (tmp_path / "x.yaml").touch()
    first, second, anew = (run_script(tmp_path) for _ in range(3))
    assert first.returncode == 0 and "== requeue: a rank was killed before the ranks had met\n" in first.stdout
    assert second.returncode == 137
    assert "== not requeued: twice in a row a rank was killed before the ranks had met (status 137, signal KILL)." in (
        second.stdout
    )
    assert "submit it again" in second.stdout and anew.returncode == 0  # submitted again, it has two attempts again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_was_remembered_ends_who_has_nothing_to_save(number):
    code = (
        "import signal; from megarlhf.cluster import signals; signals.remember(); "
        f"signal.raise_signal({int(number)}); print('remembered', flush=True); signals.end_at_once(); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-number, "remembered\n"), done.stderr
