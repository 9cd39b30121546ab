"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, qwen2
from megarlhf.convert.mapping import Family, Row
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    qwen2.no_windows(config)
    config = {"max_position_embeddings": 32768, **config, "intermediate_size": config.get("moe_intermediate_size", 768)}
    return {
        **llama.from_config(config),
        "qk_norm": True,
        "num_experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "experts_per_token": config.get("num_experts_per_tok", 8),
        "renormalize_experts": config.get("norm_topk_prob", False),
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    for key in ("mlp_bias", "intermediate_size"):  # the latter is that of layers without experts
        del config[key]
    return {
        **config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": architecture.ffn_hidden_size,
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
        "norm_topk_prob": architecture.renormalize_experts,
    }


def rows(architecture: Architecture) -> list[Row]:
    return llama.expert_rows(architecture, "mlp", "gate_proj", "up_proj", "down_proj")


KEYS = qwen2.FAMILY.keys.also(
    "moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob",
    {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},  # every layer has experts
)
FAMILY = Family("qwen3_moe", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
