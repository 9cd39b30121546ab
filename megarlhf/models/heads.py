"""What a model returns instead of logits: token log-probs, values, scores or Q values, as response-aligned (B, R)
tensors.

The last layer returns only the states that the head reads; `GPT._read` says which.

Legend: B rows, R response columns, N counted tokens, K >= N states, H hidden size, V' vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megarlhf import kernels
from megarlhf.cluster import backend, operations
from megarlhf.stream import Stream


class WordHead(tensor_parallel.ColumnParallelLinear):
    """The output layer as a head: log-probs of the next tokens, never logits.

    `GPTModel` builds the ColumnParallelLinear (weight, tying, checkpoint keys, DDP hooks); `GPT` changes its class to
    this one.
    """

    def forward(
        self,
        hidden: Tensor,
        stream: Stream,
        *,
        weight: Tensor,
        vocab_size: int,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, Tensor]:
        """hidden [K, 1, H] (a [K/TP, 1, H] shard under sequence parallelism), after the final norm: the states that
        predict the N counted tokens come first. weight [V', H], its own or the word embedding's. Returns
        {"logprobs": (B, R)[, "entropy": (B, R)]} in fp32, 0 for tokens that do not count."""
        output = kernels.linear_logprobs(
            hidden,
            weight,
            stream.labels,
            rows=slice(len(stream.counted)),
            temperature=temperature,
            with_entropy=with_entropy,
            vocab_size=vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )
        outputs = {"logprobs": stream.aligned(output.logprobs)}
        if with_entropy:
            outputs["entropy"] = stream.aligned(output.entropy)
        return outputs

    def states(self, hidden: Tensor, stream: Stream) -> Tensor:
        """(N, H): the states that predict the counted tokens; `hidden` as in `forward`."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden[: len(stream.counted), 0]

    def kl(
        self, hidden: Tensor, stream: Stream, ref_states: Tensor, *, weight: Tensor, ref_weight: Tensor,
        vocab_size: int, temperature: float,
    ) -> Tensor:  # fmt: skip
        """(B, R) fp32: the exact KL(policy || reference) of each counted token's distribution. `ref_states` (B, R, H)
        and `ref_weight`: the reference's states, as `with_states` returns them, and its `weight`."""
        kl = kernels.linear_policy_ref_kl(
            hidden,
            weight,
            ref_states.flatten(0, 1)[stream.places],
            ref_weight,
            rows=slice(len(stream.counted)),
            temperature=temperature,
            vocab_size=vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )
        return stream.aligned(kl)


class ScalarHead(nn.Module):
    """One number a token, in fp32: a critic's values or a reward model's scores (detail G1).

    Replicated over the tensor-parallel ranks.

    What it returns is reward_gain * raw + reward_bias: two constants that reward-model training sets (detail R3).
    """

    def __init__(self, config, output: str, tp_group: dist.ProcessGroup):
        super().__init__()
        assert output in ("values", "scores")
        self.output = output
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        kwargs = dict(dtype=config.params_dtype, device=backend.device())
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **kwargs))
        self.bias = nn.Parameter(torch.empty(1, **kwargs))
        self.register_buffer("reward_gain", torch.ones(1, device=backend.device()))
        self.register_buffer("reward_bias", torch.zeros(1, device=backend.device()))

    def forward(self, hidden: Tensor, stream: Stream) -> dict[str, Tensor]:
        """hidden [K, 1, H] or its sequence shard, the states of the N counted tokens first -> {output: (B, R)} in
        fp32, 0 for tokens that do not count."""
        if self.sequence_parallel:
            # Every rank computes the whole head, so its input's gradient is whole as well: the backward is a split.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        hidden = hidden[: len(stream.counted), 0]
        raw = F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)
        return {self.output: stream.aligned(self.reward_gain * raw + self.reward_bias)}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )


class QHeads(nn.Module):
    """ILQL's Q heads: two linear layers from the last hidden state to a Q value of every token of the vocabulary, split
    over the tensor-parallel ranks like the output layer, and a slow copy of each.

    The slow copies are buffers: they get no gradient. They are in fp32, because bf16 would round small moves away.
    """

    def __init__(self, config, padded_vocab_size: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        shape = (padded_vocab_size // tp_group.size(), config.hidden_size)
        for name in ("first", "second"):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=backend.device()))
            tensor_parallel.set_tensor_model_parallel_attributes(weight, True, 0, 1)
            self.register_parameter(name, weight)
            self.register_buffer(f"slow_{name}", torch.zeros(shape, dtype=torch.float32, device=backend.device()))

    def forward(self, hidden: Tensor, stream: Stream, *, vocab_size: int) -> dict[str, Tensor]:
        """hidden [K, 1, H] or its sequence shard, the states that predict the N counted tokens first -> (B, R) each, in
        fp32, 0 for tokens that do not count: "q1" and "q2", the heads' Q values of the tokens; "q1_logprobs" and
        "q2_logprobs", the tokens' log-probs under softmax(Q); "slow_q", the smaller of the slow copies' two Q values,
        without gradient."""
        outputs = {}
        for name, weight in (("q1", self.first), ("q2", self.second)):
            found = kernels.linear_logprobs(
                hidden,
                weight,
                stream.labels,
                rows=slice(len(stream.counted)),
                vocab_size=vocab_size,
                tp_group=self.tp_group,
                sequence_parallel=self.sequence_parallel,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            )
            outputs |= {name: stream.aligned(found.logits), f"{name}_logprobs": stream.aligned(found.logprobs)}
        with torch.no_grad():
            if self.sequence_parallel:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
            states = hidden[: len(stream.counted), 0]
            both = [
                kernels.label_logits(states, weight, stream.labels, tp_group=self.tp_group)
                for weight in (self.slow_first, self.slow_second)
            ]
            outputs["slow_q"] = stream.aligned(torch.minimum(*both))
        return outputs

    def slow_values(self, hidden: Tensor) -> Tensor:
        """hidden (N, H), the same on all tensor-parallel ranks -> (N, V') fp32: the smaller of the slow copies' Q
        values of this rank's part of the vocabulary."""
        wide = hidden.float()
        return torch.minimum(operations.linear(wide, self.slow_first), operations.linear(wide, self.slow_second))

    @torch.no_grad()
    def update_slow_copies(self, rate: float) -> None:
        """slow = (1 - rate) * slow + rate * weight."""
        for slow, weight in ((self.slow_first, self.first), (self.slow_second, self.second)):
            slow.lerp_(weight.float(), rate)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {
            f"{prefix}{name}": make_tp_sharded_tensor_for_checkpoint(
                tensor, f"{prefix}{name}", allow_shape_mismatch=True, prepend_offsets=sharded_offsets,
                tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
            )
            for name, tensor in self.state_dict(keep_vars=True).items()
        }  # fmt: skip
