"""The input of a model: one stream of tokens, cut from rows. Padding of rows is not in it.

Legend: B rows, S columns, P prompt columns, R = S - P response columns, T tokens of a stream, N counted tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megarlhf.batch import Sequences


@dataclass(frozen=True)
class Spans:
    """Which tokens of a stream see each other: a token sees those of its own span up to itself. What follows the last
    span is padding. Megatron passes this object to attention in the place of its `packed_seq_params`."""

    qkv_format: ClassVar[str] = "spans"  # none of megatron's formats, so that it passes tensors as they are

    lengths: tuple[int, ...]  # of the spans, in their order; none is 0
    bounds: Tensor  # (len(lengths) + 1,) int32: span i is [bounds[i], bounds[i + 1])
    read: Tensor | None = None  # (K,) int64: tokens whose output the head reads; the last layer computes no other
    counts: Tensor | None = None  # (len(lengths),) int64: counted tokens of each span
    experts: Tensor | None = None  # (T, L, k) int16: experts that compute a token in a layer; -1: the router chooses

    @property
    def num_real(self) -> int:
        return sum(self.lengths)

    def blocks(self, multiple: int = 1) -> Blocks:
        return Blocks.of(self.lengths, self.bounds.device, multiple)


@dataclass(frozen=True)
class Blocks:
    """Spans as a few blocks of (rows, length) for kernels that want rows of one length, a `multiple` of some number.
    Shorter spans are padded at the right, which no real token sees under a causal mask."""

    shapes: list[tuple[int, int]]  # (rows, length) of each block
    index: Tensor | None  # (sum of rows * length,) int64: token of each place; None: the tokens in their order
    inverse: Tensor | None  # (real tokens,) int64: place of each token
    real: Tensor | None  # (sum of rows * length, 1) bool: not padding

    WASTE = 1.25  # a block's longest span is at most so many times its shortest

    @classmethod
    @lru_cache(maxsize=8)  # all layers of a pass ask for the same
    def of(cls, lengths: tuple[int, ...], device: torch.device, multiple: int = 1) -> Blocks:
        sizes = np.array(lengths)
        order = np.argsort(-sizes, kind="stable")
        groups: list[list[int]] = []
        for span in order:
            if not groups or sizes[groups[-1][0]] > cls.WASTE * sizes[span]:
                groups.append([])
            groups[-1].append(int(span))
        shapes = [(len(group), int(-(-sizes[group[0]] // multiple) * multiple)) for group in groups]
        if len(groups) <= 1 and len(set(lengths)) <= 1 and (not lengths or lengths[0] % multiple == 0):
            return cls(shapes, None, None, None)
        starts = np.cumsum(sizes) - sizes
        places = [
            (starts[group][:, None] + np.arange(length)[None], np.arange(length)[None] < sizes[group][:, None])
            for group, (_, length) in zip(groups, shapes, strict=True)
        ]
        real = np.concatenate([mask.ravel() for _, mask in places])
        index = np.where(real, np.concatenate([place.ravel() for place, _ in places]), 0)
        inverse = np.empty(int(sizes.sum()), np.int64)
        inverse[index[real]] = real.nonzero()[0]
        return cls(shapes, *(torch.from_numpy(x).to(device) for x in (index, inverse, real[:, None])))


@dataclass(frozen=True)
class Stream:
    """T tokens of some rows, in the order of the rows, then padding. The heads' outputs are (B, R) again."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64: a token's place in its span
    spans: Spans
    counted: Tensor  # (N,) int64: the tokens of the rows' masks
    places: Tensor  # (N,) int64: the same, as an index into the flat (B, R) outputs
    shape: tuple[int, int]  # (B, R)
    max_length: int  # of the spans, at least

    @property
    def labels(self) -> Tensor:
        """(N,) ids of the counted tokens."""
        return self.tokens[self.counted]

    def aligned(self, values: Tensor) -> Tensor:
        """A value of each counted token, (N, ...) -> response-aligned (B, R, ...), 0 elsewhere."""
        rows, responses = self.shape
        flat = values.new_zeros(rows * responses, *values.shape[1:]).index_put((self.places,), values)
        return flat.view(rows, responses, *values.shape[1:])

    def to(self, device: torch.device) -> Stream:
        if self.tokens.device == device:
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True)
                 for name in ("tokens", "positions", "counted", "places")}  # fmt: skip
        spans = {name: value.to(device, non_blocking=True) for name in ("bounds", "counts", "experts")
                 if (value := getattr(self.spans, name)) is not None}  # fmt: skip
        spans = dataclasses.replace(self.spans, **spans)
        return dataclasses.replace(self, spans=spans, **moved)


def num_tokens(rows: Sequences) -> Tensor:
    """(B,) int64: real tokens of each row."""
    if rows.segments is None:
        return torch.full((len(rows),), rows.tokens.shape[1], device=rows.tokens.device)
    return (rows.segments > 0).sum(1)


def stream_of(rows: Sequences, total: int | None = None) -> Stream:
    """The real tokens of `rows`, which are on the CPU, filled up with padding to `total`."""
    count, columns = rows.tokens.shape
    segments = torch.ones_like(rows.tokens) if rows.segments is None else rows.segments
    real = segments > 0
    flat = real.flatten().nonzero().squeeze(1)
    tokens = rows.tokens.flatten()[flat]
    # A span ends where the row or the segment changes.
    key = (segments + torch.arange(count)[:, None] * (int(segments.max()) + 1 if count else 1)).flatten()[flat]
    lengths = torch.unique_consecutive(key, return_counts=True)[1]
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(flat)) - starts.repeat_interleave(lengths)
    place = torch.full((count * columns,), -1)
    place[flat] = torch.arange(len(flat))
    places = rows.mask.flatten().nonzero().squeeze(1)
    counted = place.view(count, columns)[:, rows.prompt_len :].flatten()[places]
    assert not len(counted) or int(counted.min()) >= 0, "the mask counts padding"
    assert not (positions[counted] == 0).any(), "the mask counts a token that nothing precedes"
    if total is not None:
        missing = total - len(flat)
        assert missing >= 0, (total, len(flat))
        tokens, positions = (torch.nn.functional.pad(x, (0, missing)) for x in (tokens, positions))
    experts = None
    if rows.experts is not None:
        experts = rows.experts.flatten(0, 1)[flat]
        experts = torch.cat([experts, experts.new_full((len(tokens) - len(flat), *experts.shape[1:]), -1)])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    counts = torch.bincount(torch.searchsorted(bounds, counted, right=True) - 1, minlength=len(lengths))
    spans = Spans(tuple(lengths.tolist()), bounds.int(), counts=counts, experts=experts)
    longest = max(spans.lengths, default=1)
    return Stream(tokens, positions, spans, counted, places, tuple(rows.mask.shape), longest)


def cut(rows: Sequences, budget: int) -> list[Tensor]:
    """The rows of each micro-batch, as index tensors: as few micro-batches of at most `budget` tokens as first-fit
    decreasing finds (Johnson 1973), each of about as many tokens. Rows that belong together stay together and adjacent.
    A row that alone has more tokens is a micro-batch of its own."""
    lengths = num_tokens(rows).cpu().numpy().reshape(-1, rows.together).sum(1)
    falling = np.argsort(-lengths, kind="stable")
    filled: list[list[int]] = []
    space: list[int] = []
    for unit in falling:
        fit = next((i for i, room in enumerate(space) if room >= lengths[unit]), len(space))
        if fit == len(space):
            space.append(budget)
            filled.append([])
        space[fit] -= lengths[unit]
        filled[fit].append(unit)
    even: list[list[int]] = [[] for _ in filled]  # each unit to the micro-batch that has the fewest tokens
    load = np.zeros(len(filled), np.int64)
    for unit in falling:
        even[least := int(load.argmin())].append(unit)
        load[least] += lengths[unit]
    fits = all(len(units) == 1 or load[i] <= budget for i, units in enumerate(even))
    offsets = np.arange(rows.together)
    return [
        torch.from_numpy((np.array(units)[:, None] * rows.together + offsets).ravel())
        for units in (even if fits else filled)
    ]


def shares(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """(G,) lengths -> (ranks, G / ranks) indices: each rank gets as many rows and about as many tokens. Rows are dealt
    from the longest to the shortest, back and forth; a rank's own are in their old order."""
    order = np.argsort(-lengths, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1]
    return np.sort(order.T, 1)
