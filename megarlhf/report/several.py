"""The page of several runs: their curves on common axes, final numbers, differences of their configurations, and their
responses to the same prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megarlhf.config import UserError
from megarlhf.report.charts import Chart, distribution_title, groups, level
from megarlhf.report.drawing import COLOURS, Figure, draw, histogram, number
from megarlhf.report.page import fill, listed
from megarlhf.report.run import Run, finite, read
from megarlhf.report.samples import UNFOLDED
from megarlhf.report.summary import HIGHLIGHTS, facts

MOST_PROMPTS = 40  # of the table of responses
# The medians that runs are judged by: (label, names of which a run has one, as in HIGHLIGHTS).
RATES = (("Tokens a second, median", ("tokens_per_second",), 1),
         ("Seconds a step, median", ("time/step", "step_seconds"), -1))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of a table: a cell for each run. `best`: the place of the best one, if it is better than the others."""

    label: str
    cells: list[str]
    best: int | None = None


def render(directories: list[Path]) -> str:
    """The page of run directories."""
    if len(directories) > COLOURS:
        raise UserError(
            f"{len(directories)} runs cannot be told apart by {COLOURS} colours; give at most {COLOURS} runs"
        )
    runs = [read(directory) for directory in directories]
    labels = _labels(directories)
    grids = _grids(runs, labels)
    values = {
        "facts": _table([facts(run) for run in runs]),
        "final": _final(runs),
        "all_final": _last(runs),
        "settings": _differences(runs),
        "phases": _phases(runs),
        "held_out": _responses([run.held_out for run in runs]),
        "sampled": _responses([run.samples for run in runs]),
    }
    rest = {
        "Final numbers": values["final"] or values["all_final"],
        "Configurations": True,
        **grids,
        "Phases": values["phases"],
        "Responses": values["held_out"] or values["sampled"],
    }
    return fill(
        "several.html", title=" · ".join(labels), labels=labels, grids=grids, sections=listed(rest),
        unfolded=UNFOLDED, **values,
    )  # fmt: skip


def _labels(directories: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"{twice}: is given twice; name each run once")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        ends = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(ends)) == len(ends):
            break
    return ends


def _grids(runs: list[Run], labels: list[str]) -> dict[str, list[Figure]]:
    """Each number that a run recorded, with a curve for each run, in the groups of a single run's page."""
    grids = {}
    for group, charts in groups(*runs).items():
        drawn = []
        for chart in charts:
            numbers = dict.fromkeys(chart.curves.values())
            for number_label in numbers:
                title = f"{chart.title}: {number_label}" if len(numbers) > 1 else chart.title
                # The same number has one name for each kind of algorithm, under the same label.
                names = [name for name, text in chart.curves.items() if text == number_label]
                drawn.append(_overlaid(title, chart, names, runs, labels))
        grids[group] = [figure for figure in drawn if figure]
    return grids | {"Scores": _distributions(runs, labels), "Other": grids.pop("Other")}


def _overlaid(title: str, chart: Chart, names: list[str], runs: list[Run], labels: list[str]) -> Figure | None:
    """A curve of a number for each run, with the level of the chart if it is the same in all runs that have the
    number."""
    found = [next((points for name in names if (points := run.series(name))), []) for run in runs]
    levels = {level(chart, run) for run, points in zip(runs, found, strict=True) if points}
    curves = {str(place): label for place, label in enumerate(labels)}
    return draw(
        Chart(title, chart.unit, curves, chart.level, exact=chart.exact),
        lambda place: found[int(place)],
        levels.pop() if len(levels) == 1 else None,
        keep_colours=True,
    )


def _distributions(runs: list[Run], labels: list[str]) -> list[Figure]:
    """The last recorded scores of each run."""
    figures = []
    for name in dict.fromkeys(name for run in runs for name in run.distributions()):
        columns = {}
        for label, run in zip(labels, runs, strict=True):
            step, values = run.ends(name)[-1] if name in run.distributions() else (0, [])
            columns[f"{label}, step {step}"] = values
        title = distribution_title(name)
        figures.append(histogram(title, columns))
    return figures


def _final(runs: list[Run]) -> list[Row]:
    """The numbers that runs are judged by: the last of each, with its best one where that is another. The losses of
    different programs are not compared."""
    rows, alike = [], len({facts(run)["program"] for run in runs}) == 1
    for label, name, better in HIGHLIGHTS:
        series = [[point for point in run.series(name) if finite(point[1])] for run in runs]
        cells = [_ends(points, better) for points in series]
        last = [points[-1][1] if points else math.nan for points in series]
        if any(series):
            rows.append(Row(label, cells, _best(last, better) if alike or not name.endswith("loss") else None))
    for label, names, better in RATES:
        found = [[y for name in names for _, y in run.series(name) if finite(y)] for run in runs]
        medians = [median(values) if values else math.nan for values in found]
        if any(map(finite, medians)):
            rows.append(
                Row(label, [number(value, 3) if finite(value) else "" for value in medians], _best(medians, better))
            )
    return rows


def _ends(points: list[tuple[float, float]], better: int) -> str:
    if not points:
        return ""
    step, last = points[-1]
    best_step, best = max(points, key=lambda point: better * point[1]) if better else points[-1]
    text = f"{number(last, 4)} at step {step}"
    return text if best == last else f"{text}; best {number(best, 4)} at {best_step}"


def _best(values: list[float], better: int) -> int | None:
    found = [value for value in values if finite(value)]
    if not better or len(found) < 2:
        return None
    best = max(found, key=lambda value: better * value)
    return values.index(best) if values.count(best) == 1 else None


def _last(runs: list[Run]) -> list[Row]:
    """The last value of everything that a run recorded."""
    names = dict.fromkeys(name for run in runs for name in run.names() if name not in ("step", "time"))
    last = {
        name: [next((y for _, y in reversed(run.series(name)) if finite(y)), None) for run in runs] for name in names
    }
    return [
        Row(name, ["" if value is None else number(value, 5) for value in values])
        for name, values in last.items()
        if any(value is not None for value in values)
    ]


def _phases(runs: list[Run]) -> list[Row]:
    """The median seconds of each phase of a step."""
    names = dict.fromkeys(name for run in runs for name in run.names() if name.startswith("time/"))
    rows = []
    for name in names:
        found = [[y for _, y in run.series(name) if finite(y)] for run in runs]
        seconds = [median(values) if values else math.nan for values in found]
        cells = [f"{number(value, 3)} s" if finite(value) else "" for value in seconds]
        rows.append(Row(name.removeprefix("time/"), cells, _best(seconds, -1)))
    return rows


def _table(columns: list[dict[str, Any]]) -> list[Row]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [Row(key, [str(column.get(key, "")) for column in columns]) for key in keys]


def _differences(runs: list[Run]) -> list[Row]:
    """The keys of run.yaml whose values are not the same in all runs."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [Row(key, [config.get(key, "–") for config in flat]) for key in keys if key != "run"]
    return [row for row in rows if len(set(row.cells)) > 1]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, value) of every value of a configuration, with keys and values as overrides have them."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for place, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{place}]")
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _responses(tables: list[list[dict[str, Any]]]) -> list[tuple[str, list[tuple[Any, Any]]]]:
    """(prompt, (first, last) response of each run) of the prompts that every run answered at its last recorded step.
    `first` is None where the run answered the prompt once."""
    sides = []
    for rows in tables:
        steps = sorted({row["step"] for row in rows})
        before, after = {}, {}
        for row in rows:
            if row["step"] == steps[-1]:
                after.setdefault(row["query"], row)
            elif row["step"] == steps[0]:
                before.setdefault(row["query"], row)
        sides.append((before, after))
    common = [query for query in sides[0][1] if all(query in after for _, after in sides)]
    return [(query, [(before.get(query), after[query]) for before, after in sides]) for query in common[:MOST_PROMPTS]]
