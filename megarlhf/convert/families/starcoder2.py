"""StarCoder2: Llama's attention with biases and a sliding window, LayerNorm, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama, mistral
from megarlhf.convert.mapping import Family, Row
from megarlhf.models.spec import Architecture

BLOCK, LAYER = llama.BLOCK, llama.LAYER


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    bias = config.get("use_bias", True)
    usual = {"max_position_embeddings": 4096, "tie_word_embeddings": True,
             "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.018042}  # fmt: skip
    fields = llama.from_config({**usual, **config, "attention_bias": bias, "mlp_bias": bias})
    return {
        **fields,
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("norm_epsilon", 1e-5),
        "gated_mlp": False,
        "sliding_window": config.get("sliding_window"),
    }


def to_config(architecture: Architecture) -> dict[str, Any]:
    config = mistral.to_config(architecture)
    for key in ("head_dim", "rms_norm_eps"):
        del config[key]
    return {
        **config,
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": architecture.norm_epsilon,
        "use_bias": architecture.linear_bias,
    }


def rows(architecture: Architecture) -> list[Row]:
    table = llama.attention_rows(architecture)
    table.append(Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.mlp.linear_fc1.layer_norm_weight"))
    for row in [row for row in table if "norm" in row.ours]:
        theirs = row.theirs[0].removesuffix("weight") + "bias"
        table.append(Row((theirs,), row.ours.removesuffix("weight") + "bias"))
    for kind in ("weight", "bias") if architecture.linear_bias else ("weight",):
        table += [
            Row((f"{BLOCK}.mlp.c_fc.{kind}",), f"{LAYER}.mlp.linear_fc1.{kind}"),
            Row((f"{BLOCK}.mlp.c_proj.{kind}",), f"{LAYER}.mlp.linear_fc2.{kind}"),
        ]
    return table


KEYS = llama.KEYS.also(
    "sliding_window use_bias norm_epsilon",
    {"attention_bias": (), "mlp_bias": (), "rms_norm_eps": (), "head_dim": (), "norm_type": ("layer_norm",),
     "mlp_type": ("default",)},
    harmless="residual_dropout embedding_dropout attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
    "scale_attn_weights",
)  # fmt: skip
FAMILY = Family("starcoder2", from_config, to_config, rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS)
