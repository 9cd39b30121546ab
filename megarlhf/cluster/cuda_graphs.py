"""Steps recorded as CUDA graphs: a decode step launches hundreds of small kernels, which takes longer than they run.

What a recorded step allocates comes from a pool of its own, whose memory no one else can use. Steps that are recorded
`together` share one pool, so that it is as large as the largest of them needs. That is right for steps that run one
after the other on one stream, in any order, and allocate nothing that is read after their end: their results go into
tensors that were there before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from megarlhf.cluster.device import on_cuda


def captures() -> bool:
    """Whether `captured` records: then the tensors of its step must keep their addresses."""
    return on_cuda()


_pool: tuple[int, int] | None = None  # of the steps that are recorded together


@contextlib.contextmanager
def together() -> Iterator[None]:
    """The steps that are given to `captured` within the context share a pool. torch frees it with the last of their
    graphs, and does not take it again: steps that come later need a new context."""
    global _pool
    _pool = torch.cuda.graph_pool_handle() if on_cuda() else None
    try:
        yield
    finally:
        _pool = None


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
        self.step, self.pool = step, _pool
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

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
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"):
                self.step()
        self.graph.replay()
