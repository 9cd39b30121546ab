"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters beside frozen linear layers, in any layout.

    y = W x + scale * B A x,   scale = alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, arXiv:2312.03732)

Megatron has q, k and v in one layer, and gate and up. Each of these projections has an A and a B of its own here, as in
peft. So adapters of both go over into each other exactly, also where only some projections have one; one A of rank r
for all three could not hold three.

An adapter is a module beside its layer, and a forward hook of the layer adds its output. Training, prefill and decode
steps all call that layer, so that the sampler cannot have other adapters than the trainer.

Legend: T tokens, r rank, I and O input and output size of a layer, p projections of a layer, TP ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megarlhf.batch import Sequences
from megarlhf.cluster import backend
from megarlhf.cluster.offload import Hosted, Named
from megarlhf.models.gpt import GPT
from megarlhf.models.model_config import HEADS, LoraConfig, projections

if TYPE_CHECKING:
    from megarlhf.engine import Engine, Outputs

SUFFIX = "_lora"  # of an adapter's name, behind that of its layer
BLOCKS = {"linear_qkv": "self_attention", "linear_proj": "self_attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f"{SUFFIX}." in name


def trains(name: str) -> bool:
    """Whether a parameter of this name trains in a model with adapters: adapters and scalar and Q heads."""
    return is_adapter(name) or name.startswith(HEADS)


class Lora(nn.Module):
    """The adapter of one linear layer, of column-parallel (linear_qkv, linear_fc1) or row-parallel kind.

    Column: the A of all projections (p * r, I), replicated; a B for each, (O / TP, r). Row: A (r, I / TP); B (O, r),
    replicated. Under sequence parallelism a replicated matrix sees this rank's part of the sequence, so its gradient is
    summed over the tensor-parallel ranks.
    """

    def __init__(self, chunk: GPT, linear: str, config: LoraConfig):
        super().__init__()
        architecture, parallel, model = chunk.architecture, chunk.topology.parallel, chunk.config
        self.tp_group, self.sequence_parallel = chunk.topology.tensor_group, model.sequence_parallel
        self.column = linear in ("linear_qkv", "linear_fc1")
        self.config = config
        self.rank, self.scale, self.dropout, self.enabled = config.rank, config.scale, config.dropout, True
        # Rows of this rank of each projection of the layer; megatron has them group by group in linear_qkv.
        self.rows = {name: rows // (parallel.tensor if self.column else 1)
                     for name, rows in projections(architecture, linear).items()}  # fmt: skip
        self.groups = architecture.num_query_groups // parallel.tensor if linear == "linear_qkv" else 1
        self.parts = config.projections(architecture, linear)
        inputs = {"linear_proj": architecture.num_attention_heads * architecture.kv_channels,
                  "linear_fc2": architecture.ffn_hidden_size}.get(linear, architecture.hidden_size)  # fmt: skip
        kwargs = dict(dtype=model.params_dtype, device=backend.device())
        inputs //= 1 if self.column else parallel.tensor
        self.a = nn.Parameter(torch.empty(len(self.parts) * config.rank, inputs, **kwargs))
        if not self.column:
            tensor_parallel.set_tensor_model_parallel_attributes(self.a, True, 1, 1)
        self.a.sequence_parallel = self.column and self.sequence_parallel
        for name in self.parts:
            b = nn.Parameter(torch.zeros(self.rows[name], config.rank, **kwargs))
            if self.column:
                tensor_parallel.set_tensor_model_parallel_attributes(b, True, 0, 1)
            b.sequence_parallel = not self.column and self.sequence_parallel
            self.register_parameter(f"b_{name}", b)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's input -> what is added to its output: [T, 1, I] -> [T, 1, O / TP] (column-parallel), or
        [T, 1, I / TP] -> [T, 1, O] (row-parallel). Under sequence parallelism T is this rank's part where I or O is
        whole."""
        if self.dropout and self.training:
            x = self._dropped(x)
        low = self._crossed(F.linear(x, self.a)) * self.scale
        added = {name: F.linear(part, getattr(self, f"b_{name}"))
                 for name, part in zip(self.parts, low.split(self.rank, -1), strict=True)}  # fmt: skip
        return self._together(added)

    def _crossed(self, low: Tensor) -> Tensor:
        """(..., p * r) between A and B, over the tensor-parallel ranks: the same tokens and sums on all, or the tokens
        of each under sequence parallelism behind a row-parallel layer."""
        if self.tp_group.size() == 1:
            return low
        if self.column and self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(low, group=self.tp_group)
        if self.column:
            return tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self.tp_group)

    def _together(self, added: dict[str, Tensor]) -> Tensor:
        """The outputs of the projections, (..., rows of each), in the order of the layer's rows."""
        if len(self.rows) == 1:
            return next(iter(added.values()))
        shape = next(iter(added.values())).shape[:-1]
        some = self.a.new_zeros(())
        parts = [
            added[name].unflatten(-1, (self.groups, -1))
            if name in added
            else some.expand(*shape, self.groups, rows // self.groups)
            for name, rows in self.rows.items()
        ]
        return torch.cat(parts, -1).flatten(-2)

    def _dropped(self, x: Tensor) -> Tensor:
        """Dropout of the input. Where ranks have different parts of it, they draw different numbers; under sequence
        parallelism the surrounding region sees to that."""
        apart = not self.column and not self.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if apart else contextlib.nullcontext():
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def product(self) -> Tensor:
        """scale * B A in float32, in the shape of this rank's part of the layer's weight."""
        a = self.a.float().split(self.rank)
        added = {
            name: (getattr(self, f"b_{name}").float() @ part).t() for name, part in zip(self.parts, a, strict=True)
        }
        return self._together(added).t() * self.scale

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        axes = {f"b_{name}": 0 for name in self.parts} if self.column else {"a": 1}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ in a model


def attach(chunk: GPT, config: LoraConfig) -> None:
    """Give the layers of a chunk that `config` names an adapter each. A model has adapters of one configuration."""
    for layer in chunk.decoder.layers:
        for linear, block in BLOCKS.items():
            if config.projections(chunk.architecture, linear):
                owner = getattr(layer, block)
                adapter = Lora(chunk, linear, config)
                setattr(owner, linear + SUFFIX, adapter)
                adapter.hook = getattr(owner, linear).register_forward_hook(_adding(adapter))


def _adding(adapter: Lora):
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]):
        if not adapter.enabled:
            return None  # the output stays as it is, to the bit
        return output[0] + adapter(inputs[0]), output[1]

    return hook


def adapters(modules: Iterable[GPT]) -> Iterator[tuple[nn.Module, str, Lora]]:
    """(module, name of its linear layer, adapter) of all adapters."""
    for chunk in modules:
        for layer in chunk.decoder.layers:
            for linear, block in BLOCKS.items():
                owner = getattr(layer, block)
                if hasattr(owner, linear + SUFFIX):
                    yield owner, linear, getattr(owner, linear + SUFFIX)


@contextlib.contextmanager
def off(modules: Iterable[GPT]) -> Iterator[None]:
    """The model without its adapters."""
    found = [adapter for _, _, adapter in adapters(modules)]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


@contextlib.contextmanager
def replaced(modules: list[GPT], config: LoraConfig) -> Iterator[None]:
    """The model with new adapters of another configuration in the place of its own, which return at the end."""
    own = list(adapters(modules))
    for owner, linear, adapter in own:
        adapter.hook.remove()
        delattr(owner, linear + SUFFIX)
    for chunk in modules:
        attach(chunk, config)
    try:
        yield
    finally:
        for owner, linear, adapter in list(adapters(modules)):
            adapter.hook.remove()
            delattr(owner, linear + SUFFIX)
        for owner, linear, adapter in own:
            setattr(owner, linear + SUFFIX, adapter)
            adapter.hook = getattr(owner, linear).register_forward_hook(_adding(adapter))


@torch.no_grad()
def merge(modules: Iterable[GPT]) -> None:
    """Add every adapter's product to its layer's weight, in float32, rounded once to the weight's precision."""
    for owner, linear, adapter in adapters(modules):
        weight = getattr(owner, linear).weight
        weight.copy_(weight.float() + adapter.product())


class Reference(Hosted):
    """The frozen model that a policy with adapters starts from: the policy's own engine with its adapters off, or as
    they were when this object was made (`started`: from given adapters). It has the part of Engine's interface that
    references need, and no weights but those of the adapters."""

    role = "reference"

    def __init__(self, engine: Engine, *, started: bool = False):
        super().__init__()
        self.engine, self.modules, self.topology, self.config = engine, engine.modules, engine.topology, engine.config
        self.start = None
        if started:
            self.start = [
                (p, p.detach().clone()) for _, _, adapter in adapters(self.modules) for p in adapter.parameters()
            ]

    def forward(self, batch: Sequences, **options: Any) -> Outputs:
        """As `Engine.forward`."""
        with self.present(), off(self.modules) if self.start is None else self._as_started():
            return self.engine.forward(batch, **options)

    def head_weight(self) -> Tensor:
        """As `Engine.head_weight`: no adapter changes it."""
        return self.engine.head_weight()

    @property
    def parts(self) -> dict[str, Callable[[], Named]]:
        return {"weights": lambda: ((str(i), value) for i, (_, value) in enumerate(self.start or ()))}

    @contextlib.contextmanager
    def _as_started(self) -> Iterator[None]:
        self.engine.sync_params()
        now = [p.data for p, _ in self.start]
        for p, value in self.start:
            p.data = value
        try:
            yield
        finally:
            for (p, _), data in zip(self.start, now, strict=True):
                p.data = data
