"""Falcon: 7B (one key/value head, one norm for attention and MLP), the new decoder of 40B and 180B (grouped, two
norms), and layers with sequential attention and MLP. ALiBi (the "rw" models) is refused."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.keys import HUGGING_FACE
from megarlhf.convert.mapping import Family, Row
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    activation = config.get("activation", "gelu")
    if activation not in llama.ACTIVATIONS:
        raise ValueError(f"activation: '{activation}' is not supported; known: {', '.join(llama.ACTIVATIONS)}")
    heads, new = config["num_attention_heads"], bool(config.get("new_decoder_architecture"))
    parallel = config.get("parallel_attn", True)
    if new and not parallel:
        raise ValueError("parallel_attn: false contradicts new_decoder_architecture true; transformers cannot run it")
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    if norms == 2 and parallel and not new:
        raise ValueError("num_ln_in_parallel_attn: 2 needs new_decoder_architecture true; transformers cannot run it")
    groups = (config.get("num_kv_heads") or heads) if new else 1 if config.get("multi_query", True) else heads
    rope = llama.rope_from(config)
    if rope["rotary_percent"] != 1:
        raise ValueError(f"partial_rotary_factor: {rope['rotary_percent']} is no Falcon's; only 1.0 can be converted")
    return dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        normalization="LayerNorm",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        activation=llama.ACTIVATIONS[activation],
        gated_mlp=False,
        linear_bias=config.get("bias", False),
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        tie_embeddings=config.get("tie_word_embeddings", True),
        init_std=config.get("initializer_range", 0.02),
        **rope,
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    rope = llama.to_config(architecture)
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    # The old layout has one key/value head or as many as query heads; its rows are those of the new layout.
    new = architecture.parallel_residual and (not architecture.shared_norm or groups not in (1, heads))
    layout: dict[str, Any] = dict(multi_query=groups == 1)
    if new:
        layout = dict(num_kv_heads=groups, num_ln_in_parallel_attn=1 if architecture.shared_norm else 2)
    return dict(
        architectures=["FalconForCausalLM"],
        num_hidden_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=heads,
        vocab_size=architecture.vocab_size,
        max_position_embeddings=architecture.max_position_embeddings,
        layer_norm_epsilon=architecture.norm_epsilon,
        activation="gelu_new" if architecture.activation == "gelu_tanh" else architecture.activation,
        bias=architecture.linear_bias,
        alibi=False,
        new_decoder_architecture=new,
        parallel_attn=architecture.parallel_residual,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.init_std,
        **layout,
        **{key: rope[key] for key in ("rope_theta", "rope_scaling", "rope_parameters")},
    )


def rows(architecture: Architecture) -> list[Row]:
    """Rows of query_key_value are ordered by groups, as in Megatron."""
    block, layer = "transformer.h.{i}", "decoder.layers.{i}"
    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture.parallel_residual:
        norms = ["input_layernorm"] if architecture.shared_norm else ["ln_attn", "ln_mlp"]
    table = [Row(("transformer.word_embeddings.weight",), "embedding.word_embeddings.weight")]
    for kind in ("weight", "bias"):
        table.append(Row((f"transformer.ln_f.{kind}",), f"decoder.final_layernorm.{kind}"))
        for norm, linear in zip(norms, ("self_attention.linear_qkv", "mlp.linear_fc1"), strict=False):
            table.append(Row((f"{block}.{norm}.{kind}",), f"{layer}.{linear}.layer_norm_{kind}"))
    for kind in ("weight", "bias") if architecture.linear_bias else ("weight",):
        table += [
            Row((f"{block}.self_attention.query_key_value.{kind}",), f"{layer}.self_attention.linear_qkv.{kind}"),
            Row((f"{block}.self_attention.dense.{kind}",), f"{layer}.self_attention.linear_proj.{kind}"),
            Row((f"{block}.mlp.dense_h_to_4h.{kind}",), f"{layer}.mlp.linear_fc1.{kind}"),
            Row((f"{block}.mlp.dense_4h_to_h.{kind}",), f"{layer}.mlp.linear_fc2.{kind}"),
        ]
    if not architecture.tie_embeddings:
        table.append(Row(("lm_head.weight",), "output_layer.weight"))
    return table


FAMILY = Family(
    name="falcon",
    from_config=from_config,
    to_config=to_config,
    rows=rows,
    prefix="transformer.",
    buffers=(r"transformer\.(h\.\d+\.self_attention\.)?rotary(_emb)?\.inv_freq",),
    keys=HUGGING_FACE.also(
        """
        num_hidden_layers hidden_size ffn_hidden_size num_attention_heads num_kv_heads bias max_position_embeddings
        layer_norm_epsilon activation new_decoder_architecture parallel_attn multi_query num_ln_in_parallel_attn
        """
        + llama.ROPE,
        fixed={"alibi": (False,), "apply_residual_connection_post_layernorm": (False,)},
        harmless="ff_factor",  # transformers reads ffn_hidden_size
    ),
)
