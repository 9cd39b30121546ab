"""Qwen 2 and 2.5: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megarlhf.models.spec import Architecture
from tools.convert.families import llama
from tools.convert.mapping import Family


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    no_windows(config)
    length = config.get("max_position_embeddings", 32768)
    return {**llama.from_config(config), "qkv_bias": True, "max_position_embeddings": length}


def no_windows(config: dict[str, Any]) -> None:
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(
                f"layer_types: {kind} has no counterpart in megarlhf; only full_attention can be converted"
            )


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    # Qwen 2 of transformers has no head_dim of its own, so hidden_size / num_attention_heads must be it.
    del config["head_dim"]
    return {**config, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


FIXED: dict[str, tuple] = {
    "use_sliding_window": (False,),  # without it the other settings of windows have no effect
    "use_mrope": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
KEYS = llama.KEYS.also("layer_types", FIXED, "sliding_window max_window_layers")
FAMILY = Family("qwen2", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
