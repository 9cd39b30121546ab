"""Qwen 2 with a mixture of experts in every layer and a shared expert beside them (Qwen1.5-MoE-A2.7B,
Qwen2-57B-A14B)."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, qwen2
from megarlhf.convert.mapping import GATE_UP, Family, Row
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {**config, "intermediate_size": config.get("moe_intermediate_size", 1408)}
    shared = config.get("shared_expert_intermediate_size", 5632)
    if not shared:
        raise ValueError(
            f"shared_expert_intermediate_size: {shared} has no counterpart in megarlhf; a model of this family has a "
            "shared expert"
        )
    return {
        **qwen2.from_config(config),
        "num_experts": config.get("num_experts", config.get("num_local_experts", 60)),
        "experts_per_token": config.get("num_experts_per_tok", 4),
        "renormalize_experts": config.get("norm_topk_prob", False),
        "shared_expert_size": shared,
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = qwen2.to_config(architecture)
    del config["intermediate_size"]  # of layers without experts
    return {
        **config,
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "moe_intermediate_size": architecture.ffn_hidden_size,
        "shared_expert_intermediate_size": architecture.shared_expert_size,
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "norm_topk_prob": architecture.renormalize_experts,
    }


def rows(architecture: Architecture) -> list[Row]:
    theirs, ours = f"{llama.BLOCK}.mlp.shared_expert", f"{llama.LAYER}.mlp.shared_experts"
    return [
        *llama.expert_rows(architecture, "mlp", "gate_proj", "up_proj", "down_proj"),
        Row((f"{theirs}_gate.weight",), f"{ours}.gate_weight"),
        Row((f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), f"{ours}.linear_fc1.weight", GATE_UP),
        Row((f"{theirs}.down_proj.weight",), f"{ours}.linear_fc2.weight"),
    ]


KEYS = qwen2.FAMILY.keys.also(
    "moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok "
    "norm_topk_prob",
    {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "qkv_bias": (True,)},
)
FAMILY = Family("qwen2_moe", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
