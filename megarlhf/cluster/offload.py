"""Tensors that are on the device only while something uses them, and in host memory otherwise.

They keep their storages: one that has left has no bytes on the device, and its tensors and all views of them, such as
megatron's buckets, are valid again when it is back. CPU ranks have no separate device. There the same copies are made
in one memory: they take time and save nothing, but the code and its accounting are those of a GPU.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from megarlhf.cluster import residency
from megarlhf.cluster.device import on_cuda

Named = Iterable[tuple[str, Tensor]]


@dataclass
class _Kept:
    """One storage."""

    name: str  # of its first tensor
    storage: UntypedStorage
    host: Tensor  # its bytes
    digest: Tensor  # of the bytes that left


class Offloaded:
    """The tensors that `tensors()` names when they leave. They leave at once, and return for `present`."""

    def __init__(self, name: str, tensors: Callable[[], Named]):
        self.name, self.tensors = name, tensors
        self.kept: list[_Kept] = []
        self.users = 0
        self.written = True  # since they left
        self._leave()

    @contextlib.contextmanager
    def present(self, *, written: bool = False) -> Iterator[None]:
        """All tensors on the device. May be nested. `written`: they change meanwhile; otherwise nothing is copied when
        they leave."""
        if self.users == 0:
            self._return()
        self.users += 1
        self.written |= written
        try:
            yield
        finally:
            self.users -= 1
            if self.users == 0:
                self._leave()

    def changed(self) -> list[str]:
        """The names of storages whose bytes come back other than they left. Call it while they are away."""
        assert self.users == 0
        with self.present():
            return [kept.name for kept in self.kept if _digest(_bytes(kept.storage)) != kept.digest]

    def _leave(self) -> None:
        if self.written:
            before = {kept.name: kept.host for kept in self.kept}  # pinning memory takes long
            self.kept = []
            for name, storage in distinct(self.tensors()):
                data, host = _bytes(storage), before.get(name)
                if host is None or len(host) != len(data):
                    host = torch.empty(len(data), dtype=torch.uint8, pin_memory=on_cuda())
                # Later work of this stream finds the memory free only after the copy.
                host.copy_(data, non_blocking=True)
                self.kept.append(_Kept(name, storage, host, _digest(data)))
        self.written = False
        for kept in self.kept:
            kept.storage.resize_(0)

    def _return(self) -> None:
        for kept in self.kept:
            kept.storage.resize_(len(kept.host))
            _restore(kept)


class Hosted(abc.ABC):
    """Something with tensors of several kinds, each of which may be kept in host memory."""

    role: str  # for messages

    def __init__(self):
        self.offloaded: dict[str, Offloaded] = {}  # by kind

    @property
    @abc.abstractmethod
    def parts(self) -> dict[str, Callable[[], Named]]:
        """{kind: its named tensors}: "weights" and, of what trains, "optimizer"."""

    def keep_on_host(self, kind: str) -> None:
        """Keep these tensors in host memory, and on the device only while they are used."""
        self.offloaded[kind] = Offloaded(f"{self.role}'s {kind}", self.parts[kind])

    def is_on_host(self, kind: str) -> bool:
        return kind in self.offloaded

    @contextlib.contextmanager
    def present(self, *kinds: str, written: bool = False) -> Iterator[None]:
        """What is kept on the host, on the device: these kinds of it, by default all. `written`: they change."""
        with contextlib.ExitStack() as stack:
            for kind in kinds or self.offloaded:
                if kind in self.offloaded:
                    stack.enter_context(self.offloaded[kind].present(written=written))
            residency.note()
            yield

    def resident(self) -> dict[str, int]:
        """{kind: bytes on the device now}"""
        return {kind: sum(storage.nbytes() for _, storage in distinct(named())) for kind, named in self.parts.items()}


def named_weights(modules: list[torch.nn.Module], owns: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers (weights in 4 bits, constants of heads) whose names `owns` admits, each with the
    number of its module in its name."""
    for i, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if owns(name):
                yield f"{i}.{name}", tensor


def digests(tensors: Iterable[Tensor]) -> Tensor:
    """(n,) int64: a digest of the bits of each of n contiguous tensors, on the host."""
    found = [_digest(tensor.detach().reshape(-1).view(torch.uint8)) for tensor in tensors]
    return torch.stack(found).cpu() if found else torch.empty(0, dtype=torch.int64)


def _restore(kept: _Kept) -> None:
    _bytes(kept.storage).copy_(kept.host, non_blocking=True)


def distinct(tensors: Named) -> Iterator[tuple[str, UntypedStorage]]:
    """(name of its first tensor, storage) of each storage that has bytes."""
    found = set()
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found.add(storage.data_ptr())
            yield name, storage


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _digest(data: Tensor) -> Tensor:
    """The sum of the 32-bit words of (n,) bytes, and of the bytes after the last: a scalar on their device."""
    whole = len(data) // 4 * 4
    return data[:whole].view(torch.int32).sum(dtype=torch.int64) + data[whole:].sum(dtype=torch.int64)
