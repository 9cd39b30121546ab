"""What a model returns instead of logits: token log-probs, values or scores, as response-aligned (B, R) tensors.

Only this file shifts by one between a position and the token that it predicts.

Legend: B rows, S tokens, P prompt columns, R = S - P, H hidden size, V' vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megarlhf import kernels
from megarlhf.batch import Compared, Sequences
from megarlhf.cluster import backend


class WordHead(tensor_parallel.ColumnParallelLinear):
    """The output layer as a head: log-probs of the next tokens, never logits.

    `GPTModel` builds the ColumnParallelLinear (weight, tying, checkpoint keys, DDP hooks); `GPT` changes its class to
    this one.
    """

    def forward(
        self,
        hidden: Tensor,
        sequences: Sequences,
        *,
        weight: Tensor,
        vocab_size: int,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, Tensor]:
        """hidden [S, B, H] (a [S/TP, B, H] shard under sequence parallelism), after the final norm; weight [V', H], its
        own or the word embedding's. Returns {"logprobs": (B, R)[, "entropy": (B, R)]} in fp32, 0 where `sequences.mask`
        is False: the head skips these positions."""
        first, rows = sequences.prompt_len, len(sequences)
        counted, labels = self._counted(sequences)
        output = kernels.linear_logprobs(
            hidden,
            weight,
            labels,
            rows=counted + (first - 1) * rows,  # the hidden state one position before predicts the token
            temperature=temperature,
            with_entropy=with_entropy,
            vocab_size=vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )

        outputs = {"logprobs": self._response_aligned(output.logprobs, counted, sequences)}
        if with_entropy:
            outputs["entropy"] = self._response_aligned(output.entropy, counted, sequences)
        return outputs

    def states(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """(B, R, H): the hidden states that predict the response tokens; `hidden` as in `forward`."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        return hidden[sequences.prompt_len - 1 : -1].transpose(0, 1)

    def kl(
        self, hidden: Tensor, compared: Compared, *, weight: Tensor, ref_weight: Tensor, vocab_size: int,
        temperature: float,
    ) -> Tensor:  # fmt: skip
        """(B, R) fp32: the exact KL(policy || reference) of each response token's distribution, 0 where it does not
        count. `ref_weight`: the reference's `weight`."""
        counted, _ = self._counted(compared)
        own, other = (
            states.transpose(0, 1).flatten(0, 1)[counted]
            for states in (self.states(hidden, compared), compared.ref_states)
        )
        kl = kernels.linear_policy_ref_kl(
            own, weight, other, ref_weight,
            temperature=temperature, vocab_size=vocab_size, tp_group=self.tp_group,
        )  # fmt: skip
        return self._response_aligned(kl, counted, compared)

    @staticmethod
    def _counted(sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The tokens of `sequences.mask`, as an index into [R * B], and their ids."""
        counted = sequences.mask.t().flatten().nonzero().squeeze(1)
        return counted, sequences.tokens[:, sequences.prompt_len :].t().flatten()[counted]

    @staticmethod
    def _response_aligned(values: Tensor, counted: Tensor, sequences: Sequences) -> Tensor:
        rows, responses = sequences.mask.shape
        return values.new_zeros(responses * rows).index_put((counted,), values).view(responses, rows).t()


class ScalarHead(nn.Module):
    """One number a token, in fp32: a critic's values or a reward model's scores (detail G1).

    A value belongs to the state *before* a token (position P + j - 1 for column j), a score to the text *up to and
    including* it (position P + j). Replicated over the tensor-parallel ranks.

    What it returns is reward_gain * raw + reward_bias: two constants that reward-model training sets (detail R3).
    """

    def __init__(self, config, output: str):
        super().__init__()
        assert output in ("values", "scores")
        self.output = output
        self.sequence_parallel = config.sequence_parallel
        kwargs = dict(dtype=config.params_dtype, device=backend.device())
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **kwargs))
        self.bias = nn.Parameter(torch.empty(1, **kwargs))
        self.register_buffer("reward_gain", torch.ones(1, device=backend.device()))
        self.register_buffer("reward_bias", torch.zeros(1, device=backend.device()))

    def forward(self, hidden: Tensor, sequences: Sequences) -> dict[str, Tensor]:
        """hidden [S, B, H] or its sequence shard -> {output: (B, R)} in fp32."""
        if self.sequence_parallel:
            # Every rank computes the whole head, so its input's gradient is whole as well: the backward is a split.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        first = sequences.prompt_len
        hidden = hidden[first - 1 : -1] if self.output == "values" else hidden[first:]
        raw = F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1).t()
        return {self.output: self.reward_gain * raw + self.reward_bias}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )
