"""Sampling from logits whose vocabulary is split over tensor-parallel ranks, without gathering them.

The Gumbel-max trick in two levels, over blocks of BLOCK = 128 vocabulary ids and then within the chosen one:

    block = argmax_b  log sum_{v in b} e^(x_v / T) + g_b        token = argmax_{v in block}  x_v / T + h_v

with g and h independent standard Gumbel noise. That draws exactly from softmax(x / T), like Gumbel-max over the whole
vocabulary, with V / 128 + 128 random numbers a row instead of V, which on a CPU would cost several times the output
layer. And like Gumbel-max, but unlike inverting the cumulative sum, it is robust: where rounding moves logits by s, a
token changes with probability of order s, whatever V. (All V steps of the cumulative sum move, which makes it
s sqrt(V).)

The noise belongs to (seed, sequence id, step, block or place in the block). The step of a row is the number of tokens
that were drawn of its sequence before. A block lies on one rank, since shards are multiples of 128 columns wide. So a
token depends on the logits, the seed, the sequence id and the step alone.

Each rank reduces its columns of a row to six numbers, one all-gather brings them together, and every rank finds the
same winner: the only collective. Log-prob and entropy are those of softmax(x / T), unfiltered, from the same pass.

Legend: N rows, V vocabulary, V' columns of one rank, of which `width` are real (the rest is padding, never sampled), TP
ranks, T temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megarlhf.kernels import torch_rows
from megarlhf.kernels.noise import BLOCK, BLOCK_NOISE, TOKEN_NOISE, gumbel
from megarlhf.kernels.shard import gather, row_kernels, tp_size
from megarlhf.kernels.torch_rows import BLOCK_BYTES, LN2, NO_MAXIMUM

RADIX_BITS = 8  # of a filter's threshold, found in one round
Histogram = Callable[[Tensor, int], Tensor]  # see `torch_histogram`


class Sampled(NamedTuple):
    """One token a row. Log-probs and entropies in nats, float32."""

    tokens: Tensor  # (N,) int64
    logprobs: Tensor  # (N,)
    entropy: Tensor | None  # (N,)


@dataclass(frozen=True)
class Draw:
    """How to choose. `top_k` and `top_p` leave the log-probs as they are, those of the unfiltered distribution: with
    them the tokens come from another distribution than the one a PPO ratio assumes."""

    temperature: float = 1.0  # logits are divided by it; log-probs and entropies are of the result
    greedy: bool = False  # the most probable token, the lowest id among equals
    top_k: int = 0  # only the k most probable tokens, and what equals the k-th; 0: all
    # Only the most probable tokens that together have this probability, and what equals the last of them (transformers
    # cuts within equals, by their place in its sort). 1: all.
    top_p: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"temperature: must be finite and positive, not {self.temperature}; for the most probable token set "
                "greedy: true"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k: must not be negative, not {self.top_k}; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], not {self.top_p}; 1 turns it off")


def sample(
    logits_shard: Tensor,
    draw: Draw,
    *,
    seed: int,
    sequence_ids: Tensor,
    steps: Tensor,
    vocab_size: int,
    with_entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> Sampled:
    """One token a row of logits, the same on every rank of `tp_group`. Nothing here waits for the device.

    logits_shard: (N, V') float, this rank's columns [rank V', (rank + 1) V'), V' a multiple of BLOCK; columns beyond
        `vocab_size` count as -inf. A row with nan or +inf logits gives a meaningless token and nan log-prob.
    sequence_ids: (N,) int64, not negative. steps: (N,) int64, from 0 to 2^32 - 1, each row's own.
    backend: "auto" (Triton for CUDA tensors where it is installed), "torch" or "triton".
    """
    columns = logits_shard.shape[1]
    assert columns % BLOCK == 0 and logits_shard.stride(1) == 1, (logits_shard.shape, logits_shard.stride())
    assert sequence_ids.dtype == steps.dtype == torch.int64
    assert sequence_ids.shape == steps.shape == logits_shard.shape[:1], (sequence_ids.shape, steps.shape)
    assert vocab_size <= columns * tp_size(tp_group) < 2**24  # records hold ids as float32
    rank = dist.get_rank(tp_group) if tp_size(tp_group) > 1 else 0
    start = rank * columns
    x = logits_shard[:, : min(max(vocab_size - start, 0), columns)]
    records_of, histogram_of = torch_records, torch_histogram
    if row_kernels(x, backend) is not torch_rows:
        from megarlhf.kernels.triton_sampling import triton_histogram as histogram_of
        from megarlhf.kernels.triton_sampling import triton_records as records_of
    threshold = None if draw.greedy else _threshold(x, draw, tp_group, histogram_of)
    records = records_of(
        x, temperature=draw.temperature, greedy=draw.greedy, start=start, threshold=threshold, seed=seed,
        sequence_ids=sequence_ids, steps=steps, with_entropy=with_entropy,
    )  # fmt: skip
    return _winner(gather(records, tp_group), draw, vocab_size, with_entropy)


def torch_records(
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
    """(N, width) logits of the vocabulary ids from `start` -> (N, 6) float32: the best score (relative to top / T), its
    token, that token's logit; top = max_v x_v, size = sum_v e^z_v, moment = sum_v e^z_v z_v (or 0), z = (x - top) / T.

    A rank without a real column has top = NO_MAXIMUM, and cannot win. Only logits of at least `threshold` (N,) can.
    """
    records = x.new_zeros(len(x), 6, dtype=torch.float32)
    score, token, logit, top, size, moment = records.unbind(-1)
    width = x.shape[1]
    if width == 0:
        top.fill_(NO_MAXIMUM)
        return records
    top.copy_(x.amax(-1))
    sums = x.new_empty(len(x), -(-width // BLOCK), dtype=torch.float32)
    for rows, z, e in _row_blocks(x, with_entropy):
        z.copy_(x[rows]).sub_(top[rows, None]).mul_(1 / (LN2 * temperature))  # exp2 is faster than exp on a CPU
        if with_entropy:
            z.clamp_(min=NO_MAXIMUM)  # 0 * -inf
        torch.exp2(z, out=e)
        _block_sums(e, sums[rows])
        torch.sum(sums[rows], -1, out=size[rows])
        if with_entropy:
            torch.sum(z.mul_(e), -1, out=moment[rows]).mul_(LN2)
        if threshold is not None:
            _block_sums(e.masked_fill_(x[rows] < threshold[rows, None], 0), sums[rows])
    if greedy:
        column = x.argmax(-1)
    else:
        noise = gumbel(seed, sequence_ids, steps, stream=BLOCK_NOISE, first=start // BLOCK, count=sums.shape[1])
        best, block = (sums.log() + noise).max(-1)
        score.copy_(best)
        column = _within(x, block, top, temperature, threshold, seed, sequence_ids, steps)
    token.copy_(column + start)
    logit.copy_(x.gather(1, column[:, None])[:, 0])
    return records


def _within(x, block: Tensor, top: Tensor, temperature: float, threshold, seed: int, sequence_ids, steps) -> Tensor:
    """The column chosen within each row's `block` (N,)."""
    place = torch.arange(BLOCK, device=x.device)
    columns = block[:, None] * BLOCK + place
    inside = x.gather(1, columns.clamp(max=x.shape[1] - 1)).float()
    possible = columns < x.shape[1]
    if threshold is not None:
        possible &= inside >= threshold[:, None]
    noise = gumbel(seed, sequence_ids, steps, stream=TOKEN_NOISE, first=0, count=BLOCK)
    scores = ((inside - top[:, None]) / temperature + noise).masked_fill_(~possible, -torch.inf)
    return block * BLOCK + scores.argmax(-1)


def _winner(everyone: Tensor, draw: Draw, vocab_size: int, with_entropy: bool) -> Sampled:
    """(TP, N, 6) records of the ranks -> the tokens, the same on every rank. As `shard.merge`."""
    score, token, logit, top, size, moment = everyone.unbind(-1)
    highest = top.amax(0)
    shift = (top - highest) / draw.temperature
    score = score + shift
    won = score == score.amax(0)
    token_of_row = token.masked_fill(~won, vocab_size - 1).amin(0)  # of a row of nan: any id that an embedding has
    chosen = (logit * (won & (token == token_of_row))).sum(0)
    scale = shift.exp()
    total = (scale * size).sum(0)
    log_total = total.log()
    entropy = log_total - (scale * (moment + size * shift)).sum(0) / total if with_entropy else None
    return Sampled(token_of_row.long(), (chosen - highest) / draw.temperature - log_total, entropy)


def _row_blocks(x: Tensor, with_entropy: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, z, e): a few rows at a time, so that their scratch stays in a CPU core's cache. e is z where z is not
    needed any more."""
    rows, width = x.shape
    step = max(1, BLOCK_BYTES[x.device.type] // (4 * width))
    z = x.new_empty(min(step, rows), width, dtype=torch.float32)
    e = torch.empty_like(z) if with_entropy else z
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield slice(first, first + count), z[:count], e[:count]


def _block_sums(e: Tensor, out: Tensor) -> None:
    """(n, width) -> (n, blocks): sums over blocks of BLOCK columns, of which the last may be short."""
    whole = e.shape[1] // BLOCK
    torch.sum(e[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), -1, out=out[:, :whole])
    if whole < out.shape[1]:
        torch.sum(e[:, whole * BLOCK :], -1, out=out[:, whole])


# ------------------------------------------------------------------------------------------- top_k and top_p


def _threshold(
    x: Tensor, draw: Draw, tp_group: ProcessGroup | None, histogram_of: Callable[..., Histogram]
) -> Tensor | None:
    """(N,) the least logit that `top_k`, and then `top_p` among what it leaves, let pass; None if both are off.

    Found digit by digit of the logits' float32 pattern (radix selection), four all-gathers each. The masses are counted
    in whole numbers, whose sum depends on no order, so the threshold does not depend on the layout.
    """
    if not draw.top_k and draw.top_p == 1:
        return None
    least = None
    if draw.top_k:
        histogram = histogram_of(x, temperature=draw.temperature, top=None, least=None)
        least = _select(histogram, lambda count: count.clamp(max=draw.top_k), len(x), x.device, tp_group)
    if draw.top_p < 1:
        top = x.amax(-1).float() if x.shape[1] else x.new_full((len(x),), NO_MAXIMUM, dtype=torch.float32)
        top = gather(top, tp_group).amax(0)
        histogram = histogram_of(x, temperature=draw.temperature, top=top, least=least)
        target = lambda mass: (mass.double() * draw.top_p).ceil().long()  # noqa: E731
        nucleus = _select(histogram, target, len(x), x.device, tp_group)
        least = nucleus if least is None else torch.maximum(least, nucleus)
    return _unordered(least)


def _select(
    histogram: Histogram, target_of: Callable[[Tensor], Tensor], rows: int, device: torch.device,
    tp_group: ProcessGroup | None,
) -> Tensor:  # fmt: skip
    """(N,) the largest key such that the weights of the keys from it upwards sum to the target (N,) at least; a
    function of the sum of all, from 1 to that sum. `histogram`: of this rank, see `torch_histogram`."""
    found, target = torch.zeros(rows, dtype=torch.int64, device=device), None
    for shift in range(32 - RADIX_BITS, -1, -RADIX_BITS):
        weights = gather(histogram(found, shift), tp_group).sum(0)
        upwards = weights.flip(1).cumsum(1).flip(1)  # of a digit and all greater ones
        if target is None:
            target = target_of(upwards[:, 0])
        digit = ((upwards >= target[:, None]).sum(1, keepdim=True) - 1).clamp_(min=0)
        target = target - (upwards - weights).gather(1, digit)[:, 0]
        found = (found << RADIX_BITS) + digit[:, 0]
    return found


def torch_histogram(x: Tensor, *, temperature: float, top: Tensor | None, least: Tensor | None) -> Histogram:
    """A function of (found (N,) int64, shift): (N, 256) int64 sums of weights, by the bits [shift, shift + 8) of a
    logit's key, of those logits of a row whose key has the bits `found` above them.

    The key is the float32 logit's bits in its order, from 0 to 2^32 - 1. Weights: 1; with `top` (N,) 2^32 e^((x - top)
    / temperature), rounded, and 0 below the key `least` (N,) if that is given."""
    keys = _ordered(x.float())
    weights = torch.ones_like(keys)
    if top is not None:
        weights = ((x.float() - top[:, None]) / temperature).exp_().mul_(2.0**32).round_().long()
        if least is not None:
            weights.masked_fill_(keys < least[:, None], 0)

    def histogram(found: Tensor, shift: int) -> Tensor:
        alive = (keys >> (shift + RADIX_BITS)) == found[:, None]
        digits = (keys >> shift) & (2**RADIX_BITS - 1)
        return keys.new_zeros(len(keys), 2**RADIX_BITS).scatter_add_(1, digits, weights * alive)

    return histogram


def _ordered(x: Tensor) -> Tensor:
    """float32 -> int64 in [0, 2^32) of the same order."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, ~bits & (2**32 - 1), bits + 2**31)


def _unordered(keys: Tensor) -> Tensor:
    bits = torch.where(keys < 2**31, ~keys, keys - 2**31)
    return bits.int().view(torch.float32)
