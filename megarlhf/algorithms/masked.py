"""Statistics of the tokens that count. Values outside the mask, NaN included, change nothing.

Legend: B rows, R response columns. `mask` is bool and has the shape of `values`; True counts. With a `group`, a
statistic is of all its ranks' values together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.metrics import Variance


def masked_sum(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """sum_{b,j} mask * values, a scalar. Differentiable without a group."""
    total = torch.where(mask, values, 0).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """(B, R) -> (B,) float64: sum_j mask * values of each row. In float64 a sum of hundreds of log-probs is exact to
    far less than their own rounding, so it does not depend on the width R. Differentiable."""
    return torch.where(mask.to(values.device), values, 0).double().sum(1)


def masked_mean(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """mu = sum(mask * values) / sum(mask), a scalar; NaN if no token counts."""
    return masked_sum(values, mask, group=group) / masked_sum(mask.to(values.dtype), mask, group=group)


def masked_var(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """sum(mask * (values - mu)^2) / sum(mask), a scalar: the biased variance, tf.nn.moments' (detail P9)."""
    return masked_mean((values - masked_mean(values, mask, group=group)) ** 2, mask, group=group)


def inverse_deviation(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """1 / sqrt(var + 1e-8), a float64 scalar: the factor of `whiten`."""
    return torch.rsqrt(masked_var(values.double(), mask, group=group) + 1e-8)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
    """(B, R) -> (B, R): (values - mu) / sqrt(var + 1e-8), plus mu again if not `shift_mean`; 0 outside the mask.

    Detail P9 (lm-human-preferences utils/core.py, `whiten`). `values` are the minibatch: `group` is the data-parallel
    group, so that the result does not depend on the layout. (The original takes each rank's own moments.) The moments
    are in float64.
    """
    wide = values.double()
    mean = masked_mean(wide, mask, group=group)
    whitened = (wide - mean) * inverse_deviation(wide, mask, group=group)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0).to(values.dtype)


def last_valid(mask: Tensor) -> Tensor:
    """(B, R) -> (B, R) bool, True at each row's last counted token; nowhere in a row without one."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def variance(values: Tensor, mask: Tensor) -> Variance:
    """The biased variance of the counted values as a metric of a loss, summed in float64."""
    wide = values.detach().double()
    return Variance(masked_sum(wide, mask), masked_sum(wide**2, mask), mask.sum())
