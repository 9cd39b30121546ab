"""Collectives among CPU ranks of one machine, through shared memory.

gloo sends data between two processes of one machine over TCP: into the kernel and out of it, and two threads must wake
on the way, which takes longer than the sums themselves. Here a rank writes what others need into memory that all ranks
of the group have mapped, increments its counter, and waits until the others have incremented theirs.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

HALF = 1 << 20  # bytes that a rank writes at once: they stay in the caches
REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
_SPIN = 1e-3  # seconds of busy waiting, before a wait becomes a sleep
_LINE = 64  # bytes of a rank's counter: one cache line, so that no two ranks write to the same line
_NAME = "megarlhf"

_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = weakref.WeakKeyDictionary()


class SharedMemory:
    """The shared memory of one group: the ranks' counters, then (ranks, 2, HALF) bytes. Its collectives take flat
    tensors, all of one type.

    A rank writes to its two halves alternately. When all other counters have reached turn k + 1, the others have read
    what this rank wrote in turn k: so one counter a rank is enough.
    """

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap, processes: list[int]):
        self.rank, self.count = group.rank(), group.size()
        self.others = [rank for rank in range(self.count) if rank != self.rank]
        self.ranks = dist.get_process_group_ranks(group)
        counts = self.count * _LINE
        self.counts = memoryview(memory)[:counts].cast("q")[:: _LINE // 8]
        self.halves = torch.frombuffer(memory, dtype=torch.uint8, offset=counts).view(self.count, 2, HALF)
        self.turn = 0
        self.timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self.ends = {other: self._end_of(processes[other]) for other in self.others}

    def _end_of(self, process: int) -> select.poll:
        """Reports when another process has ended."""
        descriptor = os.pidfd_open(process)
        weakref.finalize(self, os.close, descriptor)
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        return end

    def all_gather(self, parts: list[Tensor]) -> None:
        """`parts`: one for each rank, all of the same length; this rank's own is filled in."""
        for cut, written in self._turns(parts[self.rank], 1):
            written[self.rank, 0].copy_(parts[self.rank][cut])
            self._barrier()
            for other in self.others:
                parts[other][cut].copy_(written[other, 0])

    def reduce_scatter(self, total: Tensor, parts: list[Tensor]) -> None:
        """Add the other ranks' parts for this rank to `total`, which is parts[rank] or a copy of it."""
        for cut, written in self._turns(total, self.count):
            for other in self.others:
                written[self.rank, other].copy_(parts[other][cut])
            self._barrier()
            for other in self.others:
                total[cut].add_(written[other, self.rank])

    def all_reduce(self, total: Tensor, reduction) -> None:
        """Sums in the order of the ranks, so that all have the same result, bit for bit."""
        for cut, written in self._turns(total, 1):
            written[self.rank, 0].copy_(total[cut])
            self._barrier()
            result = reduction(written[0, 0], written[1, 0], out=total[cut])
            for other in range(2, self.count):
                reduction(result, written[other, 0], out=result)

    def _turns(self, whole: Tensor, parts: int) -> Iterator[tuple[slice, Tensor]]:
        """(a slice of `whole`, the buffers for it: what each rank writes in this turn, (ranks, parts, n))."""
        most = HALF // whole.element_size() // parts
        for start in range(0, len(whole), most):
            length = min(most, len(whole) - start)
            half = self.halves[:, self.turn % 2].view(whole.dtype)
            yield slice(start, start + length), half[:, : parts * length].unflatten(1, (parts, length))

    def _barrier(self) -> None:
        """A barrier: after it, each rank can read what the others have written."""
        self.turn += 1
        self.counts[self.rank] = self.turn
        for other in self.others:
            if self.counts[other] < self.turn:
                self._wait_for(other)

    def _wait_for(self, other: int) -> None:
        began = time.monotonic()
        while self.counts[other] < self.turn:
            waited = time.monotonic() - began
            if waited < _SPIN:
                os.sched_yield()
            elif self.ends[other].poll(1) and self.counts[other] < self.turn:
                raise dist.DistBackendError(f"rank {self.ranks[other]} has ended in the middle of a collective")
            elif waited > self.timeout:
                raise dist.DistBackendError(f"rank {self.ranks[other]} did not come to a collective: {waited:.0f} s")


def of_group(group: dist.ProcessGroup | None) -> SharedMemory | None:
    """The shared memory of `group`, created at the first call, which is a collective. None where its ranks cannot share
    memory, as on several machines."""
    group = group or dist.group.WORLD
    if group not in _of_groups:
        _of_groups[group] = _make(group) if group.size() > 1 else None
    return _of_groups[group]


def _make(group: dist.ProcessGroup) -> SharedMemory | None:
    """The first rank creates the memory, a file without a name, and sends its process id and descriptor."""
    size = group.size() * (_LINE + 2 * HALF)
    box = [_offer(size) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[0] is None:
        return None
    memory = _attached(*box[0], size)
    processes = [None] * group.size()
    dist.all_gather_object(processes, os.getpid() if memory is not None else None, group=group)
    if group.rank() == 0:
        os.close(box[0][1])
    return SharedMemory(group, memory, processes) if None not in processes else None


def _offer(size: int) -> tuple[int, int, bytes] | None:
    """The arguments of `_attached`. None where the kernel (before 5.3) has no descriptors of processes, or where the
    processor may reorder two writes as others see them (all but x86)."""
    if platform.machine() != "x86_64":
        return None
    try:
        os.close(os.pidfd_open(os.getpid()))
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, size)
    except (OSError, AttributeError):
        return None
    key = os.urandom(16)
    os.pwrite(descriptor, key, size - len(key))
    return os.getpid(), descriptor, key


def _attached(pid: int, descriptor: int, key: bytes, size: int) -> mmap.mmap | None:
    """The memory that process `pid` offers; None if it is on another machine, or this process may not open it."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        handle = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(handle, size) if os.fstat(handle).st_size == size else None
        finally:
            os.close(handle)
    except OSError:
        return None
    return memory if memory is not None and memory[-len(key) :] == key else None
