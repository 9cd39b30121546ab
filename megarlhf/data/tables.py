"""The tokenized lines of a source as flat arrays, made in this process or, together with other ranks, in a cache.

Legend: N tokens, K rows: row k of a flat array of tokens is [offsets[k], offsets[k + 1]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from megarlhf.data.jsonl import Lines, Places, Records, check_bad
from megarlhf.data.sources import find

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """The tokenized lines of a source, or of a part of it."""

    columns: dict[str, np.ndarray]  # 1-D
    counts: dict[str, int]  # sums over the lines
    notes: dict[str, Lines]  # lines to which something happened, by what
    starts: tuple[int, ...] = ()  # lines before each file of the source

    def offsets(self, column: str = "lengths") -> np.ndarray:
        """(K + 1,) int64: where the rows of `column` begin and end."""
        return offsets_of(self.columns[column])

    @property
    def num_tokens(self) -> int:
        return len(self.columns["tokens"])


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(K,) -> (K + 1,) int64"""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


Columns = dict[str, np.ndarray | Iterable[np.ndarray]]  # arrays, whole or in blocks


@dataclass(frozen=True)
class Recipe:
    """How the lines of a kind of data become a table. It is applied to parts of a source, whose tables are joined."""

    kind: str
    options: dict[str, Any]  # all that decides the table beside the source and the tokenizer, as JSON has it
    read: Callable[[Records], Table]
    finish: Callable[[Table], Columns] | None = None  # the columns, from those of the whole source


def read_part(recipe: Recipe, records: Records) -> Table:
    """The table of some lines."""
    table = recipe.read(records)
    return replace(
        table,
        counts=table.counts | {"lines": records.num_lines},
        notes=table.notes | {"bad": records.bad},
        starts=records.starts,
    )


def load(name: str, recipe: Recipe, tokenizer: Any, cache: Any, max_bad_fraction: float | None) -> Loaded:
    """The table of a source, from the cache if there is one (data/cache.py). Raises UserError if the source cannot be
    read, and if more than `max_bad_fraction` of its lines are malformed (None: if any is)."""
    source = find(name)
    if cache is not None:
        table = cache.table(source, recipe, tokenizer)
    else:
        table = read_part(recipe, Records(source))
        if recipe.finish is not None:
            table = replace(table, columns={name: whole(given) for name, given in recipe.finish(table).items()})
    notes = {name: lines.placed(source, table.starts) for name, lines in table.notes.items()}
    check_bad(notes["bad"], table.counts["lines"], max_bad_fraction)
    return Loaded(table, notes)


@dataclass(frozen=True)
class Loaded:
    """The table of a source, and what happened to its lines."""

    table: Table
    notes: dict[str, Places]
    counts: dict[str, int] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "counts", self.table.counts)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.table.columns[column]


def whole(given: np.ndarray | Iterable[np.ndarray]) -> np.ndarray:
    return given if isinstance(given, np.ndarray) else np.concatenate([*given])


# ------------------------------------------------------------------------------------------------ rows of flat arrays


class Joined:
    """Arrays, one after the other, without a copy of them: what slices, hashes and comparisons of an array need."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = tuple(parts)
        self.starts = offsets_of(np.array([len(part) for part in parts]))
        self.dtype, self.shape, self.ndim = self.parts[0].dtype, (int(self.starts[-1]),), 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, given: slice | np.ndarray) -> np.ndarray:
        """A slice within one part is a view of it."""
        if not isinstance(given, slice):
            return np.asarray(self)[given]
        start, stop, step = given.indices(len(self))
        first = max(0, int(np.searchsorted(self.starts, start, side="right")) - 1)
        if step == 1 and first < len(self.parts) and stop <= self.starts[first + 1]:
            before = self.starts[first]
            return self.parts[first][start - before : max(start, stop) - before]
        return np.asarray(self)[given]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self.parts, dtype=dtype)

    def __getattr__(self, name: str) -> Any:  # sum, tolist, ...
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def pieces(values: np.ndarray | Joined) -> tuple[np.ndarray, ...]:
    """The arrays of which `values` consists."""
    return values.parts if isinstance(values, Joined) else (values,)


class Rows(Sequence[T]):
    """Rows of a flat array, each as `read` gives it. Nothing is kept in memory."""

    def __init__(self, flat: np.ndarray, lengths: np.ndarray, read: Callable[[np.ndarray], T] = lambda row: row):
        self.flat, self.offsets, self.read = flat, offsets_of(lengths), read

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> T:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.read(self.flat[self.offsets[index] : self.offsets[index + 1]])


class Chain(Sequence[T]):
    """Sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[T]]):
        self.parts, self.starts = tuple(parts), offsets_of(np.array([len(part) for part in parts]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> T:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[part][index - int(self.starts[part])]

    def __iter__(self) -> Iterator[T]:
        for part in self.parts:
            yield from part


def text_of(row: np.ndarray) -> str:
    return row.tobytes().decode()


def bytes_of(row: np.ndarray) -> bytes:
    return row.tobytes()


class Blobs:
    """Byte strings that are collected into a flat array."""

    def __init__(self) -> None:
        self.data, self.sizes = bytearray(), []

    def append(self, one: bytes) -> None:
        self.data += one
        self.sizes.append(len(one))

    def columns(self, name: str) -> dict[str, np.ndarray]:
        """{name: (bytes,) uint8, name_lengths: (K,) int64}"""
        return {name: np.frombuffer(bytes(self.data), np.uint8), f"{name}_lengths": np.array(self.sizes, np.int64)}
