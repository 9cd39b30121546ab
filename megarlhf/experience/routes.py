"""Which experts computed the tokens that a sampler samples: recorded slot by slot, and given out row by row.

A token's experts lie in the cache beside its keys and values, so that they go wherever these go.

Legend: N rows, S = P + R columns of a row, L layers of the model, k experts a token, T tokens of a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.cluster import backend
from megarlhf.models.cache import Cache

if TYPE_CHECKING:
    from megarlhf.engine import Engine


class Routes:
    """Of one call of `Sampler.sample`, for N rows of S columns whose prompts have P, padded at the left. `parts`: into
    which sequence parallelism cuts the tokens of a pass."""

    def __init__(self, engine: Engine, cache: Cache, *, rows: int, columns: int, prompt_length: int, parts: int):
        self.topology, self.cache, self.parts = engine.topology, cache, parts
        self.prompt_length = prompt_length
        self.each = cache.experts.shape[2:]  # layers of this stage, k
        self.rows = self._none(rows, columns)

    def _none(self, *shape: int) -> Tensor:
        return torch.full((*shape, *self.each), -1, dtype=torch.int16, device=backend.device())

    def blank(self, tokens: int) -> Tensor:
        """Where the layers of this rank write the experts of its share of a pass of so many tokens."""
        return self._none(tokens // self.parts)

    def store(self, record: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Keep what the layers wrote to `record`, for the first tokens of the pass, whose slots and positions these
        are. The last layer computes no output for prompts and writes nothing."""
        if self.parts > 1:
            shard = record.view(torch.uint8).flatten()
            whole = shard.new_empty(self.parts * len(shard))
            dist.all_gather_into_tensor(whole, shard, group=self.topology.tensor_group)
            record = whole.view(torch.int16).view(-1, *self.each)
        self.cache.experts[slots, positions] = record[: len(slots)]

    def leave(self, row: int, slot: int, *, prompt: int, steps: int) -> None:
        """A row leaves its slot, whose prompt has so many tokens, after so many steps. A step computes the token before
        the one that it samples."""
        first, columns = self.prompt_length - prompt, self.rows.shape[1]
        count = min(prompt - 1 + steps, columns - first)
        self.rows[row, first : first + count] = self.cache.experts[slot, :count]

    def result(self) -> Tensor:
        """(N, S, L, k) int16 on all stages, -1 where nothing was recorded."""
        stages = self.topology.parallel.pipeline
        if stages == 1:
            return self.rows
        own = self.rows.view(torch.uint8).flatten()
        found = own.new_empty(stages * len(own))
        dist.all_gather_into_tensor(found, own, group=self.topology.pipeline_group)
        found = found.view(torch.int16).view(stages, *self.rows.shape)
        return found.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
