"""One gradient buffer for all models of a process: no two are updated at the same time. On a GPU it exists during an
update alone, so that sampling can use its memory for caches."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel

from megarlhf.cluster import backend

_memory: dict[torch.dtype, torch.UntypedStorage] = {}
_sizes: dict[torch.dtype, int] = {}  # bytes that the largest model needs
_in_use = False


def share(chunks: list[DistributedDataParallel]) -> None:
    """Move the gradients of a model's chunks, all zero, to the shared buffer. Megatron's buffer, its buckets and the
    parameters' `main_grad` are views of it from then on. Call it before the optimizer is built."""
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
    free()


def allocate() -> None:
    """Before an update: allocate the shared buffer. Its contents are undefined."""
    global _in_use
    _in_use = True
    for dtype, storage in _memory.items():
        if storage.nbytes() < _sizes[dtype]:
            storage.resize_(_sizes[dtype])


def free() -> None:
    """After an update: free the shared buffer. A CPU keeps it, since the page faults of a new one cost time."""
    global _in_use
    _in_use = False
    if not backend.on_cuda():
        return
    for storage in _memory.values():
        storage.resize_(0)


def resident() -> int:
    """Bytes of the shared buffer that are in use."""
    return sum(storage.nbytes() for storage in _memory.values()) if _in_use else 0
