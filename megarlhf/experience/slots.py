"""Which sequence is sampled in which slot: the host's side of the sampler, the same on every stage.

A rank has `groups` of slots, one a pipeline stage, so that every stage has work; each slot holds one row (a sequence to
sample, by its index) or none. A row that ends leaves its slot to the next row of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """A row that begins in a slot. `source`: the slot of the row before, if its prompt is the same; then the prompt's
    keys and values are copied from there instead of computed."""

    slot: int
    row: int
    source: int | None


class Slots:
    """The rows in the slots of this rank. Slots are numbered over all groups: group g has [g size, (g + 1) size).

    Rows start in their order. So the slot of the row before still holds its prompt when a row starts: only later rows
    replace it.
    """

    def __init__(self, *, rows: int, samples: int, groups: int, size: int):
        self.rows, self.samples, self.size = rows, samples, size
        self.queue = 0  # the next row to start
        self.held: list[list[int | None]] = [[None] * size for _ in range(groups)]
        self.where: dict[int, int] = {}  # the slot in which a row started

    def refilled(self, group: int, ended: list[bool], *, compact: bool) -> list[int | None]:
        """The rows of a group after those of the `ended` slots have left. `compact`: once the queue is empty, rows
        move so that the empty slots come last."""
        held = [None if over else row for row, over in zip(self.held[group], ended, strict=True)]
        free = [slot for slot, row in enumerate(held) if row is None]
        queue, before = self.queue, self.where.get(self.queue - 1, -1) - group * self.size
        while free and queue < self.rows:
            # A slot that holds the row's prompt must not get another first.
            slot = before if before in free and queue % self.samples else free[0]
            free.remove(slot)
            held[slot], queue = queue, queue + 1
        if compact and self.queue == self.rows:  # no row starts, whose prompt would be looked for in an old place
            held = [row for row in held if row is not None]
            held += [None] * (self.size - len(held))
        return held

    def take(self, group: int, held: list[int | None]) -> tuple[list[Start], list[tuple[int, int]]]:
        """Hold these rows in `group` from now on. Returns the rows that start, in their order, and the moves of the
        others, (from, to) places in the group, in an order in which no row is overwritten before it has moved."""
        first, old = group * self.size, {row: slot for slot, row in enumerate(self.held[group]) if row is not None}
        new = {row: slot for slot, row in enumerate(held) if row is not None}
        starts = []
        for row in sorted(new.keys() - old.keys()):
            assert row == self.queue, (row, self.queue)
            slot = first + new[row]
            sibling = row % self.samples != 0
            starts.append(Start(slot, row, self.where[row - 1] if sibling else None))
            self.where[row], self.queue = slot, row + 1
        moves = sorted((old[row], new[row]) for row in new.keys() & old.keys() if new[row] != old[row])
        assert all(target < source for source, target in moves), moves
        self.held[group] = held
        return starts, moves

    def count(self, group: int) -> int:
        """Number of rows in a group."""
        return sum(row is not None for row in self.held[group])

    def used(self, group: int) -> int:
        """Number of slots up to the last one that holds a row."""
        return max((slot + 1 for slot, row in enumerate(self.held[group]) if row is not None), default=0)
