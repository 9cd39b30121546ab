"""Metrics that add up, reduced once a step, and the sinks they go to: console, JSONL, TensorBoard, W&B."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Metric:
    """Something that still adds up: over micro-batches, ranks and steps. In a loss its parts are 0-d tensors, from the
    engine on they are numbers."""

    def map(self, function: Callable[[Any], Any]):
        """The same metric with `function` of each part."""
        return type(self)(*map(function, vars(self).values()))


@dataclass(frozen=True)
class Mean(Metric):
    sum: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        return self.sum / self.count if self.count else math.nan


@dataclass(frozen=True)
class Variance(Metric):
    """The biased variance, sum_squares / count - (sum / count)^2. Fill it from float64: the difference cancels."""

    sum: float
    sum_squares: float
    count: float

    def __add__(self, other: Variance) -> Variance:
        return Variance(self.sum + other.sum, self.sum_squares + other.sum_squares, self.count + other.count)

    @property
    def value(self) -> float:
        return max(0.0, self.sum_squares / self.count - (self.sum / self.count) ** 2) if self.count else math.nan


@dataclass(frozen=True)
class Max(Metric):
    value: float

    def __add__(self, other: Max) -> Max:
        return Max(_extreme(max, self.value, other.value))


@dataclass(frozen=True)
class Min(Metric):
    value: float

    def __add__(self, other: Min) -> Min:
        return Min(_extreme(min, self.value, other.value))


def _extreme(choose: Callable[[float, float], float], a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


def of_loss(values: Mapping[str, tuple[Tensor, Tensor] | Metric]) -> dict[str, Metric]:
    """What a loss returns as its metrics, without the graph: a bare (sum, count) is a Mean."""
    metrics = {name: Mean(*value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: metric.map(Tensor.detach) for name, metric in metrics.items()}


def add(parts: list[dict[str, Metric]]) -> dict[str, Metric]:
    """Sum of dictionaries of metrics; a name may be missing in some."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name] + metric if name in total else metric
    return total


def all_reduce(values: dict[str, Metric], group: dist.ProcessGroup, device: torch.device) -> dict[str, Metric]:
    """The sums over `group` of metrics with the same names on every rank: one collective, in float64, added up in rank
    order."""
    if dist.get_world_size(group) == 1 or not values:
        return values
    packed = torch.tensor(
        [part for v in values.values() for part in vars(v).values()], dtype=torch.float64, device=device
    )
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    numbers = [iter(row) for row in torch.stack(gathered).tolist()]
    return add([{name: value.map(lambda _, row=row: next(row)) for name, value in values.items()} for row in numbers])


class Log:
    """Where a run's numbers go. Only global rank 0 writes; on the others every method does nothing.

    `metrics.jsonl` has one object a step: {"step": n, "time": seconds since the epoch, name: value, ...}. A resumed run
    first drops the lines of steps that it is going to repeat.
    """

    def __init__(self, directory: Path, *, enabled: bool, start: int, total: int, unit: str, wandb: str | None = None):
        self.enabled = enabled
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= start]
            path.write_text("".join(lines))
        self.file = path.open("a", buffering=1)
        from torch.utils.tensorboard import SummaryWriter

        self.tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1 if start else None)
        self.wandb = None
        if wandb:
            import wandb as weights_and_biases

            self.wandb = weights_and_biases.init(project=wandb, name=directory.name, dir=str(directory), resume="allow")
        self.bar = tqdm(total=total, initial=start, unit=unit, dynamic_ncols=True, smoothing=0.1)

    def step(self, step: int, values: dict[str, float], shown: dict[str, str] | None = None) -> None:
        """Record the numbers of one finished step; `shown` goes into the progress bar."""
        if not self.enabled:
            return
        self.record(step, values)
        self.bar.set_postfix(shown or {}, refresh=False)
        self.bar.update(step - self.bar.n)

    def record(self, step: int, values: dict[str, float]) -> None:
        """Record numbers without moving the progress bar (evaluations)."""
        if not self.enabled:
            return
        # JSON has no NaN: null keeps the line readable by every parser.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(values, step=step)

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Rows of text and numbers, with the same keys each, to TensorBoard and W&B."""
        if not self.enabled or not rows:
            return
        columns = list(rows[0])

        def line(cells) -> str:
            return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"

        lines = [line(columns), line("-" for _ in columns), *(line(row.values()) for row in rows)]
        self.tensorboard.add_text(name, "\n".join(lines), step)
        if self.wandb:
            import wandb as weights_and_biases

            table = weights_and_biases.Table(columns=columns, data=[list(row.values()) for row in rows])
            self.wandb.log({name: table}, step=step)

    def say(self, message: str) -> None:
        """A line above the progress bar."""
        if self.enabled:
            self.bar.write(message)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        if not self.enabled:
            return
        self.bar.close()
        self.file.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def _step_of(line: str) -> float:
    try:
        value: Any = json.loads(line)["step"]
        return float(value)
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill
