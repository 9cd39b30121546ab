"""Seconds of work on a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megarlhf.plan.job import Device, Job
from megarlhf.plan.work import Attention, Collective, Operation, Product, Traffic, Work


@dataclass(frozen=True)
class Link:
    """Between two ranks."""

    bandwidth: float  # bytes a second, one way, of one rank
    latency: float  # seconds of a message or a step of a collective


@dataclass(frozen=True)
class Machine:
    """What one rank's device and its links can do. `hardware.py` has GPUs, `calibrate.py` measures this CPU."""

    name: str
    device: Device
    memory: int  # bytes of a device
    flops: float  # a second, in large matrix products of the job's precision
    bandwidth: float  # bytes a second of a device's memory
    call: float  # seconds that an operation takes beside its arithmetic: a launch, or torch's own
    near: Link  # within a node
    far: Link  # between nodes
    per_node: int  # ranks of a node
    host: float = math.inf  # bytes a second between a device and pinned host memory, each way
    host_memory: float = math.inf  # bytes of a node
    attention: float = 0.6  # share of `flops` that attention reaches
    reach: float = 0.8  # share of `flops` that products of a model's sizes reach
    spread: float = 0.2  # of predictions: published reruns of the same job differ by so much
    measured: Mapping[Operation, float] = field(default_factory=dict)  # seconds of operations that were timed
    rates: Mapping[str, float] = field(default_factory=dict)  # bytes a second by kind of `Work.memory`, where measured

    def seconds(self, operation: Operation, size: int) -> float:
        """Of one operation on numbers of `size` bytes."""
        if operation in self.measured:
            return self.measured[operation]
        share = self.attention if isinstance(operation, Attention) else self.reach
        flops = operation.flops
        if self.measured and (near := self._nearest(operation)) is not None:
            return flops * self.measured[near] / near.flops
        return max(flops / (self.flops * share), operation.elements * size / self.bandwidth)

    def _nearest(self, operation: Operation) -> Operation | None:
        """The measured operation of the same kind whose shape differs least, in powers of two."""

        def distance(other: Operation) -> float:
            return sum(abs(math.log(a / b)) for a, b in zip(_shape(operation), _shape(other), strict=True))

        same = [other for other in self.measured if type(other) is type(operation) and other.flops
                and _routine(other) == _routine(operation)]  # fmt: skip
        return min(same, key=distance, default=None) if operation.flops else None


def _routine(operation: Operation) -> str:
    return operation.way if isinstance(operation, Product) else str(operation.backward)


def _shape(operation: Operation) -> tuple[int, ...]:
    if isinstance(operation, Product):
        return operation.rows, operation.inner, operation.columns
    return operation.batch, operation.heads, operation.queries, operation.keys, operation.channels


@dataclass(frozen=True)
class Seconds:
    """Of a rank in a phase, by what takes them."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # operations beside these
    calls: float = 0.0
    collectives: float = 0.0
    messages: float = 0.0
    copies: float = 0.0  # of what is in host memory
    bubble: float = 0.0  # a pipeline stage waits for others

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def computing(self) -> float:
        """Without communication and waiting."""
        return self.products + self.attention + self.memory + self.calls

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def seconds(work: Work, job: Job, machine: Machine) -> Seconds:
    """Of one rank's work; without the bubble."""
    size = 4 if job.dtype == "fp32" else 2
    kinds = {Product: 0.0, Attention: 0.0}
    for operation, times in work.operations.items():
        kinds[type(operation)] += times * machine.seconds(operation, size)
    count = sum(work.operations.values()) + work.calls
    return Seconds(
        kinds[Product],
        kinds[Attention],
        sum(size / machine.rates.get(kind, machine.bandwidth) for kind, size in work.memory.items() if kind != "host"),
        count * machine.call,
        sum(collective(name, traffic, job, machine) for name, traffic in work.collectives.items()),
        message(work.messages, job, machine),
        work.memory.get("host", 0) / machine.host,
    )


def collective(name: Collective, traffic: Traffic, job: Job, machine: Machine) -> float:
    """A ring over the group's ranks: (n - 1) / n of the bytes cross each link, twice in an all-reduce; the slowest link
    counts."""
    kind, group = name
    ranks = job.group_size(group)
    if ranks == 1 or not traffic.calls:
        return 0.0
    link = machine.near if spans(job, group) <= machine.per_node else machine.far
    rounds = {"all_reduce": 2 * (ranks - 1), "broadcast": math.ceil(math.log2(ranks))}.get(kind, ranks - 1)
    crossing = traffic.bytes * {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
    return crossing / link.bandwidth + traffic.calls * rounds * link.latency


def message(traffic: Traffic, job: Job, machine: Machine) -> float:
    """Between neighbouring stages."""
    if not traffic.calls:
        return 0.0
    link = machine.near if spans(job, "pipeline") <= machine.per_node else machine.far
    return traffic.bytes / link.bandwidth + traffic.calls * link.latency


def spans(job: Job, group: str) -> int:
    """Consecutive ranks among which a group lies. Megatron numbers ranks tensor first, then data, then pipeline."""
    tensor, data = job.parallel.tensor, job.data
    spanned = {"tensor": tensor, "data": tensor * data, "expert": job.parallel.expert, "expert_data": tensor * data}
    return spanned.get(group, job.world_size)
