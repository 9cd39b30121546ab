"""Gemma 2: Gemma's layers with norms before and behind attention and MLP, capped scores and logits, and a sliding
window in every other layer."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.families.windows import layer_types, windows_from
from megarlhf.convert.mapping import GATE_UP, Family, Row
from megarlhf.models.spec import Architecture

BLOCK, LAYER = llama.BLOCK, llama.LAYER


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"max_position_embeddings": 8192, **config}
    local = [i % 2 == 0 for i in range(config["num_hidden_layers"])]
    return {
        **common_from(config),
        **windows_from(config, config.get("sliding_window", 4096), local),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


def common_from(config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    config = {"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": activation}
    scalar, size = config.get("query_pre_attn_scalar", 256), config["head_dim"]
    return {
        **llama.from_config(config),
        "zero_centered_norm": True,
        "scale_embedding": True,
        "norms": "both",
        "attention_scale": None if scalar == size else scalar**-0.5,
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    return {
        **common_to(architecture),
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": architecture.attention_softcap,
        "final_logit_softcapping": architecture.logit_softcap,
    }


def common_to(architecture: Architecture) -> dict[str, Any]:
    config, scale = llama.to_config(architecture), architecture.attention_scale
    for key in ("attention_bias", "mlp_bias", "hidden_act"):
        del config[key]
    return {
        **config,
        "hidden_activation": llama.to_config(architecture)["hidden_act"],
        "query_pre_attn_scalar": architecture.kv_channels if scale is None else round(scale**-2),
        "sliding_window": architecture.sliding_window,
        "layer_types": layer_types(architecture),
    }


def rows(architecture: Architecture) -> list[Row]:
    gate, up = (f"{BLOCK}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return [
        *llama.attention_rows(architecture),
        Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.post_attention_layernorm.weight"),
        Row((f"{BLOCK}.pre_feedforward_layernorm.weight",), f"{LAYER}.mlp.linear_fc1.layer_norm_weight"),
        Row((f"{BLOCK}.post_feedforward_layernorm.weight",), f"{LAYER}.post_mlp_layernorm.weight"),
        Row((gate, up), f"{LAYER}.mlp.linear_fc1.weight", GATE_UP),
        Row((f"{BLOCK}.mlp.down_proj.weight",), f"{LAYER}.mlp.linear_fc2.weight"),
    ]


KEYS = llama.KEYS.also(
    """
    hidden_activation query_pre_attn_scalar sliding_window layer_types attn_logit_softcapping final_logit_softcapping
    """,
    # transformers reads hidden_activation; files have the other, too.
    {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("gelu_pytorch_tanh",)},
    harmless="cache_implementation",
)
FAMILY = Family("gemma2", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
