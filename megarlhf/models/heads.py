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
        softcap: float | None = None,
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
            softcap=softcap,
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
        vocab_size: int, temperature: float, softcap: float | None = None,
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
            softcap=softcap,
            vocab_size=vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )
        return stream.aligned(kl)


class ScalarHead(nn.Module):
    """One number a token, in fp32: a critic's values or a reward model's scores (detail G1).

    Linear, replicated over the tensor-parallel ranks. With `mlp`, one hidden layer before it: Linear(H, 2H), ReLU,
    Linear(2H, 1), trlX's value head; the 2H units are split over these ranks, and each adds its part.

    What it returns is reward_gain * raw + reward_bias: two constants that reward-model training sets (detail R3).
    """

    def __init__(self, config, output: str, tp_group: dist.ProcessGroup, *, mlp: bool = False):
        super().__init__()
        assert output in ("values", "scores")
        self.output, self.mlp = output, mlp
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        kwargs = dict(dtype=config.params_dtype, device=backend.device())
        units = config.hidden_size
        if mlp:
            units = 2 * config.hidden_size // tp_group.size()
            self.hidden_weight = nn.Parameter(torch.empty(units, config.hidden_size, **kwargs))
            self.hidden_bias = nn.Parameter(torch.empty(units, **kwargs))
        self.weight = nn.Parameter(torch.empty(1, units, **kwargs))
        for name, dim in self._split.items():
            tensor_parallel.set_tensor_model_parallel_attributes(getattr(self, name), True, dim, 1)
        self.bias = nn.Parameter(torch.empty(1, **kwargs))
        self.register_buffer("reward_gain", torch.ones(1, device=backend.device()))
        self.register_buffer("reward_bias", torch.zeros(1, device=backend.device()))

    @property
    def _split(self) -> dict[str, int]:
        """The dimension of each weight that is split over the tensor-parallel ranks."""
        return {"hidden_weight": 0, "hidden_bias": 0, "weight": 1} if self.mlp else {}

    def forward(self, hidden: Tensor, stream: Stream) -> dict[str, Tensor]:
        """hidden [K, 1, H] or its sequence shard, the states of the N counted tokens first -> {output: (B, R)} in
        fp32, 0 for tokens that do not count."""
        if self.sequence_parallel:
            # If every rank computes the whole head, its input's gradient is whole as well: the backward is a split.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=self.mlp, group=self.tp_group
            )
        elif self.mlp:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        states = hidden[: len(stream.counted), 0].float()
        if self.mlp:
            units = F.relu(F.linear(states, self.hidden_weight.float(), self.hidden_bias.float()))
            parts = F.linear(units, self.weight.float())
            whole = tensor_parallel.reduce_from_tensor_model_parallel_region(parts, group=self.tp_group)
            raw = (whole + self.bias.float()).squeeze(-1)
        else:
            raw = F.linear(states, self.weight.float(), self.bias.float()).squeeze(-1)
        return {self.output: stream.aligned(self.reward_gain * raw + self.reward_bias)}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, self._split, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


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
