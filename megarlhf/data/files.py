"""The files of a data set: one, or several with weights.

Legend: a group is what is shuffled as one: a row, or the rows of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    path: str
    weight: float = (
        1.0  # how often its rows occur in an epoch: 2: each twice; 0.5: half of them, the others in the next
    )

    def __post_init__(self):
        if not self.path:
            raise ValueError("path: is empty; name a file")
        if not 0 < self.weight <= 1000:
            raise ValueError(f"weight: must be above 0 and at most 1000, not {self.weight:g}")


D = TypeVar("D", bound="DataSet")
R = TypeVar("R", bound="FileReport")
Files = str | tuple[str | DataFile, ...]


@dataclass(frozen=True)
class Part:
    """The rows of one file in a data set of several."""

    num_groups: int
    weight: float

    @property
    def size(self) -> int:
        """Groups of this file in an epoch."""
        return max(1, round(self.weight * self.num_groups))


class DataSet(Protocol):
    """What can be read from several files."""

    @property
    def num_groups(self) -> int: ...

    @classmethod
    def join(cls: type[D], sets: Sequence[D], parts: tuple[Part, ...]) -> D:
        """The rows of `sets` one after the other."""


class FileReport(Protocol):
    """The report on the lines of one file."""

    def summary(self) -> str: ...


@dataclass(frozen=True)
class Reports:
    """The reports on several files."""

    reports: tuple[Any, ...]  # a `FileReport` for each
    parts: tuple[Part, ...]

    def summary(self) -> str:
        """A line for each file, as the banner indents them."""
        lines = []
        for report, part in zip(self.reports, self.parts, strict=True):
            weighted = f"; weight {part.weight:g}: {part.size} of {part.num_groups} an epoch"
            lines.append(report.summary() + (weighted if part.weight != 1 else ""))
        return "\n  ".join(lines)


def data_files(given: Files) -> tuple[DataFile, ...]:
    files = (given,) if isinstance(given, str) else given
    return tuple(DataFile(file) if isinstance(file, str) else file for file in files)


def paths(given: Files) -> tuple[str, ...]:
    return tuple(file.path for file in data_files(given))


def weighted(given: Files) -> bool:
    return any(file.weight != 1 for file in data_files(given))


def check_files(given: Files, key: str) -> None:
    """ValueError for an empty list, and for a file that is named twice. `key`: for messages."""
    if given == "" or (not isinstance(given, str) and "" in given):
        raise ValueError(f"{key}: is empty; name a file")
    named = paths(given)
    if not named:
        raise ValueError(f"{key}: is an empty list; name a file")
    real = [os.path.realpath(path) for path in named]
    if twice := [path for path, one in zip(named, real, strict=True) if real.count(one) > 1]:
        raise ValueError(f"{key}: {twice[0]} is named twice; name it once, with the weight {len(twice)}")


def load_files(given: Files, load: Callable[[str], tuple[D, R]]) -> tuple[D, R | Reports]:
    """The data set in these files, read one by one with `load`, and the report on their lines."""
    files = data_files(given)
    loaded = [load(file.path) for file in files]
    if len(files) == 1 and files[0].weight == 1:
        return loaded[0]
    sets = [data for data, _ in loaded]
    parts = tuple(Part(data.num_groups, file.weight) for data, file in zip(sets, files, strict=True))
    # Without weights the files are read as one.
    return type(sets[0]).join(sets, parts if weighted(given) else ()), Reports(
        tuple(report for _, report in loaded), parts
    )
