"""The bytes that a device holds, by owner, kind and phase of a step.

They are the sizes of the storages of weights, gradients, optimizer state and the sampler's caches, at the moments when
they change: activations and temporaries are not counted. A CPU rank is counted as if its device were separate. On a GPU
the allocator's peak, with everything, is measured too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megarlhf.cluster.device import on_cuda

Parts = Mapping[tuple[str, str], Callable[[], int]]  # (owner, kind) -> the bytes on the device now

_watches: list[Watch] = []


@dataclass
class Watch:
    """The most that each phase held."""

    parts: Parts
    peaks: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)  # {phase: its fullest moment}
    measured: dict[str, int] = field(default_factory=dict)  # {phase: peak of the allocator}, on a GPU
    phase: str = "start"

    def enter(self, phase: str) -> None:
        self.note()
        if on_cuda():
            self.measured[self.phase] = max(self.measured.get(self.phase, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase
        self.note()

    def note(self) -> None:
        now = {name: count() for name, count in self.parts.items()}
        if sum(now.values()) >= sum(self.peaks.get(self.phase, {}).values()):
            self.peaks[self.phase] = now

    def kinds(self, phase: str) -> dict[str, int]:
        """{kind: bytes of all owners} at the fullest moment of a phase."""
        totals: dict[str, int] = {}
        for (_, kind), size in self.peaks[phase].items():
            totals[kind] = totals.get(kind, 0) + size
        return totals


@contextlib.contextmanager
def watched(parts: Parts) -> Iterator[Watch]:
    """Count `parts` in each phase meanwhile."""
    watch = Watch(parts)
    _watches.append(watch)
    try:
        yield watch
    finally:
        watch.enter("end")
        _watches.remove(watch)


def note() -> None:
    """What the device holds has changed."""
    for watch in _watches:
        watch.note()


def enter(phase: str) -> None:
    """A phase of a step begins."""
    for watch in _watches:
        watch.enter(phase)
