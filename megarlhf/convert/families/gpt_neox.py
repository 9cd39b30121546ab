"""GPT-NeoX and Pythia: partly rotary, LayerNorm, biases everywhere, attention and MLP parallel or sequential."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import llama
from megarlhf.convert.keys import HUGGING_FACE
from megarlhf.convert.mapping import Family, Row
from megarlhf.models.spec import Architecture


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    activation = config.get("hidden_act", "gelu")
    if activation not in llama.ACTIVATIONS:
        raise ValueError(f"hidden_act: '{activation}' is not supported; known: {', '.join(llama.ACTIVATIONS)}")
    return dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        normalization="LayerNorm",
        norm_epsilon=config.get("layer_norm_eps", 1e-5),
        activation=llama.ACTIVATIONS[activation],
        gated_mlp=False,
        linear_bias=True,
        parallel_residual=config.get("use_parallel_residual", True),
        tie_embeddings=config.get("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        **llama.rope_from(config, 10000.0, 0.25, "rotary_emb_base", "rotary_pct"),
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    rope = llama.to_config(architecture)
    return dict(
        architectures=["GPTNeoXForCausalLM"],
        num_hidden_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        vocab_size=architecture.vocab_size,
        max_position_embeddings=architecture.max_position_embeddings,
        layer_norm_eps=architecture.norm_epsilon,
        hidden_act="gelu_new" if architecture.activation == "gelu_tanh" else architecture.activation,
        attention_bias=True,
        use_parallel_residual=architecture.parallel_residual,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.init_std,
        # transformers 4 reads the first three, transformers 5 the fourth
        rotary_emb_base=architecture.rotary_base,
        rotary_pct=architecture.rotary_percent,
        rope_scaling=rope["rope_scaling"],
        rope_parameters={**rope["rope_parameters"], "partial_rotary_factor": architecture.rotary_percent},
    )


def rows(architecture: Architecture) -> list[Row]:
    """Query, key and value of a head lie together, as in Megatron."""
    block, layer = "gpt_neox.layers.{i}", "decoder.layers.{i}"
    table = [Row(("gpt_neox.embed_in.weight",), "embedding.word_embeddings.weight")]
    for kind in ("weight", "bias"):
        table += [
            Row((f"{block}.input_layernorm.{kind}",), f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"),
            Row((f"{block}.attention.query_key_value.{kind}",), f"{layer}.self_attention.linear_qkv.{kind}"),
            Row((f"{block}.attention.dense.{kind}",), f"{layer}.self_attention.linear_proj.{kind}"),
            Row((f"{block}.post_attention_layernorm.{kind}",), f"{layer}.mlp.linear_fc1.layer_norm_{kind}"),
            Row((f"{block}.mlp.dense_h_to_4h.{kind}",), f"{layer}.mlp.linear_fc1.{kind}"),
            Row((f"{block}.mlp.dense_4h_to_h.{kind}",), f"{layer}.mlp.linear_fc2.{kind}"),
            Row((f"gpt_neox.final_layer_norm.{kind}",), f"decoder.final_layernorm.{kind}"),
        ]
    if not architecture.tie_embeddings:
        table.append(Row(("embed_out.weight",), "output_layer.weight"))
    return table


FAMILY = Family(
    name="gpt_neox",
    from_config=from_config,
    to_config=to_config,
    rows=rows,
    prefix="gpt_neox.",
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    keys=HUGGING_FACE.also(
        """
        num_hidden_layers hidden_size intermediate_size num_attention_heads max_position_embeddings hidden_act
        layer_norm_eps use_parallel_residual rotary_emb_base rotary_pct
        """
        + llama.ROPE,
        fixed={"attention_bias": (True,)},
        harmless="attention_probs_dropout_prob hidden_dropout_prob",
    ),
    head="embed_out.weight",
)
