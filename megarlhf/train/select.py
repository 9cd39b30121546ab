"""`megarlhf select`: scored responses -> the data of the next stage. It has no ranks and imports no torch.

The file is read twice, a line at a time: first for each prompt's scores, then for the texts that are kept. The memory
grows with the number of prompts, not with their texts. Groups are the lines of one prompt id: equal texts with
different ids are different prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarlhf import config
from megarlhf.config import PathName, UserError
from megarlhf.data.files import real_paths
from megarlhf.data.jsonl import read_all, string
from megarlhf.data.outputs import check_out, write

Line = dict[str, Any]
_FIELD = re.compile(r"\{(\w+)\}")
_KINDS = {  # key: the kinds that read it
    "score": ("best", "pairs"),
    "group_key": ("best", "pairs"),
    "response_key": ("best", "pairs", "conditional"),
    "unfinished": ("best", "pairs", "conditional"),
    "min_score": ("best",),
    "ties": ("best",),
    "min_margin": ("pairs",),
    "margin": ("pairs",),
    "template": ("conditional", "ask"),
    "attributes": ("conditional",),
    "values": ("conditional", "ask"),
    "levels": ("conditional", "ask"),
    "words": ("conditional", "ask"),
    "decimals": ("conditional", "ask"),
    "ask": ("ask",),
}


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """What is selected. Each key below `kind` is for some kinds alone."""

    input: PathName  # JSONL: the output of `megarlhf score`; with kind ask, prompts
    out: PathName  # JSONL; written once, at the end
    # best: {"prompt", "response"}, the best response to each prompt;
    # pairs: {"prompt", "chosen", "rejected"}, the best and the worst one;
    # conditional: {"prompt", "response"}, every response, with its score in the prompt;
    # ask: the lines of a file of prompts, with a given score in the prompt
    kind: Literal["best", "pairs", "conditional", "ask"]
    prompt_key: str = "prompt"
    response_key: str = "response"
    unfinished: Literal["drop", "keep"] = "drop"  # responses that were cut at their longest length ("ended": false)
    score: str = "score"  # best, pairs: the number that is compared, "score" or the name of a source
    group_key: str = "prompt_id"  # best, pairs: what the responses to one prompt have in common
    min_score: float | None = None  # best: a prompt whose best response has less is dropped
    ties: Literal["keep", "drop"] = "keep"  # best: prompts whose responses all have the same score; keep: the first one
    min_margin: float = 0.0  # pairs: with a smaller difference of scores a prompt is dropped; equal scores always are
    margin: bool = False  # pairs: write the difference as "margin", which losses with a margin read
    template: str | None = None  # conditional, ask: the new prompt, of {prompt} and {NAME} of each attribute
    attributes: tuple[str, ...] = ("score",)  # conditional: "score", names of sources or keys of a line
    values: Literal["z", "levels"] = "z"  # z-scores over the file, or levels of equally many responses
    levels: int = 5  # levels: from 0, the worst, to levels - 1
    words: tuple[str, ...] | None = None  # levels: their names in the prompt, the worst first; default: 0, 1, ...
    decimals: int = 1  # z: digits after the point
    ask: dict[str, float] = field(default_factory=dict)  # ask: {attribute: value}, in units of `values`

    def __post_init__(self):
        for name, kinds in _KINDS.items():
            default = SelectConfig.__dataclass_fields__[name]
            usual = {} if name == "ask" else default.default
            if self.kind not in kinds and getattr(self, name) != usual:
                raise ValueError(f"{name}: is for kind {' and '.join(kinds)}, not for {self.kind}; remove it")
        if self.levels < 2 or self.decimals < 0:
            raise ValueError(f"levels: must be at least 2, and decimals 0, not {self.levels} and {self.decimals}")
        if self.words is not None and (self.values != "levels" or len({*self.words}) != self.levels):
            raise ValueError(f"words: must be {self.levels} different names, one for each level, with values: levels")
        if self.min_margin < 0:
            raise ValueError(f"min_margin: must not be negative, not {self.min_margin}")
        if self.kind not in ("conditional", "ask"):
            return
        names = (*self.ask,) if self.kind == "ask" else self.attributes
        if not names or len({*names}) < len(names):
            key = "ask" if self.kind == "ask" else "attributes"
            raise ValueError(f"{key}: must name one or more different attributes, not {list(names)}")
        if self.template is None:
            raise ValueError('template: is missing; write the new prompt, such as "quality: {score}\\n{prompt}"')
        found = _FIELD.findall(self.template)
        for name in ("prompt", *names):
            if name not in found:
                raise ValueError(f"template: has no {{{name}}}; it needs {{prompt}} and each attribute")
        for name in found:
            if name not in ("prompt", *names):
                raise ValueError(f"template: {{{name}}} is neither the prompt nor an attribute; remove or correct it")
        for name, value in self.ask.items():
            if not math.isfinite(value) or (
                self.values == "levels" and not (value == int(value) and 0 <= value < self.levels)
            ):
                wanted = f"a level from 0 to {self.levels - 1}" if self.values == "levels" else "a finite number"
                raise ValueError(f"ask: {name} must be {wanted}, not {value:g}")

    def rendered(self, prompt: str, values: dict[str, float]) -> str:
        """The new prompt. Braces within `prompt` stay as they are."""
        texts = {name: self._shown(value) for name, value in values.items()}
        return _FIELD.sub(lambda found: (texts | {"prompt": prompt})[found[1]], self.template)

    def _shown(self, value: float) -> str:
        if self.words is not None:
            return self.words[int(value)]
        digits = self.decimals if self.values == "z" else 0
        return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: a rounded -0.04 must not be "-0.0"


configurations = (SelectConfig,)


def main(path: str | None, overrides: list[str]) -> None:
    print(select(config.load(SelectConfig, path, overrides)))


def select(settings: SelectConfig) -> str:
    """Write `out`. Returns one line on what was kept and dropped. Raises UserError (file:line) for a malformed line, a
    score that is missing or not finite, and if nothing is left."""
    check_out(settings.out, real_paths(settings.input), "prompts" if settings.kind == "ask" else "scored responses")
    kinds = {"best": _best, "pairs": _pairs, "conditional": _conditional, "ask": _ask}
    dropped: Counter[str] = Counter()
    lines, summary = kinds[settings.kind](settings, dropped)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{settings.input}: nothing is left: {_summary(0, dropped, summary)}")
    count = write(Path(settings.out), _chain(first, lines))
    return f"{settings.out}: {_summary(count, dropped, summary)}"


def _summary(kept: int, dropped: Counter[str], rest: Callable[[int], str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return rest(kept) + (f"; dropped: {reasons}" if reasons else "")


def _chain(first: Line, rest: Iterator[Line]) -> Iterator[Line]:
    yield first
    yield from rest


@dataclass(slots=True)
class _Group:
    """The responses to one prompt, of those that may be kept."""

    digest: bytes  # of the prompt
    line: int  # the first one
    best: float = -math.inf
    worst: float = math.inf
    best_line: int = 0  # 0: none; the first of equal ones
    worst_line: int = 0
    count: int = 0


def _groups(settings: SelectConfig, dropped: Counter[str]) -> tuple[dict[int | str, _Group], int, float]:
    """({prompt id: group}, number of responses, sum of their scores)."""
    groups: dict[int | str, _Group] = {}
    responses, total = 0, 0.0

    def convert(row: Line) -> tuple[int | str, str, float, str | None]:
        return (
            _group_id(row, settings.group_key),
            _prompt(row, settings.prompt_key),
            _number(row, settings.score),
            _unfit(row, settings),
        )

    for line, (key, prompt, score, unfit) in _read(settings.input, convert):
        digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
        group = groups.setdefault(key, _Group(digest, line))
        if group.digest != digest:
            raise UserError(
                f"{settings.input}:{line}: {settings.group_key} {key!r} has another prompt than in line {group.line}; "
                "give each prompt an id of its own (files of several runs have the same ids)"
            )
        responses, total = responses + 1, total + score
        if unfit is not None:
            dropped[unfit] += 1
            continue
        group.count += 1
        if not group.best_line or score > group.best:
            group.best, group.best_line = score, line
        if not group.worst_line or score < group.worst:
            group.worst, group.worst_line = score, line
    return groups, responses, total


def _best(settings: SelectConfig, dropped: Counter[str]) -> tuple[Iterator[Line], Callable[[int], str]]:
    groups, responses, total = _groups(settings, dropped)
    kept, sums = set(), 0.0
    for group in groups.values():
        if not group.best_line:
            dropped["prompts without a response left"] += 1
        elif settings.min_score is not None and group.best < settings.min_score:
            dropped[f"prompts whose best score is below min_score {settings.min_score:g}"] += 1
        elif settings.ties == "drop" and group.best == group.worst:
            dropped["prompts whose responses all have the same score"] += 1
        else:
            kept.add(group.best_line)
            sums += group.best

    def lines() -> Iterator[Line]:
        for line, row in _read(settings.input, lambda row: row):
            if line in kept:
                yield {"prompt": row[settings.prompt_key], "response": row[settings.response_key]}

    ties = sum(group.best_line in kept and group.best == group.worst for group in groups.values())
    return (
        lines(),
        lambda count: (
            f"the best of {responses} responses to {len(groups)} prompts: {count} kept"
            + (f", mean score {total / responses:.4g} -> {sums / count:.4g}" if count else "")
            + (f", {ties} without a choice (equal scores or one response)" if ties else "")
        ),
    )


def _pairs(settings: SelectConfig, dropped: Counter[str]) -> tuple[Iterator[Line], Callable[[int], str]]:
    groups, responses, _ = _groups(settings, dropped)
    roles: dict[int, tuple[_Group, str]] = {}  # by line
    margins = 0.0
    for group in groups.values():
        if not group.best_line:
            dropped["prompts without a response left"] += 1
        elif group.count == 1:
            dropped["prompts with one response"] += 1
        elif group.best == group.worst:
            dropped["prompts whose responses all have the same score"] += 1
        elif group.best - group.worst < settings.min_margin:
            dropped[f"prompts with a difference below min_margin {settings.min_margin:g}"] += 1
        else:
            roles[group.best_line], roles[group.worst_line] = (group, "chosen"), (group, "rejected")
            margins += group.best - group.worst

    def lines() -> Iterator[Line]:
        waiting: dict[int, Line] = {}  # by the group's first line
        for number, row in _read(settings.input, lambda row: row):
            group, role = roles.get(number, (None, ""))
            if group is None:
                continue
            found = waiting.setdefault(group.line, {"prompt": row[settings.prompt_key], "chosen": "", "rejected": ""})
            found[role] = row[settings.response_key]
            if not (found["chosen"] and found["rejected"]):
                continue
            del waiting[group.line]
            if found["chosen"] == found["rejected"]:
                dropped["prompts whose best and worst responses are the same text"] += 1
                continue
            yield found | ({"margin": group.best - group.worst} if settings.margin else {})

    number = len(roles) // 2
    return (
        lines(),
        lambda count: (
            f"the best and the worst of {responses} responses to {len(groups)} prompts: {count} pairs kept"
            + (f", mean difference {margins / number:.4g}" if number else "")
        ),
    )


def _conditional(settings: SelectConfig, dropped: Counter[str]) -> tuple[Iterator[Line], Callable[[int], str]]:
    columns = {name: array("d") for name in settings.attributes}

    def values(row: Line) -> tuple[dict[str, float], str | None]:
        _text(row, settings.prompt_key)
        return {name: _number(row, name) for name in settings.attributes}, _unfit(row, settings)

    for _, (found, unfit) in _read(settings.input, values):
        if unfit is not None:
            dropped[unfit] += 1
            continue
        for name, value in found.items():
            columns[name].append(value)
    scales = {name: _scale(name, column, settings) for name, column in columns.items() if column}

    def lines() -> Iterator[Line]:
        for _, row in _read(settings.input, lambda row: row):
            found, unfit = values(row)
            if unfit is None:
                shown = {name: scales[name](value) for name, value in found.items()}
                prompt = settings.rendered(row[settings.prompt_key], shown)
                yield {"prompt": prompt, "response": row[settings.response_key]}

    names = ", ".join(f"{name} mean {_mean(column):.4g}" for name, column in columns.items() if column)
    return lines(), lambda count: f"{count} responses kept, with their scores in the prompt ({names})"


def _ask(settings: SelectConfig, dropped: Counter[str]) -> tuple[Iterator[Line], Callable[[int], str]]:
    def lines() -> Iterator[Line]:
        for _, row in _read(settings.input, lambda row: row | {settings.prompt_key: _text(row, settings.prompt_key)}):
            yield row | {settings.prompt_key: settings.rendered(row[settings.prompt_key], settings.ask)}

    asked = ", ".join(f"{name} {value:g}" for name, value in settings.ask.items())
    return lines(), lambda count: f"{count} prompts that ask for {asked}"


def _scale(name: str, column: array, settings: SelectConfig) -> Callable[[float], float]:
    """A function from an attribute's numbers to what stands in the prompt."""
    if settings.values == "levels":
        ordered = array("d", sorted(column))

        def level(value: float) -> float:  # of the middle of the equal ones, so that equal scores have one level
            middle = (bisect_left(ordered, value) + bisect_right(ordered, value)) / 2
            return min(settings.levels - 1, int(settings.levels * middle / len(ordered)))

        if ordered[0] < ordered[-1]:
            return level
    else:
        mean = _mean(column)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in column) / len(column))
        if std > 0 and column.count(column[0]) < len(column):
            return lambda value: (value - mean) / std
    raise UserError(f"{settings.input}: '{name}' is {column[0]:g} in every line, so it says nothing about a response")


def _mean(column: array) -> float:
    return math.fsum(column) / len(column)


def _read(path: str, convert: Callable[[Line], Any]) -> Iterator[tuple[int, Any]]:
    return read_all(path, convert)


def _group_id(row: Line, key: str) -> int | str:
    value = row.get(key)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    if key in row:
        raise ValueError(f"'{key}' must be a number or a text, not {type(value).__name__}")
    raise ValueError(
        f"no key '{key}', which says whose response it is (found: {', '.join(row)}); megarlhf generate writes it"
    )


def _number(row: Line, name: str) -> float:
    """The score `name` of a line: of its `scores` if it is a source's, else the line's own key."""
    given = row.get("scores")
    place = given if isinstance(given, dict) and name in given and name != "score" else row
    if name not in place:
        also = f", {', '.join(given)}" if isinstance(given, dict) else ""
        raise ValueError(f"no key '{name}' (found: {', '.join(row)}{also}); megarlhf score writes it")
    value = place[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"'{name}' must be a finite number, not {value!r}")
    return float(value)


def _prompt(row: Line, key: str) -> str:
    """A prompt, a text or a list of messages, as one string."""
    return json.dumps(row[key]) if isinstance(row.get(key), list) else string(row, key)


def _text(row: Line, key: str) -> str:
    if isinstance(row.get(key), list):
        raise ValueError(f"'{key}' is a conversation, and a score is written into a text; give prompts that are texts")
    return string(row, key)


def _unfit(row: Line, settings: SelectConfig) -> str | None:
    """Why a response cannot be learnt from; None: it can."""
    if not string(row, settings.response_key).strip():
        return "empty responses"
    if settings.unfinished == "drop" and row.get("ended") is False:
        return "unfinished responses"
    return None
