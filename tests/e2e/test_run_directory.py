"""Several jobs that want the same run directory."""

import signal
import sys
import time

from tests.e2e.runs import CLI, finish, prepare, start


def own_files(run):
    """Without the cache of tokenized data, which jobs may share: a later one may note what it knows of a data file."""
    return sorted(path for path in run.rglob("*") if run / "data" not in (path, *path.parents))


def test_a_run_directory_belongs_to_one_job(tmp_path):
    config = prepare(tmp_path, **{"data.validation": None, "training.evaluate_every": 1000})
    run, command = tmp_path / "run", (sys.executable, *CLI, "sft", "--config", str(config))
    first = start(*command, "training.steps=1000000", "checkpoint.every=1000000")
    try:
        deadline = time.monotonic() + 200
        while not (run / "metrics.jsonl").exists():
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1]
            time.sleep(0.1)

        script = (
            'for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank "$@" & pids="$pids $!"; done; '
            'for pid in $pids; do wait $pid; echo "status $?"; done'
        )
        files = own_files(run)
        second = finish(
            "bash", "-c", script, "_", *command,
            environment=dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29613"),
        )  # fmt: skip
        assert second.stdout.splitlines() == ["status 2", "status 2"], second.stderr
        (line,) = [line for line in second.stderr.splitlines() if "error" in line]
        assert f"run: {run} belongs to another job that still runs (pid {first.pid} on " in line
        assert own_files(run) == files and first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()

    # taken over at once, and the disk of its log is full: it goes on without
    third = finish("bash", "-c", 'exec "$@" >/dev/full 2>&1', "_", *command)
    assert third.returncode == 0
    assert (run / "checkpoints" / "latest").read_text().split()[0] == "step_00000008"
    assert not list(run.glob("lease*"))
