"""What a step of decoding computes beside its matrix products. `fused_for` has the same functions in Triton; there are
two more, attention over a cache and the sum of a residual with its norm, for which other devices use several operations
of torch (`models/cache.py`, `cluster/operations.py`). No gradients.

Legend: n tokens, g key/value heads of this rank, m query heads a key/value head, D head size, W columns of a slot, S
slots, d channels that turn.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def fused_for(x: Tensor) -> ModuleType | None:
    """The Triton kernels (`triton_decode`) if they compute tensors like `x`: on a GPU, up to 32 bits."""
    if not x.is_cuda or x.dtype.itemsize > 4 or importlib.util.find_spec("triton") is None:
        return None
    from megarlhf.kernels import triton_decode

    return triton_decode


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor,
    turns: Tensor | None,
) -> Tensor:  # fmt: skip
    """Turn queries and keys, store keys and values. Returns the queries, (n, g, m, D).

    query (n, g, m, D), key and value (n, g, D): any strides but the last, so that they may be parts of one product.
    keys, values: (S, g, W, D), written at the slots `rows` and the columns `positions`, (n,) int64 each.
    turns: (n, d) float32, cosines then sines of the angles of the tokens; channel i < d / 2 turns with channel
        i + d / 2 (Su et al. 2021, arXiv:2104.09864), in float32, rounded once. None: nothing turns.
    """
    if fused := fused_for(query):
        return fused.rotate_and_store(query, key, value, keys, values, rows, positions, turns)
    if turns is not None:
        query, key = _turned(query, turns[:, None, None]), _turned(key, turns[:, None])
    keys[rows, :, positions] = key
    values[rows, :, positions] = value
    return query


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """In the order of operations of `cpu.operations.rotate`, which the trainer uses: the same bits."""
    cos, sin = turns.chunk(2, -1)
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    a, b = x[..., :half], x[..., half : 2 * half]
    if x.dtype != torch.float32:
        a, b = a.float(), b.float()
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out.to(x.dtype)


def activate(x: Tensor, bias: Tensor | None, name: str, *, gated: bool) -> Tensor:
    """act(x + bias); if `gated`, of x = [gate; up] act(gate) * up (Shazeer 2020, arXiv:2002.05202). x [..., C] with
    bias (C,) -> [..., C], [..., C / 2] if gated. `name`: a key of ACTIVATIONS."""
    if fused := fused_for(x):
        return fused.activate(x, bias, name, gated=gated)
    if bias is not None:
        x = x + bias
    if not gated:
        return ACTIVATIONS[name](x)
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[name](gate).mul_(up)
