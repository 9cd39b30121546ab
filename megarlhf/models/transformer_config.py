"""`Architecture` -> megatron-core's TransformerConfig, for a layout, a precision and a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megarlhf.cluster import backend
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.models import experts
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.rotary import attention_factor
from megarlhf.models.spec import Architecture


@dataclass
class ModelTransformerConfig(TransformerConfig):
    """megatron-core's, with the architecture: our layers read there what megatron's fields cannot say."""

    architecture: Architecture | None = None


def transformer_config(
    architecture: Architecture,
    *,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    dropout: float = 0.0,
    recompute: Literal["none", "selective", "full"] = "none",
    losses: ExpertsConfig | None = None,
) -> ModelTransformerConfig:
    """megatron-core's view of `architecture` on this layout and backend. `losses`: of the routers, if they learn."""
    activation = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}[architecture.activation]
    recomputation = {
        "none": {},
        "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
        "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    }[recompute]
    return ModelTransformerConfig(
        architecture=architecture,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        normalization=architecture.normalization,
        layernorm_epsilon=architecture.norm_epsilon,
        activation_func=activation,
        gated_linear_unit=architecture.gated_mlp,
        add_bias_linear=architecture.linear_bias,
        add_qkv_bias=architecture.qkv_bias or architecture.linear_bias,
        qk_layernorm=architecture.qk_norm,
        layernorm_zero_centered_gamma=architecture.zero_centered_norm,
        # megatron marks a tensor-parallel weight only when it also initialises it; ours come from build.initialize
        init_method=_leave,
        output_layer_init_method=_leave,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_softmax_in_fp32=True,
        softmax_scale=architecture.attention_scale,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        # The interleaved schedule sends both ways between the same two ranks; in one batch of messages over two stages
        # activations and gradients would be taken for each other, silently.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        sequence_parallel=parallel.sequence,
        # Losses are sums with counts (see engine.py): Megatron divides by the count once, over all micro-batches and
        # data-parallel ranks, so gradients do not depend on how a batch is cut.
        calculate_per_token_loss=True,
        # megatron refuses variable_seq_lengths with the default dispatcher even in dense models
        moe_token_dispatcher_type="alltoall",
        **experts.options(architecture, parallel, dtype, losses),
        variable_seq_lengths=False,
        **recomputation,
        use_cpu_initialization=not backend.on_cuda(),
        bias_activation_fusion=architecture.gated_mlp and architecture.activation == "silu",
        bias_dropout_fusion=backend.on_cuda(),
        masked_softmax_fusion=False,
        # Transformer Engine's kernel does not scale cosines and sines.
        apply_rope_fusion=backend.uses_transformer_engine(dtype) and attention_factor(architecture.rope_scaling) == 1,
        persist_layer_norm=backend.uses_transformer_engine(dtype),
        gradient_accumulation_fusion=True,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's GELU ("gelu_new" in transformers)."""
    return F.gelu(x, approximate="tanh")
