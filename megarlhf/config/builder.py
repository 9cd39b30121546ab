"""Nodes -> dataclasses, by their annotations."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from typing import Any, Literal, TypeVar, Union

from megarlhf.config.errors import UnknownKeyError, UserError, cut, nearest, show
from megarlhf.config.nodes import Node, unwrap

T = TypeVar("T")
LIKE = "like"  # in a field's metadata
# The name of a file or directory: `~` and environment variables in it are expanded.
PathName = typing.NewType("PathName", str)


@dataclasses.dataclass(frozen=True)
class Builder:
    """Nodes -> values, for one configuration: `cls`, and the whole `tree`."""

    cls: type
    tree: Node

    def build(self, kind: Any, node: Node, key: str, default: Any = None) -> Any:
        """`node` as a value of the type `kind`; `key` is its dotted name for errors. Keys that a section leaves
        out are as in `default` (None: as its class says)."""

        def refuse(expected: str) -> typing.NoReturn:
            shown = "a section" if isinstance(node.value, dict) else show(unwrap(node))
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
            return unwrap(node)
        if origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            rest = [arg for arg in args if arg is not type(None)]
            if len(rest) == 1:
                return self.build(rest[0], node, key, default)
            fitting = [arg for arg in rest if isinstance(value, (str, list, dict)) and _form(arg) is type(value)]
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
        if kind is PathName:
            return self._path(self.build(str, node, key), node, key)
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

    def _path(self, name: str, node: Node, key: str) -> str:
        def value_of(match: re.Match) -> str:
            variable = match[1] or match[2]
            if variable not in os.environ:
                raise UserError(
                    f"{node.where}: {key}: {show(name)} names the environment variable {variable}, which is not set; "
                    "set it in the job's script, or write the path out"
                )
            return os.environ[variable]

        return os.path.expanduser(_VARIABLE.sub(value_of, name))

    def _section(self, cls: type[T], values: dict[str, Node], where: str, key: str, default: T | None) -> T:
        hints = hints_of(cls)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        defaults = {
            name: default_of(field) if default is None else getattr(default, name) for name, field in fields.items()
        }
        built = {}
        for name, node in values.items():
            full = f"{key}.{name}" if key else name
            if name not in fields:
                raise UnknownKeyError(f"{node.where}: unknown key '{cut(full, 100)}'; {nearest(name, list(fields))}")
            usual = defaults[name]
            if usual is None and LIKE in fields[name].metadata and isinstance(node.value, dict):
                usual = self._program_section(fields[name].metadata[LIKE])
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
        usual = default_of(field)
        if name not in self.tree.value:
            return usual
        default = None if usual is dataclasses.MISSING else usual
        return self.build(hints_of(self.cls)[name], self.tree.value[name], name, default)


_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
hints_of = functools.cache(typing.get_type_hints)  # a function of the class, and slow


def default_of(field: dataclasses.Field) -> Any:
    """The default of a field; MISSING if it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _form(kind: Any) -> type | None:
    """The YAML form of a type: list, dict, str; None: another scalar."""
    if dataclasses.is_dataclass(kind):
        return dict
    if kind in (str, PathName):
        return str
    return {tuple: list, list: list, dict: dict}.get(typing.get_origin(kind))


def _name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return f"a section ({', '.join(field.name for field in dataclasses.fields(kind))})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", PathName: "a string"}
    words |= {list: "a list", dict: "a mapping"}
    return words.get(_form(kind) or kind, str(kind))
