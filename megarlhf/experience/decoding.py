"""The forward pass with a key/value cache, over the weights of a model chunk (`models.gpt.GPT`): nothing is copied.

Megatron's own inference path runs every module for each token and keeps its position in a Python int. This one computes
the same with plain functions of the same parameters. It is three times as fast on a CPU, and a CUDA graph can capture
its decode step: static shapes, the position on the device, no synchronisation. It needs no rebuilt model: parameters
have the same shapes with and without sequence parallelism, and a step of one token has no sequence to split.

Legend: B rows, b prompts, P prompt columns, S columns of prompt and response, H hidden size, D head size, V' vocabulary
columns of this rank; on this rank G key/value heads, each with Q query heads; L layers of this chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf import batch, kernels
from megarlhf.cluster import operations
from megarlhf.cluster.parallel import Topology

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}  # computed at once: they fit a CPU's cache, and fill a GPU

Attend = Callable[[int, Tensor], Tensor]  # (layer, its fused query, key, value [..., G, Q + 2, D]) -> context


@dataclass(frozen=True)
class Cache:
    """The keys and values of one micro-batch in one chunk. Written in place; `Decoder.prefill` resets it."""

    keys: Tensor  # (L, B, G, S, D), rotated
    values: Tensor  # (L, B, G, S, D)
    visible: Tensor  # (B, 1, 1, S) bool: the columns that the newest token sees
    column: Tensor  # (1,) int64: the next token's
    position: Tensor  # (B,) int64: its position among the row's real tokens

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values, self.visible, self.position))

    def allocate(self) -> None:
        """Allocate the memory of keys and values, filled with zeros: masked values must be finite."""
        for x in (self.keys, self.values):
            x.untyped_storage().resize_(x.nbytes)
            x.zero_()

    def free(self) -> None:
        """Free the memory of keys and values."""
        for x in (self.keys, self.values):
            x.untyped_storage().resize_(0)


class Decoder:
    """One chunk of a model as two functions, `prefill` and `decode`. Their inputs are tokens on the first chunk, else
    the hidden states that the previous chunk returned; call them under `torch.inference_mode`."""

    def __init__(self, chunk: torch.nn.Module, topology: Topology, *, max_length: int):
        config = chunk.config
        self.chunk = chunk
        self.config = config
        self.group = topology.tensor_group if topology.parallel.tensor > 1 else None
        self.tensor_rank = topology.tensor_rank
        self.groups = config.num_query_groups // topology.parallel.tensor
        self.queries = config.num_attention_heads // config.num_query_groups
        self.head_dim = config.kv_channels
        self.layers = [_Layer(layer) for layer in chunk.decoder.layers]
        self.final_norm = _parameters(chunk.decoder.final_layernorm) if chunk.post_process else None
        self.rotary = None
        if chunk.position_embedding_type == "rope":
            # Rotary attention depends on the distance of two tokens alone, so a token's column serves as its position.
            angles = chunk.rotary_pos_emb(max_length)[:, 0, 0]
            self.rotary = (angles.cos(), _signed(angles.sin()))  # float32, as in the trainer (backend.install)

    def cache(self, rows: int, length: int) -> Cache:
        """A cache for `rows` rows of at most `length` tokens."""
        kwargs = dict(device=self.chunk.decoder.layers[0].self_attention.linear_qkv.weight.device)
        shape = (len(self.layers), rows, self.groups, length, self.head_dim)
        return Cache(
            keys=torch.zeros(shape, dtype=self.config.params_dtype, **kwargs),
            values=torch.zeros(shape, dtype=self.config.params_dtype, **kwargs),
            visible=torch.zeros(rows, 1, 1, length, dtype=torch.bool, **kwargs),
            column=torch.zeros(1, dtype=torch.int64, **kwargs),
            position=torch.zeros(rows, dtype=torch.int64, **kwargs),
        )

    def prefill(self, cache: Cache, x: Tensor, valid: Tensor) -> Tensor:
        """Left-padded prompts, tokens (b, P) or hidden states (b, P, H), with `valid` (b, P) -> hidden states
        (b, P, H); on the last chunk those of the last column alone, (b, 1, H), after the final norm. The cache's B rows
        may be a multiple of b: each prompt then fills B / b adjacent rows."""
        rows, length = valid.shape
        samples = len(cache.position) // rows
        cache.visible.zero_()
        cache.visible[:, 0, 0, :length] = valid.repeat_interleave(samples, 0)
        cache.column.fill_(length)
        cache.position.copy_(valid.sum(1).repeat_interleave(samples))
        step = max(1, PREFILL_TOKENS[x.device.type] // length)
        parts = [self._prefill(cache, x[i : i + step], valid[i : i + step], i, samples) for i in range(0, rows, step)]
        return torch.cat(parts)

    def _prefill(self, cache: Cache, x: Tensor, valid: Tensor, first: int, samples: int) -> Tensor:
        """A part of the prompts, from index `first` on."""
        rows, length = valid.shape
        if self.chunk.pre_process:
            x = self._embed(x.masked_fill(~valid, 0), batch.positions(valid.long()))
        mask = ~batch.attention_mask(valid.long())
        rotary = None if self.rotary is None else tuple(table[:length, None, None] for table in self.rotary)
        mine = slice(first * samples, (first + rows) * samples)

        def attend(layer: int, fused: Tensor) -> Tensor:  # (b, P, G, Q + 2, D) -> (b, P, G Q D)
            query, key, value = self._rotated(layer, fused, rotary)
            for store, new in ((cache.keys, key), (cache.values, value)):
                store[layer, mine].unflatten(0, (rows, samples))[:, :, :, :length] = new.transpose(1, 2)[:, None]
            context = operations.attend(
                query.flatten(2, 3).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask
            )
            return context.transpose(1, 2).flatten(2)

        return self._run(x, attend, read=slice(-1, None))

    def decode(self, cache: Cache, x: Tensor) -> Tensor:
        """The newest token of each row, (B,), or its hidden state (B, H) -> its hidden state (B, H), after the final
        norm on the last chunk."""
        if self.chunk.pre_process:
            x = self._embed(x, cache.position)
        cache.visible.index_fill_(3, cache.column, True)
        rotary = None if self.rotary is None else tuple(table.index_select(0, cache.column) for table in self.rotary)

        def attend(layer: int, fused: Tensor) -> Tensor:  # (B, G, Q + 2, D) -> (B, G Q D)
            query, key, value = self._rotated(layer, fused, rotary)
            keys, values = cache.keys[layer], cache.values[layer]
            keys.index_copy_(2, cache.column, key[:, :, None])
            values.index_copy_(2, cache.column, value[:, :, None])
            # The query heads of a group attend to the same keys, as the tokens of a sequence do: no key is copied.
            return operations.attend(query, keys, values, cache.visible).flatten(1)

        x = self._run(x, attend)
        cache.column.add_(1)
        cache.position.add_(1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, H) after the final norm -> this rank's (B, V') logits, in float32 as the trainer's."""
        weight = self.chunk.head_weight()
        return operations.linear(hidden, weight) if weight.dtype.itemsize > 2 else kernels.linear_logits(hidden, weight)

    # ------------------------------------------------------------------------------------------- how

    def _run(self, x: Tensor, attend: Attend, read: slice | None = None) -> Tensor:
        """All layers. With `read`, the model's last layer computes only those columns after attention."""
        for index, layer in enumerate(self.layers):
            fused = operations.linear(self._norm(x, *layer.attention_norm), *layer.qkv)
            fused = fused.unflatten(-1, (self.groups, self.queries + 2, self.head_dim))
            context = attend(index, fused)
            if read is not None and self.final_norm is not None and layer is self.layers[-1]:
                x, context = x[:, read], context[:, read]
            attended = x + self._row_parallel(context, *layer.projection)
            x = attended + self._mlp(layer, x if self.chunk.architecture.parallel_residual else attended)
        return x if self.final_norm is None else self._norm(x, *self.final_norm)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        return self._row_parallel(self._activated(F.linear(self._norm(x, *layer.mlp_norm), *layer.up)), *layer.down)

    def _rotated(
        self, layer: int, fused: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(..., G, Q + 2, D) -> query (..., G, Q, D), key (..., G, D), value (..., G, D). The rotary tables are
        (..., d) with d <= D: the rest of a head is not rotated."""
        value = fused[..., -1, :]
        turning = fused[..., :-1, :]  # queries and the key are rotated alike
        if self.config.qk_layernorm:
            norms = self.layers[layer].query_norm, self.layers[layer].key_norm
            parts = turning[..., :-1, :], turning[..., -1:, :]
            turning = torch.cat([self._norm(part, *norm) for part, norm in zip(parts, norms, strict=True)], -2)
        if rotary is not None:
            cos, sin = rotary
            size = cos.shape[-1]
            part = turning[..., :size]
            turned = (part * cos + part.roll(size // 2, -1) * sin).to(part.dtype)
            turning = turned if size == self.head_dim else torch.cat([turned, turning[..., size:]], -1)
        return turning[..., :-1, :], turning[..., -1, :], value

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weight = self.chunk.embedding.word_embeddings.weight
        if self.group is None:
            x = F.embedding(tokens, weight)
        else:
            local = tokens - self.tensor_rank * len(weight)
            absent = (local < 0) | (local >= len(weight))
            x = F.embedding(local.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0)
            dist.all_reduce(x, group=self.group)
        if self.chunk.embedding_scale != 1:
            x = x * self.chunk.embedding_scale
        if self.rotary is None:
            x = x + F.embedding(positions, self.chunk.embedding.position_embeddings.weight)
        return x

    def _row_parallel(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.group is None:
            return operations.linear(x, weight, bias)
        x = operations.linear(x, weight)
        dist.all_reduce(x, group=self.group)
        return x if bias is None else x + bias

    def _activated(self, x: Tensor) -> Tensor:
        if not self.config.gated_linear_unit:
            return self.config.activation_func(x)
        gate, up = x.chunk(2, -1)
        return self.config.activation_func(gate) * up

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return operations.normalize(x, weight, bias, self.config)


class _Layer:
    """The parameters of a transformer layer, (weight, bias or None) each."""

    def __init__(self, layer):
        attention, mlp = layer.self_attention, layer.mlp
        self.attention_norm = _norm_of(layer.input_layernorm, attention.linear_qkv)
        self.qkv = _parameters(attention.linear_qkv)
        self.projection = _parameters(attention.linear_proj)
        self.mlp_norm = _norm_of(layer.pre_mlp_layernorm, mlp.linear_fc1) or self.attention_norm
        self.up = _parameters(mlp.linear_fc1)
        self.down = _parameters(mlp.linear_fc2)
        self.query_norm = _norm_of(attention.q_layernorm, None)
        self.key_norm = _norm_of(attention.k_layernorm, None)


def _parameters(module) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a linear layer or a norm. Without a bias Transformer Engine's linear layers have an empty
    one, its norms no such attribute."""
    bias = getattr(module, "bias", None)
    return module.weight, None if bias is None or not bias.numel() else bias


def _norm_of(norm, linear) -> tuple[Tensor, Tensor | None] | None:
    """Transformer Engine fuses a norm into the linear layer after it, and keeps its parameters there. None if there is
    no norm."""
    if hasattr(linear, "layer_norm_weight"):
        return linear.layer_norm_weight, getattr(linear, "layer_norm_bias", None)
    return _parameters(norm) if hasattr(norm, "weight") else None


def _signed(sin: Tensor) -> Tensor:
    """The signed sine for a head rolled by half its size: (x1, x2) turns into x cos + (x2, x1) (-sin, sin)."""
    return torch.cat([-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]], -1)
