"""The row kernels in Triton, shaped for Hopper. The functions and their arguments are those of `torch_rows`.

In bf16 an H200 is bound by instructions before it is bound by memory: at 4.8 TB/s it has issue slots for 12 of them an
element. Hence one program a row with a maximum per tile rather than per lane, so that an element costs one exponential;
powers of 2; full tiles without masks and the masked tail apart; 32 elements a thread, to spread a tile's reduction; and
shapes without spills. `tests/sm90_gate.py` compiles these kernels and counts registers, spills and instructions.

Legend: N rows, V' real columns of this rank, x logits, top = max_v x_v, z = (x - top) / temperature, e = exp(z);
scale = log2(e) / temperature takes differences of logits to powers of 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarlhf.kernels.torch_rows import NO_MAXIMUM

LN2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(NO_MAXIMUM)

# Columns of a tile and warps of a program: as many elements a thread as fit 128 registers.
STATS_BLOCK, STATS_WARPS = 4096, 4
KL_BLOCK, KL_WARPS = 2048, 4
GRAD_BLOCK, GRAD_WARPS = 4096, 8


@triton.jit
def logprob_stats_kernel(X, LABELS, STATS, stride_x, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """One row of `logprob_stats`."""
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    lanes = tl.arange(0, BLOCK)
    top = LOWEST
    base = LOWEST * scale
    size = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    full = columns // BLOCK * BLOCK
    for start in tl.range(0, full, BLOCK, num_stages=3):  # two tiles on their way: 4.8 TB/s needs some 30 KB an SM
        x = tl.load(X + start + lanes).to(tl.float32)
        top, base, size, moment, _ = add_tile(x, top, base, size, moment, scale, ENTROPY)
    if full < columns:
        x = tl.load(X + full + lanes, mask=full + lanes < columns, other=float("-inf")).to(tl.float32)
        top, base, size, moment, _ = add_tile(x, top, base, size, moment, scale, ENTROPY)
    STATS += row * 4
    unit, error = store_size(STATS, top, base, size, scale)
    if ENTROPY:
        tl.store(STATS + 2, unit * (tl.sum(moment, 0) - error * tl.sum(size, 0)) * LN2)
    label = tl.load(LABELS + row)
    tl.store(STATS + 3, tl.load(X + label, mask=label >= 0, other=0).to(tl.float32))


@triton.jit
def add_tile(x, top, base, size, moment, scale, ENTROPY: tl.constexpr):
    """One more tile of a row, into lane-wise sums relative to the row's maximum so far; base = top * scale, rounded."""
    tile_top = tl.max(x, 0)
    if tile_top > top:
        shift = base - tile_top * scale
        shrink = tl.exp2(shift)
        if ENTROPY:
            moment = shrink * (moment + size * shift)
        size = shrink * size
        top = tile_top
        base = tile_top * scale
    z = tl.fma(x, scale, -base)
    e = tl.exp2(z)
    if ENTROPY:
        moment += e * tl.maximum(z, LOWEST)  # 0, not nan, for a logit of -inf
    size += e
    return top, base, size, moment, e


@triton.jit
def store_size(STATS, top, base, size, scale):
    """A row's maximum and its sum of e, relative to that maximum itself: `base` was rounded, the sums are off by
    2^error. Returns (the factor that corrects such a sum, error)."""
    error = tl.fma(top, scale, -base)
    unit = tl.exp2(-error)
    tl.store(STATS, top)
    tl.store(STATS + 1, unit * tl.sum(size, 0))
    return unit, error


@triton.jit
def logprob_grad_kernel(X, OUT, LABELS, STATS, CONSTANT, SLOPE, ONEHOT, stride_x, stride_out, columns, scale,
                        ENTROPY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One tile of a row of `logprob_grad`."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    x = load_tile(X + row * stride_x, column, start + BLOCK <= columns, columns)
    # Subtracted first: a rounded top * scale would put its error on every element of the row.
    z = tl.maximum((x - tl.load(STATS + row * 4)) * scale, LOWEST)
    factor = tl.load(CONSTANT + row)
    if ENTROPY:
        factor += z * (tl.load(SLOPE + row) * LN2)
    d = tl.exp2(z) * factor
    d = tl.where(column == tl.load(LABELS + row).to(tl.int32), d + tl.load(ONEHOT + row), d)
    store_tile(OUT + row * stride_out, column, start + BLOCK <= columns, columns, d)


@triton.jit
def load_tile(X, column, whole, columns):
    """Whole tiles apart, here and below: a masked access moves one element at a time."""
    if whole:
        x = tl.load(X + column).to(tl.float32)
    else:
        x = tl.load(X + column, mask=column < columns, other=0).to(tl.float32)
    return x


@triton.jit
def store_tile(OUT, column, whole, columns, d):
    if whole:
        tl.store(OUT + column, d.to(OUT.dtype.element_ty))
    else:
        tl.store(OUT + column, d.to(OUT.dtype.element_ty), mask=column < columns)


@triton.jit
def kl_stats_kernel(X, REF, STATS, stride_x, stride_ref, columns, scale, BLOCK: tl.constexpr):
    """One row of `kl_stats`."""
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    REF += row * stride_ref
    STATS += row * 5
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), tl.float32)
    top, base, size, distance = LOWEST, LOWEST * scale, zeros, zeros
    ref_top, ref_base, ref_size = LOWEST, LOWEST * scale, zeros
    full = columns // BLOCK * BLOCK
    # One pair of tiles on its way, 32 KB an SM. A second pair's bookkeeping would cost more instructions than there is
    # room for: 24 a pair of elements.
    for start in tl.range(0, full, BLOCK, num_stages=2):
        x = tl.load(X + start + lanes).to(tl.float32)
        ref = tl.load(REF + start + lanes).to(tl.float32)
        top, base, size, distance, ref_top, ref_base, ref_size = add_pair(
            x, ref, top, base, size, distance, ref_top, ref_base, ref_size, scale
        )
    if full < columns:
        x = tl.load(X + full + lanes, mask=full + lanes < columns, other=float("-inf")).to(tl.float32)
        ref = tl.load(REF + full + lanes, mask=full + lanes < columns, other=float("-inf")).to(tl.float32)
        top, base, size, distance, ref_top, ref_base, ref_size = add_pair(
            x, ref, top, base, size, distance, ref_top, ref_base, ref_size, scale
        )
    unit, _ = store_size(STATS, top, base, size, scale)
    tl.store(STATS + 2, unit * tl.sum(distance, 0) * scale * LN2)
    store_size(STATS + 3, ref_top, ref_base, ref_size, scale)


@triton.jit
def kl_grad_kernel(X, REF, TOP, MEAN, OUT, FACTOR, stride_x, stride_ref, stride_out, columns, scale,
                   BLOCK: tl.constexpr):  # fmt: skip
    """One tile of a row of `kl_grad`."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    whole = start + BLOCK <= columns
    x = load_tile(X + row * stride_x, column, whole, columns)
    ref = load_tile(REF + row * stride_ref, column, whole, columns)
    e = tl.exp2(tl.maximum((x - tl.load(TOP + row)) * scale, LOWEST))
    d = tl.where(e == 0, 0.0, tl.load(FACTOR + row) * e * (x - ref - tl.load(MEAN + row)))
    store_tile(OUT + row * stride_out, column, whole, columns, d)


@triton.jit
def add_pair(x, ref, top, base, size, distance, ref_top, ref_base, ref_size, scale):
    """`add_tile` of the policy's and the reference's; distance is sum_v e (x - ref), also relative to `base`."""
    ref_top, ref_base, ref_size, _, _ = add_tile(ref, ref_top, ref_base, ref_size, distance, scale, False)
    before = base
    top, base, size, _, e = add_tile(x, top, base, size, distance, scale, False)
    distance = distance * tl.exp2(before - base) + distance_of(x, ref, e)
    return top, base, size, distance, ref_top, ref_base, ref_size


@triton.jit
def distance_of(x, ref, e):
    """e (x - ref), with 0 for every class of e = 0, where both logits may be -inf."""
    return tl.where(e == 0, 0.0, e * (x - ref))


def logprob_stats(x: Tensor, labels: Tensor, *, temperature: float, with_entropy: bool) -> Tensor:
    stats = x.new_zeros(len(x), 4, dtype=torch.float32)
    if len(x):
        logprob_stats_kernel[len(x),](
            x, labels, stats, x.stride(0), x.shape[1], scale_of(temperature),
            ENTROPY=with_entropy, BLOCK=STATS_BLOCK, num_warps=STATS_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return stats


def logprob_grad(
    x: Tensor, labels: Tensor, stats: Tensor, out: Tensor, *, temperature: float, constant: Tensor,
    slope: Tensor | None, onehot: Tensor,
) -> None:  # fmt: skip
    if x.numel():
        logprob_grad_kernel[len(x), triton.cdiv(x.shape[1], GRAD_BLOCK)](
            x, out, labels, stats, constant, slope, onehot, x.stride(0), out.stride(0), x.shape[1],
            scale_of(temperature), ENTROPY=slope is not None, BLOCK=GRAD_BLOCK,
            num_warps=GRAD_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def kl_stats(x: Tensor, ref: Tensor, *, temperature: float) -> Tensor:
    stats = x.new_zeros(len(x), 5, dtype=torch.float32)
    if len(x):
        kl_stats_kernel[len(x),](
            x, ref, stats, x.stride(0), ref.stride(0), x.shape[1], scale_of(temperature),
            BLOCK=KL_BLOCK, num_warps=KL_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return stats


def kl_grad(
    x: Tensor, ref: Tensor, top: Tensor, mean: Tensor, out: Tensor, *, temperature: float, factor: Tensor
) -> None:
    if x.numel():
        kl_grad_kernel[len(x), triton.cdiv(x.shape[1], GRAD_BLOCK)](
            x, ref, top, mean, out, factor, x.stride(0), ref.stride(0), out.stride(0), x.shape[1],
            scale_of(temperature), BLOCK=GRAD_BLOCK, num_warps=GRAD_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def scale_of(temperature: float) -> float:
    return 1 / (math.log(2) * temperature)
