"""Low-rank adapters beside the linear layers of a transformer layer (models/lora.py): what they compute, send and hold.

The layers below them are frozen. So a gradient is computed only of what depends on an adapter: the input of the model's
first layer does not, nor its attention where queries, keys and values have no adapter.

Legend: t tokens that a linear layer sees, r rank, p projections with an adapter, I and O inputs and outputs on a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megarlhf.models.model_config import LINEARS, projections
from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Product, Traffic, Work

COLUMN = ("linear_qkv", "linear_fc1")  # tensor parallelism cuts their outputs, and the inputs of the others
CALLS = {"forward": 4, "backward": 8}  # of small operations of an adapter: to scale, split, join and add. Estimated


@dataclass(frozen=True)
class Adapter:
    """One linear layer's, on one rank."""

    linear: str
    inputs: int  # I
    outputs: tuple[int, ...]  # O of each projection
    rank: int  # r
    all_outputs: int  # of the linear layer

    @property
    def column(self) -> bool:
        return self.linear in COLUMN

    @property
    def low(self) -> int:
        """p r: numbers a token between A and B."""
        return len(self.outputs) * self.rank

    @property
    def matrices(self) -> tuple[int, ...]:
        """Elements of A and of each B."""
        return self.low * self.inputs, *(size * self.rank for size in self.outputs)


def of(job: Job, model: Model) -> dict[str, Adapter]:
    """{linear layer: adapter} of a transformer layer; {} of a model without adapters."""
    if model.lora is None:
        return {}
    a, tensor, found = model.architecture, job.parallel.tensor, {}
    inputs = {"linear_proj": a.num_attention_heads * a.kv_channels, "linear_fc2": a.ffn_hidden_size}
    for linear in LINEARS:
        cut, column = tensor if linear in COLUMN else 1, linear in COLUMN
        rows = {name: size // cut for name, size in projections(a, linear).items()}
        if names := model.lora.projections(a, linear):
            size = inputs.get(linear, a.hidden_size) // (1 if column else tensor)
            outputs = tuple(rows[name] for name in names)
            found[linear] = Adapter(linear, size, outputs, model.lora.rank, sum(rows.values()))
    return found


def elements(job: Job, model: Model) -> list[int]:
    """Elements of each matrix of a layer's adapters on a rank."""
    return [size for adapter in of(job, model).values() for size in adapter.matrices]


def sequence_elements(job: Job, model: Model) -> int:
    """Elements of a layer's adapters of which each tensor-parallel rank sees a part of the sequence alone."""
    total = 0
    for adapter in of(job, model).values():
        first, *others = adapter.matrices
        total += first if adapter.column else sum(others)
    return total


def needed(job: Job, model: Model, *, given: bool) -> dict[str, tuple[bool, bool]]:
    """{linear layer: (whether a backward pass reaches its input, whether it reaches its output)}, where `given` says
    whether it reaches the input of the layer. Without adapters: everything."""
    if model.lora is None:
        return dict.fromkeys(LINEARS, (True, True))
    found, a = of(job, model), model.architecture
    reached: dict[str, tuple[bool, bool]] = {}
    here = given
    for linear in LINEARS:
        if linear == "linear_fc1":
            # attention has been added to the residual, unless it is beside the MLP
            here = given if a.parallel_residual else here or given
        reached[linear] = here, here or linear in found
        here = reached[linear][1]
    return reached


def forward(job: Job, model: Model, tokens: int, kept: int) -> Work:
    """Of a layer over T = tokens, whose projection and MLP see K = kept."""
    operations: Counter = Counter()
    work = Work()
    for seen, adapter in _seen(job, model, tokens, kept):
        before, after = _rows(job, adapter, seen)
        operations[Product(before, adapter.inputs, adapter.low)] += 1
        for size in adapter.outputs:
            operations[Product(after, adapter.rank, size)] += 1
        kind = {True: "all_gather_into_tensor" if job.parts > 1 else None,
                False: "reduce_scatter_tensor" if job.parts > 1 else "all_reduce"}[adapter.column]  # fmt: skip
        work += _crossing(job, model, kind, seen * adapter.low)
        work += _around(job, model, adapter, before, after)
    return work + Work(operations)


def backward(job: Job, model: Model, tokens: int, kept: int, *, given: bool) -> Work:
    """Gradients of the adapters' matrices, and of their inputs where a backward pass reaches these."""
    operations: Counter = Counter()
    work, reached = Work(), needed(job, model, given=given)
    for seen, adapter in _seen(job, model, tokens, kept):
        before, after = _rows(job, adapter, seen)
        for size in adapter.outputs:
            operations[Product(after, size, adapter.rank, "input")] += 1
            operations[Product(size, after, adapter.rank, "weight")] += 1
        operations[Product(adapter.low, before, adapter.inputs, "weight")] += 1
        if reached[adapter.linear][0]:
            operations[Product(before, adapter.low, adapter.inputs, "input")] += 1
        kind = {True: "reduce_scatter_tensor" if job.parts > 1 else "all_reduce",
                False: "all_gather_into_tensor" if job.parts > 1 else None}[adapter.column]  # fmt: skip
        work += _crossing(job, model, kind, seen * adapter.low)
        work += _around(job, model, adapter, before, after, times=2)
        work += Work(memory=Counter({"gradients": 2 * 4 * sum(adapter.matrices)}))
    return work + Work(operations)


def _seen(job: Job, model: Model, tokens: int, kept: int) -> Iterator[tuple[int, Adapter]]:
    for linear, adapter in of(job, model).items():
        yield tokens if linear == "linear_qkv" else kept, adapter


def _rows(job: Job, adapter: Adapter, tokens: int) -> tuple[int, int]:
    """Tokens of A and of B on a rank: under sequence parallelism its part where I or O is whole."""
    part = tokens // job.parts
    return (part, tokens) if adapter.column else (tokens, part)


def _crossing(job: Job, model: Model, kind: str | None, numbers: int) -> Work:
    """The tensor-parallel ranks' exchange between A and B."""
    if kind is None or job.parallel.tensor == 1:
        return Work()
    return Work(collectives={(kind, "tensor"): Traffic(numbers * job.size(model), 1)})


def _around(job: Job, model: Model, adapter: Adapter, before: int, after: int, times: int = 1) -> Work:
    """What stands around the products: to scale, to join projections, to add."""
    joins = adapter.all_outputs if adapter.linear in COLUMN else 0
    numbers = 2 * before * adapter.low + after * (3 * adapter.all_outputs + 2 * joins)
    calls = CALLS["forward" if times == 1 else "backward"]
    return Work(memory=Counter({"activations": times * job.size(model) * numbers}), calls=calls)
