"""The differences between CPU and CUDA for most files: the device, megatron on it, and the process group.

On CUDA: NCCL, Transformer Engine layers (bfloat16) and TE/apex fused Adam where they import; `cuda.py` has what must be
right before that. On CPU: unmodified megatron-core over gloo, by way of the directory megarlhf/cpu. Code elsewhere asks
this module, `operations` or `cuda_graphs`, and never asks for a device type itself.

`install()` is called once by a program, before megatron is first imported; it is never called at import.
"""

from __future__ import annotations

import contextlib
import os

import torch

from megarlhf.cluster import cuda, fused_adam, operations, weight_gradients
from megarlhf.cluster.device import (  # noqa: F401 (this module's names, too)
    device,
    loading,
    memory,
    on_cuda,
    synchronize,
    trim,
    uses_transformer_engine,
)
from megarlhf.cluster.process_group import join, open_store, timeout  # noqa: F401


def install() -> None:
    """Make megatron-core importable and runnable here. Idempotent; must precede the first import of megatron."""
    cuda.hide_unusable(on_cuda())
    weight_gradients.install()
    if on_cuda():
        # NVIDIA's images turn TF32 on. Its float32 products have 10 bits: sampler and trainer would not agree.
        torch.set_float32_matmul_precision("highest")
        cuda.load_transformer_engine()
        import megatron.core  # noqa: F401
    else:
        from megarlhf.cpu.megatron import install as install_on_cpu

        install_on_cpu()
    operations.rotate_in_float32()
    fused_adam.install()


def lean_imports() -> contextlib.AbstractContextManager[None]:
    """Around imports of libraries that prepare for GPUs and compilers: on a CPU without Triton and torch's compiler."""
    if on_cuda():
        return contextlib.nullcontext()
    from megarlhf.cpu.lean_imports import lean_imports

    return lean_imports()


def remarks(dtype: torch.dtype, key: str) -> list[str]:
    """What a user should know about models of `dtype` on this device; `key`: what sets the dtype."""
    if on_cuda() or dtype == torch.float32:
        return []
    from megarlhf.cpu.speed import bf16_to_fp32

    times = bf16_to_fp32()
    figure = f"{times:.1f} times the time of fp32 here" if times >= 1.05 else "on this one as fast as fp32, or faster"
    return [f"{key}: bf16 is slow on most CPUs, {figure}; on a CPU, {key}=fp32 is the usual choice"]


def describe(dtype: torch.dtype) -> dict[str, str]:
    """What was chosen for models of `dtype`, for the start-up banner."""
    import megatron.core.optimizer

    environment = {}
    if on_cuda():
        environment = {"environment": ", ".join(f"{x}={os.environ[x]}" for x in cuda.ENVIRONMENT if x in os.environ)}
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"cpu, {torch.get_num_threads()} thread(s) a rank"
    return {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "device": hardware,
        "collectives": "nccl" if on_cuda() else "gloo; shared memory on one machine",
        "layers": "transformer-engine" if uses_transformer_engine(dtype) else "megatron local",
        "attention": "scaled_dot_product_attention",
        "adam": f"{megatron.core.optimizer.Adam.__module__.partition('.')[0]} FusedAdam",
        "gradient accumulation": f"fused, {weight_gradients.kind()}",
        **environment,
    }
