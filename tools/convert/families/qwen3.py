"""Qwen 3: Llama's layers with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from megarlhf.models.spec import Architecture
from tools.convert.families import llama, qwen2
from tools.convert.mapping import Family


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    qwen2.no_windows(config)
    config = {"head_dim": 128, "max_position_embeddings": 32768, **config}
    return {**llama.from_config(config), "qk_norm": True}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    del config["mlp_bias"]
    return {**config, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


FAMILY = Family(
    "qwen3", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, qwen2.FAMILY.keys
)
