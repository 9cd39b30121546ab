"""The device of this rank: which one it is, waiting for it, and its memory."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from megarlhf.cluster import cuda


@functools.cache
def on_cuda() -> bool:
    """Whether this rank computes on a GPU. The first call sets the environment of CUDA's driver and may start it;
    it makes no context."""
    return cuda.available(os.environ, torch.cuda.is_available)


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the device (for timers)."""
    if on_cuda():
        torch.cuda.synchronize()


def memory() -> tuple[int, int]:
    """(free, total) bytes of the device; (0, 0) on CPU, whose memory other programs use too."""
    return torch.cuda.mem_get_info() if on_cuda() else (0, 0)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around building and loading models: memory that this leaves free returns to the device, on CPU to the system."""
    if on_cuda():
        try:
            yield
        finally:
            torch.cuda.empty_cache()
        return
    from megarlhf.cpu import memory

    with memory.loading():
        yield


def trim() -> None:
    """Return the free memory of this process to the device, on CPU to the system."""
    if on_cuda():
        torch.cuda.empty_cache()
        return
    from megarlhf.cpu import memory

    memory.trim()


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether layers of `dtype` are TE's. It multiplies float32 in TF32, which differs by 1e-3 from the sampler."""
    if not on_cuda() or dtype == torch.float32:
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE
