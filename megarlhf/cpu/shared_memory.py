"""Collectives among CPU ranks of one machine, through memory that they share.

gloo carries what two processes of one machine say over TCP: into the kernel and out of it, with two threads to be woken
on the way, which takes longer than the sums themselves. Here a rank writes what others need into memory that the whole
group has mapped, counts up, and waits until the others have counted up too.
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

HALF = 1 << 20  # bytes that a rank says at once: they stay in the caches
REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
_SPIN = 1e-3  # seconds of looking again and again, before a wait becomes a sleep
_LINE = 64  # bytes of a rank's count: a line of a cache, so that two ranks do not write to the same
_NAME = "megarlhf"

_rooms: weakref.WeakKeyDictionary[dist.ProcessGroup, Room | None] = weakref.WeakKeyDictionary()


class Room:
    """The shared memory of one group: the ranks' counts, then (ranks, 2, HALF) bytes. Its collectives are on flat
    tensors of any one type.

    A rank has two halves and writes to them by turns. Who has seen all others reach turn k + 1 knows that they have
    read what it wrote in turn k: so one count a turn is enough.
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
        """Says when another process has ended."""
        descriptor = os.pidfd_open(process)
        weakref.finalize(self, os.close, descriptor)
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        return end

    def all_gather(self, parts: list[Tensor]) -> None:
        """`parts`: of every rank one, all of the same length; this rank's own is there."""
        for cut, said in self._turns(parts[self.rank], 1):
            said[self.rank, 0].copy_(parts[self.rank][cut])
            self._meet()
            for other in self.others:
                parts[other][cut].copy_(said[other, 0])

    def reduce_scatter(self, total: Tensor, parts: list[Tensor]) -> None:
        """Add to `total`, which is parts[rank] or a copy of it, what the others have for this rank."""
        for cut, said in self._turns(total, self.count):
            for other in self.others:
                said[self.rank, other].copy_(parts[other][cut])
            self._meet()
            for other in self.others:
                total[cut].add_(said[other, self.rank])

    def all_reduce(self, total: Tensor, reduction) -> None:
        """In the order of the ranks: the result is the same, bit for bit, on all."""
        for cut, said in self._turns(total, 1):
            said[self.rank, 0].copy_(total[cut])
            self._meet()
            result = reduction(said[0, 0], said[1, 0], out=total[cut])
            for other in range(2, self.count):
                reduction(result, said[other, 0], out=result)

    def _turns(self, whole: Tensor, parts: int) -> Iterator[tuple[slice, Tensor]]:
        """(a stretch of `whole`, room for it: what each rank says in this turn in `parts` parts, (ranks, parts, n))."""
        most = HALF // whole.element_size() // parts
        for start in range(0, len(whole), most):
            length = min(most, len(whole) - start)
            half = self.halves[:, self.turn % 2].view(whole.dtype)
            yield slice(start, start + length), half[:, : parts * length].unflatten(1, (parts, length))

    def _meet(self) -> None:
        """What this rank has written can be read by the others, and theirs by this one."""
        self.turn += 1
        self.counts[self.rank] = self.turn
        for other in self.others:
            if self.counts[other] < self.turn:
                self._await(other)

    def _await(self, other: int) -> None:
        began = time.monotonic()
        while self.counts[other] < self.turn:
            waited = time.monotonic() - began
            if waited < _SPIN:
                os.sched_yield()
            elif self.ends[other].poll(1) and self.counts[other] < self.turn:
                raise dist.DistBackendError(f"rank {self.ranks[other]} has ended in the middle of a collective")
            elif waited > self.timeout:
                raise dist.DistBackendError(f"rank {self.ranks[other]} did not come to a collective: {waited:.0f} s")


def room(group: dist.ProcessGroup | None) -> Room | None:
    """The group's, made at the first call, which is a collective; None where its ranks cannot share memory, as on
    several machines."""
    group = group or dist.group.WORLD
    if group not in _rooms:
        _rooms[group] = _make(group) if group.size() > 1 else None
    return _rooms[group]


def _make(group: dist.ProcessGroup) -> Room | None:
    """Its first rank makes the memory, a file without a name, and tells the others its process and descriptor."""
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
    return Room(group, memory, processes) if None not in processes else None


def _offer(size: int) -> tuple[int, int, bytes] | None:
    """What `_attached` asks for. None where the kernel (before 5.3) has no descriptors of processes, or the processor
    may show others two writes in another order than they were made (not x86)."""
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
    """The memory that process `pid` offers; None if it is not of this machine, or must not be seen from here."""
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
