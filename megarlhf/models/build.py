"""Engines by role: actor, critic, reward, reference; and actors whose trunk also has the critic's head, or ILQL's value
and Q heads."""

from __future__ import annotations

import math
import zlib
from typing import Literal

import torch

from megarlhf.cluster.parallel import Topology, seed_generators
from megarlhf.engine import Engine
from megarlhf.models.gpt import GPT, Head
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
) -> Engine:
    """An Engine for `role` on this layout, with weights initialised from `seed`; it trains if it gets an optimizer.
    With `awaits_checkpoint` only scalar and Q heads are initialised: drawing billions of numbers takes minutes."""
    config = transformer_config(
        architecture, parallel=topology.parallel, dtype=DTYPES[dtype], dropout=dropout, recompute=recompute
    )
    stages = range(topology.parallel.chunks) if topology.parallel.virtual_pipeline else [None]
    seed_generators(topology, seed)  # megatron's modules want its generators to exist
    chunks = [GPT(architecture, config, topology, HEADS[role], vp_stage=stage) for stage in stages]
    for chunk in chunks:
        initialize(chunk, topology, seed, head_only=awaits_checkpoint)
    return Engine(
        chunks,
        config,
        topology,
        role=role,
        micro_batch_tokens=micro_batch_tokens,
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
    )


@torch.no_grad()
def initialize(chunk: GPT, topology: Topology, seed: int, head_only: bool = False) -> None:
    """Initial weights that do not depend on the layout: each full tensor is drawn on the CPU from a generator keyed by
    (seed, name), and this rank keeps its shard.

    GPT-2's scheme: normal(0, init_std), the projections back into the residual stream scaled by 1 / sqrt(2 L), norms
    one (zero where they scale by 1 + weight), biases zero. A critic's head is zero (detail P2), a reward head
    normal(0, 1 / sqrt(H + 1)) (detail R2). Q heads are normal(0, init_std), their slow copies equal to them. With
    `head_only` all but scalar and Q heads is zero.
    """
    architecture, size, rank = chunk.architecture, topology.parallel.tensor, topology.tensor_rank
    for name, parameter in chunk.named_parameters():
        if name.endswith("bias") or (head_only and not name.startswith(("value_head.", "q_heads."))):
            parameter.zero_()
            continue
        if "norm" in name:
            parameter.fill_(0.0 if architecture.zero_centered_norm else 1.0)
            continue
        if name == "value_head.weight":
            std = 0.0 if chunk.head != "scores" else 1 / math.sqrt(architecture.hidden_size + 1)
        else:
            std = architecture.init_std
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                std /= math.sqrt(2 * architecture.num_layers)
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= size
        vocabulary = name in VOCABULARY
        if vocabulary:  # the padded rows depend on the layout, so they are not drawn
            shape[0] = architecture.vocab_size
        full = torch.randn(shape, generator=torch.Generator().manual_seed(_key(chunk, name, seed))) * std
        if vocabulary:
            full = torch.nn.functional.pad(full, (0, 0, 0, parameter.shape[0] * size - shape[0]))
        if name.endswith("linear_fc1.weight") and architecture.gated_mlp:  # a rank holds [its gate rows; its up rows]
            shard = torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
        else:
            shard = full.chunk(size, split)[rank] if split >= 0 else full
        parameter.copy_(shard)
    if hasattr(chunk, "q_heads"):
        chunk.q_heads.update_slow_copies(1.0)


def _key(chunk: GPT, name: str, seed: int) -> int:
    """A generator seed from the parameter's global name (its layer counted over all stages)."""
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        parts = ["embedding", "word_embeddings", "weight"]  # the last stage's copy of a tied embedding
    return zlib.crc32(f"{seed}:{'.'.join(parts)}".encode())
