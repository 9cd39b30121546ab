"""Mixtures of experts: megatron's experts and dispatcher behind a router of ours, which can record the experts that a
token goes to, and can be told them.

Experts are whole: `parallel.expert` ranks share them out, and tensor parallelism does not cut them. Under sequence
parallelism each tensor-parallel rank sends its own tokens to them. No token is dropped.

Legend: T tokens of this rank, L layers of the model, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarlhf.cluster import backend
from megarlhf.models.cache import Prefill, Step
from megarlhf.stream import Spans

if TYPE_CHECKING:
    from megarlhf.cluster.parallel import ParallelConfig
    from megarlhf.models.mixture import ExpertsConfig
    from megarlhf.models.spec import Architecture


def options(
    architecture: Architecture, parallel: ParallelConfig, dtype: torch.dtype, losses: ExpertsConfig | None
) -> dict[str, Any]:
    """The fields of megatron's TransformerConfig that describe the experts; {} for a dense model."""
    if not architecture.num_experts:
        return {}
    return dict(
        num_moe_experts=architecture.num_experts,
        moe_ffn_hidden_size=architecture.ffn_hidden_size,
        moe_router_topk=architecture.experts_per_token,
        # megatron's own router wants it so; ours reads `Router.renormalizes`
        moe_router_pre_softmax=not architecture.renormalize_experts or architecture.experts_per_token == 1,
        moe_router_load_balancing_type="none",  # these losses are ours, with megatron's names for their coefficients
        moe_aux_loss_coeff=losses.balance_loss if losses else 0.0,
        moe_z_loss_coeff=losses.z_loss if losses else 0.0,
        moe_router_dtype="fp32",
        moe_shared_expert_intermediate_size=architecture.shared_expert_size,
        moe_shared_expert_gate=architecture.shared_expert_size is not None,
        moe_grouped_gemm=backend.uses_transformer_engine(dtype),
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )


def spec(config: TransformerConfig, linears: tuple[type, type] | None) -> ModuleSpec:
    """The MLP of a layer with experts. `linears`: column- and row-parallel layers that replace megatron's; None:
    Transformer Engine's."""
    if linears is None:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        provider = TESpecProvider()
        linears = provider.column_parallel_linear(), provider.row_parallel_linear()
        module, submodules = provider.grouped_mlp_modules(config.moe_grouped_gemm, False)
    else:
        module, submodules = megatron_experts.SequentialMLP, MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1])
    shared = MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1])
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=module, submodules=submodules),
            shared_experts=ModuleSpec(module=SharedExpert, submodules=shared),
            router=Router,
        ),
    )


def mark(mlp: MoELayer) -> None:
    """Let gradients of the experts always be summed over the ranks that hold the same experts. Megatron sums them over
    the data-parallel ranks where nothing is expert-parallel, but then tensor-parallel ranks hold the same ones too."""
    for parameter in mlp.experts.parameters():
        parameter.allreduce = False  # megatron's mark of an expert's weight


def global_name(mlp: MoELayer, parts: list[str]) -> list[str]:
    """The name of an expert's weight inside its layer, split at the dots: with its number in the whole model."""
    if parts[:2] != ["mlp", "experts"]:
        return parts
    if parts[2] == "local_experts":
        number, rest = int(parts[3]), parts[4:]
    else:  # Transformer Engine's layer has all of a rank's experts: linear_fc1.weight0, ...
        number, rest = int(parts[3].removeprefix("weight")), [parts[2], "weight"]
    return ["mlp", "experts", "experts", str(mlp.local_expert_indices[number]), *rest]


def prepare(layers: Iterable[TransformerLayer], architecture: Architecture) -> None:
    """Tell the routers of a chunk what TransformerConfig cannot say."""
    for layer in layers:
        if layer.is_moe_layer:
            layer.mlp.router.renormalizes = architecture.renormalize_experts


def instruct(layer, where: Spans | Step, tokens: int, read: bool) -> None:
    """Tell a layer's router which experts its next pass uses, and where to write those that it used. `tokens`:
    of this rank's stream. `read`: the pass is of those that the head reads."""
    router, number = layer.mlp.router, layer.layer_number - 1
    router.given = router.record = router.sequences = None
    if isinstance(where, Step):
        if where.record is not None:
            router.record = where.record[:, number - where.cache.first + 1]
        return
    if where.experts is not None:
        given = where.experts[:, number]
        if read:
            given = given[where.read]
        if layer.config.sequence_parallel:
            given = given.chunk(layer.tp_group.size())[layer.tp_group.rank()]
        router.given = given
    if router.has_losses and router.training and torch.is_grad_enabled():
        group = router.tp_group if layer.config.sequence_parallel else None
        total = tokens if group is None else tokens * group.size()
        router.sequences = Sequences.of(where, total, read=read, group=group)
    if isinstance(where, Prefill) and where.record is not None and not read:
        router.record = where.record[:, number - where.cache.first + 1]


@dataclass(frozen=True)
class Sequences:
    """To which sequence each token of this rank's pass belongs, for losses that are means over a sequence."""

    index: Tensor  # (T,) int64; n: none
    sizes: Tensor  # (n,) float32: tokens of each sequence in the pass, on all ranks
    weights: Tensor  # (n,) float32: its counted tokens, as which its mean counts
    group: dist.ProcessGroup | None  # of the ranks that share the tokens

    @classmethod
    def of(cls, spans: Spans, total: int, *, read: bool, group: dist.ProcessGroup | None) -> Sequences:
        """total: tokens of the stream, padding included. read: of those that the head reads."""
        sizes = spans.bounds.diff()
        index = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        if read:  # what follows the tokens that are read fills up to a multiple
            real, sizes = int(spans.counts.sum()), spans.counts
            index = F.pad(index[spans.read[:real]], (0, len(spans.read) - real), value=len(sizes))
        else:
            index = F.pad(index, (0, total - len(index)), value=len(sizes))
        if group is not None:
            index = index.chunk(group.size())[group.rank()]
        return cls(index, sizes.float(), spans.counts.float(), group)

    def sums(self, values: Tensor) -> Tensor:
        """(T, ...) -> (n, ...), of this rank's tokens."""
        out = values.new_zeros(len(self.sizes) + 1, *values.shape[1:])
        return out.index_add(0, self.index, values)[:-1]


class SharedExpert(SharedExpertMLP):
    """Megatron's, with its gate on this rank's device."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate_weight.data = self.gate_weight.data.to(backend.device())


class Router(TopKRouter):
    """A linear layer in float32 whose k largest logits choose a token's experts. Their weights are the softmax over the
    chosen logits (mixtral; qwen's norm_topk_prob), or over all logits if it does not renormalize (qwen2_moe).

    `given`: experts to use instead, (T, k) int, -1 in rows where the router chooses. Their weights are always those of
    the current logits. `record`: where to write the chosen experts, (T, k) int16. Both are of the next pass; the layer
    sets them (layers.py).
    """

    def __init__(self, config: TransformerConfig, pg_collection=None):
        super().__init__(config, pg_collection)
        self.weight.data = self.weight.data.to(backend.device())
        self.renormalizes = True  # the weights of a token's experts sum to one
        self.given: Tensor | None = None
        self.record: Tensor | None = None
        self.sequences: Sequences | None = None
        self.has_losses = bool(config.moe_aux_loss_coeff or config.moe_z_loss_coeff)

    def gating(self, input: Tensor) -> Tensor:
        """Logits in float32. Megatron's own function fails without Transformer Engine (0.16: te_general_gemm)."""
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, E] -> (weights (T, E) float32, 0 for experts that are not chosen; chosen (T, E) bool)."""
        logits = logits.view(-1, self.num_experts)
        chosen = logits.detach().topk(self.topk, dim=1).indices
        if self.given is not None:
            chosen = torch.where(self.given >= 0, self.given.to(chosen.dtype), chosen)
        if self.record is not None:
            self.record.copy_(chosen)
        if self.renormalizes:
            weights = logits.gather(1, chosen).softmax(1)
        else:
            weights = logits.softmax(1).gather(1, chosen)
        if self.sequences is not None:
            weights = MoEAuxLossAutoScaler.apply(weights, self.losses(logits, chosen))
        return (
            torch.zeros_like(logits).scatter(1, chosen, weights),
            torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True),
        )

    def losses(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """This rank's share of the sum over the sequences of (counted tokens) x (mean loss): a sum like the engine's
        losses, which is divided by their count. No sequence is on two ranks or in two micro-batches, so that nothing
        depends on how a batch is cut; tensor-parallel ranks share its tokens and agree on the counts.

        Load balancing (arXiv:2101.03961, eq. 4, of a sequence): E sum_e f_e P_e with f_e the share of the k choices of
        all tokens that fell on expert e and P_e the mean probability of e; 1 if all are equal. z-loss
        (arXiv:2202.08906, eq. 5): the mean of logsumexp(logits)^2.
        """
        own = self.sequences
        scale = own.weights / own.sizes.clamp(min=1)  # of a token's share in the sum
        total = logits.new_zeros(())
        if coefficient := self.config.moe_aux_loss_coeff:
            chosen = torch.zeros_like(logits).scatter(1, chosen, 1.0)
            counts = own.sums(chosen)
            if own.group is not None:
                dist.all_reduce(counts, group=own.group)
            shares = counts / (own.sizes.clamp(min=1)[:, None] * self.topk)
            balance = self.num_experts * (shares * own.sums(logits.softmax(1))).sum(1)
            total = total + coefficient * (scale * balance).sum()
        if coefficient := self.config.moe_z_loss_coeff:
            total = total + coefficient * (scale * own.sums(logits.logsumexp(1).square())).sum()
        return total
