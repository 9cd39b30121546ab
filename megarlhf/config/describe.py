"""Dataclasses -> descriptions: a reference of all keys, a JSON schema for editors, and a file to start from.

A key's text is the comment beside its field or above it; a section's, where its field has none, is the first sentence
of its docstring. So what the code says is all there is to keep current.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from megarlhf.config import dump_values, to_dict
from megarlhf.config.builder import LIKE, PathName, default_of, hints_of

REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a configuration."""

    name: str
    kind: Any  # its annotation
    default: Any  # REQUIRED, or a value
    text: str
    section: type | None  # of the key, or of the items of its list
    like: str | None  # another section of the program, whose keys these are where they are left out

    @property
    def opens(self) -> bool:
        """Whether the section's keys stand below this key."""
        return self.section is not None and not self.like


def keys(cls: type, usual: Any = None) -> list[Key]:
    """The keys of a section. `usual`: the section where a configuration leaves it out; None: as its class says."""
    found = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        kind = hints_of(cls)[field.name]
        section, like = _section(kind), field.metadata.get(LIKE)
        text = [_comments(cls).get(field.name, "")]
        if section is not None and not like:
            text.insert(0, _first_sentence(section))
        if like:
            text.append(f"Keys that are left out are those of {like}.")
        default = default_of(field) if usual is None else getattr(usual, field.name)
        found.append(Key(field.name, kind, default, " ".join(filter(None, text)), section, like))
    return found


def reference(cls: type) -> str:
    """All keys of a configuration in words, indented by section, for a terminal."""
    lines: list[str] = []

    def add(section: type, usual: Any, indent: str) -> None:
        for key in keys(section, usual):
            opens = key.opens
            value = "section" if opens and not _is_list(key.kind) else words(key.kind)
            lines.append(f"{indent}{key.name}: {value}{_said(key)}")
            around = {"initial_indent": f"{indent}    ", "subsequent_indent": f"{indent}    "}
            lines.extend(textwrap.wrap(key.text, 110, **around))
            if opens:
                default = key.default if dataclasses.is_dataclass(key.default) else None
                add(key.section, default, f"{indent}{'  - ' if _is_list(key.kind) else '  '}")

    add(cls, None, "")
    return "\n".join(lines) + "\n"


def template(cls: type) -> str:
    """A YAML file with the required keys, and all others as comments with their defaults."""
    lines: list[str] = []

    def add(section: type, usual: Any, indent: str, active: bool) -> None:
        for key in keys(section, usual):
            needed = active and key.default is REQUIRED
            mark = "" if needed else "# "
            if not indent and key.section is not None:
                lines.append("")
            lines.extend(f"{indent}# {line}" for line in textwrap.wrap(key.text, 100))
            if key.opens and not _is_list(key.kind):
                lines.append(f"{indent}{mark}{key.name}:")
                default = key.default if dataclasses.is_dataclass(key.default) else None
                add(key.section, default, f"{indent}  " if needed or "#" in indent else f"{indent}{mark}  ", needed)
            elif key.default is REQUIRED:
                lines.append(f"{indent}{mark}{key.name}:  # {words(key.kind)}; required")
            else:
                shown = dump_values({key.name: _plain(key.default)}).rstrip().splitlines()
                lines.extend(f"{indent}{mark}{line}" for line in shown)

    add(cls, None, "", True)
    return "\n".join(lines) + "\n"


def handbook(programs: dict[str, tuple[type, ...]]) -> str:
    """All keys of all programs as Markdown: a table for each program, then each section once."""
    places: dict[type, dict[str, list[str]]] = {}
    for program, configurations in programs.items():
        for cls in configurations:
            _collect(cls, "", program, places)
    names = [section.__name__ for section in places]
    # two sections of the same name differ by their modules
    titles = {
        section: section.__name__
        + (f" of {section.__module__.rpartition('.')[2]}" if names.count(section.__name__) > 1 else "")
        for section in places
    }
    parts = []
    for program, configurations in programs.items():
        for cls in configurations:
            parts.append(f"## megarlhf {program}" + (f" with {cls.algorithm}" if len(configurations) > 1 else ""))
            parts.append(_table(keys(cls), titles))
    parts.append("## Sections")
    for section, title in sorted(titles.items(), key=lambda item: item[1]):
        where = ", ".join(f"`{name}` ({', '.join(of)})" for name, of in places[section].items())
        parts.append(f"### {title}\n\n{inspect.cleandoc(section.__doc__ or '')}\n\nWhere: {where}")
        parts.append(_table(keys(section), titles))
    return "\n\n".join(parts) + "\n"


def schema(configurations: tuple[type, ...], title: str) -> dict[str, Any]:
    """The JSON schema (draft 7) of a program's files: names and types of keys, choices, ranges, and which are required.
    What several keys decide together is the program's to check."""
    definitions: dict[str, Any] = {}
    made = [_object(cls, None, definitions) for cls in configurations]
    root = made[0] if len(made) == 1 else {"anyOf": made}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **root, "definitions": definitions}


# ------------------------------------------------------------------------------------------------ their parts


def _collect(cls: type, prefix: str, program: str, places: dict[type, dict[str, list[str]]]) -> None:
    """Add the sections below `cls` to {section: {dotted name: programs}}."""
    for key in keys(cls):
        if key.section is not None:
            name = f"{prefix}{key.name}{'[]' if _is_list(key.kind) else ''}"
            programs = places.setdefault(key.section, {}).setdefault(name, [])
            if program not in programs:
                programs.append(program)
            _collect(key.section, f"{name}.", program, places)


def _table(found: list[Key], titles: dict[type, str]) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for key in found:
        rows.append(f"| `{key.name}` | {_cell(words(key.kind, titles))} | {_default(key)} | {_cell(key.text)} |")
    return "\n".join(rows)


def _default(key: Key) -> str:
    """A default in a table; of a section what differs from its class."""
    if key.default is REQUIRED:
        return "required"
    if dataclasses.is_dataclass(key.default):
        usual = {item.name: item.default for item in keys(type(key.default))}
        own = {name: value for name, value in usual.items() if getattr(key.default, name) != value}
        return ", ".join(f"`{name}: {json.dumps(_plain(getattr(key.default, name)))}`" for name in own)
    return "none" if key.default is None else f"`{json.dumps(_plain(key.default))}`"


def _said(key: Key) -> str:
    """A default on a line."""
    if key.default is REQUIRED:
        return "; required"
    if key.opens:
        return "" if key.default is not None else "; default: left out"
    return "" if key.default is None else f"; default {json.dumps(_plain(key.default))}"


def _cell(text: str) -> str:
    """Text in a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _object(cls: type, usual: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for key in keys(cls, usual):
        found = _bounded(_schema(key.kind, definitions), _probe(cls, usual, key.name))
        if key.default is REQUIRED:
            required.append(key.name)
        extra = {"description": key.text} if key.text else {}
        if key.default not in (REQUIRED, None) and not key.opens:
            extra["default"] = _plain(key.default)
        properties[key.name] = {"allOf": [found], **extra} if "$ref" in found and extra else found | extra
    made = {"type": "object", "additionalProperties": False, "properties": properties}
    return made | ({"required": required} if required else {})


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = f"{kind.__module__.removeprefix('megarlhf.')}.{kind.__name__}"
        if name not in definitions:
            definitions[name] = {}  # while it is made
            made = _object(kind, None, definitions)
            if "required" not in made:  # a section of which every key is commented out is null
                made["type"] = ["object", "null"]
            definitions[name] = made
        return {"$ref": f"#/definitions/{name}"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, definitions) for arg in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    simple = {type(None): "null", str: "string", PathName: "string", int: "integer", float: "number", bool: "boolean"}
    return {"type": simple[kind]} if kind in simple else {}


def _bounded(schema: dict[str, Any], refuses: Callable[[Any], bool]) -> dict[str, Any]:
    """The schema of a key's value with its range, as far as the usual bounds go: 0, 1 and 2."""
    if "anyOf" in schema:
        return {"anyOf": [_bounded(part, refuses) for part in schema["anyOf"]]}
    limits: dict[str, Any] = {}
    kind = schema.get("type")
    if kind == "array" and refuses(()):
        limits["minItems"] = 1
    if kind == "integer" and refuses(-1):
        least = next((value for value in (0, 1, 2) if not refuses(value)), None)
        limits |= {} if least is None else {"minimum": least}
    if kind == "number" and refuses(-1.0):
        if not refuses(0.0):
            limits["minimum"] = 0
        elif not refuses(1e-9):
            limits["exclusiveMinimum"] = 0
        elif not refuses(1.0):
            limits["minimum"] = 1
    if kind == "number" and not refuses(1 - 1e-9):
        if refuses(1.0):
            limits["exclusiveMaximum"] = 1
        elif refuses(1 + 1e-9):
            limits["maximum"] = 1
    return schema | limits


def _probe(cls: type, usual: Any, name: str) -> Callable[[Any], bool]:
    """Whether a section refuses a value of the key `name`, whatever its other keys are: asked of the section's own
    checks. False where they cannot be asked."""
    usual = usual or _example(cls)
    others = {key.name for key in keys(cls)} - {name}

    def refuses(value: Any) -> bool:
        if not dataclasses.is_dataclass(usual):
            return False
        try:
            dataclasses.replace(usual, **{name: value})
        except ValueError as error:
            place, _, why = str(error).partition(":")
            return place == name and not others & set(re.findall(r"\w+", why))
        except Exception:  # other keys have no value that fits
            return False
        return False

    return refuses


def _example(cls: type) -> Any:
    """A section that its class accepts, with as few keys as it takes; None if there is none to be found."""
    needed = {}
    for key in keys(cls):
        if key.default is REQUIRED:
            section = None if _is_list(key.kind) else key.section
            needed[key.name] = 1 if key.kind in (int, float) else "x" if section is None else _example(section)
    optional = [key.name for key in keys(cls) if key.default is None and not key.section]
    for more in ({}, *({name: "x"} for name in optional)):  # perhaps one of several keys must be there
        with contextlib.suppress(Exception):
            return cls(**needed, **more)
    return None


# ------------------------------------------------------------------------------------------------ what the code says


def _parts(kind: Any) -> list[Any]:
    """The alternatives of a type, without None."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return [arg for arg in typing.get_args(kind) if arg is not type(None)]
    return [kind]


def _is_list(kind: Any) -> bool:
    return any(typing.get_origin(part) in (tuple, list) for part in _parts(kind))


def _section(kind: Any) -> type | None:
    """The dataclass of a section, or of a list's items."""
    for part in _parts(kind):
        if typing.get_origin(part) in (tuple, list):
            part = next(iter(_parts(typing.get_args(part)[0])[::-1]))
        if dataclasses.is_dataclass(part):
            return part
    return None


def words(kind: Any, titles: dict[type, str] | None = None) -> str:
    """A type in words; with the handbook's `titles` a section is a link to its heading."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return "section" if titles is None else f"[section](#{titles[kind].lower().replace(' ', '-')})"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(arg, titles) for arg in args if arg is not type(None)))
    if origin is Literal:
        return ", ".join(json.dumps(arg) if isinstance(arg, bool) else str(arg) for arg in args)
    if origin in (tuple, list):
        return f"list of {words(args[0], titles)}"
    if origin is dict:
        return f"mapping to {words(args[1], titles)}"
    named = {str: "text", PathName: "path", int: "whole number", float: "number", bool: "true, false"}
    return named.get(kind, "any value")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _first_sentence(cls: type) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    if not text or text.startswith(f"{cls.__name__}("):  # dataclass's own
        return ""
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """{field: the comment above it and beside it}, of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # a class that was made, or a built-in one
            continue
        lines = source.splitlines()
        body = ast.parse(source).body[0].body
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _comment(lines, node.lineno - 1, node.end_lineno - 1, node.end_col_offset)
    return found


def _comment(lines: list[str], first: int, last: int, end: int) -> str:
    above = []
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].strip().lstrip("# "))
    beside = lines[last].encode()[end:].decode().partition("#")[2].strip()
    return " ".join(filter(None, [*above, beside]))
