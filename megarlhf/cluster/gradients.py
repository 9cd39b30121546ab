"""Where gradients lie: one memory for all models of a process, since no two are updated at once. On a GPU it is there
during an update alone, and sampling has it for caches."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel

from megarlhf.cluster import backend

_memory: dict[torch.dtype, torch.UntypedStorage] = {}
_sizes: dict[torch.dtype, int] = {}  # bytes that the largest model needs


def share(chunks: list[DistributedDataParallel]) -> None:
    """Move the gradients of a model's chunks, all zero, to the shared memory. Megatron's buffer, its buckets and the
    parameters' `main_grad` are views of it from then on. Before there is an optimizer."""
    used: dict[torch.dtype, int] = {}
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers):
        own = buffer.grad_data
        first = used.get(own.dtype, 0)
        used[own.dtype] = first + own.numel()
        storage = _memory.setdefault(own.dtype, own.new_empty(0).untyped_storage())
        _sizes[own.dtype] = max(_sizes.get(own.dtype, 0), used[own.dtype] * own.itemsize)
        storage.resize_(_sizes[own.dtype])
        shared = own.new_empty(0).set_(storage, first, own.shape, own.stride())
        buffer.grad_data = shared
        for bucket in buffer.buckets:
            bucket.grad_data = shared[bucket.offset : bucket.offset + bucket.grad_data.numel()]
        for parameter, (start, end, _) in buffer.param_index_map.items():
            parameter.main_grad = shared[start:end].view(parameter.shape)
    release()


def hold() -> None:
    """Before an update. What is in the memory is left from another."""
    for dtype, storage in _memory.items():
        if storage.nbytes() < _sizes[dtype]:
            storage.resize_(_sizes[dtype])


def release() -> None:
    """After an update."""
    if not backend.on_cuda():  # where to give memory back and ask again costs page faults
        return
    for storage in _memory.values():
        storage.resize_(0)
