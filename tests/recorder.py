"""A CUDA graph's recording and replay, on a CPU: `Recording` stands where `cluster/cuda_graphs.py` has a graph.

It records the tensor operations of one call and repeats them on the same memory: whatever the host computed meanwhile
stays what it was. It refuses what a graph's capture refuses: reading a value on the host, and a result whose shape
depends on values.

`Recording.cost` counts: operations (each at least one kernel; views none) and bytes that they read and write. Triton
kernels that run in the interpreter are counted by their launches, and by the elements that they load and store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tests.interpreter import Launch

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal")


@dataclass
class Operation:
    function: torch._ops.OpOverload
    arguments: tuple
    options: dict
    results: object

    @property
    def name(self) -> str:
        return self.function._schema.name.partition("::")[2]

    @property
    def is_view(self) -> bool:
        """Whether it computes nothing: its results are views of its arguments."""
        returns = self.function._schema.returns
        if self.name in ("_unsafe_view", "detach", "_reshape_alias", "lift_fresh"):
            return True
        return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)

    @property
    def writes(self) -> bool:
        """Whether it writes to an argument."""
        return any(x.alias_info is not None and x.alias_info.is_write for x in self.function._schema.arguments)

    def again(self) -> None:
        found = self.function(*self.arguments, **self.options)
        if not self.writes:
            for old, new in zip(tensors(self.results), tensors(found), strict=True):
                old.copy_(new)

    @property
    def num_bytes(self) -> int:
        """Read and written. Of elements that an expanded view repeats, one; of an indexed store or a lookup, what it
        moves; of a fill, what it writes."""
        read = [x for x in tensors((self.arguments, self.options))]
        written = [] if self.writes else tensors(self.results)
        if self.name in ("index_put_", "index_copy_", "_index_put_impl_"):
            return 2 * size(read[-1])
        if self.name in ("index", "embedding", "gather", "index_select"):
            return 2 * sum(map(size, written))
        return sum(map(size, read + written))


def tensors(values) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def size(x: Tensor) -> int:
    return x.element_size() * max(1, torch.Size(n for n, step in zip(x.shape, x.stride(), strict=True) if step).numel())


@dataclass
class Fused:
    """Several operations that are one kernel on a GPU: it reads the arguments and writes the results."""

    call: Callable[[], object]
    read: list[Tensor]
    written: list[Tensor]

    def again(self) -> None:
        for old, new in zip(self.written, tensors(self.call()), strict=True):
            old.copy_(new)

    @property
    def num_bytes(self) -> int:
        return sum(map(size, self.read + self.written))


def as_one(function, ignore: tuple[int, ...] = ()):
    """`function`, whose operations are recorded as one. `ignore`: arguments that are not counted as read."""

    def call(*args, **kwargs):
        recorder = _Recorder.active
        before = len(recorder.operations) if recorder else 0
        results = function(*args, **kwargs)
        if recorder:
            read = tensors([x for place, x in enumerate(args) if place not in ignore])
            recorder.operations[before:] = [Fused(partial(function, *args, **kwargs), read, tensors(results))]
        return results

    return call


class _Recorder(TorchDispatchMode):
    active: _Recorder | None = None

    def __init__(self):
        super().__init__()
        self.operations: list[Operation | Fused | Launch] = []

    def __enter__(self):
        _Recorder.active = self
        return super().__enter__()

    def __exit__(self, *error):
        _Recorder.active = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = Operation(function, args, kwargs, function(*args, **kwargs))
        assert operation.name not in REFUSED, f"{operation.name} cannot be recorded"
        if not operation.is_view and not operation.name.startswith(("empty", "new_empty")):
            self.operations.append(operation)
        return operation.results


class Recording:
    """As `cuda_graphs._Captured`: two calls as they are, the third records, later ones repeat it."""

    def __init__(self, step, kernels: bool = False):
        """`kernels`: the step launches Triton kernels in the interpreter."""
        self.step, self.calls, self.operations, self.kernels = step, 0, [], kernels

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 2:
            self.step()
        elif self.calls == 3:
            with _Recorder() as recorder, self._launches(recorder):
                self.step()
            self.operations += recorder.operations
        else:
            for operation in self.operations:
                operation.again()

    def _launches(self, recorder: _Recorder) -> contextlib.AbstractContextManager[None]:
        if not self.kernels:
            return contextlib.nullcontext()
        from tests import interpreter

        return interpreter.launches(recorder.operations.append)

    @property
    def cost(self) -> tuple[int, int]:
        """(operations, bytes) of the recorded step."""
        return len(self.operations), sum(operation.num_bytes for operation in self.operations)
