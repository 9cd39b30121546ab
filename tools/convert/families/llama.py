"""Llama 1, 2, 3, 3.1, 3.2: RoPE, RMSNorm, gated MLP, grouped-query attention, tied or untied."""

from __future__ import annotations

import dataclasses
from typing import Any

from megarlhf.models.spec import Architecture, RopeScaling
from tools.convert.keys import HUGGING_FACE
from tools.convert.mapping import GATE_UP, Family, Row, qkv

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula, with sqrt(2/pi) to 10 digits
}


def from_config(config: dict[str, Any], base: float = 10000.0) -> dict[str, Any]:
    """`base`: the default base of the rotary frequencies."""
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act: '{activation}' is not supported; known: {', '.join(ACTIVATIONS)}")
    bias = config.get("attention_bias", False)
    if bias != config.get("mlp_bias", False):
        raise ValueError(
            f"attention_bias: {bias} while mlp_bias is {not bias} has no counterpart in Megatron, where the linear "
            "layers have biases all or none"
        )
    rope = rope_from(config, base)
    if rope["rotary_percent"] != 1:
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
        linear_bias=bias,
        tie_embeddings=config.get("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        **rope,
    )


def to_config(architecture: Architecture) -> dict[str, Any]:
    scaling = architecture.rope_scaling
    scaling = None if scaling is None else {"rope_type": "llama3", **dataclasses.asdict(scaling)}
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
        attention_bias=architecture.linear_bias,
        mlp_bias=architecture.linear_bias,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.init_std,
        # transformers 4 reads the first two, transformers 5 the third
        rope_theta=architecture.rotary_base,
        rope_scaling=scaling,
        rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": architecture.rotary_base},
    )


ROPE = " rope_parameters rope_scaling rope_theta partial_rotary_factor"


def rope_from(
    config: dict[str, Any],
    base: float = 10000.0,
    percent: float = 1.0,
    base_key: str = "rope_theta",
    percent_key: str = "partial_rotary_factor",
) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling` (whose type was once `type`); `base`
    and `percent` are the defaults. `rope_scaling` has precedence over `rope_parameters`, as in transformers 5. A
    contradiction between them is refused, because other versions may have another precedence."""
    said = {key: _rope(key, config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    key = next(iter(said), "rope_parameters")
    rope = said.get(key, {})
    effective = {
        "rope_theta": rope.get("rope_theta", config.get(base_key, base)),
        "partial_rotary_factor": rope.get("partial_rotary_factor", config.get(percent_key, percent)),
    }
    names = {"rope_theta": {"rope_theta", base_key}, "partial_rotary_factor": {"partial_rotary_factor", percent_key}}
    remedy = "remove the one that is wrong"
    for place, values in [*said.items(), ("", config)]:
        for name, value in effective.items():
            for other in sorted(names[name] & values.keys()):
                if values[other] != value:
                    where = f"{place}: its {other}" if place else f"{other}:"
                    raise ValueError(f"{where} {values[other]} contradicts {name} {value}; {remedy}")
        if place and (values["kind"], values["scaling"]) != (rope["kind"], rope["scaling"]):
            raise ValueError(f"{place}: contradicts {key}; {remedy}")
    rotary = dict(rotary_base=effective["rope_theta"], rotary_percent=effective["partial_rotary_factor"])
    return rotary if not rope or rope["kind"] == "default" else {**rotary, "rope_scaling": rope["scaling"]}


def _rope(key: str, value: Any) -> dict[str, Any]:
    """One of the two dictionaries: its `kind`, the frequencies' base and share, and the `scaling`."""
    if not isinstance(value, dict):
        raise ValueError(f"{key}: {value} is no set of settings; restore the file")
    rope = dict(value)
    out = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kinds = [rope.pop(name) for name in ("rope_type", "type") if name in rope] or ["default"]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"{key}: its rope_type {kinds[0]} contradicts its type {kinds[1]}; remove the wrong one")
    known = [field.name for field in dataclasses.fields(RopeScaling)]
    if kinds[0] not in ("default", "llama3"):
        raise ValueError(
            f"{key}: rope_type '{kinds[0]}' has no counterpart in megarlhf; only default and llama3 convert"
        )
    needed = known if kinds[0] == "llama3" else []
    if sorted(rope) != sorted(needed):
        raise ValueError(
            f"{key}: rope_type {kinds[0]} needs exactly {', '.join(needed) or 'nothing'}, not "
            f"{', '.join(map(str, rope)) or 'none'}"
        )
    return {**out, "kind": kinds[0], "scaling": rope}


BLOCK, LAYER = "model.layers.{i}", "decoder.layers.{i}"


def rows(architecture: Architecture) -> list[Row]:
    table = attention_rows(architecture)
    table.append(Row((f"{BLOCK}.post_attention_layernorm.weight",), f"{LAYER}.mlp.linear_fc1.layer_norm_weight"))
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
