"""Statistics that are summed over micro-batches and ranks, reduced once a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A statistic that can be summed over micro-batches, ranks and steps. Its fields are 0-d tensors in a loss, and
    numbers in the engine's results."""

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
    """The metrics that a loss returns, without the graph: a bare (sum, count) is a Mean."""
    metrics = {name: Mean(*value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: metric.map(Tensor.detach) for name, metric in metrics.items()}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers, without the means of nothing, such as those of a class that a batch does not have."""
    return {name: metric.value for name, metric in metrics.items() if getattr(metric, "count", 1)}


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
