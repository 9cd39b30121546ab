"""RMSNorm of all heads of a projection as one vector, split over the tensor-parallel ranks (OLMo 2's queries and
keys)."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megarlhf.cluster import backend, operations


class JointNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the channels of all ranks. `channels`: of this rank; its weight is
    the same part of the whole weight."""

    def __init__(self, config, channels: int, tp_group: ProcessGroup):
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.weight = nn.Parameter(torch.ones(channels, dtype=config.params_dtype, device=backend.device()))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] of this rank -> the same."""
        if self.tp_group.size() == 1:
            return operations.normalize(x, self.weight, None, self.config)
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        # Every rank needs the whole sum, and every rank's output has a gradient for it: both directions are sums.
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        mean = squares / (x.shape[-1] * self.tp_group.size())
        weight = self.weight.float() + self.config.layernorm_zero_centered_gamma
        return (wide * (mean + self.config.layernorm_epsilon).rsqrt() * weight).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
