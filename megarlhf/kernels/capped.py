"""Attention whose scores are capped, softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2), in torch:
the fused kernels that are at hand have no such operation. `triton_decode` has it for a step of decoding.

Legend: B rows, h query heads, g key/value heads, Q queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 256  # queries whose scores exist at once


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, softcap: float, scale: float,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """softmax(softcap tanh(scale q k^T / softcap) + mask) v of query [B, h, Q, D] over key and value [B, g, S, D], in
    float32, rounded once. `mask`: as torch's scaled_dot_product_attention has it; None: causal, Q = S. Memory is linear
    in Q: the backward computes the scores of a block again."""
    heads, count = query.shape[1], query.shape[2]
    query = query.unflatten(1, (key.shape[1], -1))  # the query heads of a group share its key
    if mask is not None:
        mask = mask.unsqueeze(2)
    options = dict(softcap=softcap, scale=scale, dropout_p=dropout_p)
    parts = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        seen = stop if mask is None else key.shape[2]
        arguments = query[..., start:stop, :], key[:, :, :seen], value[:, :, :seen]
        if mask is None:
            places = torch.arange(seen, device=query.device)
            own = places[start:stop, None] >= places
        else:
            own = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
        if torch.is_grad_enabled():
            part = checkpoint(
                _block, *arguments, own, **options, use_reentrant=False, preserve_rng_state=dropout_p > 0
            )  # fmt: skip
        else:
            part = _block(*arguments, own, **options)
        parts.append(part)
    context = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    return context.flatten(1, 2).unflatten(1, (heads,))


def _block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, softcap: float, scale: float, dropout_p: float
) -> Tensor:
    """query [B, g, h / g, Q, D], key and value [B, g, S, D], mask [..., Q or 1, S] -> as query."""
    scores = (query.float() * scale) @ key.float().unsqueeze(2).mT
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (weights @ value.float().unsqueeze(2)).to(value.dtype)
