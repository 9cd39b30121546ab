"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, mistral
from megarlhf.convert.mapping import Family, Row
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"sliding_window": None, **config}  # where transformers' defaults are not Mistral's; the base is another
    return {
        **mistral.from_config(config, 1e6),
        "num_experts": config.get("num_local_experts", 8),
        "experts_per_token": config.get("num_experts_per_tok", 2),
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    return {
        **mistral.to_config(architecture),
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
    }


def rows(architecture: Architecture) -> list[Row]:
    return llama.expert_rows(architecture, "block_sparse_moe", "w1", "w3", "w2")


KEYS = mistral.FAMILY.keys.also("num_local_experts num_experts_per_tok", harmless="router_jitter_noise")
FAMILY = Family("mixtral", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
