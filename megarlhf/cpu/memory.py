"""glibc's malloc, so that page faults cost little in a step and free memory returns to the system between phases."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)

_spare: dict[torch.dtype, torch.UntypedStorage] = {}


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around building and loading models: memory that this leaves free returns to the system."""
    _map_large_blocks(True)
    try:
        yield
    finally:
        trim()
        _map_large_blocks(False)


def trim() -> None:
    """Return malloc's free memory to the system: it is in pieces that the next phase could not use."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _map_large_blocks(separately: bool) -> None:
    """Whether malloc maps each large block separately. Then a block returns to the system when it is freed, which is
    good while models are loaded; but each costs page faults, which the temporaries of a step should not."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**18 if separately else 2**24)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**18 if separately else 2**28)  # free memory that malloc keeps


def take(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An empty (rows, columns) tensor, in the memory that `give` kept last if that is large enough. malloc returns
    blocks of this size to the system, and the page faults of a new one take a quarter of the time of a GEMM into it."""
    if dtype in _spare:
        storage = _spare.pop(dtype)
        if storage.nbytes() >= rows * columns * dtype.itemsize:
            return torch.empty(0, dtype=dtype).set_(storage, 0, (rows, columns))
    return torch.empty(rows, columns, dtype=dtype)


def give(tensor: Tensor) -> None:
    """Keep the memory of `tensor`, which nobody uses any more, for the next `take`."""
    _spare[tensor.dtype] = tensor.untyped_storage()
