"""`Run`: what the files of a run directory hold, also of a run that goes on or was cut short."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf import config as configuration
from megarlhf.config import UserError

Points = list[tuple[float, float]]  # (step, value); NaN: not finite


@dataclass(frozen=True)
class Run:
    """What a run directory holds."""

    name: str
    yaml: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    audit: list[dict[str, str]]
    work: dict[str, Any]

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record))

    def series(self, name: str) -> Points:
        """(step, value) of every record that has the number; NaN where it was not finite."""
        found = ((record["step"], record[name]) for record in self.records if name in record)
        return [(step, value if finite(value) else math.nan) for step, value in found]

    def distributions(self) -> list[str]:
        """The names of the numbers whose distributions it recorded."""
        return list(dict.fromkeys(row["name"] for row in self.scores))

    def ends(self, name: str) -> list[tuple[int, list[float]]]:
        """(step, values) of the first and the last recorded distribution."""
        rows = sorted((row for row in self.scores if row["name"] == name), key=lambda row: row["step"])
        return [(row["step"], row["values"]) for row in (rows[0], rows[-1])][: len(rows)]

    def setting(self, key: str) -> Any:
        """A value of the configuration. "*" is the algorithm's section: the one that has a KL penalty."""
        sections = self.config.items()
        algorithm = next((name for name, value in sections if isinstance(value, dict) and "kl" in value), None)
        value: Any = self.config
        for part in key.split("."):
            value = value.get(algorithm if part == "*" else part) if isinstance(value, dict) else None
        return value


def read(directory: Path) -> Run:
    for name in ("run.yaml", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise UserError(
                f"{directory}: not a run directory, {name} is missing; give the one that `run:` of a configuration of "
                "megarlhf sft, reward, prm, dpo, kto, ilql, ppo or rl names"
            )
    remedy = "put that of the run there again"
    config = configuration.read(directory / "run.yaml", "the configuration", remedy)
    if not config:
        raise UserError(f"{directory / 'run.yaml'}: is empty; {remedy}")
    text = (directory / "run.yaml").read_text(encoding="utf-8")
    return Run(
        name=directory.resolve().name,
        yaml=text,
        config=config,
        records=list(_objects(directory / "metrics.jsonl", strict=True)),
        samples=_responses(directory / "samples.jsonl"),
        held_out=_responses(directory / "held_out.jsonl"),
        scores=[row for row in _objects(directory / "scores.jsonl") if _is_distribution(row)],
        audit=_json(directory / "audit.json", _is_audit, []),
        work=_json(directory / "work.json", _is_work, {}),
    )


def _json(path: Path, is_good: Callable[[Any], bool], missing: Any) -> Any:
    """The content of a JSON file that a run writes once, `missing` if there is none."""
    if not path.is_file():
        return missing
    try:
        value = json.loads(path.read_bytes())
        damage = None if is_good(value) else "it does not hold what a run writes there"
    except (ValueError, RecursionError) as error:
        damage = f"it is not JSON: {error}"
    if damage:
        raise UserError(f"{path}: damaged ({damage}); remove it, and the report goes without")
    return value


def _is_audit(value: Any) -> bool:
    keys = ("detail", "what", "value", "original")
    return isinstance(value, list) and all(
        isinstance(row, dict) and all(isinstance(row.get(key), str) for key in keys) for row in value
    )


def _is_work(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("phases"), dict):
        return False
    figures = [phase.get(key) if isinstance(phase, dict) else None
               for phase in value["phases"].values() for key in ("flops", "bytes")]  # fmt: skip
    predicted = value.get("predicted", {})
    if not isinstance(predicted, dict):
        return False
    figures += predicted.values()
    return finite(value.get("matmul")) and value["matmul"] > 0 and all(finite(figure) for figure in figures)


def _is_distribution(row: dict[str, Any]) -> bool:
    values = row.get("values")
    return isinstance(row.get("name"), str) and isinstance(values, list) and bool(values) and all(map(finite, values))


def _responses(path: Path) -> list[dict[str, Any]]:
    return [row for row in _objects(path) if all(isinstance(row.get(key), str) for key in ("query", "response"))]


def _objects(path: Path, *, strict: bool = False) -> Iterator[dict[str, Any]]:
    """The objects with a step of a JSONL file. Lines that a kill cut short are passed over (`strict`: only the last may
    be one), those that a resumed run wrote again are taken once. Not by `splitlines`: responses may hold other line
    ends."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    places = {line: place for place, line in reversed(list(enumerate(lines, start=1)))}
    for line in dict.fromkeys(lines):
        try:
            value = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and type(step := value.get("step")) is int and 0 <= step < 2**53:
            yield value
        elif strict and line.strip() and places[line] < len(lines):
            raise UserError(f"{path}:{places[line]}: damaged, not an object with a step; remove the line")


def finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e300
