"""Engines by role: actor, critic, reward, reference; and actors whose trunk also has the critic's head, or ILQL's value
and Q heads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from megarlhf.cluster.parallel import Topology, seed_generators
from megarlhf.engine import Engine
from megarlhf.models import borrowed, lora, mixture
from megarlhf.models.gpt import GPT, Head
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.model_config import LoraConfig, in_top_layers
from megarlhf.models.spec import VOCABULARY, Architecture
from megarlhf.models.transformer_config import transformer_config
from megarlhf.optim import OptimizerConfig

Role = Literal["actor", "reference", "critic", "reward", "actor_critic", "actor_q"]
HEADS: dict[Role, Head] = {
    "actor": "logprobs",
    "reference": "logprobs",
    "critic": "values",
    "reward": "scores",
    "actor_critic": "logprobs+values",
    "actor_q": "logprobs+values+q",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(
    role: Role,
    architecture: Architecture,
    topology: Topology,
    *,
    micro_batch_tokens: int,
    dtype: Literal["fp32", "bf16"] = "bf16",
    optimizer: OptimizerConfig | None = None,
    total_steps: int = 1,
    dropout: float = 0.0,
    recompute: Literal["none", "selective", "full"] = "none",
    seed: int = 0,
    awaits_checkpoint: bool = False,
    trains: Callable[[str], bool] | None = None,
    trained_layers: int | None = None,
    adapters: LoraConfig | None = None,
    router: ExpertsConfig | None = None,
    mlp_values: bool = False,
    trunk: Engine | None = None,
) -> Engine:
    """An Engine for `role` on this layout, with weights initialised from `seed`; it trains if it gets an optimizer.
    With `awaits_checkpoint` only scalar and Q heads are initialised: drawing billions of numbers takes minutes.

    `trains`: which weights the optimizer changes, by their global names (`GPT.global_name`); None: all. The others are
    frozen: they have no gradients, no fp32 main weights and no optimizer state. A stage may have none that train. A
    linear layer's bias trains with its weight or not at all: megatron computes no gradient of a frozen weight's bias.
    `trained_layers`: instead, so many layers from the top and what is above them (`in_top_layers`). `adapters`:
    instead, low-rank adapters (lora.py) with scalar and Q heads; checkpoints hold these alone. `router`: the losses of
    the routers of experts, whose weights train unless it says otherwise. `mlp_values`: a value
    head with a hidden layer (`ScalarHead`). `trunk`: a loaded engine with adapters of the same configuration, whose
    frozen weights this one uses; it has adapters and a head of its own. While a chunk is built, the weights of one
    chunk exist a second time.
    """
    assert (trains, trained_layers, adapters).count(None) >= 2
    if trained_layers is not None:
        trains = partial(in_top_layers, architecture, trained_layers)
    if adapters is not None:
        trains = lora.trains
    config = transformer_config(
        architecture,
        parallel=topology.parallel,
        dtype=DTYPES[dtype],
        dropout=dropout,
        recompute=recompute,
        losses=router if optimizer is not None else None,
    )
    stages = range(topology.parallel.chunks) if topology.parallel.virtual_pipeline else [None]
    seed_generators(topology, seed)  # megatron's modules want its generators to exist
    chunks = []
    for number, stage in enumerate(stages):
        chunk = GPT(architecture, config, topology, HEADS[role], stage, mlp_values, norms_apart=adapters is not None)
        chunks.append(chunk)
        if adapters is not None:
            lora.attach(chunk, adapters)
        if trunk is not None:
            borrowed.share(chunk, trunk.modules[number])
        initialize(chunk, topology, seed, head_only=awaits_checkpoint, trained_only=trunk is not None)
        for name, parameter in chunk.named_parameters():
            chosen = trains is None or trains(chunk.global_name(name))
            frozen = mixture.ROUTER in name and router is not None and router.train_router is False
            parameter.requires_grad_(optimizer is not None and chosen and not frozen)
    engine = Engine(
        chunks,
        config,
        topology,
        role=role,
        micro_batch_tokens=micro_batch_tokens,
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
        trains_all=trains is None,
        saves=lora.trains if adapters is not None else None,
        owns=lora.trains if trunk is not None else None,
    )
    if trunk is not None:
        engine.base = trunk.base
    return engine


@torch.no_grad()
def initialize(chunk: GPT, topology: Topology, seed: int, head_only: bool = False, trained_only: bool = False) -> None:
    """Initial weights that do not depend on the layout: each full tensor is drawn on the CPU from a generator keyed by
    (seed, name), and this rank keeps its shard.

    GPT-2's scheme: normal(0, init_std), the projections back into the residual stream scaled by 1 / sqrt(2 L), norms
    one (zero where they scale by 1 + weight), biases zero. A critic's head is zero (detail P2; with a hidden layer, the
    layer above that), a reward head normal(0, 1 / sqrt(H + 1)) (detail R2). Q heads are normal(0, init_std), their slow
    copies equal to them. An adapter's A is uniform in +-1 / sqrt(its input size), as in peft, its B zero. With
    `head_only` all but adapters and scalar and Q heads is zero; with `trained_only` it stays as it is.
    """
    architecture = chunk.architecture
    for name, parameter in chunk.named_parameters():
        # Experts are whole, though megatron marks their weights as cut.
        whole = mixture.is_expert(name)
        kind = chunk.global_name(name) if whole else name
        size, rank = (1, 0) if whole else (topology.parallel.tensor, topology.tensor_rank)
        if trained_only and not lora.trains(name):
            continue
        if name.endswith("bias") or f"{lora.SUFFIX}.b_" in name or (head_only and not lora.trains(name)):
            parameter.zero_()
            continue
        if "norm" in name:
            parameter.fill_(0.0 if architecture.zero_centered_norm else 1.0)
            continue
        if name == "value_head.weight":
            std = 0.0 if chunk.head != "scores" else 1 / math.sqrt(architecture.hidden_size + 1)
        else:
            std = architecture.init_std
            if kind.endswith(("linear_proj.weight", "linear_fc2.weight")):
                std /= math.sqrt(2 * architecture.num_layers)
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= size
        vocabulary = name in VOCABULARY
        if vocabulary:  # the padded rows depend on the layout, so they are not drawn
            shape[0] = architecture.vocab_size
        generator = torch.Generator().manual_seed(_key(chunk, name, seed))
        if lora.is_adapter(name):
            full = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
        else:
            full = torch.randn(shape, generator=generator) * std
        if vocabulary:
            full = torch.nn.functional.pad(full, (0, 0, 0, parameter.shape[0] * size - shape[0]))
        if kind.endswith("linear_fc1.weight") and architecture.gated_mlp:  # a rank holds [its gate rows; its up rows]
            shard = torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
        else:
            shard = full.chunk(size, split)[rank] if split >= 0 else full
        parameter.copy_(shard)
    if hasattr(chunk, "q_heads"):
        chunk.q_heads.update_slow_copies(1.0)


def _key(chunk: GPT, name: str, seed: int) -> int:
    """A generator seed from the parameter's global name."""
    return zlib.crc32(f"{seed}:{chunk.global_name(name)}".encode())
