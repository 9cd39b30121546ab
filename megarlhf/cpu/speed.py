"""How slow bf16 is on this CPU: few have instructions for it, and without them torch converts every number."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F


def bf16_to_fp32() -> float:
    """The time of a small MLP and a softmax, forward and backward, in bf16 over that in fp32; some milliseconds."""
    return _seconds(torch.bfloat16) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype, rows: int = 128, size: int = 128, tries: int = 5) -> float:
    """The shortest of a few."""
    wide = torch.full((4 * size, size), 0.01, dtype=dtype, requires_grad=True)
    best = float("inf")
    for _ in range(tries + 1):  # the first one warms up
        x = torch.full((rows, size), 0.5, dtype=dtype, requires_grad=True)
        started = time.perf_counter()
        y = F.silu(x @ wide.t()) @ wide
        y = F.layer_norm(y, (size,)).log_softmax(-1)
        y.sum().backward()
        best = min(best, time.perf_counter() - started)
    return best
