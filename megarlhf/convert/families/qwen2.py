"""Qwen 2 and 2.5: Llama's layers with biases on q, k and v; the upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.families.windows import layer_types, windows_from
from megarlhf.convert.mapping import Family
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    length = config.get("max_position_embeddings", 32768)
    fields = llama.from_config({**config, "max_position_embeddings": length})
    return {**fields, "qkv_bias": True, **upper_windows(config)}


def upper_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Without `use_sliding_window` the other settings of windows have no effect, but `layer_types` must agree."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return windows_from(config, window, [i >= first for i in range(config["num_hidden_layers"])])


def no_windows(config: dict[str, Any]) -> None:
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window: True has no counterpart in this family; only False can be converted")
    if upper_windows(config):
        raise ValueError("layer_types: sliding_attention has no counterpart in this family")


def windows_to(architecture: Architecture) -> dict[str, Any]:
    if architecture.sliding_window is None:
        return {"use_sliding_window": False}
    return dict(
        use_sliding_window=True, sliding_window=architecture.sliding_window, layer_types=layer_types(architecture)
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    # Qwen 2 of transformers has no head_dim of its own, so hidden_size / num_attention_heads must be it.
    del config["head_dim"]
    return {**config, "architectures": ["Qwen2ForCausalLM"], **windows_to(architecture)}


FIXED: dict[str, tuple] = {
    "use_mrope": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
KEYS = llama.KEYS.also("layer_types use_sliding_window sliding_window max_window_layers", FIXED)
FAMILY = Family("qwen2", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
