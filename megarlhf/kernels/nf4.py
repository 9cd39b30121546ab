"""NF4, a data type of 4 bits for weights (Dettmers et al. 2023, arXiv:2305.14314, section 3): a weight is one of 16
numbers times the largest magnitude of its block of 64.

The 16 numbers are quantiles of the normal distribution, divided by the largest: 8 above zero, 7 below, and zero.
Blocks lie along a row, so that a tensor-parallel shard of a matrix has the blocks of the whole.

Legend: O rows, I columns, a multiple of 64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
# The probability of the outermost quantile: the mean of 1 - 1/30 and 1 - 1/32, for 15 and 16 intervals.
OUTERMOST = (1 - 1 / 30) / 2 + (1 - 1 / 32) / 2


class Quantized(NamedTuple):
    """A matrix in NF4."""

    codes: Tensor  # (O, I / 2) uint8: two numbers a byte, the first in the upper bits
    scales: Tensor  # (O, I / 64) fp32: the largest magnitude of each block


@functools.cache
def code_book(device: torch.device) -> Tensor:
    """(16,) float32, ascending from -1 to 1."""
    above = torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, 9, dtype=torch.float64)[:-1])
    below = torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)]) / above.max()
    return values.float().to(device)


@torch.no_grad()
def quantize(weight: Tensor) -> Quantized:
    """(O, I) -> the nearest number of the code book for each weight. A block of zeros stays one."""
    rows, columns = weight.shape
    assert columns % BLOCK == 0, columns
    blocks = weight.float().view(rows, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    book = code_book(weight.device)
    middles = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None], middles)
    pairs = codes.to(torch.uint8).view(rows, columns // 2, 2)
    return Quantized((pairs[..., 0] << 4) | pairs[..., 1], scales)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two numbers of each byte."""
    book, byte = code_book(device), torch.arange(256, device=device)
    return torch.stack([book[byte >> 4], book[byte & 15]], -1)


@torch.no_grad()
def dequantize(matrix: Quantized, dtype: torch.dtype) -> Tensor:
    """(O, I), computed in float32 and rounded to `dtype`."""
    rows, columns = matrix.codes.shape[0], 2 * matrix.codes.shape[1]
    values = _pairs(matrix.codes.device)[matrix.codes.int()].view(rows, columns // BLOCK, BLOCK)
    return values.mul_(matrix.scales[..., None]).view(rows, columns).to(dtype)


class LinearNF4(torch.autograd.Function):
    """x (..., I) @ W^T (O, I) of a frozen W in NF4, which is dequantised here and again in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scales: Tensor):
        ctx.save_for_backward(codes, scales)
        return x @ dequantize(Quantized(codes, scales), x.dtype).t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad @ dequantize(Quantized(*ctx.saved_tensors), grad.dtype), None, None
