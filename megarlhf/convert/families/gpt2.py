"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere; linear weights are kept as [in, out]."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.keys import HUGGING_FACE
from megarlhf.convert.mapping import COPY, Family, Row, qkv, stacked, transposed
from megarlhf.models.spec import Architecture

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_function: '{activation}' is not supported; known: {', '.join(ACTIVATIONS)}")
    return dict(
        num_layers=config["n_layer"],
        hidden_size=config["n_embd"],
        ffn_hidden_size=config.get("n_inner") or 4 * config["n_embd"],
        num_attention_heads=config["n_head"],
        num_query_groups=config["n_head"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["n_positions"],
        normalization="LayerNorm",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        activation=ACTIVATIONS[activation],
        gated_mlp=False,
        linear_bias=True,
        position_embedding="learned",
        tie_embeddings=config.get("tie_word_embeddings", True),
        init_std=config.get("initializer_range", 0.02),
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    return dict(
        architectures=["GPT2LMHeadModel"],
        n_layer=architecture.num_layers,
        n_embd=architecture.hidden_size,
        n_inner=architecture.ffn_hidden_size,
        n_head=architecture.num_attention_heads,
        vocab_size=architecture.vocab_size,
        n_positions=architecture.max_position_embeddings,
        layer_norm_epsilon=architecture.norm_epsilon,
        activation_function="gelu_new" if architecture.activation == "gelu_tanh" else architecture.activation,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.init_std,
        **FIXED,
    )


def rows(architecture: Architecture) -> list[Row]:
    merge = stacked(qkv(architecture))
    block, layer = "transformer.h.{i}", "decoder.layers.{i}"
    table = [
        Row(("transformer.wte.weight",), "embedding.word_embeddings.weight"),
        Row(("transformer.wpe.weight",), "embedding.position_embeddings.weight"),
        Row((f"{block}.attn.c_attn.weight",), f"{layer}.self_attention.linear_qkv.weight", transposed(merge)),
        Row((f"{block}.attn.c_attn.bias",), f"{layer}.self_attention.linear_qkv.bias", merge),
        Row((f"{block}.attn.c_proj.weight",), f"{layer}.self_attention.linear_proj.weight", transposed(COPY)),
        Row((f"{block}.attn.c_proj.bias",), f"{layer}.self_attention.linear_proj.bias"),
        Row((f"{block}.mlp.c_fc.weight",), f"{layer}.mlp.linear_fc1.weight", transposed(COPY)),
        Row((f"{block}.mlp.c_fc.bias",), f"{layer}.mlp.linear_fc1.bias"),
        Row((f"{block}.mlp.c_proj.weight",), f"{layer}.mlp.linear_fc2.weight", transposed(COPY)),
        Row((f"{block}.mlp.c_proj.bias",), f"{layer}.mlp.linear_fc2.bias"),
    ]
    for kind in ("weight", "bias"):
        table += [
            Row((f"{block}.ln_1.{kind}",), f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"),
            Row((f"{block}.ln_2.{kind}",), f"{layer}.mlp.linear_fc1.layer_norm_{kind}"),
            Row((f"transformer.ln_f.{kind}",), f"decoder.final_layernorm.{kind}"),
        ]
    if not architecture.tie_embeddings:
        table.append(Row(("lm_head.weight",), "output_layer.weight"))
    return table


FAMILY = Family(
    name="gpt2",
    from_config=from_config,
    to_config=to_config,
    rows=rows,
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    keys=HUGGING_FACE.also(
        "n_layer n_embd n_inner n_head n_positions layer_norm_epsilon activation_function",
        fixed={key: (value,) for key, value in FIXED.items()},
        # the head of old classifiers, the length once more, and where the softmax is rounded
        harmless="summary_* n_ctx reorder_and_upcast_attn",
    ),
)
