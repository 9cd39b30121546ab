"""Qwen 3: Llama's layers with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, qwen2
from megarlhf.convert.mapping import Family
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 128, "max_position_embeddings": 32768, **config}
    return {**llama.from_config(config), "qk_norm": True, **qwen2.upper_windows(config)}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    del config["mlp_bias"]
    return {**config, "architectures": ["Qwen3ForCausalLM"], **qwen2.windows_to(architecture)}


FAMILY = Family(
    "qwen3", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, qwen2.FAMILY.keys
)
