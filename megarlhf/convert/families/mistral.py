"""Mistral: Llama's layers without biases; the first version has a sliding window."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.mapping import Family
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any], base: float = 10000.0) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # null: no window; transformers' default is 4096
    length = config.get("max_position_embeddings", 4096 * 32)
    if window is not None and window >= length:
        window = None
    return {**llama.from_config(config, base), "max_position_embeddings": length, "sliding_window": window}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "architectures": ["MistralForCausalLM"], "sliding_window": architecture.sliding_window}


KEYS = llama.KEYS.also("sliding_window", {"attention_bias": (False,), "mlp_bias": (False,)})
FAMILY = Family("mistral", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
