"""Core attention over torch's scaled_dot_product_attention, for every backend.

It applies a boolean mask everywhere (TE's causal attention ignores one), uses torch's fused causal kernel without a
mask, and supports grouped-query attention (`operations.attend`).
"""

from __future__ import annotations

import contextlib
import math

from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarlhf.cluster import operations


class Attention(MegatronModule):
    """`core_attention` of a layer spec. Constructor arguments are the ones megatron's SelfAttention passes."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D]; attention_mask bool, True = not seen, broadcastable
        to [B, 1, Q, S], or None for plain causal attention. Returns the last Q <= S positions, [Q, B, heads * D]."""
        query = query if attention_mask is None else query[-attention_mask.shape[2] :]
        length, rows = query.shape[:2]
        dropout = self.config.attention_dropout if self.training else 0.0
        # Under sequence parallelism the surrounding region already draws per rank.
        fork = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            context = operations.attend(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
                None if attention_mask is None else ~attention_mask,
                dropout_p=dropout,
                scale=self.scale,
            )
        return context.permute(2, 0, 1, 3).reshape(length, rows, -1)
