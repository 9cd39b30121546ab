"""Llama 1, 2, 3, 3.1, 3.2: RoPE, RMSNorm, gated MLP, grouped-query attention, tied or untied."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.keys import HUGGING_FACE
from megarlhf.convert.mapping import GATE_UP, Family, Row, qkv
from megarlhf.convert.rope import ROPE, rope_from, rope_to
from megarlhf.models.spec import Architecture

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula, with sqrt(2/pi) to 10 digits
}


def from_config(config: dict[str, Any], base: float = 10000.0, partly: bool = False) -> dict[str, Any]:
    """`base`: the default base of the rotary frequencies. `partly`: a part of a head's channels may turn."""
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act: '{activation}' is not supported; known: {', '.join(ACTIVATIONS)}")
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    if mlp_bias and not attention_bias:
        raise ValueError(
            "mlp_bias: True while attention_bias is False has no counterpart in megarlhf; biases of attention alone, "
            "of both, or none can be converted"
        )
    rope = rope_from(config, base)
    if rope["rotary_percent"] != 1 and not partly:
        raise ValueError(
            f"partial_rotary_factor: {rope['rotary_percent']} has no counterpart in this family; only 1.0 can be "
            "converted"
        )
    head_dim = config.get("head_dim")
    heads = config["num_attention_heads"]
    return dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        head_dim=None if head_dim is None or head_dim * heads == config["hidden_size"] else head_dim,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        linear_bias=mlp_bias,
        qkv_bias=attention_bias and not mlp_bias,
        proj_bias=attention_bias and not mlp_bias,
        tie_embeddings=config.get("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        **rope,
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    return dict(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_query_groups,
        vocab_size=architecture.vocab_size,
        max_position_embeddings=architecture.max_position_embeddings,
        head_dim=architecture.kv_channels,
        rms_norm_eps=architecture.norm_epsilon,
        hidden_act="gelu_pytorch_tanh" if architecture.activation == "gelu_tanh" else architecture.activation,
        attention_bias=architecture.linear_bias or architecture.proj_bias,
        mlp_bias=architecture.linear_bias,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.init_std,
        **rope_to(architecture),
    )


BLOCK, LAYER = "model.layers.{i}", "decoder.layers.{i}"


def rows(architecture: Architecture) -> list[Row]:
    return attention_rows(architecture) + mlp_rows(architecture)


def mlp_rows(architecture: Architecture) -> list[Row]:
    """The MLP and the norm before it."""
    table = [Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.mlp.linear_fc1.layer_norm_weight")]
    for kind in ("weight", "bias") if architecture.linear_bias else ("weight",):
        gate, up, down = (f"{BLOCK}.mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
        table += [
            Row((gate, up), f"{LAYER}.mlp.linear_fc1.{kind}", GATE_UP),
            Row((down,), f"{LAYER}.mlp.linear_fc2.{kind}"),
        ]
    return table


def expert_rows(architecture: Architecture, block: str, gate: str, up: str, down: str) -> list[Row]:
    """A mixture of experts instead of the MLP: `block` has the router and the experts, whose three matrices are called
    `gate`, `up` and `down`."""
    table = attention_rows(architecture)
    table += [
        Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.pre_mlp_layernorm.weight"),
        Row((f"{BLOCK}.{block}.gate.weight",), f"{LAYER}.mlp.router.weight"),
    ]
    for expert in range(architecture.num_experts or 0):
        theirs, ours = f"{BLOCK}.{block}.experts.{expert}", f"{LAYER}.mlp.experts.experts.{expert}"
        table += [
            Row((f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"), f"{ours}.linear_fc1.weight", GATE_UP),
            Row((f"{theirs}.{down}.weight",), f"{ours}.linear_fc2.weight"),
        ]
    return table


def attention_rows(architecture: Architecture) -> list[Row]:
    """Everything but the MLP and the norm before it."""
    merge, block, layer = qkv(architecture), BLOCK, LAYER
    table = [
        Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight"),
        Row(("model.norm.weight",), "decoder.final_layernorm.weight"),
        Row((f"{block}.input_layernorm.weight",), f"{layer}.self_attention.linear_qkv.layer_norm_weight"),
    ]
    if architecture.qk_norm:
        for name in "qk":
            table.append(
                Row((f"{block}.self_attn.{name}_norm.weight",), f"{layer}.self_attention.{name}_layernorm.weight")
            )
    if architecture.qkv_bias and not architecture.linear_bias:
        biases = tuple(f"{block}.self_attn.{name}_proj.bias" for name in "qkv")
        table.append(Row(biases, f"{layer}.self_attention.linear_qkv.bias", merge))
    if architecture.proj_bias and not architecture.linear_bias:
        table.append(Row((f"{block}.self_attn.o_proj.bias",), f"{layer}.self_attention.linear_proj.bias"))
    for kind in ("weight", "bias") if architecture.linear_bias else ("weight",):
        q, k, v, o = (f"{block}.self_attn.{name}_proj.{kind}" for name in "qkvo")
        table += [
            Row((q, k, v), f"{layer}.self_attention.linear_qkv.{kind}", merge),
            Row((o,), f"{layer}.self_attention.linear_proj.{kind}"),
        ]
    if not architecture.tie_embeddings:
        table.append(Row(("lm_head.weight",), "output_layer.weight"))
    return table


KEYS = HUGGING_FACE.also(
    """
    num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    max_position_embeddings hidden_act rms_norm_eps attention_bias mlp_bias
    """
    + ROPE,
    harmless="pretraining_tp",  # how a product is summed
)
FAMILY = Family(
    name="llama",
    from_config=from_config,
    to_config=to_config,
    rows=rows,
    prefix="model.",
    buffers=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    # Llama's attention has no windows, but transformers' cache has them where sliding_window is a number.
    keys=KEYS.also(
        fixed={"rope_interleaved": (False,), "sliding_window": (None,), "use_sliding_window": (False, None)}
    ),
)
