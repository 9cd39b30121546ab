"""Transformer layers: megatron's, with what it lacks. The last layer of a model computes only the tokens that a head
reads. Norms may stand behind attention and MLP (Gemma 2 and 3, GLM-4, OLMo 2), and what these add to the residual may
be multiplied (Granite). And a layer can have a parallel residual (GPT-J, GPT-NeoX, Falcon). Layers below all that train
are not computed again for a backward pass, since they have none.

The modules, their names and their place in checkpoints are megatron's; only their order is ours.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarlhf.kernels import decode
from megarlhf.models import experts
from megarlhf.models.cache import Step
from megarlhf.models.layer_specs import Norm
from megarlhf.stream import Spans


class Layer(TransformerLayer):
    """x + attention(norm x), then x + mlp(norm' x). With `Architecture.norms` after or both, attention's output and the
    MLP's have a norm each before they are added; with norms after, their inputs have none. `residual_multiplier`
    multiplies what is added.

    With `selects`, the layer computes keys and values of all tokens, but projection and MLP, three quarters of its
    matrices, only of those that the head reads (`Spans.read`).
    """

    selects = False

    def __init__(self, config, *args, **options):
        super().__init__(config, *args, **options)
        if self.is_moe_layer:
            experts.mark(self.mlp)
        architecture = config.architecture
        self.multiplier = architecture.residual_multiplier
        self.post_attention_layernorm = self.post_mlp_layernorm = None
        if architecture.norms != "before":
            self.post_attention_layernorm = Norm(config, config.hidden_size)
            self.post_mlp_layernorm = Norm(config, config.hidden_size)
        self.as_megatron = architecture.norms == "before" and self.multiplier == 1

    def select(self) -> None:
        self.selects = self.self_attention.core_attention.selects = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Spans | Step | None = None,
        **options,
    ) -> tuple[Tensor, None]:
        """[T, 1, H], or its sequence shard -> [T, 1, H], or its shard; of the tokens read alone with `selects`.
        Megatron's block passes further `options`, all None."""
        if self.is_moe_layer:
            experts.instruct(self, packed_seq_params, len(hidden_states), read=self.selects)
        if isinstance(packed_seq_params, Step):
            return self._step(hidden_states, packed_seq_params), None
        if not self.selects and self.as_megatron:
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options
            )
        normed = self.input_layernorm(hidden_states)
        attention = self.self_attention(
            normed, None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        attention = self._ended(attention, self.post_attention_layernorm)
        fused = self.config.bias_dropout_fusion
        residual = self._selected(hidden_states, packed_seq_params)
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        mlp = self._ended(self.mlp(self.pre_mlp_layernorm(hidden)), self.post_mlp_layernorm)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None

    def _ended(self, output: tuple[Tensor, Tensor | None], norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """What attention or MLP adds to the residual, from its output and a bias that is not yet added."""
        if self.as_megatron:
            return output
        x, bias = output
        x = x if bias is None else x + bias
        x = x if norm is None else norm(x)
        return (x if self.multiplier == 1 else x * self.multiplier), None

    def _step(self, hidden: Tensor, step: Step) -> Tensor:
        """A step of decoding, by fewer kernels and calls: addition and norm are one, the activation is one."""
        attention, bias = self._ended(
            self.self_attention(self.input_layernorm(hidden), None, packed_seq_params=step),
            self.post_attention_layernorm,
        )
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        if isinstance(self.pre_mlp_layernorm, Norm):
            hidden, normed = self.pre_mlp_layernorm.of_sum(attention, bias, hidden)
        else:  # Transformer Engine has the norm inside the linear layer behind it
            hidden = add((attention, bias), hidden, self.hidden_dropout)
            normed = self.pre_mlp_layernorm(hidden)
        return add(self._ended(self._mlp_of_step(normed), self.post_mlp_layernorm), hidden, self.hidden_dropout)

    def _mlp_of_step(self, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        config = self.config
        if self.is_moe_layer:
            return self.mlp(normed)
        inner, bias = self.mlp.linear_fc1(normed)
        name = config.activation_func.__name__.strip("_")  # a key of decode.ACTIVATIONS
        return self.mlp.linear_fc2(decode.activate(inner, bias, name, gated=config.gated_linear_unit))

    def _selected(self, hidden: Tensor, where: Spans | Step) -> Tensor:
        """The tokens that the head reads. Under sequence parallelism from shards to shards, which are of other tokens
        than before."""
        if not self.selects or isinstance(where, Step) or where.read is None:
            return hidden
        if not self.config.sequence_parallel:
            return hidden[where.read]
        group = self.tp_group
        whole = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=group
        )
        return tensor_parallel.scatter_to_sequence_parallel_region(whole[where.read], group=group)


class ParallelResidualLayer(Layer):
    """x + attention(norm x) + mlp(norm' x): attention and MLP read the layer's input. `norm'` is a norm of its own
    (gpt_neox, falcon 40B) or the same one (falcon 7B); see `layer_specs.block_spec`."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Spans | Step | None = None,
        **_,
    ) -> tuple[Tensor, None]:
        normed = self.input_layernorm(hidden_states)
        attention = self.self_attention(
            normed, None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        residual = self._selected(hidden_states, packed_seq_params)
        # No norm here: the attention's is shared; or Transformer Engine has both inside the linear layers behind them,
        # and `normed` is the bare input.
        own = not isinstance(self.pre_mlp_layernorm, IdentityOp)
        normed = self.pre_mlp_layernorm(residual) if own else self._selected(normed, packed_seq_params)
        mlp = self._mlp_of_step(normed) if isinstance(packed_seq_params, Step) else self.mlp(normed)
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None


class Block(TransformerBlock):
    """Megatron's, with another forward pass of layers that are computed again in the backward pass."""

    def _checkpointed_forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: Spans, **_
    ) -> Tensor:
        """Megatron's block calls it for `recompute_granularity` full, with further options that have no effect here."""

        def run(layer: Layer, hidden: Tensor) -> Tensor:
            return layer(hidden, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params)[0]

        hidden = hidden_states
        for layer in self.layers:
            trains = any(parameter.requires_grad for parameter in layer.parameters())
            if not trains and not hidden.requires_grad:  # nor does anything below
                with torch.no_grad():
                    hidden = run(layer, hidden)
                continue
            if not hidden.requires_grad:  # recomputed layers get gradients only if their input asks for one
                hidden = hidden.detach().requires_grad_()
            hidden = tensor_parallel.checkpoint(partial(run, layer), False, hidden)
        return hidden
