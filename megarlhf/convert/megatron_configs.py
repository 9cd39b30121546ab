"""The configurations of NeMo 1, NeMo 2 and Megatron-LM -> fields of `Architecture`.

Each function raises ValueError("key: what; remedy") for a value that megarlhf cannot compute. The keys that it does
not read are in megatron_keys.py.
"""

from __future__ import annotations

from typing import Any

# NeMo 1's activations: (ours, gated). The plain gated names keep gate and up in two tensors, the fast- ones in one.
ACTIVATIONS = {
    "gelu": ("gelu", False), "approx-gelu": ("gelu_tanh", False),
    "swiglu": ("silu", True), "fast-swiglu": ("silu", True), "geglu": ("gelu", True), "fast-geglu": ("gelu", True),
}  # fmt: skip
LLAMA31 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# Of a mixture of experts: the only values that megarlhf computes. An absent key has the first one. Keys of training
# alone (jitter, dropping, balancing) and of how it is computed change no weight's meaning and are not here.
EXPERTS = {
    "moe_layer_freq": (1,),
    "moe_router_score_function": ("softmax",),
    "moe_router_load_balancing_type": ("aux_loss", "none", "seq_aux_loss", "global_aux_loss"),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_use_legacy_grouped_gemm": (False,),
}


def nemo1_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A .nemo's model_config.yaml."""
    if config.get("num_moe_experts"):
        raise ValueError("num_moe_experts: NeMo 1's mixtures of experts cannot be converted; use NeMo 2's")
    activation = config.get("activation", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: '{activation}' has no counterpart in megarlhf")
    kind, gated = ACTIVATIONS[activation]
    bias = config.get("bias", True)
    # NeMo's fused kernel of bias and GELU computes the tanh approximation.
    if kind == "gelu" and (config.get("openai_gelu") or (bias and config.get("bias_activation_fusion", True))):
        kind = "gelu_tanh"
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(config.get("normalization", "layernorm"))
    if norm is None:
        raise ValueError(f"normalization: '{config['normalization']}' has no counterpart in megarlhf")
    positions = config.get("position_embedding_type", "learned_absolute")
    if positions not in ("learned_absolute", "rope"):
        raise ValueError(f"position_embedding_type: '{positions}' has no counterpart in megarlhf")
    learned = positions == "learned_absolute"
    length = config["encoder_seq_length"]
    if learned and not config.get("mcore_gpt"):
        length = config.get("max_position_embeddings") or length
    scaling = LLAMA31 if config.get("scale_positional_embedding") else None
    if scaling is None and config.get("seq_len_interpolation_factor") not in (None, 1, 1.0):
        raise ValueError("seq_len_interpolation_factor: linearly scaled positions have no counterpart in megarlhf")
    return dict(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config.get("num_query_groups") or config["num_attention_heads"],
        head_dim=_head_dim(config),
        max_position_embeddings=length,
        normalization=norm,
        norm_epsilon=float(config.get("layernorm_epsilon", 1e-5)),
        activation=kind,
        gated_mlp=gated,
        linear_bias=bias,
        qkv_bias=not bias and bool(config.get("qkv_bias")),
        position_embedding="learned" if learned else "rope",
        rotary_base=float(config.get("rotary_base") or 10000),
        rotary_percent=float(config.get("rotary_percentage", 1.0)),
        rope_scaling=scaling if not learned else None,
        tie_embeddings=config.get("share_embeddings_and_output_weights", True),
        zero_centered_norm=bool(config.get("layernorm_zero_centered_gamma")),
        scale_embedding=bool(config.get("apply_embedding_scaling")),
        init_std=float(config.get("init_method_std", 0.02)),
    )


def nemo2_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The `config` of a NeMo 2 model."""
    activation = str((config.get("activation_func") or {}).get("_target_"))
    kind = {"silu": "silu", "openai_gelu": "gelu_tanh", "gelu": "gelu"}.get(activation.split(".")[-1])
    if kind is None:
        raise ValueError(f"activation_func: '{activation}' has no counterpart in megarlhf")
    if kind == "gelu" and config.get("bias_activation_fusion") and config.get("add_bias_linear"):
        kind = "gelu_tanh"  # what the fused kernel computes
    if config["position_embedding_type"] not in ("learned_absolute", "rope"):
        raise ValueError(
            f"position_embedding_type: '{config['position_embedding_type']}' has no counterpart in megarlhf"
        )
    learned = config["position_embedding_type"] == "learned_absolute"
    scaling = None
    if config.get("scale_factor"):
        scaling = dict(
            factor=float(config["scale_factor"]),
            low_freq_factor=float(config["low_freq_factor"]),
            high_freq_factor=float(config["high_freq_factor"]),
            original_max_position_embeddings=config["old_context_len"],
        )
    fields = dict(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["ffn_hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config.get("num_query_groups") or config["num_attention_heads"],
        head_dim=_head_dim(config),
        max_position_embeddings=config["seq_length"],
        normalization=config["normalization"],
        norm_epsilon=float(config["layernorm_epsilon"]),
        activation=kind,
        gated_mlp=config["gated_linear_unit"],
        linear_bias=config["add_bias_linear"],
        qkv_bias=not config["add_bias_linear"] and bool(config.get("add_qkv_bias")),
        position_embedding="learned" if learned else "rope",
        rotary_base=float(config.get("rotary_base", 10000)),
        rotary_percent=float(config.get("rotary_percent", 1.0)),
        rope_scaling=scaling,
        tie_embeddings=config["share_embeddings_and_output_weights"],
        qk_norm=bool(config.get("qk_layernorm")),
        init_std=float(config.get("init_method_std", 0.02)),
    )
    return fields | _experts(config, "num_moe_experts")


def megatron_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """Megatron-LM's command line, as its checkpoints keep it."""
    gated = bool(arguments.get("swiglu"))
    rotary = bool(arguments.get("use_rotary_position_embeddings"))
    positions = arguments.get("position_embedding_type", "rope" if rotary else "learned_absolute")
    if positions not in ("learned_absolute", "rope"):
        raise ValueError(f"position_embedding_type: '{positions}' has no counterpart in megarlhf")
    learned = positions == "learned_absolute"
    if learned and (rotary or not arguments.get("add_position_embedding", True)):
        raise ValueError(
            "position_embedding_type: learned_absolute with use_rotary_position_embeddings, or without "
            "add_position_embedding, has no counterpart in megarlhf"
        )
    bias = arguments.get("add_bias_linear", True)
    fused = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu")
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    scaling = LLAMA31 if arguments.get("use_rope_scaling") else None
    if scaling:
        scaling = {**scaling, "factor": float(arguments.get("rope_scaling_factor", 8.0))}
    fields = dict(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=groups or arguments["num_attention_heads"],
        head_dim=_head_dim(arguments),
        max_position_embeddings=arguments["max_position_embeddings"],
        normalization=arguments.get("normalization", "LayerNorm"),
        norm_epsilon=float(arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5))),
        activation="silu" if gated else "gelu_tanh" if fused and bias else "gelu",
        gated_mlp=gated,
        linear_bias=bias,
        qkv_bias=not bias and bool(arguments.get("add_qkv_bias")),
        position_embedding="learned" if learned else "rope",
        rotary_base=float(arguments.get("rotary_base", 10000)),
        rotary_percent=float(arguments.get("rotary_percent", 1.0)),
        rope_scaling=scaling if not learned else None,
        tie_embeddings=not arguments.get("untie_embeddings_and_output_weights", False),
        qk_norm=bool(arguments.get("qk_layernorm")),
        init_std=float(arguments.get("init_method_std", 0.02)),
    )
    return fields | _experts(arguments, "num_experts")


def _experts(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of a mixture of experts, whose number stands under `name`; {} for a dense model."""
    number = config.get(name)
    if not number:
        return {}
    for key, values in EXPERTS.items():
        if (value := config.get(key, values[0])) not in values:
            known = " or ".join(map(str, values))
            raise ValueError(f"{key}: {value} has no counterpart in megarlhf; only {known} can be converted")
    shared = config.get("moe_shared_expert_intermediate_size")
    if shared and not config.get("moe_shared_expert_gate"):
        raise ValueError("moe_shared_expert_gate: a shared expert without a gate has no counterpart in megarlhf")
    return dict(
        num_experts=number,
        experts_per_token=config.get("moe_router_topk") or 2,
        renormalize_experts=not config.get("moe_router_pre_softmax"),
        ffn_hidden_size=config.get("moe_ffn_hidden_size") or config["ffn_hidden_size"],
        shared_expert_size=shared or None,
    )


def _head_dim(config: dict[str, Any]) -> int | None:
    channels = config.get("kv_channels")
    return None if not channels or channels * config["num_attention_heads"] == config["hidden_size"] else channels
