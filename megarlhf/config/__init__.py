"""Frozen dataclasses <-> YAML.

A program's configuration is one frozen dataclass whose fields are *sections*: frozen dataclasses that live beside the
code they configure (`ParallelConfig` in `cluster/parallel.py`, ...). This package knows none of them. It reads a YAML
file and `key.sub=value` overrides into such a tree, and every mistake becomes a `UserError` of one line: where (file,
line, key), what is wrong, and the remedy.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megarlhf.config.builder import LIKE, Builder, PathName
from megarlhf.config.errors import UnknownKeyError, UserError, nearest, open_file, show
from megarlhf.config.nodes import fill, read_file, read_tree, unwrap, wrap

__all__ = [
    "Given", "PathName", "UnknownKeyError", "UserError", "check_seed", "dump", "dump_values", "from_dict", "like",
    "load", "nearest", "open_file", "read", "to_dict", "top_level",
]  # fmt: skip
T = TypeVar("T")


def load(
    cls: type[T],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    presets: dict[str, dict[str, Any]] | None = None,
) -> T:
    """Read `path`, if there is one, into the dataclass `cls`, then apply `overrides` of the form `key.sub=value`
    (values are YAML). With `presets`, the key `preset` names one of them: the values of keys that neither file nor
    overrides give.

    Raises UserError for a missing file, bad YAML, unknown keys (naming the nearest), wrong types, and for values that
    a section's own `__post_init__` refuses.
    """
    tree = read_tree(path, overrides)
    if presets is not None and "preset" in tree.value:
        chosen = tree.value["preset"]
        if not isinstance(chosen.value, str) or chosen.value not in presets:
            hint = nearest(str(chosen.value), list(presets))
            raise UserError(f"{chosen.where}: there is no preset {show(unwrap(chosen))}; {hint}")
        fill(tree, wrap(presets[chosen.value], f"preset {chosen.value}"))
    return Builder(cls, tree).build(cls, tree, "")


class Given(typing.NamedTuple):
    """A value of a configuration and its place."""

    value: Any
    where: str


def top_level(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Given]:
    """The first level of a file with overrides. Raises UserError as `load` does."""
    return {key: Given(unwrap(node), node.where) for key, node in read_tree(path, overrides).value.items()}


def like(section: str) -> dict[str, str]:
    """Metadata for the field of an optional section: if some of its keys are given, the others are those of
    `section`, a key of the program's configuration."""
    return {LIKE: section}


def from_dict(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build `cls` from plain values (a saved section, say). `where` names their source in errors."""
    tree = wrap(values, where)
    return Builder(cls, tree).build(cls, tree, "")


def read(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The plain values of a YAML file with a mapping in it. UserError says why `what` cannot be read."""
    return unwrap(read_file(path, what, remedy))


def check_seed(seed: int) -> None:
    """ValueError unless all random number generators accept it."""
    if seed < 0:
        raise ValueError(f"seed: must not be negative, not {seed}")


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved tree as plain values: what `dump` writes and `from_dict` reads back."""
    return _plain(dataclasses.asdict(config))


def dump(config: Any) -> str:
    """The resolved tree as YAML. `load` reads it back to an equal object."""
    return dump_values(to_dict(config))


def dump_values(values: dict[str, Any]) -> str:
    """Plain values as YAML, in their order."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
