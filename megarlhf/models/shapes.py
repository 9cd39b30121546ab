"""The tensors of a megatron-core GPT: names of its distributed checkpoints, per layer, and shapes without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarlhf.models.spec import Architecture

Shape = tuple[int, ...]

# Training pads the rows of these to what its tensor-parallel size needs (`Architecture.padded_vocab_size`).
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every weight of the model, name -> shape. Layer numbers are global and in the name."""
    h, f, v = architecture.hidden_size, architecture.ffn_hidden_size, architecture.vocab_size
    attention = architecture.num_attention_heads * architecture.kv_channels
    qkv = attention + 2 * architecture.num_query_groups * architecture.kv_channels
    fc1 = 2 * f if architecture.gated_mlp else f
    norm = ("weight",) if architecture.normalization == "RMSNorm" else ("weight", "bias")

    out: dict[str, Shape] = {"embedding.word_embeddings.weight": (v, h)}
    if architecture.position_embedding == "learned":
        out["embedding.position_embeddings.weight"] = (architecture.max_position_embeddings, h)
    for i in range(architecture.num_layers):
        layer = f"decoder.layers.{i}"
        for kind in norm:
            out[f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"] = (h,)
            if architecture.qk_norm:
                for which in "qk":
                    out[f"{layer}.self_attention.{which}_layernorm.{kind}"] = (architecture.kv_channels,)
            if architecture.num_experts:
                out[f"{layer}.pre_mlp_layernorm.{kind}"] = (h,)
            elif not architecture.shared_norm:
                out[f"{layer}.mlp.linear_fc1.layer_norm_{kind}"] = (h,)
        mlps = ["mlp"]
        if architecture.num_experts:
            out[f"{layer}.mlp.router.weight"] = (architecture.num_experts, h)
            mlps = [f"mlp.experts.experts.{expert}" for expert in range(architecture.num_experts)]
        for name, rows, columns in (
            ("self_attention.linear_qkv", qkv, h),
            ("self_attention.linear_proj", h, attention),
            *((f"{mlp}.linear_fc1", fc1, h) for mlp in mlps),
            *((f"{mlp}.linear_fc2", h, f) for mlp in mlps),
        ):
            out[f"{layer}.{name}.weight"] = (rows, columns)
            if architecture.linear_bias or (architecture.qkv_bias and name.endswith("qkv")):
                out[f"{layer}.{name}.bias"] = (rows,)
    for kind in norm:
        out[f"decoder.final_layernorm.{kind}"] = (h,)
    if not architecture.tie_embeddings:
        out["output_layer.weight"] = (v, h)
    return out
