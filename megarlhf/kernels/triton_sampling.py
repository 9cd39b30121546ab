"""The sampling records in Triton: one pass over the logits that reduces each block to three numbers, with as many
programs a row as a GPU needs at decoding's few rows, then a small program a row that draws the noise and the token. A
filter's threshold takes a pass for each digit.

Legend: N rows, width real columns of this rank, in blocks of BLOCK = 128; x logits, T temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarlhf.kernels.noise import BLOCK, BLOCK_NOISE, TOKEN_NOISE, split_seed
from megarlhf.kernels.torch_rows import NO_MAXIMUM
from megarlhf.kernels.triton_rows import LN2, LOWEST, scale_of

TILE_BLOCKS, TILE_WARPS = 16, 4  # blocks of a program of the first kernel
PICK_WARPS = 4
HISTOGRAM_TILE, HISTOGRAM_WARPS = 2048, 4
WIDTH = tl.constexpr(BLOCK)


@triton.jit
def block_stats_kernel(X, STATS, THRESHOLD, stride_x, width, blocks, scale, ENTROPY: tl.constexpr,
                       FILTER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """STATS (N, 4, blocks): of each block top = max x, sum e, sum e z (or 0) with z = (x - top) / T and e = exp(z),
    and sum e over the logits that pass the filter."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(X + row * stride_x + column, mask=column < width, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, 1), LOWEST)
    z = (x - top[:, None]) * scale
    e = tl.exp2(z)
    to = STATS + row * 4 * blocks + block
    inside = block < blocks
    tl.store(to, top, mask=inside)
    tl.store(to + blocks, tl.sum(e, 1), mask=inside)
    if ENTROPY:
        tl.store(to + 2 * blocks, tl.sum(e * tl.maximum(z, LOWEST), 1) * LN2, mask=inside)
    if FILTER:
        passes = x >= tl.load(THRESHOLD + row)
        tl.store(to + 3 * blocks, tl.sum(tl.where(passes, e, 0.0), 1), mask=inside)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "start"])
def pick_kernel(X, STATS, THRESHOLD, IDS, STEPS, RECORDS, stride_x, width, blocks, start, seed_low, seed_high, scale,
                GREEDY: tl.constexpr, ENTROPY: tl.constexpr, FILTER: tl.constexpr, BLOCKS: tl.constexpr,
                FIRST_STREAM: tl.constexpr, SECOND_STREAM: tl.constexpr):  # fmt: skip
    """One row's record from its blocks; BLOCKS is a power of 2 that holds them."""
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    at = STATS + row * 4 * blocks + block
    tops = tl.load(at, mask=inside, other=LOWEST)
    sizes = tl.load(at + blocks, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    shift = (tops - top) * scale
    weight = tl.exp2(shift)
    to = RECORDS + row * 6
    tl.store(to + 3, top)
    tl.store(to + 4, tl.sum(weight * sizes, 0))
    if ENTROPY:
        moments = tl.load(at + 2 * blocks, mask=inside, other=0.0)
        tl.store(to + 5, tl.sum(weight * (moments + sizes * tl.maximum(shift, LOWEST) * LN2), 0))

    place = tl.arange(0, WIDTH)
    if GREEDY:
        best = tl.argmax(tops, 0)
        x = tl.load(X + best * WIDTH + place, mask=best * WIDTH + place < width, other=float("-inf")).to(tl.float32)
        tl.store(to, 0.0)
        chosen = best * WIDTH + tl.argmax(x, 0)
    else:
        if FILTER:
            sizes = tl.load(at + 3 * blocks, mask=inside, other=0.0)
        noise = gumbel(IDS + row, STEPS + row, seed_low, seed_high, start // WIDTH + block, FIRST_STREAM)
        scores = tl.where(inside, tl.log(sizes) + shift * LN2 + noise, float("-inf"))
        best = tl.argmax(scores, 0)
        tl.store(to, tl.max(scores, 0))
        x = tl.load(X + best * WIDTH + place, mask=best * WIDTH + place < width, other=float("-inf")).to(tl.float32)
        if FILTER:
            x = tl.where(x >= tl.load(THRESHOLD + row), x, float("-inf"))
        noise = gumbel(IDS + row, STEPS + row, seed_low, seed_high, place, SECOND_STREAM)
        chosen = best * WIDTH + tl.argmax((x - top) * scale * LN2 + noise, 0)
    chosen = tl.minimum(chosen, width - 1)  # a row of nan
    tl.store(to + 1, (chosen + start).to(tl.float32))
    tl.store(to + 2, tl.load(X + chosen).to(tl.float32))


@triton.jit
def gumbel(ID, STEP, seed_low, seed_high, index, STREAM: tl.constexpr):
    """`noise.gumbel` at `index`, of the row whose sequence id and step are at these addresses."""
    sequence = tl.load(ID)
    quad = (index >> 2).to(tl.uint32) + STREAM * 2147483648
    zero = quad * 0
    a, b, c, d = tl.philox_impl(
        quad, zero + tl.load(STEP).to(tl.uint32), zero + sequence.to(tl.uint32), zero + (sequence >> 32).to(tl.uint32),
        zero + seed_low.to(tl.uint32), zero + seed_high.to(tl.uint32), 10,
    )  # fmt: skip
    word = index & 3
    bits = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    rest = 1 - uniform
    # -log(1 - u) to float32's relative precision for small u as well (Kahan's log1p)
    exponential = tl.where(rest == 1, uniform, -tl.log(rest) * (uniform / (1 - rest)))
    return -tl.log(exponential)


@triton.jit
def histogram_kernel(X, FOUND, TOP, LEAST, COUNTS, stride_x, width, scale, SHIFT: tl.constexpr, MASSES: tl.constexpr,
                     FLOOR: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """One tile of a row of `sampling.torch_histogram`, added to COUNTS (N, 256): whole numbers, in any order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    alive = column < width
    x = tl.load(X + row * stride_x + column, mask=alive, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    if SHIFT < 24:
        alive &= (key >> (SHIFT + 8)) == tl.load(FOUND + row).to(tl.uint32)
    weight = tl.full((TILE,), 1, tl.int64)
    if MASSES:
        weight = (tl.exp2((x - tl.load(TOP + row)) * scale) * 4294967296.0 + 0.5).to(tl.int64)
        alive &= weight > 0
        if FLOOR:
            alive &= key >= tl.load(LEAST + row).to(tl.uint32)
    digit = ((key >> SHIFT) & 255).to(tl.int64)
    tl.atomic_add(COUNTS + row * 256 + digit, weight, mask=alive, sem="relaxed")


def triton_histogram(
    x: Tensor, *, temperature: float, top: Tensor | None, least: Tensor | None
) -> Callable[[Tensor, int], Tensor]:
    """As `sampling.torch_histogram`."""

    def histogram(found: Tensor, shift: int) -> Tensor:
        counts = torch.zeros(len(x), 256, dtype=torch.int64, device=x.device)
        if x.shape[1]:
            histogram_kernel[len(x), triton.cdiv(x.shape[1], HISTOGRAM_TILE)](
                x, found, counts if top is None else top, counts if least is None else least, counts, x.stride(0),
                x.shape[1], scale_of(temperature), SHIFT=shift, MASSES=top is not None, FLOOR=least is not None,
                TILE=HISTOGRAM_TILE, num_warps=HISTOGRAM_WARPS,
            )  # fmt: skip
        return counts

    return histogram


def triton_records(
    x: Tensor,
    *,
    temperature: float,
    greedy: bool,
    start: int,
    threshold: Tensor | None,
    seed: int,
    sequence_ids: Tensor,
    steps: Tensor,
    with_entropy: bool,
) -> Tensor:
    """As `sampling.torch_records`."""
    rows, width = x.shape
    records = x.new_zeros(rows, 6, dtype=torch.float32)
    if width == 0:
        records[:, 3] = NO_MAXIMUM
        return records
    blocks = triton.cdiv(width, BLOCK)
    stats = x.new_empty(rows, 4, blocks, dtype=torch.float32)
    filtering = threshold is not None
    threshold = records if threshold is None else threshold  # any pointer
    scale = scale_of(temperature)
    block_stats_kernel[rows, triton.cdiv(blocks, TILE_BLOCKS)](
        x, stats, threshold, x.stride(0), width, blocks, scale,
        ENTROPY=with_entropy, FILTER=filtering, TILE=TILE_BLOCKS, num_warps=TILE_WARPS,
    )  # fmt: skip
    pick_kernel[rows,](
        x, stats, threshold, sequence_ids.contiguous(), steps.contiguous(), records, x.stride(0), width, blocks, start,
        *split_seed(seed), scale, GREEDY=greedy, ENTROPY=with_entropy, FILTER=filtering,
        BLOCKS=triton.next_power_of_2(blocks), FIRST_STREAM=BLOCK_NOISE, SECOND_STREAM=TOKEN_NOISE,
        num_warps=PICK_WARPS,
    )  # fmt: skip
    return records
