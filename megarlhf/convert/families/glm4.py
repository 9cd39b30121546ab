"""GLM-4 0414: Llama's layers with norms before and behind attention and MLP, and rotary pairs of adjacent channels in
a part of each head. Rows of queries and keys are put in another order, so that pairs are half of that part apart, as
in all other models here; scores stay the same."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.mapping import Family, Row, adjacent_pairs, qkv
from megarlhf.models.spec import Architecture

BLOCK, LAYER = llama.BLOCK, llama.LAYER


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, **config}
    rope = config.get("rope_parameters") or {}
    if "partial_rotary_factor" not in rope:
        config = {"partial_rotary_factor": 0.5, **config}
    bias = config.get("attention_bias", True)
    fields = llama.from_config({**config, "attention_bias": False}, partly=True)
    return {**fields, "qkv_bias": bias, "norms": "both"}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config, percent = llama.to_config(architecture), architecture.rotary_percent
    del config["mlp_bias"]
    return {
        **config,
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": architecture.qkv_bias,
        "partial_rotary_factor": percent,
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": percent},
    }


def rows(architecture: Architecture) -> list[Row]:
    merge = adjacent_pairs(qkv(architecture), architecture)
    table = []
    for row in llama.attention_rows(architecture):
        table.append(Row(row.theirs, row.ours, merge) if "linear_qkv" in row.ours and len(row.theirs) == 3 else row)
    return [
        *table,
        Row((f"{BLOCK}.post_self_attn_layernorm.weight",), f"{LAYER}.post_attention_layernorm.weight"),
        Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.mlp.linear_fc1.layer_norm_weight"),
        Row((f"{BLOCK}.post_mlp_layernorm.weight",), f"{LAYER}.post_mlp_layernorm.weight"),
        Row((f"{BLOCK}.mlp.gate_up_proj.weight",), f"{LAYER}.mlp.linear_fc1.weight"),
        Row((f"{BLOCK}.mlp.down_proj.weight",), f"{LAYER}.mlp.linear_fc2.weight"),
    ]


KEYS = llama.KEYS.also("", {"mlp_bias": (False,)})
FAMILY = Family("glm4", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
