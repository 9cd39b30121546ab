"""Optimizers and schedules. The learning rate and epsilon are pure functions of the step, so a resumed run needs no
scheduler state."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from megarlhf.config import UserError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megarlhf.cluster.parallel import Topology


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its schedule. Weight decay is not applied to biases and norms."""

    name: Literal["adamw", "adam", "tf_adam"] = "adamw"  # tf_adam: TensorFlow's epsilon (detail P12)
    lr: float = 1e-5  # peak
    min_lr: float = 0.0  # where linear and cosine end
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0  # global norm; 0 turns clipping off
    patience: int = 3  # an update whose gradients are not finite is skipped; so many in a row stop the run

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr: must be positive, not {self.lr}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr: must be between 0 and lr {self.lr}, not {self.min_lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: must be two numbers in [0, 1), not {list(self.betas)}")
        for name in ("warmup_steps", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        if self.eps <= 0:
            raise ValueError(f"eps: must be positive, not {self.eps}")
        if self.patience < 1:
            raise ValueError(f"patience: must be at least 1, not {self.patience}")

    def check_steps(self, total_steps: int, key: str = "optimizer") -> None:
        """Refuse (UserError) a warm-up that is longer than a run of `total_steps` updates. `key` names the section."""
        if self.warmup_steps > total_steps:
            raise UserError(
                f"{key}.warmup_steps: {self.warmup_steps} are more than the run's {total_steps} updates, so the rate "
                "would never reach lr; lower it or train longer"
            )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate for update `step` (from 0) of `total_steps`: linear warm-up to lr, then the schedule down to min_lr,
    which update number `total_steps` would reach."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * shape


def epsilon(config: OptimizerConfig, step: int) -> float:
    """Adam's epsilon for the update after `step` others.

    TensorFlow 1 adds it to the uncorrected sqrt(v): lr_t m / (sqrt(v) + eps), lr_t = lr sqrt(1 - b2^t) / (1 - b1^t).
    That equals the usual corrected update with eps / sqrt(1 - b2^t) in place of eps, which any fused Adam computes.
    """
    if config.name != "tf_adam":
        return config.eps
    return config.eps / math.sqrt(1 - config.betas[1] ** (step + 1))


def build(
    chunks: list[torch.nn.Module], config: OptimizerConfig, topology: Topology, dtype: torch.dtype
) -> MegatronOptimizer:
    """megatron's optimizer over DDP-wrapped chunks: fp32 main weights under bf16, sharded if the layout says so."""
    from megatron.core.optimizer import OptimizerConfig as MegatronConfig
    from megatron.core.optimizer import get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        MegatronConfig(
            optimizer="adam",
            decoupled_weight_decay=config.name == "adamw",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=topology.parallel.distributed_optimizer,
            overlap_param_gather=topology.parallel.overlap_param_gather,
        ),
        chunks,
        use_gloo_process_groups=False,  # there are none (cluster/parallel.py)
        pg_collection=topology.groups,
    )
    for part in optimizer.chained_optimizers:
        # The moments now, not at the first step: out of memory shows before hours of work, and a run that is told to
        # leave before its first step can be saved.
        part.init_state_fn(part.optimizer, part.config)
    return optimizer


def set_step(optimizer: MegatronOptimizer, config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Write learning rate, epsilon and weight decay of update `step` (from 0) of `total_steps` into the parameter
    groups; returns the learning rate.

    Epsilon depends on Adam's own count, which skipped updates do not raise. Weight decay is written too: megatron gives
    a group only a factor, 0 for biases and norms, and leaves the product to its scheduler, which is not used here. A
    resumed optimizer has the groups of its checkpoint.
    """
    rate = learning_rate(config, step, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["eps"] = epsilon(config, int(group.get("step", 0)))  # no step: before the first, or without parameters
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return rate


@contextlib.contextmanager
def indexed_without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Wrap `sharded_state_dict` for loading in this; otherwise the distributed optimizer looks for a parameter's state
    in the wrong place (megatron-core 0.16.1). It joins the buckets of a buffer without the padding at their ends, and
    then looks each parameter up at its offset in the padded buffer. A buffer has several buckets with tied embeddings
    and pipeline stages, and where reductions overlap."""
    buffers = [buffer for part in optimizer.chained_optimizers for buffer in getattr(part, "buffers", ())]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer, index in zip(buffers, padded, strict=True):
        padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
        before = [sum(padding[:i]) for i in range(len(padding))]
        buffer.param_index_map = {
            parameter: (start - before[bucket], end - before[bucket], bucket)
            for parameter, (start, end, bucket) in index.items()
        }
    try:
        yield
    finally:
        for buffer, index in zip(buffers, padded, strict=True):
            buffer.param_index_map = index


@contextlib.contextmanager
def saved_once(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Wrap `sharded_state_dict` for saving in this: the state of each parameter is then complete on one data-parallel
    rank, which writes it. Megatron's would be complete on every rank, 12 bytes a parameter of its tensor and pipeline
    shard in the memory of the host, and on all ranks of a node together as often as they are data-parallel."""
    parts = [part for part in optimizer.chained_optimizers if hasattr(part, "gbuf_ranges")]
    for part in parts:
        part.sharded_param_state_fully_reshardable = functools.partial(_owned_state, part)
    try:
        yield
    finally:
        for part in parts:
            del part.sharded_param_state_fully_reshardable


@torch.no_grad()
def _owned_state(part: DistributedOptimizer, model_sharded_state_dict: dict, *_: Any, **__: Any) -> dict[int, Any]:
    """{number of the parameter: its fp32 weight and moments} of the parameters that this rank owns, under the keys of
    megatron's "fully_reshardable" format. Collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded = {x.data: x for x in nested_values(extract_sharded_tensors_and_factories(model_sharded_state_dict)[0])}
    group, state, number = part.data_parallel_group, {}, 0
    owned = [0] * group.size()  # elements of each rank
    for buffer, by_dtype in zip(part.buffers, part.gbuf_ranges, strict=True):
        held = ChainMap(*(bucket["param_map"] for buckets in by_dtype.values() for bucket in buckets))
        for parameter in buffer.param_index_map:
            owner = owned.index(min(owned))
            owned[owner] += parameter.numel()
            mine = part._get_main_param_and_optimizer_states(parameter) if parameter in held else None
            found = {}
            for name in ("param", "exp_avg", "exp_avg_sq"):
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                if mine is not None:
                    whole[held[parameter]["param"].start : held[parameter]["param"].end] = mine[name]
                # Every element is on one rank and 0 on the others; the sum of their bits is exact.
                dist.reduce(whole.view(torch.int32), dist.get_global_rank(group, owner), group=group)
                if group.rank() == owner:
                    found[name] = whole.view(parameter.shape).cpu()
            if found:
                weight = sharded[parameter]
                replica = (*weight.replica_id[:-1], 0)  # its last number is the data-parallel rank: there is one
                state[number] = {
                    name: replace(weight, key=f"optimizer.state.{name}.{weight.key}", data=value, replica_id=replica,
                                  **({"dtype": value.dtype} if isinstance(weight, ShardedTensor) else {}))
                    for name, value in found.items()
                }  # fmt: skip
            number += 1
    return state
