"""Granite 3, dense: Llama's layers with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

import math
from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.mapping import Family
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    fields, scale = llama.from_config(config), config.get("attention_multiplier", 1.0)
    size = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        "attention_scale": None if scale == 1 / math.sqrt(size) else scale,
        "embedding_multiplier": config.get("embedding_multiplier", 1.0),
        "residual_multiplier": config.get("residual_multiplier", 1.0),
        "logit_divisor": config.get("logits_scaling", 1.0),
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    scale = architecture.attention_scale
    return {
        **llama.to_config(architecture),
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 1 / math.sqrt(architecture.kv_channels) if scale is None else scale,
        "embedding_multiplier": architecture.embedding_multiplier,
        "residual_multiplier": architecture.residual_multiplier,
        "logits_scaling": architecture.logit_divisor,
    }


KEYS = llama.KEYS.also("attention_multiplier embedding_multiplier residual_multiplier logits_scaling")
FAMILY = Family(
    "granite", from_config, to_config, llama.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS, classifier=None
)
