"""How many slots of the sampler a device's memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarlhf.cluster import backend
from megarlhf.kernels.sampling import Draw
from megarlhf.models.cache import Cache

if TYPE_CHECKING:
    from megarlhf.engine import Engine

SLOTS = 16  # by default, where the device's memory is not known
FREE = 0.9  # of a device's free memory, for what `SlotMemory` counts


@dataclass(frozen=True)
class SlotMemory:
    """Bytes that a sampler takes on this rank beside the weights."""

    fixed: int  # with any slots: activations of the prompts that are computed at once
    slot: int  # for each further slot of every stage

    @classmethod
    def of(
        cls,
        engine: Engine,
        draw: Draw,
        *,
        prompt_length: int,
        columns: int,
        prefill: int,
        parts: int,
        q_beta: float,
        record: bool = False,
    ) -> SlotMemory:
        """columns: of a slot's cache. prefill: tokens of prompts that are computed at once; a longer prompt is computed
        alone. parts: of the stream, which sequence parallelism cuts. q_beta: see `sampler.Sampler`."""
        config, parallel, chunks = engine.config, engine.topology.parallel, engine.modules
        size = config.params_dtype.itemsize
        channels = 4 * config.hidden_size + 4 * config.ffn_hidden_size // parallel.tensor
        if config.num_moe_experts:  # each of a token's experts has a copy of it; all of a rank's may get all tokens
            channels += 4 * config.moe_router_topk * parallel.expert * (config.hidden_size + config.ffn_hidden_size)
        cache = sum(Cache.slot_bytes(chunk, columns=columns, record=record) for chunk in chunks)
        if engine.topology.last_stage:  # logits of one stage's slots at a time, and what is computed from them
            slot = parallel.pipeline * cache + column_bytes(draw, q_beta) * len(chunks[-1].head_weight())
        else:  # the prompts' hidden states wait until the next stage has taken them
            states = prompt_length * config.hidden_size * size
            slot = parallel.pipeline * (cache + len(chunks) * states // parts)
        return cls(max(prefill, prompt_length) * channels * size, slot)

    def fitting(self, *, multiple: int) -> int:
        """Slots of each stage for which every rank has memory, a multiple of `multiple`; SLOTS if the device does not
        say how much it has. Collective."""
        backend.trim()
        free, _ = backend.memory()
        if not free:
            return SLOTS
        fitting = torch.tensor(int(FREE * free - self.fixed) // self.slot, device=backend.device())
        dist.all_reduce(fitting, op=dist.ReduceOp.MIN)
        return max(multiple, int(fitting) // multiple * multiple)


def column_bytes(draw: Draw, q_beta: float) -> int:
    """Bytes of a slot's logit in float32 and of the sampling kernels' scratch for it."""
    if draw.top_k or draw.top_p < 1:
        return 48  # torch searches for the threshold with int64 keys; measured: 41 beside the logit
    return 16 if q_beta else 8
