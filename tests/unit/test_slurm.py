"""A run's bookkeeping of its Slurm job: starts without progress, bounded requeues, the nodes that lack ranks."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from megarlhf.cluster import slurm
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME", "MEGARLHF_REQUEUE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/no/such")  # a scontrol without its slurm.conf asks for twenty seconds
    return monkeypatch


def test_two_attempts_without_progress_are_the_last(job, tmp_path):
    job.setenv("SLURM_JOB_ID", "71")
    for step in (0, 0, 4, 4):  # twice from the same step: the first attempt at it brought nothing
        slurm._count_start(tmp_path / "run", step)
    with pytest.raises(UserError, match="job 71 made no progress twice: .* began after step 4; "):
        slurm._count_start(tmp_path / "run", 4)
    job.setenv("SLURM_JOB_ID", "72")  # submitted anew
    slurm._count_start(tmp_path / "run", 4)
    job.delenv("SLURM_JOB_ID")  # nothing to do with Slurm
    for _ in range(4):
        slurm._count_start(tmp_path / "other", 0)
    assert not (tmp_path / "other").exists()


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
    """Twice the same in a row; other ranks of one attempt may report it, too."""
    config, run, request = JobConfig(), tmp_path / "run", tmp_path / "requeue"
    job.setenv("SLURM_JOB_ID", "71")
    job.setenv("MEGARLHF_REQUEUE", str(request))
    story = [("killed in step 3", True), ("killed in step 5", True), ("killed in step 5", False), (None, True),
             ("killed in step 5", True), ("killed in step 5", False)]  # fmt: skip
    for attempt, (failure, goes_on) in enumerate(story):
        job.setenv("SLURM_RESTART_COUNT", str(attempt))
        slurm.take_over()
        assert request.read_text() == ""
        slurm._count_start(run, attempt)
        for _ in range(2):
            text = slurm.request_requeue("why", config, run, failure)
            assert ("the job is requeued" in text) == goes_on == bool(request.read_text())
        assert goes_on or "the attempt before ended alike (killed in step 5)" in text
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
    for path, content in {
        ".venv/bin/python": "#!/bin/sh\n",
        "bin/srun": '#!/bin/sh\nprintf "%s\\n" "$@" --container-image=\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(content)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "x.yaml").touch()
    done = subprocess.run(
        [shutil.which("bash", path="/bin:/usr/bin"), ROOT / "examples/slurm/run.sh", "sft", "x.yaml", "seed=1"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:/bin:/usr/bin", "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "node1", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    command = words[words.index("-m") - 1 : -1]
    assert command == [expected.format(root=tmp_path), "-m", "megarlhf", "sft", "--config", "x.yaml", "seed=1"]
    assert ("--container-image=image.sqsh" in words) == ("CONTAINER_IMAGE" in environment)
