"""The kernels of a decode step in Triton. Such a step moves the weights and the cache once and computes little, so each
kernel reads every byte once, and there are few of them: between two matrix products one, but for attention.

Attention takes one program a token and key/value head, which shares a key among the query heads of its group. It reads
the columns that the token sees, whose number is on the device: a recorded step stays right while columns are added.
With too few tokens to fill a GPU, several programs have a part of the columns each, and a second kernel brings the
parts together. The last program to arrive could do that in the same launch. It would have to order its loads after
other programs' stores by fences; two launches on one stream are ordered without any, and cost about 2 us where a step
of so few tokens takes 1 ms or more.

Legend: n tokens, g key/value heads of this rank, m query heads a key/value head, D head size, W columns of a slot, S
slots, d channels that turn.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarlhf.kernels.torch_rows import NO_MAXIMUM

LOWEST = tl.constexpr(NO_MAXIMUM)
# Columns at a time, by the bytes of an element. Two tiles of keys and of values are on their way: 4.8 TB/s needs some
# 30 KB an SM.
BLOCKS = {2: 64, 4: 32}
ATTEND_STAGES = 3
DOT_ROWS = 16  # the least that a tensor core multiplies
MOST_PARTS = 32
PROGRAMS = 2  # of attention that an SM holds
ACTIVATE_BLOCK, ACTIVATE_WARPS = 1024, 4


@triton.jit
def rotate_and_store_kernel(
    Q, K, V, TURNS, ROWS, POSITIONS, OUT, KEYS, VALUES, stride_q_token, stride_q_group, stride_q_head, stride_k_token,
    stride_k_group, stride_v_token, stride_v_group, stride_slot, stride_group, groups, heads, HALF: tl.constexpr,
    SIZE: tl.constexpr, LANES: tl.constexpr, HALF_LANES: tl.constexpr, REST_LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A token's queries of one group, its key and its value. HALF = d / 2, or 0."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = tl.load(ROWS + token) * stride_slot + group * stride_group + tl.load(POSITIONS + token) * SIZE
    K += token * stride_k_token + group * stride_k_group
    V += token * stride_v_token + group * stride_v_group
    lane = tl.arange(0, LANES)
    tl.store(VALUES + to + lane, tl.load(V + lane, mask=lane < SIZE), mask=lane < SIZE)
    if HALF == 0:
        tl.store(KEYS + to + lane, tl.load(K + lane, mask=lane < SIZE), mask=lane < SIZE)
    else:
        half = tl.arange(0, HALF_LANES)
        cos = tl.load(TURNS + token * (2 * HALF) + half, mask=half < HALF, other=0.0)
        sin = tl.load(TURNS + token * (2 * HALF) + HALF + half, mask=half < HALF, other=0.0)
        a = tl.load(K + half, mask=half < HALF, other=0.0).to(tl.float32)
        b = tl.load(K + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
        tl.store(KEYS + to + half, (a * cos - b * sin).to(KEYS.dtype.element_ty), mask=half < HALF)
        tl.store(KEYS + to + HALF + half, (b * cos + a * sin).to(KEYS.dtype.element_ty), mask=half < HALF)

        head = tl.arange(0, HEADS)[:, None]
        Q += token * stride_q_token + group * stride_q_group + head * stride_q_head
        OUT += ((token * groups + group) * heads + head) * SIZE
        inside = (head < heads) & (half < HALF)[None, :]
        a = tl.load(Q + half[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(Q + HALF + half[None, :], mask=inside, other=0.0).to(tl.float32)
        cos, sin = cos[None, :], sin[None, :]
        tl.store(OUT + half[None, :], (a * cos - b * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(OUT + HALF + half[None, :], (b * cos + a * sin).to(OUT.dtype.element_ty), mask=inside)
        if 2 * HALF < SIZE:
            rest = 2 * HALF + tl.arange(0, REST_LANES)
            tl.store(KEYS + to + rest, tl.load(K + rest, mask=rest < SIZE), mask=rest < SIZE)
            inside = (head < heads) & (rest < SIZE)[None, :]
            tl.store(OUT + rest[None, :], tl.load(Q + rest[None, :], mask=inside), mask=inside)


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor,
    turns: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `decode.rotate_and_store`. Products are rounded before they are added (no FMA), as megatron's own rotation in
    torch does: the same bits. Transformer Engine's kernel may keep them exact: in bfloat16 at most one rounding apart.
    """
    tokens, groups, heads, size = query.shape
    assert query.stride(3) == key.stride(2) == value.stride(2) == keys.stride(3) == 1, "the channels must be adjacent"
    assert keys.stride() == values.stride() and keys.stride(2) == size
    half = 0 if turns is None else turns.shape[1] // 2
    out = query if turns is None else query.new_empty(query.shape)
    rotate_and_store_kernel[tokens, groups](
        query, key, value, positions if turns is None else turns.contiguous(), rows, positions, out, keys, values,
        *query.stride()[:3], *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2], groups, heads, HALF=half,
        SIZE=size, LANES=triton.next_power_of_2(size), HALF_LANES=triton.next_power_of_2(max(half, 1)),
        REST_LANES=triton.next_power_of_2(max(size - 2 * half, 1)), HEADS=triton.next_power_of_2(heads),
        num_warps=rotate_warps(heads, half), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def rotate_warps(heads: int, half: int) -> int:
    """As many as leave a thread 16 pairs of channels."""
    return max(1, min(8, triton.next_power_of_2(heads) * triton.next_power_of_2(max(half, 1)) // 512))


@triton.jit
def attend_kernel(
    Q, K, V, OUT, PARTS, STATS, ROWS, POSITIONS, stride_q_token, stride_q_group, stride_q_head, stride_slot,
    stride_group, groups, heads, window, scale, cap, SIZE: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One token, one group, one of SPLITS equal parts of the columns that the token sees. scale: log2(e) / sqrt(D);
    cap: the cap of the scores, times log2(e)."""
    token, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(POSITIONS + token).to(tl.int32) + 1
    begin = tl.maximum(end - window, 0)
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK), SPLITS) * BLOCK
        begin += part * share
        end = tl.minimum(end, begin + share)
    at = tl.load(ROWS + token) * stride_slot + group * stride_group
    lane = tl.arange(0, LANES)
    head = tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & (lane < SIZE)[None, :]
    Q += token * stride_q_token + group * stride_q_group
    q = tl.load(Q + head[:, None] * stride_q_head + lane[None, :], mask=inside, other=0.0)
    top = tl.full((HEADS,), LOWEST, tl.float32)
    size = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, LANES), tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        here = at + column[:, None].to(tl.int64) * SIZE + lane[None, :]
        seen = (column < end)[:, None] & (lane < SIZE)[None, :]
        k = tl.load(K + here, mask=seen, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)  # cap tanh(z / cap)
        z = tl.where((column < end)[None, :], z, float("-inf"))
        greatest = tl.maximum(top, tl.max(z, 1))
        shrink = tl.exp2(top - greatest)
        e = tl.exp2(z - greatest[:, None])
        v = tl.load(V + here, mask=seen, other=0.0)
        total = total * shrink[:, None] + tl.dot(e.to(v.dtype), v, input_precision="ieee")
        size = size * shrink + tl.sum(e, 1)
        top = greatest
    place = (token * groups + group) * heads + head
    if SPLITS == 1:
        tl.store(OUT + place[:, None] * SIZE + lane[None, :], (total / size[:, None]).to(OUT.dtype.element_ty),
                 mask=inside)  # fmt: skip
    else:
        place = place * SPLITS + part
        tl.store(PARTS + place[:, None] * SIZE + lane[None, :], total, mask=inside)
        tl.store(STATS + place * 2, top, mask=head < heads)
        tl.store(STATS + place * 2 + 1, size, mask=head < heads)


@triton.jit
def join_kernel(PARTS, STATS, OUT, SIZE: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one query head of one token. A part without columns has size 0 and top LOWEST."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    lane = tl.arange(0, LANES)
    top = tl.load(STATS + (place * SPLITS + part) * 2)
    size = tl.load(STATS + (place * SPLITS + part) * 2 + 1)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.load(PARTS + ((place * SPLITS + part) * SIZE)[:, None] + lane[None, :], mask=(lane < SIZE)[None, :],
                    other=0.0)  # fmt: skip
    out = tl.sum(total * weight[:, None], 0) / tl.sum(size * weight, 0)
    tl.store(OUT + place * SIZE + lane, out.to(OUT.dtype.element_ty), mask=lane < SIZE)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, *, window: int | None, scale: float,
    softcap: float | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T) v of query (n, g, m, D) over keys and values (S, g, W, D) -> (n, g, m, D); with `softcap`
    of softcap tanh(scale q k^T / softcap). Token i sees the columns up to positions[i] (n,) of slot rows[i] (n,), with
    a window the last so many of them. Sums in float32; weights are rounded to the values' precision, as flash attention
    does. `splits`: parts of the columns, a power of 2; by default what fills the GPU. What columns beyond hold, nan
    included, does not matter."""
    tokens, groups, heads, size = query.shape
    columns = keys.shape[2]
    assert query.stride(3) == keys.stride(3) == 1 and keys.stride(2) == size and keys.stride() == values.stride()
    block = BLOCKS[keys.element_size()]
    splits = splits or splits_for(tokens * groups, columns, block, processors(query.device))
    out = query.new_empty(query.shape)
    parts = stats = out
    if splits > 1:
        parts, stats = (out.new_empty(*out.shape[:3], splits, x, dtype=torch.float32) for x in (size, 2))
    lanes = max(16, triton.next_power_of_2(size))
    attend_kernel[tokens, groups, splits](
        query, keys, values, out, parts, stats, rows, positions, *query.stride()[:3], *keys.stride()[:2], groups, heads,
        columns if window is None else window, scale / math.log(2), (softcap or 1.0) / math.log(2), SIZE=size,
        LANES=lanes, HEADS=rows_for(heads), BLOCK=block, SPLITS=splits, STAGES=ATTEND_STAGES,
        CAPPED=softcap is not None,
        num_warps=attend_warps(heads, lanes),
    )  # fmt: skip
    if splits > 1:
        join_kernel[tokens * groups * heads,](
            parts, stats, out, SIZE=size, LANES=lanes, SPLITS=splits, num_warps=1 if splits * lanes <= 512 else 4
        )
    return out


def rows_for(heads: int) -> int:
    """Rows of a product of the query heads of a group."""
    return max(DOT_ROWS, triton.next_power_of_2(heads))


def attend_warps(heads: int, lanes: int) -> int:
    """As many as leave a thread 16 sums: more would not fit into its registers with many heads a group, or large
    ones."""
    return max(4, min(16, rows_for(heads) * lanes // 512))


def splits_for(programs: int, columns: int, block: int, processors: int) -> int:
    """Parts of the columns, so that there are PROGRAMS for every one of the processors: a power of 2, each part of a
    block at least."""
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS * processors, max(programs, 1)))
    return max(1, min(wanted, MOST_PARTS, triton.next_power_of_2(triton.cdiv(columns, block) + 1) // 2))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@triton.jit
def add_norm_kernel(
    X, BIAS, RESIDUAL, WEIGHT, SHIFT, OUT, NORMED, columns, epsilon, HAS_BIAS: tl.constexpr, RMS: tl.constexpr,
    CENTRED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row of `add_norm`."""
    row = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, LANES)
    inside = lane < columns
    x = tl.load(X + row + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + lane, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(RESIDUAL + row + lane, mask=inside, other=0.0).to(tl.float32)
    total = x.to(OUT.dtype.element_ty)
    tl.store(OUT + row + lane, total, mask=inside)
    x = total.to(tl.float32)  # the norm of what is stored, as where two kernels do this
    if not RMS:
        x = tl.where(inside, x - tl.sum(x, 0) / columns, 0.0)
    weight = tl.load(WEIGHT + lane, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        weight += 1
    x *= tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon) * weight
    if not RMS:
        x += tl.load(SHIFT + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(NORMED + row + lane, x.to(NORMED.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None, *, epsilon: float,
    zero_centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total = x + bias + residual, its norm): x and residual [..., H], bias (H,). RMSNorm with weight (H,); with
    `shift` (H,), LayerNorm. `zero_centred`: it scales by 1 + weight. Sums in float32; the total is rounded before its
    norm is taken."""
    x, residual = x.contiguous(), residual.contiguous()
    out, normed, columns = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    lanes = triton.next_power_of_2(columns)
    add_norm_kernel[x.numel() // columns,](
        x, weight if bias is None else bias, residual, weight, weight if shift is None else shift, out, normed, columns,
        epsilon, HAS_BIAS=bias is not None, RMS=shift is None, CENTRED=zero_centred, LANES=lanes,
        num_warps=norm_warps(lanes),
    )  # fmt: skip
    return out, normed


def norm_warps(lanes: int) -> int:
    """As many as leave a thread 8 elements, up to 4096 columns."""
    return min(16, max(1, lanes // 256))


@triton.jit
def activate_kernel(X, BIAS, OUT, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
                    ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One block of a row of `activate`; columns: of the result."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < columns
    X += row * (columns * 2 if GATED else columns)
    x = tl.load(X + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + lane, mask=inside, other=0.0).to(tl.float32)
        if ROUNDS:
            x = x.to(OUT.dtype.element_ty).to(tl.float32)
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # 1 + tanh(u) = 2 sigmoid(2u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if GATED:
        up = tl.load(X + columns + lane, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(BIAS + columns + lane, mask=inside, other=0.0).to(tl.float32)
        if ROUNDS:
            up, y = up.to(OUT.dtype.element_ty).to(tl.float32), y.to(OUT.dtype.element_ty).to(tl.float32)
        y *= up
    tl.store(OUT + row * columns + lane, y.to(OUT.dtype.element_ty), mask=inside)


def activate(x: Tensor, bias: Tensor | None, name: str, *, gated: bool) -> Tensor:
    """As `decode.activate`. On a GPU megatron compiles SwiGLU, which rounds once; what it leaves to torch's operations
    is rounded after each of them. Here, too, so that the sampler's numbers are the trainer's."""
    x, columns = x.contiguous(), x.shape[-1] // 2 if gated else x.shape[-1]
    out = x.new_empty(*x.shape[:-1], columns)
    activate_kernel[x.numel() // x.shape[-1], triton.cdiv(columns, ACTIVATE_BLOCK)](
        x, x if bias is None else bias, out, columns, ACTIVATION=name, GATED=gated, HAS_BIAS=bias is not None,
        ROUNDS=not (gated and name == "silu"), BLOCK=ACTIVATE_BLOCK, num_warps=ACTIVATE_WARPS,
    )  # fmt: skip
    return out
