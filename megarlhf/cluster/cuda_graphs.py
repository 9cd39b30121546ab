"""Steps recorded as CUDA graphs: a decode step launches hundreds of small kernels, which takes longer than they run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megarlhf.cluster.device import on_cuda


def captures() -> bool:
    """Whether `captured` records: then the tensors of its step must keep their addresses."""
    return on_cuda()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """`step`, which works on tensors with fixed addresses, as a CUDA graph: the first two calls run it as it is,
    since libraries tune and allocate then; the third records it. On CPU, `step` itself."""
    return _Captured(step) if captures() else step


@functools.cache
def _warm_up_stream() -> torch.cuda.Stream:
    """One for all: torch keeps a workspace of cuBLAS for each stream."""
    return torch.cuda.Stream()


class _Captured:
    def __init__(self, step: Callable[[], None]):
        self.step = step
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 2:  # not on the default stream, which cannot be recorded
            stream = _warm_up_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.calls == 3:
            # thread_local: NCCL's watchdog thread queries events meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()
        self.graph.replay()
