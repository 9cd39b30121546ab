"""Operations that differ between devices, or that megatron's own layers and the sampler must compute alike."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megarlhf.cluster.device import on_cuda
from megarlhf.kernels import capped, decode

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@functools.cache
def _cpu() -> ModuleType | None:
    """The faster operations of a CPU, None on a GPU."""
    if on_cuda():
        return None
    from megarlhf.cpu import operations

    return operations


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, [..., H] with weight [H], as `config` says. A zero-centred weight
    scales by 1 + weight, in fp32: bf16 would round the sum."""
    if config.layernorm_zero_centered_gamma:
        plain = F.rms_norm if config.normalization == "RMSNorm" else F.layer_norm
        x, kind = plain(x.float(), weight.shape, eps=config.layernorm_epsilon) * (1 + weight.float()), x.dtype
        return (x if bias is None else x + bias.float()).to(kind)
    if config.normalization == "RMSNorm":
        if cpu := _cpu():
            return cpu.rms_norm(x, weight, config.layernorm_epsilon)
        return F.rms_norm(x, weight.shape, weight, config.layernorm_epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, config.layernorm_epsilon)


def normalize_sum(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
    norm_bias: torch.Tensor | None, config: TransformerConfig,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x + bias + residual, `normalize` of it) where no gradient is needed, [..., H] each. x may be overwritten."""
    if fused := decode.fused_for(x):
        return fused.add_norm(
            x, bias, residual, weight, norm_bias, epsilon=config.layernorm_epsilon,
            zero_centred=config.layernorm_zero_centered_gamma,
        )  # fmt: skip
    total = (x if bias is None else x.add_(bias)).add_(residual)
    return total, normalize(total, weight, norm_bias, config)


def embed(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of weight [V, H]. On CPU a gradient goes straight to `weight.main_grad`; on a GPU the order in which rows
    are added there would not be the same every time."""
    if (cpu := _cpu()) and weight.requires_grad and torch.is_grad_enabled():
        return cpu.embed(weight, ids)
    return F.embedding(ids, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear where no gradient is needed."""
    if cpu := _cpu():
        return cpu.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *,
    softcap: float | None = None, **options,
) -> torch.Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention of query [B, heads, Q, D] over key and value [B, groups, S, D], with `mask`
    (True: is seen; or a number that is added to the scores) or, without one, causal. `options` go to it. With `softcap`
    it is `capped.attend`.

    A mask on a GPU (torch <= 2.13): cuDNN's kernel, the default on Hopper, gives NaN gradients for some lengths and low
    scores; and no fused kernel knows mask and groups together, nor groups in 32 bits, so that keys and values are
    repeated."""
    if softcap is not None:
        return capped.attend(query, key, value, mask, softcap=softcap, **options)
    repeats = query.shape[1] // key.shape[1]
    if on_cuda():
        torch.backends.cuda.enable_cudnn_sdp(mask is None)
        if repeats > 1 and (mask is not None or query.dtype.itemsize > 2):
            key, value, repeats = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=repeats > 1, **options
    )


def _rotary(plain):
    """Megatron's rotary embedding, in float32 as TE's: sines rounded to bfloat16 are off by up to 1/512. On CPU in
    fewer passes where it is the usual one."""

    @functools.wraps(plain)
    def apply(t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0):
        cpu = None if rotary_interleaved or multi_latent_attention else _cpu()
        if cpu:
            return cpu.rotate(t.float(), freqs, mscale).to(t.dtype)
        return plain(t.float(), freqs, rotary_interleaved, multi_latent_attention, mscale).to(t.dtype)

    return apply


def rotate_in_float32() -> None:
    """Replace megatron's rotary embedding by one in float32."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    if not hasattr(rope_utils._apply_rotary_pos_emb_bshd, "__wrapped__"):
        rope_utils._apply_rotary_pos_emb_bshd = _rotary(rope_utils._apply_rotary_pos_emb_bshd)
