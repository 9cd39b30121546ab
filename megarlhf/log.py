"""The outputs for a run's numbers: console, JSONL files, TensorBoard, W&B, MLflow. None ends the run by a failure."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarlhf import console, records
from megarlhf.records import Appender
from megarlhf.trackers import MLflow, Tracker, WandB

TABLES = ("metrics", "samples", "held_out", "scores")  # the JSONL files of a run directory


class Log:
    """Only global rank 0 writes; on the others every method does nothing.

    `metrics.jsonl` has one object a step: {"step": n, "time": seconds since the epoch, name: value, ...}, and one more
    for an evaluation after that step. A run that resumes after step `start` first drops the lines of later steps, which
    it repeats; so each step is there once after any number of kills.
    """

    def __init__(
        self, directory: Path, *, enabled: bool, start: int, total: int, unit: str,
        trackers: Sequence[WandB | MLflow] = (),
    ):  # fmt: skip
        self.enabled = enabled
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.files: dict[str, Appender] = {}
        for name in TABLES:
            records.keep_until(directory / f"{name}.jsonl", start)
            self.files[name] = Appender(directory / f"{name}.jsonl")
        self.events = _Events(directory / "tensorboard", start)
        self.complained = False
        self.trackers: dict[str, Tracker] = {}
        for given in trackers:
            if joined := self._try(given.service, lambda given=given: given.join(directory, start)):
                self.trackers[given.service] = joined
        self.progress = console.Progress(total, unit, done=start)

    def step(self, step: int, values: dict[str, float], shown: dict[str, str] | None = None) -> None:
        """Record the numbers of one finished step; `shown` goes into the progress bar, in a file into the step's
        line."""
        if not self.enabled:
            return
        self.record(step, values)
        self.progress.to(step, shown or {})

    def record(self, step: int, values: dict[str, float]) -> None:
        """Record numbers without moving the progress bar (evaluations)."""
        if not self.enabled:
            return
        self._append("metrics", {"step": step, "time": round(time.time(), 3), **values})
        for name, value in values.items():
            self.events.scalar(name, value, step)
        self._flush()
        self._tell(lambda tracker: tracker.log(values, step))

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Rows of JSON values, with the same keys each, to `name`.jsonl (with their step), TensorBoard, W&B and MLflow,
        where lists and objects are text. `name` is one of TABLES."""
        if not self.enabled or not rows:
            return
        assert name in TABLES
        columns = list(rows[0])
        cells = [[_cell(value) for value in row.values()] for row in rows]

        def line(cells) -> str:
            return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"

        for row in rows:
            self._append(name, {"step": step, **row})
        self.events.text(name, "\n".join(map(line, [columns, ["-" for _ in columns], *cells])), step)
        self._flush()
        self._tell(lambda tracker: tracker.table(name, columns, cells, step))

    def distribution(self, name: str, values: Sequence[float], step: int) -> None:
        """Numbers whose distribution is of interest, to scores.jsonl and, as histograms, to TensorBoard and
        trackers: rounded to six digits, without what is not finite."""
        values = [float(f"{value:.6g}") for value in values if math.isfinite(value)]
        if not self.enabled or not values:
            return
        self._append("scores", {"step": step, "name": name, "values": values})
        self.events.histogram(name, values, step)
        self._flush()
        self._tell(lambda tracker: tracker.histogram(name, values, step))

    def say(self, message: str) -> None:
        """A line for the person who watches."""
        if self.enabled:
            console.say(message)

    def sync(self) -> None:
        """Write all lines to the disk before a checkpoint is published: a run that resumes from it does not write them
        again. If this fails, they stay in memory, with a warning; the checkpoint, which is on the disk, is more
        important."""
        if self.enabled:
            self._flush(sync=True)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        # JSON has no NaN: null keeps the line readable by every parser. Half a surrogate pair stays an escape.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self.files[name].write((json.dumps(finite, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))

    def _flush(self, *, sync: bool = False) -> None:
        """Write pending lines. Warn at the first failure, and again at the first success after it."""
        files = [*self.files.values(), self.events.file]
        failures = [(file.path, error) for file in files if (error := file.flush(sync=sync))]
        if failures and not self.complained:
            path, error = failures[0]
            self._warn(
                f"{path}: cannot be written ({error.strerror}); the run goes on, and the lines follow when it can"
            )
        elif self.complained and not failures:
            lost = sum(file.lost for file in files)
            self._warn(f"{self.directory}: can be written again; {f'{lost} lines are' if lost else 'nothing is'} lost")
        self.complained = bool(failures)

    def _warn(self, message: str) -> None:
        console.say(f"  {message}")

    def _tell(self, call: Callable[[Tracker], object]) -> None:
        """Call every service that still answers. One that fails is left out from then on, with a warning."""
        for service, tracker in list(self.trackers.items()):
            self._try(service, lambda tracker=tracker: call(tracker))

    def _try(self, service: str, call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as error:  # any failure of the network, the disk or the server
            self.trackers.pop(service, None)
            first = (str(error).strip().splitlines() or [""])[0][:200]
            self._warn(f"{service}: {type(error).__name__}: {first}; the run goes on without it")
            return None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        if not self.enabled:
            return
        self._flush(sync=True)
        for file in (*self.files.values(), self.events.file):
            if error := file.close():
                self._warn(f"{file.path}: its last lines are lost ({error.strerror})")
        self.progress.close()
        self._tell(lambda tracker: tracker.finish())


def _cell(value: Any) -> Any:
    """A JSON value as a cell of a table. Half a surrogate pair becomes an escape: TensorBoard and W&B refuse it."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
    return text.encode(errors="backslashreplace").decode() if isinstance(text, str) else text


class _Events:
    """A TensorBoard event file. TensorBoard's own writer ends for good, with a traceback, when its disk is full."""

    def __init__(self, directory: Path, start: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010}.{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        self.file = Appender(directory / name)
        self._event, self._records = Event, RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        # the reader drops what earlier starts have recorded from this step on
        self._write(step=start + 1 if start else 0, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self._write(step=step, summary=scalar(name, value))

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        import numpy as np
        from torch.utils.tensorboard.summary import histogram

        # Not "auto": some versions of NumPy make as many bins of that as an outlier asks for.
        self._write(step=step, summary=histogram(name, np.asarray(values), bins="sqrt"))

    def text(self, name: str, text: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text as summary

        self._write(step=step, summary=summary(name, text))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
