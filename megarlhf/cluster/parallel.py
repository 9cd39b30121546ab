"""ParallelConfig -> Topology: sizes, this rank's place, process groups. The only module that reads Megatron's global
state (`parallel_state`): everything else takes its groups from the Topology."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarlhf.cluster import backend
from megarlhf.config import UserError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class ParallelConfig:
    """The layout of a model over ranks. The data-parallel size is the number of ranks divided by the model's ranks."""

    tensor: int = 1  # ranks that share each layer's matrices
    pipeline: int = 1  # ranks that hold consecutive layers
    virtual_pipeline: int | None = None  # interleaved schedule: this many chunks of layers a pipeline rank
    sequence: bool = False  # split activations along the sequence between the tensor-parallel regions
    distributed_optimizer: bool = True  # shard optimizer states and fp32 weights over the data-parallel ranks
    overlap_grad_reduce: bool = False  # reduce gradients while the backward pass still runs
    overlap_param_gather: bool = False  # gather weights while the next forward pass runs (distributed optimizer)
    context: int = 1  # context parallelism: only 1 is supported
    expert: int = 1  # ranks that share a layer's experts, each with whole ones: of tensor x data-parallel ranks

    def __post_init__(self):
        for name in ("tensor", "pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.context != 1:
            raise ValueError("context: context parallelism is not supported yet; set it to 1")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence: splits the sequence over tensor-parallel ranks; set tensor > 1 or sequence: false"
            )
        if self.virtual_pipeline is not None and (self.pipeline == 1 or self.virtual_pipeline < 2):
            raise ValueError(
                "virtual_pipeline: the interleaved schedule needs pipeline > 1 and at least 2 chunks a rank"
            )
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather: needs distributed_optimizer and overlap_grad_reduce; set both to true"
            )

    @property
    def model(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def chunks(self) -> int:
        """Model chunks a pipeline rank holds."""
        return self.virtual_pipeline or 1

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches that the schedule runs must be a multiple of this."""
        return self.pipeline if self.virtual_pipeline else 1

    def data(self, world_size: int) -> int:
        """The data-parallel size that `world_size` ranks give."""
        if world_size % self.model:
            raise UserError(
                f"parallel: {world_size} ranks cannot be divided by tensor {self.tensor} x pipeline {self.pipeline} "
                f"= {self.model}; start a multiple of {self.model} ranks or change the sizes"
            )
        if (world_size // self.pipeline) % self.expert:
            raise UserError(
                f"parallel.expert: the {world_size // self.pipeline} ranks of a pipeline stage cannot be divided by "
                f"{self.expert}; start other ranks or change the size"
            )
        return world_size // self.model


@dataclass(frozen=True)
class Topology:
    """This rank's place in the layout, with the groups that modules pass on explicitly."""

    parallel: ParallelConfig
    rank: int
    world_size: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    data_size: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    ring_group: dist.ProcessGroup | None  # first and last stage: sampled tokens go back; None on all other stages
    groups: ProcessGroupCollection  # all groups under Megatron's names, for Megatron's own modules

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.parallel.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline, which broadcasts what only it computes."""
        return dist.get_global_rank(self.pipeline_group, self.parallel.pipeline - 1)


def start(parallel: ParallelConfig) -> Topology:
    """Create Megatron's process groups over the default group, with its time-out. Collective; call once after
    `backend.join`."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    world_size = dist.get_world_size()
    data_size = parallel.data(world_size)
    timeout = backend.timeout()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # experts are never cut (models/experts.py)
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        # Megatron gathers some kinds of checkpoints over gloo, which we do not use. On GPUs gloo can fail to connect.
        create_gloo_process_groups=False,
    )
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    return Topology(
        parallel=parallel,
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=data_size,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=pipeline_group,
        data_group=parallel_state.get_data_parallel_group(),
        ring_group=_ring(pipeline_group, timeout) if parallel.pipeline > 1 else None,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def stop() -> None:
    """Forget Megatron's groups, so that `start` can make others. The default process group remains."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def seed_generators(topology: Topology, seed: int) -> None:
    """Reset Megatron's generators of random numbers. Those for dropout differ between tensor-parallel ranks."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    tp, ep, etp = (group.rank() for group in (topology.groups.tp, topology.groups.ep, topology.groups.expt_tp))
    model_parallel_cuda_manual_seed(seed, tp_rank=tp, ep_rank=ep, etp_rank=etp, force_reset_rng=True)


def _ring(pipeline_group: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """This rank's group of the first and the last stage of its pipeline; None on other stages. Collective."""
    stages = dist.get_process_group_ranks(pipeline_group)
    ends = [None] * dist.get_world_size()
    dist.all_gather_object(ends, (stages[0], stages[-1]))
    ring, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in sorted(set(ends))], timeout=timeout)
    return ring
