"""The transformer layer with a parallel residual (GPT-J, GPT-NeoX, Falcon), of which megatron-core has none."""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm x) + mlp(norm' x): attention and MLP read the layer's input. `norm'` is a norm of its own
    (gpt_neox, falcon 40B) or the same one (falcon 7B); see `backend.block_spec`.

    The modules, their names and their place in checkpoints are megatron's; only their order is ours.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Tensor | None = None, **_
    ) -> tuple[Tensor, None]:
        """[S, B, H], or its sequence shard -> the same shape. Megatron's block passes much else, all None."""
        normed = self.input_layernorm(hidden_states)
        attention = self.self_attention(normed, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb)
        # No norm here: the attention's is shared; or Transformer Engine has both inside the linear layers behind them,
        # and `normed` is the bare input.
        own = not isinstance(self.pre_mlp_layernorm, IdentityOp)
        mlp = self.mlp(self.pre_mlp_layernorm(hidden_states) if own else normed)
        fused = self.config.bias_dropout_fusion
        hidden = self.self_attn_bda(self.training, fused)(attention, hidden_states, self.hidden_dropout)
        return self.mlp_bda(self.training, fused)(mlp, hidden, self.hidden_dropout), None
