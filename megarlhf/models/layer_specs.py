"""The layers that a model is built of: Transformer Engine's or megatron's own."""

from __future__ import annotations

import copy

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megarlhf.cluster import backend, operations
from megarlhf.models import experts


def block_spec(
    config: TransformerConfig,
    self_attention: type,
    core_attention: type,
    vp_stage: int | None,
    *,
    pipeline_rank: int,
    layer_type: type | None = None,
    shared_norm: bool = False,
    norms_apart: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, always with our attention: TE's linears and norms on CUDA where TE
    imports, for bfloat16; otherwise megatron's local ones. `layer_type` replaces megatron's TransformerLayer. With
    `shared_norm` attention and MLP share one norm. With `norms_apart` TE's norms are modules of their own: adapters
    read a linear layer's input, which TE's fused layers do not give out. Names in checkpoints stay the same."""
    if backend.uses_transformer_engine(config.params_dtype):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        norm = TENorm
        layer = copy.deepcopy(
            gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        )
        after = config.architecture.norms == "after"
        # A shared norm cannot be fused with one of the two linear layers that read it.
        if shared_norm or norms_apart or after:
            layer.submodules.input_layernorm = IdentityOp if after else norm
            layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            layer.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
            layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            if not shared_norm and not after:
                layer.submodules.pre_mlp_layernorm = norm
                layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    else:
        norm = Norm
        layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization))
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
        if shared_norm:
            layer.submodules.pre_mlp_layernorm = IdentityOp
        if config.architecture.norms == "after":
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        linears = ColumnLinear, RowLinear
        attention.linear_qkv = mlp.linear_fc1 = ColumnLinear
        attention.linear_proj = mlp.linear_fc2 = RowLinear
    if config.architecture.proj_bias:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _biased(attention.linear_proj)
    if config.num_moe_experts:
        layer.submodules.mlp = experts.spec(config, None if norm is not Norm else linears)
        layer.submodules.pre_mlp_layernorm = IdentityOp if config.architecture.norms == "after" else norm
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)  # the norm has its own name
    layer.submodules.self_attention.module = self_attention
    layer.submodules.self_attention.submodules.core_attention = core_attention
    layer.module = layer_type or layer.module
    layers = [layer] * get_num_layers_to_build(config, vp_stage, pipeline_rank)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _biased(linear: type) -> type:
    """A linear layer that has a bias whatever the configuration says of all: megatron's has one key for attention's
    output and the MLP."""

    class Biased(linear):
        def __init__(self, *sizes, bias: bool, **options):
            super().__init__(*sizes, bias=True, **options)

    return Biased


class ColumnLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's, with a direct way where no gradient is needed: its own takes longer than the product of a few
    tokens."""

    def forward(self, x: torch.Tensor, *options) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.is_grad_enabled() or self.sequence_parallel or options:
            return super().forward(x, *options)
        return operations.linear(x, self.weight, None if self.skip_bias_add else self.bias), (
            self.bias if self.skip_bias_add else None
        )


class RowLinear(tensor_parallel.RowParallelLinear):
    """As `ColumnLinear`."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.is_grad_enabled() or self.tp_group.size() > 1:
            return super().forward(x)
        return operations.linear(x, self.weight, None if self.skip_bias_add else self.bias), (
            self.bias if self.skip_bias_add else None
        )


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm for layer specs without TE. Megatron's own refuses sequence parallelism; this one marks its
    parameters so that `finalize_model_grads` sums their gradients over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=backend.device()))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=backend.device()))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return operations.normalize(x, self.weight, self.bias, self.config)

    def of_sum(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + bias + residual, its norm), where no gradient is needed. x may be overwritten."""
        return operations.normalize_sum(x, bias, residual, self.weight, self.bias, self.config)
