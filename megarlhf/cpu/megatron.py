"""Unmodified megatron-core on a CPU rank, over gloo."""

from __future__ import annotations

import functools
import logging
import warnings

import torch
import torch.distributed as dist

from megarlhf.cpu import collectives, operations, stand_ins
from megarlhf.cpu.lean_imports import lean_imports


@functools.cache
def install() -> None:
    """Import megatron-core with everything it needs replaced. Must precede the first other import of megatron."""
    # TE and apex are absent, which the banner says once; torch's new names for collectives are megatron's affair.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", r"Please use DTensor instead", FutureWarning)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    stand_ins.install()
    dist.all_gather_into_tensor = collectives.all_gather_into_tensor  # megatron binds them when it is imported
    dist.reduce_scatter_tensor = collectives.reduce_scatter_tensor
    dist.all_reduce = collectives.all_reduce
    dist.all_to_all_single = collectives.all_to_all_single
    with lean_imports():  # megatron decorates functions with torch.compile while it is imported
        import megatron.core.jit
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
    megatron.core.jit.disable_jit_fuser()  # for what megatron imports later

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.mlp as mlp

    mlp.bias_swiglu_impl = lambda x, bias, *_: operations.swiglu(x if bias is None else x + bias)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns that the CPU generator moves inside a fork of the GPU's; here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
