"""YAML text and overrides -> nodes: values that know their places."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarlhf.config.errors import UserError, cut, open_file, show

LARGEST_FILE = 2**18  # bytes; yaml reads about 100 kB a second
MOST_VALUES = 20_000
DEEPEST = 40  # brackets within brackets
_STEP, _INDEX = re.compile(r"([^\[\]]+)((?:\[\d{1,6}\])+)"), re.compile(r"\d+")


# A parsed value and its place: `Node(value, "run.yaml:12")`, with dicts and lists of further nodes inside.
@dataclasses.dataclass
class Node:
    value: Any
    where: str


def read_tree(path: str | Path | None, overrides: Sequence[str]) -> Node:
    tree = Node({}, "command line")
    if path is not None:
        tree = read_file(Path(path), "the configuration", "give --config an existing YAML file")
    for override in overrides:
        apply(tree, override)
    return tree


def read_file(path: Path, what: str, remedy: str) -> Node:
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
        return Node({}, f"{path}:1")
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

    def read(self, text: str) -> Node | None:
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

    def _convert(self, node: yaml.Node) -> Node:
        where = self._where(node)
        self.count += 1
        if self.count > MOST_VALUES:
            raise UserError(f"{where}: the anchors up to here stand for more than {MOST_VALUES} values; use fewer")
        if id(node) in self.around:
            raise UserError(f"{where}: this anchor contains itself; write out what it stands for")
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node), where)
        if node.tag not in _COLLECTIONS:
            raise UserError(f"{where}: the tag {node.tag} is not understood; remove it")
        self.around.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node)
        else:
            value = [self._convert(item) for item in node.value]
        self.around.remove(id(node))
        return Node(value, where)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        out: dict[str, Node] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            here = self._where(key_node)
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "of several values"
                raise UserError(f"{here}: the key {show(shown)} is not a name; keys must be words")
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
            raise UserError(f"{self._where(node)}: {show(node.value)} cannot be read as {tag}; correct or quote it")
        if not isinstance(value, (str, int, float, type(None))):
            kind = type(value).__name__
            raise UserError(f"{self._where(node)}: {show(node.value)} is read as a {kind}; quote it")
        return value

    def _where(self, node: yaml.Node) -> str:
        return self.place(node.start_mark.line + 1)


_MERGE = "tag:yaml.org,2002:merge"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def wrap(value: Any, where: str) -> Node:
    if isinstance(value, dict):
        return Node({key: wrap(item, where) for key, item in value.items()}, where)
    if isinstance(value, (list, tuple)):
        return Node([wrap(item, where) for item in value], where)
    return Node(value, where)


def apply(tree: Node, override: str) -> None:
    """Set one key, `section.key=value`; `[i]` behind a list's name is its item, from 0."""
    key, separator, text = override.partition("=")
    where = f"override '{cut(override, 100)}'"
    if not separator or not key:
        raise UserError(f"{where}: must have the form key.sub=value")
    value = _Reader(lambda line: where).read(text) or Node(None, where)
    steps: list[str | int] = []
    for name in key.split("."):
        match = _STEP.fullmatch(name)
        steps += [name] if match is None else [match[1], *map(int, _INDEX.findall(match[2]))]
    here: Any = tree.value
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int) and step >= len(here):
            raise UserError(f"{where}: there is no item {step}; the file's list has {len(here)}, counted from 0")
        if following is None:
            here[step] = value
            return
        inner = here[step] if isinstance(step, int) else here.get(step)
        if isinstance(following, int) and (inner is None or not isinstance(inner.value, list)):
            raise UserError(f"{where}: the file has no list there; give the whole list")
        if isinstance(following, str) and (inner is None or not isinstance(inner.value, dict)):
            inner = here[step] = Node({}, where)  # an explicit null section is opened by setting a key in it
        here = inner.value


def fill(tree: Node, base: Node) -> None:
    """Add to `tree` the keys of `base` that it does not have."""
    for key, node in base.value.items():
        if key not in tree.value or (tree.value[key].value is None and isinstance(node.value, dict)):
            tree.value[key] = node  # a section of which every key is commented out is null
        elif isinstance(node.value, dict) and isinstance(tree.value[key].value, dict):
            fill(tree.value[key], node)


def unwrap(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: unwrap(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [unwrap(item) for item in node.value]
    return node.value
