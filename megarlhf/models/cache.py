"""Keys and values of the slots of a sampler, and what attention does with them: fill them with prompts, or add the
newest token of each slot and look at all of its tokens.

Legend: L layers of a chunk, W columns of a slot, g key/value heads of this rank, D head size, T tokens, n slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megarlhf.stream import Spans

# Keys that a CPU's attention takes at once. It rounds those left over differently, so that in 16 bits the sampler would
# differ from the trainer, whose rows have other lengths.
VECTOR = 16


class Cache:
    """The keys and values of `slots` sequences in one chunk of a model; a token's column is its position."""

    def __init__(self, chunk, *, slots: int, columns: int):
        attention = [layer.self_attention for layer in chunk.decoder.layers]
        weight = attention[0].linear_qkv.weight
        groups = attention[0].num_query_groups_per_partition
        shape = (len(attention), slots, groups, columns, chunk.config.kv_channels)
        # zeros, since values that attention does not look at must be finite
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)  # (L, slots, g, W, D), rotated
        self.values = torch.zeros_like(self.keys)
        self.first = attention[0].layer_number

    @staticmethod
    def slot_bytes(chunk, *, columns: int) -> int:
        """Bytes of one slot."""
        attention = [layer.self_attention for layer in chunk.decoder.layers]
        groups, kind = attention[0].num_query_groups_per_partition, attention[0].linear_qkv.weight.dtype
        return 2 * len(attention) * groups * columns * chunk.config.kv_channels * kind.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        for x in (self.keys, self.values):
            x.untyped_storage().resize_(x.nbytes)
            x.zero_()

    def free(self) -> None:
        for x in (self.keys, self.values):
            x.untyped_storage().resize_(0)

    def copy(self, source: int, target: int, columns: int) -> None:
        """The first `columns` of slot `source` into slot `target`."""
        for x in (self.keys, self.values):
            x[:, target, :, :columns] = x[:, source, :, :columns]


@dataclass(frozen=True, kw_only=True)
class Prefill(Spans):
    """Prompts whose keys and values go into a cache. Nothing reads the model's output."""

    cache: Cache
    slots: Tensor  # (real tokens,) int64: of each token
    positions: Tensor  # (real tokens,) int64: its column

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """key and value [T, g, D]"""
        layer = layer_number - self.cache.first
        for store, new in ((self.cache.keys, key), (self.cache.values, value)):
            store[layer][self.slots, :, self.positions] = new[: len(self.slots)]


@dataclass(frozen=True)
class Step:
    """The newest token of each of n slots. Megatron passes it to attention like `Spans`."""

    qkv_format: ClassVar[str] = "step"

    cache: Cache
    slots: slice  # these n slots of the cache
    rows: Tensor  # (n,) int64: 0 to n - 1
    positions: Tensor  # (n,) int64: of the tokens
    # (n, 1, 1, W) in the model's precision: 0 at the columns up to them, else -inf; W may be less than the cache's.
    # Attention would make it of a boolean mask, once in every layer.
    bias: Tensor

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key and value [n, g, D] -> those of all columns, (n, g, W, D)."""
        layer, width = layer_number - self.cache.first, self.bias.shape[-1]
        found = []
        for store, new in ((self.cache.keys, key), (self.cache.values, value)):
            mine = store[layer, self.slots]
            mine[self.rows, :, self.positions] = new
            found.append(mine[:, :, :width])
        return tuple(found)

    def within(self, window: int | None) -> Tensor:
        """`bias` for a layer whose tokens see so many columns."""
        if window is None:
            return self.bias
        columns = torch.arange(self.bias.shape[-1], device=self.bias.device)
        return self.bias.masked_fill(columns <= self.positions[:, None, None, None] - window, -torch.inf)
