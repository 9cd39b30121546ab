"""A single rank of megarlhf, of whichever checkout is in PYTHONPATH, for the processes that the benchmarks start."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Iterator
from pathlib import Path


def start():
    """Set the process up -> the Topology of one rank."""
    import torch

    from megarlhf.cluster import backend

    cuda = backend.on_cuda()  # first: it sets the driver's environment
    if not cuda:
        torch.set_num_threads(1)
    backend.install()
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return parallel.start(parallel.ParallelConfig())


def build(role: str, architecture, topology, *, rows: int, columns: int, dtype: str = "fp32", **options):
    """An Engine that computes so many full rows at once; older versions count rows instead of tokens."""
    from megarlhf.models.build import build

    tokens = "micro_batch_tokens" in inspect.signature(build).parameters
    size = {"micro_batch_tokens": rows * columns} if tokens else {"micro_batch_size": rows}
    return build(role, architecture, topology, dtype=dtype, **size, **options)


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Append the bytes that the block adds to the process at its peak."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not be reused without being counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, found = status("VmRSS"), []
    yield found
    found.append(status("VmHWM") - before)


def status(key: str) -> int:
    """Bytes from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
