"""Frozen dataclasses <-> YAML.

A program's configuration is one frozen dataclass whose fields are *sections*: frozen dataclasses that live beside the
code they configure (`ParallelConfig` in `cluster/parallel.py`, ...). This module knows none of them. It reads a YAML
file and `key.sub=value` overrides into such a tree, and every mistake becomes a `UserError` of one line: where (file,
line, key), what is wrong, and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union

import yaml

T = TypeVar("T")
_LIKE = "like"  # in a field's metadata
LARGEST_FILE = 2**18  # bytes; yaml reads about 100 kB a second
MOST_VALUES = 20_000
DEEPEST = 40  # brackets within brackets


class UserError(ValueError):
    """A mistake the user can mend. `megarlhf` prints it as one line, without a traceback, and exits with status 2."""

    def __init__(self, message: str):
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(message.split()))
        super().__init__(_cut(line, 4000))


class UnknownKeyError(UserError):
    """A key that the configuration of this program does not have; perhaps the file is for another one."""


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
    tree = _tree(path, overrides)
    if presets is not None and "preset" in tree.value:
        chosen = tree.value["preset"]
        if not isinstance(chosen.value, str) or chosen.value not in presets:
            hint = nearest(str(chosen.value), list(presets))
            raise UserError(f"{chosen.where}: there is no preset {_shown(_unwrap(chosen))}; {hint}")
        _fill(tree, _wrap(presets[chosen.value], f"preset {chosen.value}"))
    return _Builder(cls, tree).build(cls, tree, "")


class Given(typing.NamedTuple):
    """A value of a configuration and its place."""

    value: Any
    where: str


def top_level(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Given]:
    """The first level of a file with overrides. Raises UserError as `load` does."""
    return {key: Given(_unwrap(node), node.where) for key, node in _tree(path, overrides).value.items()}


def like(section: str) -> dict[str, str]:
    """Metadata for the field of an optional section: if some of its keys are given, the others are those of
    `section`, a key of the program's configuration."""
    return {_LIKE: section}


def from_dict(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build `cls` from plain values (a saved section, say). `where` names their source in errors."""
    tree = _wrap(values, where)
    return _Builder(cls, tree).build(cls, tree, "")


def read(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The plain values of a YAML file with a mapping in it. UserError says why `what` cannot be read."""
    return _unwrap(_read(path, what, remedy))


def open_file(path: str | Path, what: str, remedy: str) -> BinaryIO:
    """Open a file to read it. Raises UserError if it is not a file: opening a pipe would wait for its other end."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
        reason = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device, not a file"
    except OSError as error:
        reason = error.strerror
    except ValueError as error:  # null characters and the like
        reason = str(error)
    raise UserError(f"{_cut(str(path), 300)}: cannot read {what} ({reason}); {remedy}")


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


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a misspelt name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


# A parsed value and its place: `_Node(value, "run.yaml:12")`, with dicts and lists of further nodes inside.
@dataclasses.dataclass
class _Node:
    value: Any
    where: str


def _tree(path: str | Path | None, overrides: Sequence[str]) -> _Node:
    tree = _Node({}, "command line")
    if path is not None:
        tree = _read(Path(path), "the configuration", "give --config an existing YAML file")
    for override in overrides:
        _override(tree, override)
    return tree


def _read(path: Path, what: str, remedy: str) -> _Node:
    """The mapping in a YAML file."""
    with open_file(path, what, remedy) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise UserError(f"{path}: has more than {LARGEST_FILE} bytes, which no configuration needs; {remedy}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte {error.start + 1} of the file); save it as UTF-8 text")
    tree = _Reader(lambda line: f"{path}:{line}").read(text)
    if tree is None:
        return _Node({}, f"{path}:1")
    if not isinstance(tree.value, dict):
        raise UserError(f"{path}:1: the file must be a mapping of sections, not {type(tree.value).__name__}")
    return tree


class _Loader(yaml.SafeLoader):
    def fetch_flow_collection_start(self, token: type) -> None:
        if self.flow_level >= DEEPEST:  # yaml's time goes with the square of the depth
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token)


class _Reader:
    """YAML -> nodes, for one text. `place` names a line of it, counted from 1."""

    def __init__(self, place: Callable[[int], str]):
        self.place = place
        self.constructor = yaml.SafeLoader("")
        self.count = 0  # of values; each use of an anchor counts
        self.around: set[int] = set()  # the ids of the nodes around the one that is converted

    def read(self, text: str) -> _Node | None:
        """None for an empty text."""
        try:
            root = yaml.compose(text, Loader=_Loader)
            return None if root is None else self._convert(root)
        except yaml.reader.ReaderError as error:
            line, problem = text.count("\n", 0, error.position) + 1, f"{error.reason}: {chr(error.character)!r}"
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line, problem = mark.line + 1 if mark else 1, getattr(error, "problem", None) or str(error)
        except RecursionError:
            line, problem = 1, "nested too deeply"
        raise UserError(f"{self.place(line)}: not valid YAML ({problem}); check indentation and quotes")

    def _convert(self, node: yaml.Node) -> _Node:
        where = self._where(node)
        self.count += 1
        if self.count > MOST_VALUES:
            raise UserError(f"{where}: the anchors up to here stand for more than {MOST_VALUES} values; use fewer")
        if id(node) in self.around:
            raise UserError(f"{where}: this anchor contains itself; write out what it stands for")
        if isinstance(node, yaml.ScalarNode):
            return _Node(self._scalar(node), where)
        if node.tag not in _COLLECTIONS:
            raise UserError(f"{where}: the tag {node.tag} is not understood; remove it")
        self.around.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node)
        else:
            value = [self._convert(item) for item in node.value]
        self.around.remove(id(node))
        return _Node(value, where)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, _Node]:
        out: dict[str, _Node] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            here = self._where(key_node)
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "of several values"
                raise UserError(f"{here}: the key {_shown(shown)} is not a name; keys must be words")
            if key in out:
                raise UserError(f"{here}: key '{key}' stands twice in one section; remove one")
            out[key] = dataclasses.replace(self._convert(value_node), where=here)
        for other in merged:  # <<: keys that neither the section itself nor an earlier one gives
            if not isinstance(other, yaml.MappingNode):
                raise UserError(
                    f"{self._where(other)}: '<<' takes a section, or a list of sections; give an alias of one"
                )
            out = self._convert(other).value | out
        return out

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self.constructor.construct_object(node)
        except Exception:  # yaml raises the errors of int(), date() and its own tables
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise UserError(f"{self._where(node)}: {_shown(node.value)} cannot be read as {tag}; correct or quote it")
        if not isinstance(value, (str, int, float, type(None))):
            kind = type(value).__name__
            raise UserError(f"{self._where(node)}: {_shown(node.value)} is read as a {kind}; quote it")
        return value

    def _where(self, node: yaml.Node) -> str:
        return self.place(node.start_mark.line + 1)


_MERGE = "tag:yaml.org,2002:merge"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def _wrap(value: Any, where: str) -> _Node:
    if isinstance(value, dict):
        return _Node({key: _wrap(item, where) for key, item in value.items()}, where)
    if isinstance(value, (list, tuple)):
        return _Node([_wrap(item, where) for item in value], where)
    return _Node(value, where)


def _override(tree: _Node, override: str) -> None:
    key, separator, text = override.partition("=")
    where = f"override '{_cut(override, 100)}'"
    if not separator or not key:
        raise UserError(f"{where}: must have the form key.sub=value")
    value = _Reader(lambda line: where).read(text)
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        if not isinstance(node.value.get(parent, _Node({}, where)).value, dict):
            node.value[parent] = _Node({}, where)  # an explicit null section is opened by setting a key in it
        node = node.value.setdefault(parent, _Node({}, where))
    node.value[leaf] = value or _Node(None, where)


def _fill(tree: _Node, base: _Node) -> None:
    """Add to `tree` the keys of `base` that it does not have."""
    for key, node in base.value.items():
        if key not in tree.value or (tree.value[key].value is None and isinstance(node.value, dict)):
            tree.value[key] = node  # a section of which every key is commented out is null
        elif isinstance(node.value, dict) and isinstance(tree.value[key].value, dict):
            _fill(tree.value[key], node)


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Nodes -> values, for one configuration: `cls`, and the whole `tree`."""

    cls: type
    tree: _Node

    def build(self, kind: Any, node: _Node, key: str, default: Any = None) -> Any:
        """`node` as a value of the type `kind`; `key` is its dotted name for errors. Keys that a section leaves
        out are as in `default` (None: as its class says)."""

        def refuse(expected: str) -> typing.NoReturn:
            shown = "a section" if isinstance(node.value, dict) else _shown(_unwrap(node))
            raise UserError(f"{node.where}: {key} must be {expected}, not {shown}")

        origin, args = typing.get_origin(kind), typing.get_args(kind)
        value = node.value
        if dataclasses.is_dataclass(kind):
            if value is None:
                value = {}
            if not isinstance(value, dict):
                refuse(f"a section ({', '.join(field.name for field in dataclasses.fields(kind))})")
            return self._section(kind, value, node.where, key, default)
        if kind is Any:
            return _unwrap(node)
        if origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            rest = [arg for arg in args if arg is not type(None)]
            if len(rest) == 1:
                return self.build(rest[0], node, key, default)
            fitting = [arg for arg in rest if isinstance(value, (list, dict)) and _form(arg) is type(value)]
            if len(fitting) == 1:
                return self.build(fitting[0], node, key, default)  # its message is about a part of the value
            for arg in rest:
                try:
                    return self.build(arg, node, key)
                except UserError:
                    continue
            refuse(" or ".join(_name(arg) for arg in rest))
        if origin is Literal:
            booleans = [arg for arg in args if isinstance(arg, bool)]
            if value not in args or isinstance(value, bool) != any(value is arg for arg in booleans):
                refuse(f"one of {', '.join(str(arg) for arg in args)}")
            return value
        if origin in (tuple, list):
            if not isinstance(value, list):
                refuse("a list")
            return origin(self.build(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
        if origin is dict:
            if not isinstance(value, dict):
                refuse("a mapping")
            return {name: self.build(args[1], item, f"{key}.{name}") for name, item in value.items()}
        if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            try:
                value = float(value)  # YAML 1.1 reads 1e-5 as a string
            except (ValueError, OverflowError):
                refuse("a number")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            refuse(_name(kind))
        if kind is float and not math.isfinite(value):
            refuse("a finite number")
        if kind is int and not -(2**63) <= value < 2**63:
            refuse("a whole number of 64 bits")
        if kind is str and ("\0" in value or not _is_unicode(value)):
            refuse("a string without null characters and halves of surrogate pairs")
        return value

    def _section(self, cls: type[T], values: dict[str, _Node], where: str, key: str, default: T | None) -> T:
        hints = _hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        defaults = {
            name: _default(field) if default is None else getattr(default, name) for name, field in fields.items()
        }
        built = {}
        for name, node in values.items():
            full = f"{key}.{name}" if key else name
            if name not in fields:
                raise UnknownKeyError(f"{node.where}: unknown key '{_cut(full, 100)}'; {nearest(name, list(fields))}")
            usual = defaults[name]
            if usual is None and _LIKE in fields[name].metadata and isinstance(node.value, dict):
                usual = self._program_section(fields[name].metadata[_LIKE])
            built[name] = self.build(hints[name], node, full, None if usual is dataclasses.MISSING else usual)
        for name, value in defaults.items():
            if name not in built and value is dataclasses.MISSING:
                raise UserError(f"{where}: '{key + '.' if key else ''}{name}' is missing and has no default; set it")
        try:
            return cls(**(defaults | built))
        except UserError:
            raise
        except ValueError as error:  # what the section's own __post_init__ refuses: "field: what; remedy"
            name = str(error).partition(":")[0]
            where = values[name].where if name in values else where
            raise UserError(f"{where}: {key + '.' if key else ''}{error}")

    def _program_section(self, name: str) -> Any:
        """The section `name` of the whole configuration."""
        field = next(field for field in dataclasses.fields(self.cls) if field.name == name)
        usual = _default(field)
        if name not in self.tree.value:
            return usual
        default = None if usual is dataclasses.MISSING else usual
        return self.build(_hints(self.cls)[name], self.tree.value[name], name, default)


_hints = functools.cache(typing.get_type_hints)  # a function of the class, and slow


def _default(field: dataclasses.Field) -> Any:
    """The default of a field; MISSING if it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _shown(value: Any) -> str:
    try:
        return _cut(repr(value), 100)
    except ValueError:
        return "a number of thousands of digits"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _form(kind: Any) -> type | None:
    """The YAML form of a type: list, dict; None: a scalar."""
    if dataclasses.is_dataclass(kind):
        return dict
    return {tuple: list, list: list, dict: dict}.get(typing.get_origin(kind))


def _name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return f"a section ({', '.join(field.name for field in dataclasses.fields(kind))})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if _form(kind) is not None:
        return "a list" if _form(kind) is list else "a mapping"
    return words.get(kind, str(kind))


def _unwrap(node: _Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _unwrap(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [_unwrap(item) for item in node.value]
    return node.value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
