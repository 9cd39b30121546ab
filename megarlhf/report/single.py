"""The page of one run: curves, phase times, samples before and after, audit and configuration."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from megarlhf.report import samples
from megarlhf.report.charts import Chart, distribution_title, groups, level
from megarlhf.report.drawing import Figure, draw, histogram, stacked
from megarlhf.report.page import fill, listed
from megarlhf.report.run import Run, finite, read
from megarlhf.report.summary import HIGHLIGHTS, facts, tile


def render(directory: Path) -> str:
    """The page of the run directory."""
    run = read(directory)
    grids = {group: _grid(run, charts) for group, charts in groups(run).items()}
    grids |= {"Scores": _distributions(run), "Other": grids.pop("Other")}
    values = {
        "facts": facts(run),
        "tiles": [found for highlight in HIGHLIGHTS if (found := tile(run, *highlight))],
        "phases": _phases(run),
        "samples": samples.sides_of(run.samples),
        "held_out": samples.sides_of(run.held_out),
    }
    rest = {"Phases": values["phases"], "Samples": values["samples"], "Audit": run.audit, "Configuration": True}
    return fill("single.html", title=run.name, run=run, grids=grids, sections=listed(grids | rest), **values)


def _distributions(run: Run) -> list[Figure]:
    """The scores of the first and the last recorded batch, or evaluation."""
    figures = []
    for name in run.distributions():
        sides = run.ends(name)
        title = distribution_title(name)
        figures.append(histogram(title, {f"step {step}": values for step, values in sides}))
    return figures


def _grid(run: Run, charts: tuple[Chart, ...]) -> list[Figure]:
    drawn = [draw(chart, run.series, level(chart, run)) for chart in charts]
    return [figure for figure in drawn if figure]


def _phases(run: Run) -> dict[str, Any] | None:
    """How the time of a step is spent, over the run and typically, and how much of the machine's matmul rate that is
    (train/work.py). Evaluations are between steps."""
    apart = ("time/step", "time/evaluation")
    names = [name for name in run.names() if name.startswith("time/") and name not in apart]
    rows = [
        (record["step"], [value if finite(value := record.get(name)) and value > 0 else 0.0 for name in names])
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
        "predicted": bool(run.work.get("predicted")),
        "rate": f"{run.work['matmul'] / 1e9:,.0f}" if run.work else "",
    }


def _roofline(work: dict[str, Any], phase: str, seconds: float) -> tuple[str, ...]:
    """The cells of a phase: its seconds as predicted at the run's start (train/planned.py), its arithmetic, its
    traffic, and the share of the matmul rate that it reached."""
    if not work:
        return ()
    todo, said = work["phases"].get(phase), work.get("predicted", {})
    before = () if not said else (f"{said[phase]:.3g} s" if phase in said else "",)
    if todo is None or not seconds:
        return (*before, "", "", "")
    share = todo["flops"] / seconds / work["matmul"]
    return *before, f"{todo['flops'] / 1e9:,.3g}", f"{todo['bytes'] / 1e9:,.3g}", f"{share:.1%}"
