"""Matrix products of the head, whose results are float32 also where its operands are half precision.

A GPU's GEMM sums such products in float32 and can hand out these sums. A CPU, which may have no fast bfloat16, computes
in float32 throughout. With torch < 2.8 a GPU rounds every product to the precision of its operands: in bfloat16 a logit
is off by up to 1/256 of itself (0.06 at 20), and log-probs with it; in float16 by 1/2048.

Legend: N rows, H hidden size, V' vocabulary columns of this rank.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Of one chunk's logits. The weight's gradient is read and written once a chunk, so that small chunks are slow.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}

# Whether torch hands out the float32 sums of a GEMM of half-precision operands.
WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads()


@torch.no_grad()
def linear_logits(hidden: Tensor, weight_shard: Tensor, *, softcap: float | None = None) -> Tensor:
    """hidden (N, H) @ weight_shard^T (V', H) -> (N, V') logits as `linear_logprobs` computes them: float32 of half
    precision. No gradients."""
    x, w = operand_of(hidden), operand_of(weight_shard)
    return project(x, w, x.new_empty(len(x), len(w), dtype=sum_dtype(x)), softcap)


def default_chunk(weight: Tensor) -> int:
    """Rows whose logits fit CHUNK_BYTES: a power of 2, at least 64."""
    fitting = CHUNK_BYTES[weight.device.type] // (4 * max(len(weight), 1))
    return max(64, 1 << max(fitting, 1).bit_length() - 1)


def operand_of(tensor: Tensor) -> Tensor:
    """What the GEMMs read: half precision on a CPU becomes float32."""
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype.itemsize == 2 else tensor


def sum_dtype(operand: Tensor) -> torch.dtype:
    return torch.promote_types(operand.dtype, torch.float32)


def project(x: Tensor, weight: Tensor, scratch: Tensor, softcap: float | None = None) -> Tensor:
    """x @ weight^T, capped, in the first rows of `scratch` and in its dtype, not rounded to bfloat16 if
    WIDE_PRODUCTS."""
    logits = scratch[: len(x)]
    if logits.dtype == x.dtype:
        torch.mm(x, weight.t(), out=logits)
    elif WIDE_PRODUCTS:
        torch.mm(x, weight.t(), logits.dtype, out=logits)
    else:
        logits.copy_(torch.mm(x, weight.t()))
    return capped_(logits, softcap)


def capped_(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap) in place (Gemma 2, arXiv:2408.00118, section 2); None: as they are."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def gradient_buffer(logits: Tensor, operand: Tensor, softcap: float | None) -> Tensor:
    """Where the gradient of the logits goes. In half precision the GEMMs want half operands, and `uncap_` reads the
    logits again; else it takes their place."""
    return (
        logits if logits.dtype == operand.dtype and softcap is None else torch.empty_like(logits, dtype=operand.dtype)
    )


def uncap_(grad: Tensor, logits: Tensor, softcap: float | None) -> None:
    """The gradient of capped `logits` becomes, in place, that of the logits before they were capped: d cap tanh(x /
    cap) / dx = 1 - (y / cap)^2. `logits` are overwritten. Padding has no gradient and needs finite logits."""
    if softcap is not None:
        grad.mul_(logits.div_(softcap).square_().neg_().add_(1))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the product not rounded to the precision of its operands if WIDE_PRODUCTS."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif not WIDE_PRODUCTS:
        total.add_(torch.mm(a, b))
    elif _adds_wide(a.device, a.dtype):
        torch.addmm(total, a, b, total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b, total.dtype))


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `addmm` adds float32 products of `dtype` to a float32 total there. torch 2.8 and 2.9 refuse a total of
    another dtype than its operands'; versions do not tell for builds from in between, so it is tried. Otherwise the
    sum takes room for one product more."""
    operand = torch.zeros(16, 16, dtype=dtype, device=device)
    total = operand.float()
    try:
        torch.addmm(total, operand, operand, total.dtype, out=total)
    except RuntimeError:
        return False
    return True
