"""`megarlhf report RUN`: a run directory -> one HTML file that needs nothing else: curves, phase times, samples before
and after, audit and configuration.

Reads run.yaml, metrics.jsonl, samples.jsonl, held_out.jsonl and audit.json, also of a run that is still going or was
cut short. Imports no torch: it is instant.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.report.charts import GROUPS, Chart, Figure, Points, draw, number, stacked

LAST_TIME = 253402300800  # seconds since the epoch: the year 10000, which has no date
SHOWN, UNFOLDED = 100, 8  # rows of the table of samples
SOURCE = {part: re.compile(rf"scores/(.+)/{part}") for part in ("mean", "var")}
PASS = re.compile(r"evaluation/pass@\d+")
RECORD = 300  # characters of a prompt's record beside a sample
# What a run is judged by: (label, name, 1 if more is better, -1 if less is, 0 if neither).
HIGHLIGHTS = (
    ("Score", "objective/scores", 1),
    ("Score − KL penalty", "objective/scores_total", 1),
    ("KL to the reference, nats", "objective/kl", 0),
    ("Entropy, nats", "objective/entropy", 0),
    ("Held-out prompts answered right", "evaluation/greedy", 1),
    ("Held-out accuracy", "validation/accuracy", 1),
    ("Held-out margin", "validation/margins", 1),
    ("Held-out perplexity", "validation/perplexity", -1),
    ("Held-out loss", "validation/loss", -1),
    ("Training loss", "loss", -1),
)


@dataclass(frozen=True)
class Run:
    """What a run directory holds."""

    name: str
    yaml: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    audit: list[dict[str, str]]
    work: dict[str, Any]

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record))

    def series(self, name: str) -> Points:
        """(step, value) of every record that has the number; NaN where it was not finite."""
        found = ((record["step"], record[name]) for record in self.records if name in record)
        return [(step, value if _finite(value) else math.nan) for step, value in found]

    def setting(self, key: str) -> Any:
        """A value of the configuration. "*" is the algorithm's section: the one that has a KL penalty."""
        sections = self.config.items()
        algorithm = next((name for name, value in sections if isinstance(value, dict) and "kl" in value), None)
        value: Any = self.config
        for part in key.split("."):
            value = value.get(algorithm if part == "*" else part) if isinstance(value, dict) else None
        return value


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, finished or not")
    parser.add_argument("--output", metavar="FILE", help="the page to write (default: RUN/report.html)")


def main(run: str, output: str | None) -> None:
    print(write(Path(run), Path(output) if output else Path(run) / "report.html"))


def write(run: Path, output: Path) -> Path:
    """`render(run)` as the file `output`."""
    html = render(run)
    try:
        output.write_text(html, encoding="utf-8", errors="replace")  # of half a surrogate pair
    except OSError as error:
        raise UserError(f"{output}: cannot write the report ({error.strerror}); give --output another place")
    return output


def render(run: Path) -> str:
    """The page of the run directory `run`."""
    import jinja2

    found = read(run)
    own = {"Evaluation": _evaluation(found), "Preferences": (pairs := _preferences(found))}
    shown = {name for chart in pairs for name in chart.curves}
    common = {
        group: tuple(chart for chart in charts if not shown >= chart.curves.keys()) for group, charts in GROUPS.items()
    }
    groups = {**own, **common, "Sources": _sources(found), "Other": _others(found)}
    grids = {group: _grid(found, charts) for group, charts in groups.items()}
    values = {
        "facts": _facts(found),
        "tiles": [tile for highlight in HIGHLIGHTS if (tile := _tile(found, *highlight))],
        "phases": _phases(found),
        "samples": _samples(found.samples),
        "held_out": _samples(found.held_out),
    }
    rest = {"Phases": values["phases"], "Samples": values["samples"], "Audit": found.audit, "Configuration": True}
    sections = [name for name, content in (grids | rest).items() if content]
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {
        "means": _means,
        "record": _record,
        "sha256": lambda text: b64encode(sha256(text.encode()).digest()).decode(),
    }
    template = page.from_string((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.render(run=found, grids=grids, sections=sections, **values)


def read(directory: Path) -> Run:
    for name in ("run.yaml", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise UserError(
                f"{directory}: not a run directory, {name} is missing; give the one that `run:` of a configuration of "
                "megarlhf sft, reward, dpo, kto, ppo or rl names"
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
    return _finite(value.get("matmul")) and value["matmul"] > 0 and all(_finite(figure) for figure in figures)


def _responses(path: Path) -> list[dict[str, Any]]:
    return [row for row in _objects(path) if {"query", "response"} <= row.keys()]


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


def _finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e300


def _facts(run: Run) -> dict[str, Any]:
    """What the page says of the run at its top."""
    program = "reward" if "normalization" in run.config else "sft"
    program = next((name for name in ("dpo", "kto") if name in run.config), program)
    if "scoring" in run.config:
        program = "ppo" if "ppo" in run.config else "rl"
    times = [time for record in run.records if _finite(time := record.get("time")) and 0 <= time < LAST_TIME]
    done = max((record["step"] for record in run.records), default=0)
    total = run.setting("training.steps")  # None: epochs are configured
    total = total if _finite(total) else None
    model = run.setting("model.checkpoint") or f"random weights, {run.setting('model.architecture.family')}"
    facts = {
        "program": f"megarlhf {program}",
        "directory": run.setting("run"),
        "steps": done if total is None else f"{done} of {total}{'' if done >= total else _why(run)}",
        "recorded": f"{_date(times[0])} – {_date(times[-1])} ({_duration(times[-1] - times[0])})"
        if times
        else "nothing",
        "model": f"{model}, {run.setting('model.dtype')}",
        "layout": f"tensor {run.setting('parallel.tensor')} × pipeline {run.setting('parallel.pipeline')}",
        "seed": run.setting("seed"),
    }
    if gates := [name for name in run.names() if name.startswith("gate/")]:
        worst = max((y for name in gates for _, y in run.series(name) if _finite(y)), default=math.nan)
        facts["step-0 gate"] = f"passed, largest difference {number(worst, 2)} nats a token"
    refused = sum("objective/scores" in record and "grad_norm" not in record for record in run.records)
    if refused:
        facts["batches not learned from"] = refused
    return facts


def _why(run: Run) -> str:
    """What the page says of a run that has steps left."""
    patience, points = run.setting("evaluation.patience"), run.series("evaluation/best_step")
    if _finite(patience) and points and sum(step > points[-1][1] for step, _ in points) >= patience:
        return ", stopped by evaluation.patience"
    return ", not finished"


def _tile(run: Run, label: str, name: str, better: int) -> dict[str, Any] | None:
    """The first and the last value of a number; None if the run has none."""
    points = [point for point in run.series(name) if _finite(point[1])]
    if not points:
        return None
    (start, first), (end, last) = points[0], points[-1]
    kind = "" if not better or first == last else "good" if (last > first) == (better > 0) else "bad"
    before = number(first, 3) if len(points) > 1 else ""
    return {"label": label, "first": before, "last": number(last, 3), "kind": kind, "start": start, "end": end}


def _sources(run: Run) -> tuple[Chart, ...]:
    """The scores of each source apart."""
    return tuple(
        Chart(title, unit, {name: match[1] for name in run.names() if (match := SOURCE[part].fullmatch(name))})
        for part, title, unit in (
            ("mean", "Scores of each source", "as it gave them"),
            ("var", "Their spread", "variance"),
        )
    )


def _evaluation(run: Run) -> tuple[Chart, ...]:
    """The evaluations on held-out prompts, with a curve for each k of pass@k."""
    right = [name for name in run.names() if PASS.fullmatch(name) or name == "evaluation/greedy"]
    return (
        Chart("Right responses", "share", {name: name.removeprefix("evaluation/") for name in right}),
        Chart("Score of greedy responses", "", {"evaluation/score": "held-out"}),
        Chart("Length of greedy responses", "tokens", {"evaluation/response_length": "length"}),
        Chart("Time of an evaluation", "seconds", {"time/evaluation": "evaluation"}),
        Chart("Best step so far", "", {"evaluation/best_step": "step"}, exact=True),
    )


def _preferences(run: Run) -> tuple[Chart, ...]:
    """How far a policy tells chosen responses from rejected ones; of megarlhf dpo and kto."""
    if not run.config.keys() & {"dpo", "kto"}:
        return ()
    charts = [
        Chart("Accuracy", "share", {"accuracy": "training", "validation/accuracy": "held-out"}, ("chance", 0.5)),
        Chart("Margins", "beta × (chosen − rejected)", {"margins": "training", "validation/margins": "held-out"}),
        Chart("Baseline z0", "nats a response", {"baseline": "training", "validation/baseline": "held-out"}),
    ]
    for what, title in (("logratios", "Log-ratios to the reference"), ("logprobs", "Log-probs")):
        for how, unit in (("sum", "nats a response"), ("mean", "nats a token")):
            for prefix, data in (("", "training"), ("validation/", "held-out")):
                curves = {f"{prefix}{what}_{how}/{kind}": kind for kind in ("chosen", "rejected")}
                charts.append(Chart(title, f"{unit}, {data}", curves))
    terms = {f"loss/{name}": text for name, text in (("preference", "preference"), ("nll_token", "NLL a token"),
                                                     ("nll_sequence", "NLL a token, mean of responses"))}  # fmt: skip
    return (*charts, Chart("Terms of the loss", "training", terms))


def _others(run: Run) -> tuple[Chart, ...]:
    """A chart for each number that no group shows: nothing recorded is left out."""
    charts = [
        chart for group in (*GROUPS.values(), _evaluation(run), _preferences(run), _sources(run)) for chart in group
    ]
    known = {"step", "time"} | {name for chart in charts for name in chart.curves}
    names = [name for name in run.names() if name not in known and not name.startswith(("time/", "gate/"))]
    return tuple(Chart(name, "", {name: name}) for name in names)


def _grid(run: Run, charts: tuple[Chart, ...]) -> list[Figure]:
    drawn = []
    for chart in charts:
        level: Any = chart.level[1] if chart.level else None
        if chart.level_if and run.setting(chart.level_if[0]) != chart.level_if[1]:
            level = None
        level = run.setting(level) if isinstance(level, str) else level
        drawn.append(draw(chart, run.series, level if _finite(level) else None))
    return [figure for figure in drawn if figure]


def _phases(run: Run) -> dict[str, Any] | None:
    """How the time of a step is spent, over the run and typically, and how much of the machine's matmul rate that is
    (train/work.py). Evaluations are between steps."""
    apart = ("time/step", "time/evaluation")
    names = [name for name in run.names() if name.startswith("time/") and name not in apart]
    rows = [
        (record["step"], [value if _finite(value := record.get(name)) and value > 0 else 0.0 for name in names])
        for record in run.records
        if names
    ]
    rows = [row for row in rows if any(row[1])]
    if not rows:
        return None
    short = [name.removeprefix("time/") for name in names]
    whole = sum(sum(seconds) for _, seconds in rows)
    lines = []
    for name, times in zip(short, zip(*(row for _, row in rows), strict=True), strict=True):
        share = sum(times) / whole
        lines.append({"name": name, "median": f"{median(times):.3g} s", "width": f"{share * 120:.0f}",
                      "share": f"{share:.1%}", "roofline": _roofline(run.work, name, median(times))})  # fmt: skip
    return {
        "figure": stacked(short, rows),
        "lines": lines,
        "step": f"{median(sum(seconds) for _, seconds in rows):.3g} s",
        "rate": f"{run.work['matmul'] / 1e9:,.0f}" if run.work else "",
    }


def _roofline(work: dict[str, Any], phase: str, seconds: float) -> tuple[str, ...]:
    """The cells of a phase: its arithmetic, its traffic, and the share of the matmul rate that it reached."""
    if not work:
        return ()
    todo = work["phases"].get(phase)
    if todo is None or not seconds:
        return ("", "", "")
    share = todo["flops"] / seconds / work["matmul"]
    return f"{todo['flops'] / 1e9:,.3g}", f"{todo['bytes'] / 1e9:,.3g}", f"{share:.1%}"


def _samples(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Responses of the first and of the last recorded step: those to the same query first, then in recorded order."""
    steps = sorted({row["step"] for row in samples})
    if not steps:
        return None
    sides = {step: [row for row in samples if row["step"] == step] for step in (steps[0], steps[-1])}
    rows = _paired(list(sides.values()))
    return {"sides": sides, "unfolded": rows[:UNFOLDED], "folded": rows[UNFOLDED:SHOWN], "count": len(rows)}


def _paired(sides: list[list[dict[str, Any]]]) -> list[tuple[dict[str, Any] | None, ...]]:
    """One tuple for each line of the table, with a row of each side."""
    if len(sides) == 1:
        return [(row,) for row in sides[0]]
    before, waiting = sides[0], list(sides[1])
    matched, alone = [], []
    for row in before:
        other = next((other for other in waiting if other["query"] == row["query"]), None)
        if other is None:
            alone.append(row)
        else:
            waiting.remove(other)
            matched.append((row, other))
    return matched + list(zip_longest(alone, waiting))


def _means(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(label, mean over samples) of score and KL, and of what each source said."""
    said = [row["scores"] if isinstance(row.get("scores"), dict) else {} for row in rows]
    columns = [("score", [row.get("score") for row in rows])]
    if any("kl" in row for row in rows):
        columns.append(("KL", [row.get("kl") for row in rows]))
    for name in dict.fromkeys(name for scores in said for name in scores):
        columns.append((f"score of {name}", [scores.get(name) for scores in said]))
    means = []
    for label, column in columns:
        values = [value for value in column if _finite(value)]
        means.append((label, number(fmean(values), 3) if values else "not finite"))
    return means


def _record(row: dict[str, Any]) -> str:
    """The record of a sample's prompt, cut to a few words; "" without one."""
    record = row.get("record")
    shown = json.dumps(record, ensure_ascii=False) if isinstance(record, dict) and record else ""
    return shown if len(shown) <= RECORD else shown[:RECORD] + "…"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
