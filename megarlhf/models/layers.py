"""Transformer layers: megatron's, with two additions. The last layer of a model computes only the tokens that a head
reads; and a layer can have a parallel residual (GPT-J, GPT-NeoX, Falcon), which megatron-core lacks.

The modules, their names and their place in checkpoints are megatron's; only their order is ours.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarlhf.models.cache import Step
from megarlhf.stream import Spans


class Layer(TransformerLayer):
    """x + attention(norm x), then x + mlp(norm' x).

    With `selects`, the layer computes keys and values of all tokens, but projection and MLP, three quarters of its
    matrices, only of those that the head reads (`Spans.read`).
    """

    selects = False

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
        if not self.selects:
            return super().forward(
                hidden_states, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options
            )
        normed = self.input_layernorm(hidden_states)
        attention = self.self_attention(
            normed, None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        fused = self.config.bias_dropout_fusion
        residual = self._selected(hidden_states, packed_seq_params)
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        mlp = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None

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
        mlp = self.mlp(self.pre_mlp_layernorm(residual) if own else self._selected(normed, packed_seq_params))
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None
