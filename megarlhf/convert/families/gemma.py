"""Gemma 1: Llama's layers with norms that scale by 1 + weight, scaled embeddings, and a large head size."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.mapping import Family
from megarlhf.models.spec import Architecture

TANH = ("gelu_pytorch_tanh", "gelu", "gelu_new")  # transformers computes the tanh approximation for "gelu" here


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key) not in (None, *TANH):
            raise ValueError(f"{key}: '{config[key]}' is not Gemma's; only gelu_pytorch_tanh can be converted")
    config = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True, **config}
    fields = llama.from_config({**config, "hidden_act": "gelu_pytorch_tanh"})
    return {**fields, "zero_centered_norm": True, "scale_embedding": True}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    del config["mlp_bias"]
    return {**config, "architectures": ["GemmaForCausalLM"], "hidden_activation": config["hidden_act"]}


KEYS = llama.KEYS.also("hidden_activation", {"attention_bias": (False,), "mlp_bias": (False,)})
FAMILY = Family("gemma", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
