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
from torch import Tensor

from megarlhf.cluster import backend
from megarlhf.config import UserError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megarlhf.cluster.parallel import Topology

STATE = ("param", "exp_avg", "exp_avg_sq")  # of each parameter, in float32: megatron's names


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its schedule. Weight decay is not applied to biases and norms."""

    name: Literal["adamw", "adam", "tf_adam"] = "adamw"  # tf_adam: TensorFlow's epsilon (detail P12)
    lr: float = 1e-5  # peak
    min_lr: float = 0.0  # where linear and cosine end
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # of the rate after the warm-up
    warmup_steps: int = 0  # updates in which the rate rises linearly to lr
    weight_decay: float = 0.0  # adamw: per update, times the rate; adam, tf_adam: an L2 term of the gradients
    betas: tuple[float, ...] = (0.9, 0.95)  # decay per update of the first and the second moment
    eps: float = 1e-8  # added to the root of the second moment
    clip_grad: float = 1.0  # global norm; 0 turns clipping off
    state_on_host: bool = False  # moments and fp32 weights in host memory, except while they are applied
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


def state_of(optimizer: MegatronOptimizer, modules: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the moments and, where they are not the model's own, the fp32 main weights."""
    own = {parameter.untyped_storage().data_ptr() for module in modules for parameter in module.parameters()}
    for i, part in enumerate(optimizer.chained_optimizers):
        if part.is_stub_optimizer:
            continue
        parameters = (parameter for group in part.optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            tensors = {"param": parameter} | part.optimizer.state[parameter]
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
                    yield f"{i}.{number}.{name}", tensor


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


def agree_on_count(optimizer: MegatronOptimizer) -> None:
    """Write Adam's count of updates into all parameter groups of all ranks. A group without parameters on a rank does
    not count there, and a checkpoint has the groups of rank 0, which may train none. Collective."""
    count = max((int(group.get("step", 0)) for group in optimizer.param_groups), default=0)
    agreed = torch.tensor(count, device=backend.device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    if agreed > 0:
        for group in optimizer.param_groups:
            group["step"] = int(agreed)


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, also on a stage that trains no weights, whose empty state a checkpoint does not have."""
    inner = state.get("optimizer", state)  # bfloat16's optimizer holds torch's
    if "param_groups" in inner:
        inner.setdefault("state", {})
        if inner is not state:
            state.setdefault("fp32_from_fp16_params", [])
    optimizer.load_state_dict(state)


@contextlib.contextmanager
def held_once(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Wrap `sharded_state_dict` and `load_state_dict` in this: of the state of each parameter, 12 bytes an element, one
    data-parallel rank then has the whole of what is saved or loaded, and the others nothing. It writes the state, or
    reads it and sends each rank its piece. With megatron's every rank has the whole of all parameters of its tensor and
    pipeline shard in the memory of the host, in saving and in loading. The format is megatron's "fully_reshardable"."""
    parts = [part for part in optimizer.chained_optimizers if hasattr(part, "gbuf_ranges")]
    for part in parts:
        part.sharded_param_state_fully_reshardable = functools.partial(_owned_state, part)
        part.load_parameter_state_from_fully_reshardable = functools.partial(_share_out, part)
    try:
        yield
    finally:
        for part in parts:
            del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable


@torch.no_grad()
def _owned_state(
    part: DistributedOptimizer, model_sharded_state_dict: dict, is_loading: bool = False, metadata: Any = None
) -> dict[int, Any]:
    """{number of the parameter: its fp32 weight and moments} of the parameters that this rank owns; to be filled, if
    `is_loading`. Collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded = {x.data: x for x in nested_values(extract_sharded_tensors_and_factories(model_sharded_state_dict)[0])}
    group, state = part.data_parallel_group, {}
    if is_loading:  # an entry also where a rank owns nothing: megatron drops empty dicts, and `_share_out` with them
        state[-1] = LocalNonpersistentObject(None)
    for number, (parameter, owner, here) in enumerate(_parameters(part)):
        found = {}
        if is_loading and group.rank() == owner:
            found = {name: torch.empty(parameter.shape, dtype=torch.float32) for name in STATE}
        elif not is_loading:
            mine = part._get_main_param_and_optimizer_states(parameter) if here is not None else None
            for name in STATE:
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                if mine is not None:
                    whole[here.start : here.end] = mine[name]
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
    return state


@torch.no_grad()
def _share_out(part: DistributedOptimizer, state: dict[int, dict[str, Tensor]]) -> None:
    """Give each rank its pieces of what the owners have read; `state` is empty afterwards. Collective."""
    group = part.data_parallel_group
    for number, (parameter, owner, here) in enumerate(_parameters(part)):
        pieces = {}
        for name in STATE:
            if group.rank() == owner:
                whole = state[number].pop(name).flatten().to(parameter.device)
            else:
                whole = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
            dist.broadcast(whole, dist.get_global_rank(group, owner), group=group)
            if here is not None:
                pieces[name] = whole[here.start : here.end]
        if here is not None:
            part._set_main_param_and_optimizer_states(parameter, pieces)


def _parameters(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, Any]]:
    """(parameter, the rank in the data-parallel group that owns its saved state, this rank's range of its elements or
    None) of all parameters, in the order of megatron's numbers for them. Ranks own about as many elements each."""
    owned = [0] * part.data_parallel_group.size()
    for buffer, by_dtype in zip(part.buffers, part.gbuf_ranges, strict=True):
        held = ChainMap(*(bucket["param_map"] for buckets in by_dtype.values() for bucket in buckets))
        for parameter in buffer.param_index_map:
            owner = owned.index(min(owned))
            owned[owner] += parameter.numel()
            yield parameter, owner, held[parameter]["param"] if parameter in held else None
