"""The row kernels in torch: what one rank computes on its own columns. `triton_rows` has the same functions.

Blocks of rows are small enough to stay in the cache of a CPU core, so that memory is read once however many torch calls
a block takes, and scratch is allocated once for all blocks: on a CPU the page faults of fresh [N, V'] temporaries cost
more than the arithmetic. Powers of 2 are used because torch's exp2 is three times as fast as its exp on a CPU.

Legend: N rows, V' columns of this rank that are real (padding was cut off), x logits, top = max_v x_v,
z = (x - top) / temperature, e = exp(z).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

LN2 = math.log(2)

# The maximum of no columns, and of columns that are all -inf: finite, so that no difference of maxima is nan, and a
# power of 2, so that scaling it is exact.
NO_MAXIMUM = -(2.0**100)

BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**28}  # of one scratch buffer: half of a core's cache; enough to fill a GPU


def logprob_stats(x: Tensor, labels: Tensor, *, temperature: float, with_entropy: bool) -> Tensor:
    """(N, V') logits, (N,) label columns (-1: not here) -> (N, 4): top, sum e, sum e z (or 0), the label's x (or 0)."""
    stats = x.new_zeros(len(x), 4, dtype=_accumulator(x))
    for rows, z, e in _blocks(x, 2 if with_entropy else 1):
        top, size, moment, label = stats[rows].unbind(-1)
        _exponents(x[rows], _top(x[rows], top), z, temperature)
        torch.sum(torch.exp2(z, out=e), -1, out=size)
        if with_entropy:
            torch.sum(z.mul_(e), -1, out=moment).mul_(LN2)
        _label_logit(x[rows], labels[rows], label)
    return stats


def logprob_grad(
    x: Tensor, labels: Tensor, stats: Tensor, out: Tensor, *, temperature: float, constant: Tensor,
    slope: Tensor | None, onehot: Tensor,
) -> None:  # fmt: skip
    """out = e (constant + slope z) + [v = label] onehot, by rows; `out` (N, V') may be `x` itself.

    stats: what `logprob_stats` returned for `x`; constant, slope, onehot: (N,).
    """
    for rows, z, e in _blocks(x, 1 if slope is None else 2):
        _exponents(x[rows], stats[rows, 0], z, temperature)
        torch.exp2(z, out=e)
        factor = constant[rows, None] if slope is None else _line(z, constant[rows], slope[rows])
        torch.mul(e, factor, out=out[rows])
        _add_at_label(out[rows], labels[rows], onehot[rows])


def kl_stats(x: Tensor, ref: Tensor, *, temperature: float) -> Tensor:
    """(N, V') logits of the policy and of the reference -> (N, 5): the policy's top and sum e, sum e (x - ref) /
    temperature, and the reference's top and sum e.

    A class that the policy cannot choose adds nothing, whatever the reference says of it.
    """
    stats = x.new_zeros(len(x), 5, dtype=_accumulator(x))
    for rows, z, e, difference in _blocks(x, 3):
        top, size, distance, ref_top, ref_size = stats[rows].unbind(-1)
        _exponents(ref[rows], _top(ref[rows], ref_top), z, temperature)
        torch.sum(torch.exp2(z, out=e), -1, out=ref_size)
        _exponents(x[rows], _top(x[rows], top), z, temperature)
        torch.sum(torch.exp2(z, out=e), -1, out=size)
        torch.sum(_distance(x[rows], ref[rows], e, difference), -1, out=distance).div_(temperature)
    return stats


def kl_grad(
    x: Tensor, ref: Tensor, top: Tensor, mean: Tensor, out: Tensor, *, temperature: float, factor: Tensor
) -> None:
    """out = factor e (x - ref - mean), by rows, 0 where e is; `out` (N, V') may be `x` itself. top, mean, factor:
    (N,)."""
    for rows, z, difference in _blocks(x, 2):
        _exponents(x[rows], top[rows], z, temperature)
        e = torch.exp2(z, out=z)
        difference.copy_(x[rows]).sub_(ref[rows]).sub_(mean[rows, None]).mul_(factor[rows, None])
        out[rows] = torch.where(e == 0, 0, difference.mul_(e))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _blocks(x: Tensor, buffers: int) -> Iterator[tuple]:
    """(rows, z, e, ...): slices of a few rows, and scratch of their shape. With one buffer, e takes the place of z."""
    total, columns = x.shape
    dtype = _accumulator(x)
    step = max(1, BLOCK_BYTES[x.device.type] // (dtype.itemsize * max(columns, 1)))
    scratch = [x.new_empty(min(step, total), columns, dtype=dtype) for _ in range(buffers)]
    if buffers == 1:
        scratch.append(scratch[0])
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        yield rows, *(buffer[: rows.stop - rows.start] for buffer in scratch)


def _top(x: Tensor, top: Tensor) -> Tensor:
    """Row maxima into `top`, never below NO_MAXIMUM."""
    if x.shape[-1] == 0:
        return top.fill_(NO_MAXIMUM)
    return top.copy_(x.amax(-1)).clamp_(min=NO_MAXIMUM)


def _exponents(x: Tensor, top: Tensor, z: Tensor, temperature: float) -> Tensor:
    """z / ln 2 into `z`; bounded below, because e z must be 0 where e is."""
    if x.dtype == z.dtype:
        torch.sub(x, top[:, None], out=z)
    else:
        z.copy_(x).sub_(top[:, None])
    return z.mul_(1 / (LN2 * temperature)).clamp_(min=NO_MAXIMUM)


def _line(z: Tensor, constant: Tensor, slope: Tensor) -> Tensor:
    """constant + slope z in place; `z` holds z / ln 2."""
    return z.mul_(slope[:, None] * LN2).add_(constant[:, None])


def _distance(x: Tensor, ref: Tensor, e: Tensor, out: Tensor) -> Tensor:
    """e (x - ref), with 0 for every class of e = 0, where both logits may be -inf."""
    if x.dtype == ref.dtype == out.dtype:
        torch.sub(x, ref, out=out)
    else:
        out.copy_(x).sub_(ref)
    return out.mul_(e).nan_to_num_(nan=0, posinf=math.inf, neginf=-math.inf)  # a real nan is in e as well


def _label_logit(x: Tensor, labels: Tensor, out: Tensor) -> None:
    if x.shape[-1]:
        found = x.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        out.copy_(found.where(labels >= 0, 0))


def _add_at_label(out: Tensor, labels: Tensor, onehot: Tensor) -> None:
    if out.shape[-1]:
        here = onehot.where(labels >= 0, 0).to(out.dtype)
        out.scatter_add_(-1, labels.clamp(min=0)[:, None], here[:, None])
