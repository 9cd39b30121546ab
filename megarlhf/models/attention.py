"""Core attention over a stream of tokens, for every backend: the only place that knows which tokens see each other.

Three ways: over spans in blocks of rows of similar length; over spans on a GPU, by a variable-length flash kernel; and
over a cache, one token a slot (`cache.Step`). None has a mask of S x S. Grouped-query attention everywhere.

Legend: T tokens, h query heads and g key/value heads of this rank, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import attention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.cluster import operations
from megarlhf.models.cache import VECTOR, Prefill, Step
from megarlhf.models.joint_norm import JointNorm
from megarlhf.models.rotary import attention_factor
from megarlhf.stream import Blocks, Spans


class Attention(MegatronModule):
    """`core_attention` of a layer spec. Constructor arguments are the ones megatron's SelfAttention passes."""

    selects = False  # of the model's last layer: return the tokens that the head reads, no others

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window = config.architecture.window(layer_number - 1)
        self.softcap = config.architecture.attention_softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Spans, **_
    ) -> Tensor:
        """query [T, 1, h, D], key and value [T, 1, g, D] -> [T, 1, h * D], or the tokens `Spans.read` of the last
        layer."""
        where, (query, key, value) = packed_seq_params, (x.squeeze(1) for x in (query, key, value))
        if isinstance(where, Prefill):
            where.store(self.layer_number, key, value)
        if not where.num_real or (self.selects and isinstance(where, Prefill)):  # nothing reads the output
            return query.new_zeros(len(where.read) if self.selects else len(query), 1, query[0].numel())
        # Under sequence parallelism the surrounding region already draws per rank.
        dropout = self.config.attention_dropout if self.training else 0.0
        fork = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            options = dict(window=self.window, scale=self.scale, dropout=dropout)
            if self.softcap is None and _has_flash(query, dropout):
                context = over_spans_flash(query, key, value, where, **options)
            else:  # no flash kernel here caps scores
                context = over_spans(query, key, value, where, softcap=self.softcap, **options)
        if self.selects and where.read is not None:
            context = context[where.read]
        return context.unsqueeze(1)


class SelfAttention(attention.SelfAttention):
    """Megatron's modules. Its forward is ours: norms of all heads together, two kinds of rotary frequencies, scaled
    cosines and sines; and a short way for a step of decoding, which splits queries from keys and turns them in one
    go."""

    def __init__(self, config, *args, **options):
        super().__init__(config, *args, **options)
        architecture = config.architecture
        self.query_norm = self.key_norm = None
        if architecture.qk_norm_joint:
            size = self.hidden_size_per_attention_head
            self.query_norm = JointNorm(config, self.num_attention_heads_per_partition * size, self.tp_group)
            self.key_norm = JointNorm(config, self.num_query_groups_per_partition * size, self.tp_group)
        self.turn_factor = attention_factor(architecture.rope_scaling)
        # Which of the two kinds of angles, if there are two (see `GPT.rotary`).
        self.angles = None if architecture.local_rotary_base is None else int(self.core_attention.window is not None)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Spans | Step,
        rotary_pos_emb: Tensor | None = None,
        **_,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H], or its sequence shard -> (the same, a bias that is not yet added or None)."""
        if isinstance(packed_seq_params, Step):
            return self._step(hidden_states, packed_seq_params)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if self.query_norm is not None:
            query, key = (
                norm(x.flatten(2)).view(x.shape) for norm, x in ((self.query_norm, query), (self.key_norm, key))
            )
        if rotary_pos_emb is not None:
            turn = functools.partial(
                apply_rotary_pos_emb, freqs=self._own(rotary_pos_emb), config=self.config, mscale=self.turn_factor,
                cp_group=self.pg_collection.cp,
            )  # fmt: skip
            query, key = turn(query), turn(key)
        if self.checkpoint_core_attention and self.training:
            context = self._checkpointed_attention_forward(
                query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
            )
        else:
            context = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        return self.linear_proj(context)

    def _step(self, hidden_states: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        product, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        product = product.view(len(product), groups, -1, size)
        query, key, value = product[:, :, :-2], product[:, :, -2], product[:, :, -1]
        if self.config.qk_layernorm:
            query = self.q_layernorm(query.reshape(len(query), 1, -1, size)).view(query.shape)
            key = self.k_layernorm(key[:, None]).view(key.shape)
        if self.query_norm is not None:
            query, key = (
                norm(x.flatten(1)).view(x.shape) for norm, x in ((self.query_norm, query), (self.key_norm, key))
            )
        core = self.core_attention
        context = step.attend(
            self.layer_number, query, key, value, window=core.window, scale=core.scale, softcap=core.softcap,
            turns=self._own(step.turns),
        )  # fmt: skip
        return self.linear_proj(context.reshape(len(context), 1, -1))

    def _own(self, angles: Tensor | None) -> Tensor | None:
        """This layer's of angles [..., d], or [..., 2 d] of two kinds; cosines and sines alike. Without gaps, because
        Transformer Engine's rotary kernel takes no strides of them."""
        if self.angles is None or angles is None:
            return angles
        return angles.chunk(2, -1)[self.angles].contiguous()


def over_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, *, window: int | None, scale: float, dropout: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """[T, h, D], [T, g, D] twice -> [T, h * D], 0 at padding; with a window each token sees so many, itself included.
    With `softcap` scores become softcap * tanh(score / softcap). Memory is linear in the tokens."""
    total, count = len(query), spans.num_real
    blocks = spans.blocks(1 if query.dtype.itemsize > 2 else VECTOR)
    packed = [_pack(x[:count].flatten(1), blocks).unflatten(1, x.shape[1:]) for x in (query, key, value)]
    parts, start = [], 0
    for rows, length in blocks.shapes:
        part = [x[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2) for x in packed]
        start += rows * length
        context = _attend(*part, window, scale=scale, dropout_p=dropout, softcap=softcap)
        parts.append(context.transpose(1, 2).reshape(rows * length, -1))
    context = parts[0] if len(parts) == 1 else torch.cat(parts)
    if blocks.index is not None:
        context = _Gather.apply(context, blocks.inverse, blocks.index, blocks.real)
    return torch.nn.functional.pad(context, (0, 0, 0, total - count)) if total > count else context


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int | None, **options) -> Tensor:
    """Causal attention of rows of one length, (rows, heads, length, D) each. A window is computed in blocks of as many
    queries, whose masks are of window x 2 window at most."""
    length = query.shape[2]
    if window is None or length <= window:
        return operations.attend(query, key, value, None, **options)
    parts = []
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(0, start - window + 1) // VECTOR * VECTOR
        end = min(-(-stop // VECTOR) * VECTOR, length)
        places = torch.arange(length, device=query.device)
        distance = places[start:stop, None] - places[first:end]
        seen = (distance >= 0) & (distance < window)
        block = query[:, :, start:stop], key[:, :, first:end], value[:, :, first:end]
        parts.append(operations.attend(*block, seen[None, None], **options))
    return torch.cat(parts, 2)


def over_spans_flash(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, *, window: int | None, scale: float, dropout: float
) -> Tensor:
    """As `over_spans`, in one call of a variable-length kernel."""
    total, count, left = len(query), spans.num_real, -1 if window is None else window - 1
    query, key, value = query[:count], key[:count], value[:count]  # its backward writes nothing for padding
    context = _flash()(query, key, value, spans.bounds, max(spans.lengths), left, scale).flatten(1)
    return torch.nn.functional.pad(context, (0, 0, 0, total - count)) if total > count else context


def _has_flash(query: Tensor, dropout: float) -> bool:
    """Whether a variable-length kernel can compute this: on a GPU since Ampere, in 16 bits, without dropout."""
    if not query.is_cuda or query.dtype.itemsize > 2 or dropout or query.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0) and _flash() is not None


@functools.cache
def _flash() -> Callable[..., Tensor] | None:
    """(query, key, value, bounds, longest span, tokens seen to the left, scale) -> [T, h, D], by torch's flash
    attention, else by Transformer Engine; None without either."""
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" in inspect.signature(varlen_attn).parameters:  # its first version has neither these nor groups
            return lambda query, key, value, bounds, longest, left, scale: varlen_attn(
                query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0),
                enable_gqa=key.shape[1] != query.shape[1],
            )  # fmt: skip
    with contextlib.suppress(ImportError):
        from transformer_engine.pytorch import DotProductAttention

        @functools.cache
        def module(heads: int, groups: int, size: int, scale: float) -> torch.nn.Module:
            return DotProductAttention(
                heads, size, groups, qkv_format="thd", attn_mask_type="padding_causal", softmax_scale=scale
            )

        return lambda query, key, value, bounds, longest, left, scale: module(
            query.shape[1], key.shape[1], query.shape[2], scale
        )(query, key, value, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
          window_size=(left, 0)).view_as(query)  # fmt: skip
    return None


def _pack(x: Tensor, blocks: Blocks) -> Tensor:
    """(tokens, C) -> (places of all blocks, C). Padding holds some token: no real token sees it, and its gradient is 0,
    because nothing reads its own output."""
    return x if blocks.index is None else _Gather.apply(x, blocks.index, blocks.inverse, None)


class _Gather(torch.autograd.Function):
    """x[index], whose gradient is grad[inverse], 0 where `real` is False: index_add of autograd's own takes longer."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor, real: Tensor | None):
        ctx.save_for_backward(inverse, real)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        inverse, real = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        return (grad if real is None else grad.mul_(real)), None, None, None
