"""Attention with a mask on a GPU: finite gradients at the lengths where cuDNN's are not, and no scores in memory."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def attended(query, key, value, mask):
    from megarlhf.cluster import operations

    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    context = operations.attend(*inputs, mask)
    context.sum().backward()
    return [context, *(x.grad for x in inputs)]


@pytest.mark.parametrize("length", [128, 192, 576])  # the last two are 64 more than a multiple of 128
def test_with_a_mask_it_is_float64s(length):
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 64, device="cuda", generator=generator).mul_(scale).bfloat16()
        for heads, scale in ((8, 12), (2, 12), (2, 1))  # scores far below zero
    )
    column = torch.arange(length, device="cuda")
    mask = (column <= column[:, None]) & (column >= torch.tensor([0, 20], device="cuda")[:, None, None])
    mask = mask[:, None] | torch.eye(length, dtype=torch.bool, device="cuda")
    exact = attended(query.double().cpu(), key.double().cpu(), value.double().cpu(), mask.cpu())
    for mine, expected in zip(attended(query, key, value, mask), exact, strict=True):
        assert mine.isfinite().all()
        assert (mine.cpu().double() - expected).norm() < 0.02 * expected.norm()


def test_masked_groups_need_no_room_for_scores():
    query, key, value = (torch.randn(4, heads, 2048, 64, device="cuda").bfloat16() for heads in (16, 4, 4))
    mask = torch.ones(4, 1, 2048, 2048, dtype=torch.bool, device="cuda").tril()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended(query, key, value, mask)
    scores = 4 * 16 * 2048 * 2048 * 4
    assert torch.cuda.max_memory_allocated() - before < scores / 2
