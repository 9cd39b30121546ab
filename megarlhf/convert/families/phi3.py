"""Phi-3, Phi-3.5 mini, Phi-4 and Phi-4-mini: Llama's layers with q, k and v in one matrix, and gate and up in one;
rotary frequencies may be stretched (longrope), and a part of a head's channels may turn."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, mistral
from megarlhf.convert.mapping import Family, Row, fused, qkv
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, dict) and {rope.get("type"), rope.get("rope_type")} & {"su", "yarn"}:  # its older names
            names = {name: "longrope" for name in ("type", "rope_type") if name in rope}
            config[key] = {**rope, **names}
    fields = llama.from_config(config, partly=True)
    kind = fields.get("rope_scaling", {}).get("kind", "longrope")
    if kind != "longrope":
        raise ValueError(f"rope_scaling: {kind} is no Phi-3's; transformers has only longrope")
    return {**fields, "sliding_window": config.get("sliding_window")}


def to_config(architecture: Architecture) -> dict[str, Any]:
    config, scaling = mistral.to_config(architecture), architecture.rope_scaling
    del config["head_dim"]  # it is hidden_size / num_attention_heads
    percent = architecture.rotary_percent
    original = {} if scaling is None else dict(
        original_max_position_embeddings=scaling.original_max_position_embeddings
    )  # fmt: skip
    return {
        **config,
        "architectures": ["Phi3ForCausalLM"],
        **original,
        "partial_rotary_factor": percent,
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": percent},
    }


def rows(architecture: Architecture) -> list[Row]:
    block, layer, size = llama.BLOCK, llama.LAYER, architecture.kv_channels
    groups = architecture.num_query_groups * size
    table = [
        row for row in llama.rows(architecture) if not row.theirs[0].endswith(("q_proj.weight", "gate_proj.weight"))
    ]
    parts = architecture.num_attention_heads * size, groups, groups
    return [
        *table,
        Row(
            (f"{block}.self_attn.qkv_proj.weight",),
            f"{layer}.self_attention.linear_qkv.weight",
            fused(qkv(architecture), parts),
        ),
        Row((f"{block}.mlp.gate_up_proj.weight",), f"{layer}.mlp.linear_fc1.weight"),
    ]


KEYS = llama.KEYS.also(
    "sliding_window original_max_position_embeddings", {"attention_bias": (False,), "mlp_bias": (False,)},
    harmless="resid_pdrop embd_pdrop full_attn_mod interpolate_factor lm_head_bias",
)  # fmt: skip
FAMILY = Family("phi3", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
