"""Services that keep the numbers of runs: W&B and MLflow. All starts of a run directory are one run there.

Neither can take a number back. So of the steps that a run repeats after a restart, both keep the numbers that came
first: W&B drops others by itself, and MLflow is not sent them (it would keep both).
"""

from __future__ import annotations

import importlib.util
import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarlhf import records
from megarlhf.config import UserError


class Tracker(Protocol):
    """A run there. Every call may raise anything: the network, the disk, the server."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def table(self, name: str, columns: list[str], cells: list[list[Any]], step: int) -> None: ...
    def histogram(self, name: str, values: list[float], step: int) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class WandB:
    """W&B, whose account and server come from its own settings (WANDB_*)."""

    project: str
    entity: str | None = None  # default: the account's
    name: str | None = None  # default: the run directory's
    tags: tuple[str, ...] = ()

    service, key, package = "W&B", "log.wandb", "wandb"

    def join(self, directory: Path, start: int) -> Tracker:
        import wandb

        path = directory / "wandb.id"
        if start == 0 or not path.exists():
            records.replace(path, secrets.token_hex(4) + "\n")
        run = wandb.init(
            project=self.project, entity=self.entity, id=path.read_text().strip(), name=self.name or directory.name,
            tags=self.tags or None, dir=str(directory), resume="allow",
        )  # fmt: skip
        return _WandBRun(run, wandb)


class _WandBRun:
    def __init__(self, run: Any, module: Any):
        self.run, self._module = run, module

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def table(self, name: str, columns: list[str], cells: list[list[Any]], step: int) -> None:
        self.run.log({name: self._module.Table(columns, cells)}, step=step)

    def histogram(self, name: str, values: list[float], step: int) -> None:
        self.run.log({name: self._module.Histogram(values)}, step=step)

    def finish(self) -> None:
        self.run.finish()


@dataclass(frozen=True)
class MLflow:
    """MLflow, whose server comes from its own settings (MLFLOW_TRACKING_URI and others)."""

    experiment: str
    name: str | None = None  # default: the run directory's
    tags: tuple[str, ...] = ()

    service, key, package = "MLflow", "log.mlflow", "mlflow"

    def join(self, directory: Path, start: int) -> Tracker:
        from mlflow import MlflowClient

        client, path = MlflowClient(), directory / "mlflow.id"
        if start == 0 or not path.exists():
            found = client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else client.create_experiment(self.experiment)
            tags = dict.fromkeys(self.tags, "")
            run = client.create_run(experiment, tags=tags, run_name=self.name or directory.name)
            records.replace(path, run.info.run_id + "\n")
        run_id = path.read_text().strip()
        client.update_run(run_id, status="RUNNING")  # the run may have finished before
        newest = client.get_run(run_id).data.to_proto().metrics  # the last step of each name; `metrics` has no steps
        return _MLflowRun(client, run_id, {metric.key: metric.step for metric in newest})


class _MLflowRun:
    """`sent`: the last step of each metric that the server has from earlier starts."""

    def __init__(self, client: Any, run_id: str, sent: dict[str, int]):
        self.client, self.run_id, self.sent = client, run_id, sent

    def log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        finite = {_name(name): value for name, value in values.items() if math.isfinite(value)}
        metrics = [Metric(name, value, now, step) for name, value in finite.items() if step > self.sent.get(name, -1)]
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)

    def table(self, name: str, columns: list[str], cells: list[list[Any]], step: int) -> None:
        rows = {column: [str(row[i]) for row in cells] for i, column in enumerate(columns)}
        self.client.log_dict(self.run_id, rows, f"{name}/step_{step:08}.json")

    def histogram(self, name: str, values: list[float], step: int) -> None:  # MLflow has none
        self.client.log_dict(self.run_id, {"values": values}, f"{name}/step_{step:08}.json")

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


def _name(metric: str) -> str:
    """MLflow's names have no @."""
    return re.sub(r"[^\w./ :-]", "_at_" if "@" in metric else "_", metric)


def check(trackers: tuple[WandB | MLflow, ...]) -> None:
    """Refuse (UserError) those that are not installed."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker.package) is None:
            raise UserError(
                f"{tracker.key}: {tracker.package} is not installed; pip install {tracker.package}, or leave "
                f"{tracker.key} out"
            )
