"""Triton's interpreter as a GPU would compute, and what its kernels launch and move. TRITON_INTERPRET=1 must be set."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter


class Builder(interpreter.InterpreterBuilder):
    """It holds bfloat16 as integers, and by itself multiplies matrices of them as such, and cuts off what does not fit,
    where a GPU rounds to nearest."""

    touched: dict[tuple[bool, int], list[np.ndarray]] | None = None  # (written, bytes of an element) -> addresses

    def create_dot(self, a, b, *options):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return super().create_dot(a, b, *options)

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return super().cast_impl(src, dst_type)
        rounded = torch.from_numpy(np.array(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def create_masked_load(self, ptrs, mask, *options):
        self._touch(False, ptrs, mask)
        return super().create_masked_load(ptrs, mask, *options)

    def create_masked_store(self, ptrs, value, mask, *options):
        self._touch(True, ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *options)

    def _touch(self, written: bool, ptrs, mask) -> None:
        if self.touched is not None:
            addresses = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
            size = ptrs.get_element_ty().primitive_bitwidth // 8
            self.touched[written, size].append(addresses[np.broadcast_to(mask.data, addresses.shape)].ravel())


def mend() -> None:
    interpreter.interpreter_builder.__class__ = Builder


@dataclass
class Launch:
    """A kernel's launch, to repeat. `num_bytes`: of the elements that it read and of those that it wrote, each once:
    what several programs read, such as a norm's weight, comes from a cache."""

    again: Callable[[], object]
    num_bytes: int


@contextlib.contextmanager
def launches(record: Callable[[Launch], object]) -> Iterator[None]:
    """Give `record` every launch inside, and hide its operations from torch's dispatch modes."""
    mend()
    plain, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder

    def call(self, *args, **kwargs):
        def again():
            with _disable_current_modes():
                plain(self, *args, **kwargs)

        builder.touched = defaultdict(list)
        again()
        touched, builder.touched = builder.touched, None
        moved = sum(size * len(np.unique(np.concatenate(parts))) for (_, size), parts in touched.items())
        record(Launch(again, moved))

    interpreter.GridExecutor.__call__ = call
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = plain
