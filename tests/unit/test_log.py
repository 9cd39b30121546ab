"""What a run writes beside its checkpoints: each step once after any number of kills, and a disk that is full."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megarlhf import records, trackers
from megarlhf.config import UserError
from megarlhf.log import Log
from megarlhf.trackers import MLflow, WandB
from tests.ranks import ROOT


def log(directory: Path, start: int = 0, **options) -> Log:
    return Log(directory, enabled=True, start=start, total=9, unit="step", **options)


def steps(directory: Path, name: str = "metrics") -> list[int]:
    return [json.loads(line)["step"] for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def write(out: Log, *numbers: int) -> None:
    for step in numbers:
        out.record(step, {"loss": 1.0 / (step + 1)})
        if step % 2 == 0:
            out.record(step, {"validation/loss": float("nan")})
            out.table("samples", [{"query": f"q{row}", "score": row + step} for row in range(2)], step)


def test_each_step_is_there_once(tmp_path):
    """Starts that end without a word, with the last line cut, and go on after an earlier step."""
    (tmp_path / "prompts.jsonl").write_text('{"step": 99}\n')  # a user's own file
    write(log(tmp_path), 0, 1, 2)  # neither closed nor saved: it begins anew
    write(log(tmp_path), 0, 1, 2, 3, 4, 5)
    for name in ("metrics", "samples"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 6, "los' if name == "metrics" else '{"step": 3}')  # as a kill leaves it
    old = (tmp_path / "metrics.jsonl").open("a")
    write(log(tmp_path, 3), 4)
    write(log(tmp_path, 4), 5, 6)
    old.write('{"step": 6}\n')  # a process that lost the directory: its file is no longer this one
    old.close()
    with log(tmp_path, 6) as out:
        write(out, 7, 8)
    assert steps(tmp_path) == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]
    assert steps(tmp_path, "samples") == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert (tmp_path / "prompts.jsonl").read_text() == '{"step": 99}\n'
    assert not list(tmp_path.glob("*.partial"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["validation/loss"] is None


def test_what_tensorboard_reads(tmp_path):
    """TensorBoard's own reader: each step once, although the first start came further than its checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(log(tmp_path), 0, 1, 2, 3)
    with log(tmp_path, 2) as out:
        write(out, 3, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3, 4]
    assert events.Scalars("loss")[4].value == pytest.approx(0.2)
    assert "samples/text_summary" in events.Tags()["tensors"]


def test_a_distribution_is_numbers_and_a_histogram(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with log(tmp_path) as out:
        out.distribution("samples/score", [0.1234567, math.nan, 2.0, 2.0], 1)
        out.distribution("samples/other", [math.inf], 1)
    row = {"step": 1, "name": "samples/score", "values": [0.123457, 2.0, 2.0]}
    assert json.loads((tmp_path / "scores.jsonl").read_text()) == row
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["histograms"] == ["samples/score"]
    assert events.Histograms("samples/score")[0].histogram_value.num == 3


def test_odd_values_of_a_distribution_do_not_end_a_run(tmp_path):
    """Equal ones, ones that differ by a rounding (too near for bins between them), and outliers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    odd = [[1.0], [2.0] * 9, [0.3, 0.1 + 0.2], [0.0, 1e-45], [*map(float, range(99)), 3e38], [-3e38, 3e38]]
    with log(tmp_path) as out:
        for place, values in enumerate(odd):
            out.distribution(f"score {place}", values, 1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for place, values in enumerate(odd):
        (event,) = events.Histograms(f"score {place}")
        assert sum(event.histogram_value.bucket) == len(values)
        assert len(event.histogram_value.bucket) <= len(values) + 1


def test_half_a_surrogate_pair_is_written_as_an_escape(tmp_path):
    """JSON may hold one, UTF-8 and protocol buffers may not."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = {"query": "a\ud800", "score": 1.0, "record": {"answer": "\ud800"}}
    with log(tmp_path) as out:
        out.table("samples", [row], 1)
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"step": 1, **row}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.tensor_proto.string_val[0].decode().endswith('| a\\ud800 | 1.0 | {"answer": "\\ud800"} |')


@pytest.mark.parametrize("content", ["", "\n\n", "null\n[]\n", '{"step": "x"}\n', "[" * 100000 + "\n"])
def test_damaged_lines_are_dropped(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + content.encode() + b'\xff\xfe{"step": 1}\n{"step": 2}\n')
    records.keep_until(path, 5)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


FULL = """
import resource, sys
from pathlib import Path
from megarlhf.log import Log
import torch.utils.tensorboard.summary  # its import writes files

def limit(size):  # as a full disk: what is longer cannot be written
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with Log(Path(sys.argv[1]), enabled=True, start=0, total=9, unit="step") as log:
    for step in range(1, 100):
        if step == 20:
            limit(700)
        if step == 60:
            limit(resource.RLIM_INFINITY)
        log.step(step, {"loss": step / 7})
        log.table("samples", [{"query": "x" * 40, "score": step}], step)
        if step % 10 == 0:
            log.sync()
"""


def test_a_full_disk(tmp_path):
    """The lines wait, and are all there when the disk has room again."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert len(said) == 2, done.stderr
    assert "cannot be written (File too large); the run goes on" in said[0] and "can be written again" in said[1]
    assert "Traceback" not in done.stderr
    assert steps(tmp_path) == steps(tmp_path, "samples") == list(range(1, 100))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 100))


def test_lines_that_a_failed_sync_dropped_are_written_again(tmp_path):
    """/dev/null takes lines, keeps none, and has no fsync: so does a server that finds its disk full when it syncs."""
    file = records.Appender(tmp_path / "lines")
    file.write(b"1\n")
    assert file.flush(sync=True) is None
    disk, null = os.dup(file._file), os.open("/dev/null", os.O_WRONLY)
    file.write(b"2\n")
    assert file.flush() is None
    os.dup2(null, file._file)
    file.write(b"3\n")
    assert file.flush() is None and isinstance(file.flush(sync=True), OSError)
    file.write(b"4\n")
    assert isinstance(file.flush(), OSError)  # not before an fsync succeeds is all well again
    os.dup2(disk, file._file)
    assert file.flush() is None and file.path.read_bytes() == b"1\n2\n3\n4\n"
    file.write(b"5\n")
    assert file.close() is None and file.path.read_bytes() == b"1\n2\n3\n4\n5\n" and file.lost == 0
    os.close(disk)
    os.close(null)


@pytest.mark.parametrize("begun", [(), ("metrics",), ("metrics", "samples")])
def test_a_process_that_lost_the_directory_writes_no_line_into_it(tmp_path, begun):
    """Whichever of its files it had when the other one came."""
    for name in begun:
        (tmp_path / f"{name}.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    stale = log(tmp_path, 2)
    new = log(tmp_path, 2)
    write(new, 4)
    write(stale, 6, 8)
    for name in ("metrics", "samples"):
        assert steps(tmp_path, name) == [*([1, 2] if name in begun else []), 4, 4]


def test_memory_for_waiting_lines_is_bounded(tmp_path):
    file = records.Appender(tmp_path / "no" / "such")
    (tmp_path / "no").write_text("")  # not a directory, for now
    line = b"x" * (records.LIMIT // 4 - 1) + b"\n"
    for _ in range(6):
        file.write(line)
        assert isinstance(file.flush(), OSError)
    (tmp_path / "no").unlink()
    assert file.close() is None and file.lost == 2
    assert file.path.stat().st_size == 4 * len(line)
    file = records.Appender(tmp_path / "taken")
    for _ in range(6):  # what the disk takes is never dropped, synced or not
        file.write(line)
        assert file.flush() is None
    assert file.lost == 0 and file.path.stat().st_size == 6 * len(line)


def test_memory_is_bounded_and_nothing_forgotten_after_a_failed_sync(tmp_path, monkeypatch):
    """A disk that drops what it takes, once in the middle: the lines beyond the bound are counted, those that wait are
    all written again."""
    monkeypatch.setattr(records, "LIMIT", 40)
    file = records.Appender(tmp_path / "lines")
    file.write(b"1\n")
    assert file.flush(sync=True) is None
    disk, null = os.dup(file._file), os.open("/dev/null", os.O_WRONLY)
    line, limits = b"x" * 9 + b"\n", resource.getrlimit(resource.RLIMIT_FSIZE)
    os.dup2(null, file._file)
    for _ in range(4):
        file.write(line)
    assert isinstance(file.flush(sync=True), OSError)
    os.dup2(disk, file._file)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (17, limits[1]))
        assert isinstance(file.flush(), OSError) and file.path.stat().st_size == 17
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write(line)
    os.ftruncate(disk, 2)
    os.dup2(null, file._file)
    assert isinstance(file.flush(), OSError)
    os.dup2(disk, file._file)
    assert file.close() is None and file.lost == 1
    assert file.path.read_bytes() == b"1\n" + 4 * line
    os.close(disk)
    os.close(null)


def test_a_file_is_replaced_or_stays(tmp_path):
    path = tmp_path / "run.yaml"
    records.replace(path, "a: 1\n")
    inode = path.stat().st_ino
    records.replace(path, "a: 2\n")
    assert path.read_text() == "a: 2\n" and path.stat().st_ino != inode
    with pytest.raises(UserError, match="cannot be written"):
        records.replace(tmp_path / "none" / "x", "")


def test_wandb(tmp_path, monkeypatch):
    """One run of W&B's over all starts, unless a run begins anew; with its name, its team and its tags."""
    given = WandB("project", entity="team", name="first try", tags=("a", "b"))
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(UserError, match="log.wandb: wandb is not installed; pip install wandb"):
            trackers.check((given,))
        pytest.skip("wandb is not installed: its runs over restarts were not tried")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for start in (0, 2, 4, 0):
        with log(tmp_path, start, trackers=[given]) as out:
            run = out.trackers["W&B"].run
            ids.append(run.id)
            assert (run.project, run.entity, run.name, run.tags) == ("project", "team", "first try", ("a", "b"))
            write(out, start + 1, start + 2)
            assert out.trackers  # nothing failed
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_mlflow(tmp_path, monkeypatch):
    """The same with MLflow, whose numbers are those of metrics.jsonl."""
    given = MLflow("project", name="first try", tags=("a",))
    if importlib.util.find_spec("mlflow") is None:
        with pytest.raises(UserError, match="log.mlflow: mlflow is not installed; pip install mlflow"):
            trackers.check((given,))
        pytest.skip("mlflow is not installed: its runs over restarts were not tried")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'server'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ids = []
    for start in (0, 2, 0):
        with log(tmp_path / "run", start, trackers=[given]) as out:
            client = out.trackers["MLflow"].client
            ids.append(out.trackers["MLflow"].run_id)
            out.record(start + 1, {"evaluation/pass@8": 0.5, "odd": float("nan")})
            out.table("samples", [{"prompt": "a", "score": 1.0}], start + 1)
            assert out.trackers
    assert ids[0] == ids[1] != ids[2]
    run = client.get_run(ids[0])
    assert run.info.run_name == "first try" and "a" in run.data.tags and run.info.status == "FINISHED"
    history = client.get_metric_history(ids[0], "evaluation/pass_at_8")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.5), (3, 0.5)]


def test_mlflow_gets_no_step_twice(tmp_path, monkeypatch):
    """After restarts that repeat steps, also of numbers that come only sometimes, and of a name that comes anew."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'server'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = MLflow("project")
    for start, steps in ((0, range(1, 8)), (4, range(5, 11)), (8, range(9, 13))):
        with log(tmp_path / "run", start, trackers=[given]) as out:
            tracker = out.trackers["MLflow"]
            for step in steps:
                out.record(step, {"loss": 100 * start + step} | ({"start/8": 1.0} if start == 8 else {}))
                if step % 3 == 0:
                    out.record(step, {"validation/loss": 100 * start + step})
            assert out.trackers

    def points(name: str) -> list[tuple[int, float]]:
        found = tracker.client.get_metric_history(tracker.run_id, name)
        return sorted((point.step, point.value) for point in found)

    assert points("loss") == [*((n, n) for n in range(1, 8)), (8, 408), (9, 409), (10, 410), (11, 811), (12, 812)]
    assert points("validation/loss") == [(3, 3), (6, 6), (9, 409), (12, 812)]
    assert points("start/8") == [(n, 1) for n in range(9, 13)]
