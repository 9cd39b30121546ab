"""OLMo 2: Llama's layers with norms behind attention and MLP instead of before them, and norms of all queries and of
all keys."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.mapping import GATE_UP, Family, Row
from megarlhf.models.spec import Architecture

BLOCK, LAYER = llama.BLOCK, llama.LAYER


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    fields = llama.from_config({"rms_norm_eps": 1e-5, **config})
    return {**fields, "norms": "after", "qk_norm_joint": True}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = llama.to_config(architecture)
    for key in ("mlp_bias", "head_dim"):  # a head has hidden_size / num_attention_heads channels
        del config[key]
    return {**config, "architectures": ["Olmo2ForCausalLM"]}


def rows(architecture: Architecture) -> list[Row]:
    gate, up = (f"{BLOCK}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    table = [row for row in llama.attention_rows(architecture) if not row.theirs[0].endswith("input_layernorm.weight")]
    return [
        *table,
        Row((f"{BLOCK}.self_attn.q_norm.weight",), f"{LAYER}.self_attention.query_norm.weight"),
        Row((f"{BLOCK}.self_attn.k_norm.weight",), f"{LAYER}.self_attention.key_norm.weight"),
        Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.post_attention_layernorm.weight"),
        Row((f"{BLOCK}.post_feedforward_layernorm.weight",), f"{LAYER}.post_mlp_layernorm.weight"),
        Row((gate, up), f"{LAYER}.mlp.linear_fc1.weight", GATE_UP),
        Row((f"{BLOCK}.mlp.down_proj.weight",), f"{LAYER}.mlp.linear_fc2.weight"),
    ]


KEYS = llama.KEYS.also("", {"mlp_bias": (False,), "head_dim": ()})
FAMILY = Family("olmo2", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
