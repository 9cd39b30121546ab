"""Running mean and standard deviation of a source's scores, over all batches and all data-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megarlhf import metrics
from megarlhf.metrics import Mean

SMALLEST = 1e-8  # lower limit of the standard deviation in the division


@dataclass(frozen=True)
class Moments:
    """Of the numbers seen so far, in float64."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared differences from the mean

    def extended(self, values: Tensor, group: dist.ProcessGroup) -> Moments:
        """With `values` (N,) float64 of all ranks of `group` added; N may differ. Numbers that are not finite are left
        out. Collective.

        Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances":

            delta = mean_b - mean,   n = count + count_b
            mean' = mean + delta count_b / n,   squares' = squares + squares_b + delta^2 count count_b / n
        """
        values = values[values.isfinite()]
        batch = _mean(values, group)
        if not batch.count:
            return self
        squares = _mean((values - batch.value) ** 2, group).sum
        total, delta = self.count + batch.count, batch.value - self.mean
        return Moments(
            total,
            self.mean + delta * batch.count / total,
            self.squares + squares + delta**2 * self.count * batch.count / total,
        )

    def normalised(self, values: Tensor) -> Tensor:
        """(values - mean) / the biased standard deviation, in the type of `values`."""
        deviation = math.sqrt(self.squares / self.count) if self.count else 1.0
        return ((values.double() - self.mean) / max(deviation, SMALLEST)).to(values.dtype)


def _mean(values: Tensor, group: dist.ProcessGroup) -> Mean:
    local = {"values": Mean(values.sum().item(), float(len(values)))}
    return metrics.all_reduce(local, group, values.device)["values"]
