"""Transformer layers: megatron's, with two additions. The last layer of a model skips positions whose output no head
uses; and a layer can have a parallel residual (GPT-J, GPT-NeoX, Falcon), which megatron-core lacks.

The modules, their names and their place in checkpoints are megatron's; only their order is ours.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class Layer(TransformerLayer):
    """x + attention(norm x), then x + mlp(norm' x).

    `num_skipped`, set before a forward pass: the number of leading positions whose output no head uses. The layer
    computes keys and values of these positions, but no attention, projection or MLP, three quarters of its matrices.
    """

    num_skipped = 0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options,
    ) -> tuple[Tensor, None]:
        """[S, B, H], or its sequence shard -> [S - num_skipped, B, H], or its shard. Skipping needs a mask,
        (B, 1, S, S). Megatron's block passes further `options`, all None."""
        if not self.num_skipped:
            return super().forward(
                hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, **options
            )
        attention = self._attended(self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb)
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, self._kept(hidden_states), self.hidden_dropout)
        mlp = self.mlp(self.pre_mlp_layernorm(hidden))
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None

    def _attended(self, normed: Tensor, mask: Tensor | None, rotary: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attention takes as many of the last queries as the mask has rows."""
        mask = mask[:, :, self.num_skipped :] if self.num_skipped else mask
        return self.self_attention(normed, attention_mask=mask, rotary_pos_emb=rotary)

    def _kept(self, hidden: Tensor) -> Tensor:
        """hidden[num_skipped:]. Under sequence parallelism from shards to shards, which are of other positions than
        before."""
        if not self.num_skipped:
            return hidden
        if not self.config.sequence_parallel:
            return hidden[self.num_skipped :]
        whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return tensor_parallel.scatter_to_sequence_parallel_region(whole[self.num_skipped :])


class ParallelResidualLayer(Layer):
    """x + attention(norm x) + mlp(norm' x): attention and MLP read the layer's input. `norm'` is a norm of its own
    (gpt_neox, falcon 40B) or the same one (falcon 7B); see `layer_specs.block_spec`."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Tensor | None = None, **_
    ) -> tuple[Tensor, None]:
        normed = self.input_layernorm(hidden_states)
        attention = self._attended(normed, attention_mask, rotary_pos_emb)
        residual = self._kept(hidden_states)
        # No norm here: the attention's is shared; or Transformer Engine has both inside the linear layers behind them,
        # and `normed` is the bare input.
        own = not isinstance(self.pre_mlp_layernorm, IdentityOp)
        mlp = self.mlp(self.pre_mlp_layernorm(residual) if own else self._kept(normed))
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, residual, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None
