"""Keys and values of the slots of a sampler, and what attention does with them: fill them with prompts, or add the
newest token of each slot and look at all of its tokens.

Legend: L layers of a chunk, W columns of a slot, g key/value heads of this rank, D head size, T tokens, n slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from megarlhf.cluster import backend, operations
from megarlhf.kernels import decode
from megarlhf.stream import Spans

# Keys that a CPU's attention takes at once. It rounds those left over differently, so that in 16 bits the sampler would
# differ from the trainer, whose rows have other lengths.
VECTOR = 16


class Cache:
    """The keys and values of `slots` sequences in one chunk of a model; a token's column is its position."""

    def __init__(self, chunk, *, slots: int, columns: int, record: bool = False):
        attention = [layer.self_attention for layer in chunk.decoder.layers]
        groups = attention[0].num_query_groups_per_partition
        shape = (len(attention), slots, groups, columns, chunk.config.kv_channels)
        # (L, slots, g, W, D), keys rotated; zeros, since values that attention does not look at must be finite
        self.keys = torch.zeros(shape, dtype=chunk.config.params_dtype, device=backend.device())
        self.values = torch.zeros_like(self.keys)
        self.first = attention[0].layer_number
        # (slots, W, L, k): the experts that computed each token, if they are recorded
        chosen = (slots, columns, len(attention), chunk.config.moe_router_topk) if record else (0,)
        self.experts = torch.zeros(chosen, dtype=torch.int16, device=backend.device())

    @staticmethod
    def slot_bytes(chunk, *, columns: int, record: bool = False) -> int:
        """Bytes of one slot."""
        attention = [layer.self_attention for layer in chunk.decoder.layers]
        groups, kind = attention[0].num_query_groups_per_partition, chunk.config.params_dtype
        experts = 2 * len(attention) * columns * chunk.config.moe_router_topk if record else 0
        return 2 * len(attention) * groups * columns * chunk.config.kv_channels * kind.itemsize + experts

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values, self.experts))

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        for x in (self.keys, self.values, self.experts):
            x.untyped_storage().resize_(x.nbytes)
            x.zero_()

    def free(self) -> None:
        for x in (self.keys, self.values, self.experts):
            x.untyped_storage().resize_(0)

    def copy(self, source: int, target: int, columns: int) -> None:
        """The first `columns` of slot `source` into slot `target`."""
        for x in (self.keys, self.values):
            x[:, target, :, :columns] = x[:, source, :, :columns]
        if len(self.experts):
            self.experts[target, :columns] = self.experts[source, :columns]


@dataclass(frozen=True, kw_only=True)
class Prefill(Spans):
    """Prompts whose keys and values go into a cache. Nothing reads the model's output."""

    cache: Cache
    slots: Tensor  # (real tokens,) int64: of each token
    positions: Tensor  # (real tokens,) int64: its column
    record: Tensor | None = None  # (T or its shard, layers of the chunk, k) int16: the experts used are written here

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """key and value [T, g, D]"""
        layer = layer_number - self.cache.first
        for store, new in ((self.cache.keys, key), (self.cache.values, value)):
            store[layer][self.slots, :, self.positions] = new[: len(self.slots)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The newest token of each of n slots. Megatron passes it to attention like `Spans`."""

    qkv_format: ClassVar[str] = "step"

    cache: Cache
    slots: slice  # these n slots of the cache
    rows: Tensor  # (n,) int64: 0 to n - 1
    positions: Tensor  # (n,) int64: of the tokens
    width: int  # columns that hold all tokens up to these
    record: Tensor | None = None  # (n or its shard, layers of the chunk, k) int16: as of `Prefill`
    # Of rotary positions: see `kernels.decode.rotate_and_store`. A layer may have a part of them alone.
    turns: Tensor | None = None
    biases: dict[int | None, Tensor] = field(default_factory=dict)  # by window: all layers of a step share them

    def attend(
        self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float,
        softcap: float | None, turns: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Turn queries and keys, store keys and values, and let each token see all of its slot's, itself included; with
        a window the last so many. query [n, g, heads of a group, D], key and value [n, g, D] -> as query."""
        keys, values = (x[layer_number - self.cache.first, self.slots] for x in (self.cache.keys, self.cache.values))
        query = decode.rotate_and_store(query, key, value, keys, values, self.rows, self.positions, turns)
        if fused := decode.fused_for(query):
            return fused.attend(
                query, keys, values, self.rows, self.positions, window=window, scale=scale, softcap=softcap
            )
        keys, values = keys[:, :, : self.width], values[:, :, : self.width]
        # The query heads of a group attend to the same keys, as the tokens of a span do: no key is copied.
        return operations.attend(query, keys, values, self.bias(window, query.dtype), scale=scale, softcap=softcap)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(n, 1, 1, width): 0 at the columns that the tokens see, else -inf. Attention would make it of a boolean mask,
        once in every layer."""
        if window not in self.biases:
            columns, last = torch.arange(self.width, device=self.positions.device), self.positions[:, None, None, None]
            hidden = columns > last if window is None else (columns > last) | (columns <= last - window)
            self.biases[window] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
        return self.biases[window]
