"""The sources of a data set: one, or several with weights (data/sources.py has what a name may be).

Legend: a group is what is shuffled as one: a row, or the rows of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megarlhf.config import PathName, UserError
from megarlhf.data.sources import find


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    path: PathName
    # how often its rows occur in an epoch: 2: each twice; 0.5: half of them, the others in the next
    weight: float = 1.0

    def __post_init__(self):
        if not self.path:
            raise ValueError("path: is empty; name a file")
        if not 0 < self.weight <= 1000:
            raise ValueError(f"weight: must be above 0 and at most 1000, not {self.weight:g}")


D = TypeVar("D", bound="DataSet")
R = TypeVar("R", bound="FileReport")
Files = PathName | tuple[PathName | DataFile, ...]


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


def real_paths(given: Files) -> list[str]:
    """The files themselves, those of patterns and directories one by one. Raises UserError if there are none."""
    return [path for name in paths(given) for path in find(name).files]


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


@dataclass(frozen=True)
class RowsConfig:
    """The keys that the data sections of all programs over a data set have."""

    train: Files  # a file, a pattern (data/*.jsonl), a datasets directory, or a list, each a name or {path, weight}
    validation: PathName | None = None  # held-out rows: a file, pattern or directory; default: no evaluation
    max_length: int = 1024  # tokens of a row, special ones included
    add_bos: bool = True  # if the tokenizer has a BOS; not for chat templates, which write their own
    max_bad_fraction: float = 0.01  # a larger share of malformed lines stops the program; 0: any does
    prompt_key: str = "prompt"

    def __post_init__(self):
        check_files(self.train, "train")
        if self.max_length < 2:
            raise ValueError(
                f"max_length: must be at least 2 (the first token is never predicted), not {self.max_length}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction: must be between 0 and 1, not {self.max_bad_fraction}")


def _naming(path: str, given: Files) -> list[str]:
    return [name for name in paths(given) if path in map(os.path.realpath, find(name).files)]


def options_of(config: Any) -> dict[str, Any]:
    """The keys of a data section that decide what its lines become, as JSON has them."""
    elsewhere = {"train", "validation", "path", "max_bad_fraction"}
    return {key: value for key, value in vars(config).items() if key not in elsewhere}


def load_files(given: Files, load: Callable[[str], tuple[D, R]]) -> tuple[D, R | Reports]:
    """The data set in these files, read one by one with `load`, and the report on their lines."""
    files = data_files(given)
    real = [os.path.realpath(path) for path in real_paths(given)]
    if twice := [path for path in real if real.count(path) > 1] if len({*real}) < len(real) else []:
        raise UserError(f"{twice[0]} is named twice, by {' and '.join(_naming(twice[0], given))}; name it once")
    loaded = [load(file.path) for file in files]
    if len(files) == 1 and files[0].weight == 1:
        return loaded[0]
    sets = [data for data, _ in loaded]
    parts = tuple(Part(data.num_groups, file.weight) for data, file in zip(sets, files, strict=True))
    # Without weights the files are read as one.
    return type(sets[0]).join(sets, parts if weighted(given) else ()), Reports(
        tuple(report for _, report in loaded), parts
    )
