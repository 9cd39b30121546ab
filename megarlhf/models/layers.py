"""Transformer layers: megatron's, but that the last of a model leaves out what no head reads; and with a parallel
residual (GPT-J, GPT-NeoX, Falcon), of which megatron-core has none.

The modules, their names and their place in checkpoints are megatron's; only their order is ours.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class Layer(TransformerLayer):
    """x + attention(norm x), then x + mlp(norm' x).

    `unread`, set before a forward pass: from so many leading positions nobody reads what this layer makes of them. They
    are keys and values to the others, but get no attention, projection or MLP: three quarters of a layer's matrices.
    """

    unread = 0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options,
    ) -> tuple[Tensor, None]:
        """[S, B, H], or its sequence shard -> [S - unread, B, H], or its shard. A mask, (B, 1, S, S), is needed where
        positions are unread. Megatron's block passes much else, all None."""
        if not self.unread:
            return super().forward(
                hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, **options
            )
        attention = self._attended(self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb)
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, self._read(hidden_states), self.hidden_dropout)
        mlp = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None

    def _attended(self, normed: Tensor, mask: Tensor | None, rotary: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attention takes as many of the last queries as the mask has rows."""
        mask = mask[:, :, self.unread :] if self.unread else mask
        return self.self_attention(normed, attention_mask=mask, rotary_pos_emb=rotary)

    def _read(self, hidden: Tensor) -> Tensor:
        """hidden[unread:]; under sequence parallelism shard to shard, which are of other positions than before."""
        if not self.unread:
            return hidden
        if not self.config.sequence_parallel:
            return hidden[self.unread :]
        whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return tensor_parallel.scatter_to_sequence_parallel_region(whole[self.unread :])


class ParallelResidualLayer(Layer):
    """x + attention(norm x) + mlp(norm' x): attention and MLP read the layer's input. `norm'` is a norm of its own
    (gpt_neox, falcon 40B) or the same one (falcon 7B); see `layer_specs.block_spec`."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Tensor | None = None, **_
    ) -> tuple[Tensor, None]:
        normed = self.input_layernorm(hidden_states)
        attention = self._attended(normed, attention_mask, rotary_pos_emb)
        residual = self._read(hidden_states)
        # No norm here: the attention's is shared; or Transformer Engine has both inside the linear layers behind them,
        # and `normed` is the bare input.
        own = not isinstance(self.pre_mlp_layernorm, IdentityOp)
        mlp = self.mlp(self.pre_mlp_layernorm(residual) if own else self._read(normed))
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None
