"""Tables of what a rank computes, reads and sends. They add up, and multiply by a number of times.

Arithmetic is a table of shapes, because a device's rate depends on them: FLOPs and bytes are sums over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Product:
    """A matrix product (rows x inner) @ (inner x columns). `way`: the routine, where a device has several: plain: x @
    w^T; linear: the same where no gradient is needed; input: gradient @ w; weight: total += gradient^T @ x. weights: so
    many matrices share the rows out, in one kernel."""

    rows: int
    inner: int
    columns: int
    way: Literal["plain", "linear", "input", "weight"] = "plain"
    weights: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition are one each, as in torch.utils.flop_counter."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def elements(self) -> int:
        """Of the operands and the result."""
        sizes = [self.rows * self.inner, self.inner * self.columns, self.rows * self.columns]
        sizes[2 if self.way == "weight" else 1] *= self.weights
        return sum(sizes)


@dataclass(frozen=True)
class Attention:
    """Scores, softmax and weighted values of some rows of one length, in one kernel. `backward` is its gradient, which
    computes the scores again."""

    batch: int  # rows, or slots
    heads: int  # query heads of this rank
    groups: int  # key/value heads of this rank
    queries: int  # tokens a row
    keys: int
    channels: int
    backward: bool = False

    @property
    def flops(self) -> int:
        """As torch.utils.flop_counter: products of all queries with all keys, also those that causality masks."""
        return (5 if self.backward else 2) * 2 * self.batch * self.heads * self.queries * self.keys * self.channels

    @property
    def elements(self) -> int:
        """Of queries, keys, values and outputs; with their gradients in a backward pass."""
        each = self.queries * self.heads + self.keys * self.groups
        return (4 if self.backward else 2) * self.batch * self.channels * each


Operation = Product | Attention


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind, and bytes of the tensors that they are about: of a reduction's operand, of what a gather
    makes, of a message. What crosses a link of it depends on the algorithm (`time.py`)."""

    bytes: int = 0
    calls: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.calls + other.calls)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.bytes * times, self.calls * times)


Collective = tuple[str, str]  # (torch.distributed's name, group: see `job.GROUPS`)


@dataclass(frozen=True)
class Work:
    """What one rank does."""

    operations: Mapping[Operation, int] = field(default_factory=Counter)  # how often
    # Bytes that operations other than these read and write, by kind: activations, gradients, optimizer, cache, logits.
    # "host": what is copied to a device and from it, out of host memory and into it.
    memory: Mapping[str, int] = field(default_factory=Counter)
    collectives: Mapping[Collective, Traffic] = field(default_factory=dict)
    messages: Traffic = Traffic()  # sent to other pipeline stages
    calls: int = 0  # of small operations beside those of the table: what each costs is time, not arithmetic

    @property
    def flops(self) -> int:
        """Of matrix products and attention."""
        return sum(operation.flops * times for operation, times in self.operations.items())

    def __add__(self, other: Work) -> Work:
        collectives = dict(self.collectives)
        for name, traffic in other.collectives.items():
            collectives[name] = collectives.get(name, Traffic()) + traffic
        return Work(
            Counter(self.operations) + Counter(other.operations), Counter(self.memory) + Counter(other.memory),
            collectives, self.messages + other.messages, self.calls + other.calls,
        )  # fmt: skip

    def __mul__(self, times: int) -> Work:
        """Of so many times the same."""
        return Work(
            Counter({operation: count * times for operation, count in self.operations.items()}),
            Counter({kind: size * times for kind, size in self.memory.items()}),
            {name: traffic * times for name, traffic in self.collectives.items()},
            self.messages * times, self.calls * times,
        )  # fmt: skip


def total(parts: Iterable[Work]) -> Work:
    """The sum of some Work."""
    operations, memory, messages, calls = Counter(), Counter(), Traffic(), 0
    collectives: dict[Collective, Traffic] = {}
    for part in parts:
        for operation, times in part.operations.items():
            operations[operation] += times
        for kind, size in part.memory.items():
            memory[kind] += size
        for name, traffic in part.collectives.items():
            collectives[name] = collectives.get(name, Traffic()) + traffic
        messages += part.messages
        calls += part.calls
    return Work(operations, memory, collectives, messages, calls)
