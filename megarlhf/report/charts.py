"""Which curves a report shows, and their drawing as SVG, whose labels are escaped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import fmean

Points = list[tuple[float, float]]  # (step, value); NaN: not finite
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 50, 16, 8, 24
PHASES_WIDTH, MAX_BARS = 760, 120
MAX_POINTS = 1000  # of a curve; longer ones keep the extremes of each bucket
SMOOTHED_FROM = 20  # points
COLOURS = 6  # of curves and phases, in page.html


@dataclass(frozen=True)
class Chart:
    """Curves on common axes: {name in metrics.jsonl: label}."""

    title: str
    unit: str
    curves: dict[str, str]
    level: tuple[str, float | str] | None = None  # (label, a value to compare with or its key, see Run.setting)
    level_if: tuple[str, str] | None = None  # (key, value) of the config that the level needs to mean something
    exact: bool = False  # set, not measured: not smoothed, on a linear axis


@dataclass(frozen=True)
class Figure:
    """A drawing and what stands around it."""

    title: str
    unit: str
    legend: list[tuple[str, str, str]]  # (CSS class of the key, label, value)
    svg: str


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Objective": (
        Chart("Score", "reward", {"objective/scores": "score", "objective/scores_total": "score − KL penalty"}),
        Chart("KL to the reference", "nats a response", {"objective/kl": "KL", "objective/kl_exact": "exact"},
              ("target", "*.kl.target"), ("*.kl.controller", "adaptive")),
        Chart("Entropy", "nats a response", {"objective/entropy": "entropy"}),
        Chart("KL coefficient", "reward a nat", {"objective/kl_coef": "coefficient"}),
        Chart("KL penalty", "reward", {"objective/non_score_reward": "penalty"}),
        Chart("Spread of the scores", "variance", {"objective/scores_var": "variance"}),
        Chart("Response length", "tokens", {"objective/response_length": "length"}),
        Chart("Accepted responses", "share", {"objective/accepted": "accepted"}),
    ),
    "Policy": (
        Chart("KL of an update", "nats a token", {"ppo/policy/approxkl": "approxkl",
                                                  "reinforce/policy/approxkl": "approxkl"}),
        Chart("Clipped ratios", "share of tokens", {"ppo/policy/clipfrac": "clipfrac"}),
        Chart("Probability ratio", "new / old", {"ppo/policy/ratio_mean": "mean", "ppo/policy/ratio_min": "min",
                                                 "ppo/policy/ratio_max": "max", "reinforce/policy/ratio_max": "max"}),
        Chart("Variance of the ratio", "", {"ppo/policy/ratio_var": "variance"}),
        Chart("Entropy of the softmax", "nats a token", {"ppo/policy/entropy": "entropy",
                                                         "reinforce/policy/entropy": "entropy"}),
    ),
    "Value": (
        Chart("Values and returns", "mean over tokens", {"ppo/val/vpred": "predicted", "ppo/val/mean": "at sampling",
                                                         "ppo/returns/mean": "returns"}),
        Chart("Their spread", "variance", {"ppo/val/vpred_var": "predicted", "ppo/val/var": "at sampling",
                                           "ppo/returns/var": "returns"}),
        Chart("Value error", "squared", {"ppo/val/error": "error"}),
        Chart("Clipped values", "share of tokens", {"ppo/val/clipfrac": "clipfrac"}),
    ),
    "Losses": (
        Chart("Loss", "", {"loss": "training", "validation/loss": "held-out"}),
        Chart("Policy loss", "", {"ppo/loss/policy": "loss", "reinforce/loss/policy": "loss"}),
        Chart("Value loss", "", {"ppo/loss/value": "loss"}),
        Chart("Loss of both heads", "policy + value", {"ppo/loss/total": "loss"}),
        Chart("Gradient norm", "before clipping", {"grad_norm": "model", "ppo/val/grad_norm": "critic"}),
        Chart("Skipped updates", "share", {"skipped": "model", "ppo/val/skipped": "critic"}, exact=True),
        Chart("Learning rate", "", {"lr": "model", "ppo/val/lr": "critic"}, exact=True),
    ),
    "Validation": (
        Chart("Perplexity", "held-out", {"validation/perplexity": "perplexity"}),
        Chart("Accuracy", "share of pairs", {"accuracy": "training", "validation/accuracy": "held-out"},
              ("chance", 0.5), ("loss", "pairwise")),
        Chart("Scores of pairs", "training", {"scores/chosen": "chosen", "scores/rejected": "rejected"}),
        Chart("Scores of pairs", "held-out", {"validation/scores/chosen": "chosen",
                                              "validation/scores/rejected": "rejected"}),
    ),
    "Throughput": (
        Chart("Tokens a second", "", {"tokens_per_second": "tokens / s"}),
        Chart("Time of a step", "seconds", {"step_seconds": "step", "time/step": "step"}),
        Chart("Sampler − trainer", "nats a token", {"sampler/gap": "gap"}),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """A number -> a place between `start` and `end` on the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [
                digit * 10.0**decade
                for decade in decades[:: math.ceil(len(decades) / (count + 4))]
                for digit in ((1, 3) if len(decades) < 4 else (1,))
            ]
        else:
            unit = 10 ** math.floor(math.log10((self.high - self.low) / count))
            step = next(digit * unit for digit in (1, 2, 5, 10) if digit * unit >= (self.high - self.low) / count)
            ticks = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _axes(steps: list[float], values: list[float], *, linear: bool) -> tuple[Axis, Axis]:
    """Axes that hold the points. Logarithmic for what spans decades; from 0 where that costs little of the drawing."""
    low, high = min(values), max(values)
    log = not linear and low > 0 and high / low > 50
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if log:
        low, high = low / 1.2, high * 1.2
    elif 0 <= low <= 0.4 * high:
        low, high = 0.0, high + pad
    else:
        low, high = low - pad, high + pad
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    return Axis(first, last, LEFT + 6, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def number(value: float, digits: int = 4) -> str:
    """A number to read."""
    if not math.isfinite(value):
        return "not finite"
    value += 0.0  # no minus before a zero
    return f"{value / 1000:.{digits}g}k" if 1e4 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def _rules(up: Axis, width: int = WIDTH) -> str:
    """Horizontal grid lines with their numbers."""
    return "".join(
        f'<line class="rule" x1="{LEFT}" x2="{width - RIGHT}" y1="{up(tick)}" y2="{up(tick)}"/>'
        f'<text x="{LEFT - 6}" y="{up(tick) + 3.5:.1f}" text-anchor="end">{number(tick, 6)}</text>'
        for tick in up.ticks(4)
    )


def draw(chart: Chart, series: Callable[[str], Points], level: float | None) -> Figure | None:
    """The chart, with a dashed line at `level`; None where the run has none of its numbers."""
    curves = [(label, points) for name, label in chart.curves.items() if (points := series(name))]
    values = [y for _, points in curves for _, y in points if math.isfinite(y)]
    if not values:
        return None
    levels = [] if level is None else [level]
    across, up = _axes([x for _, points in curves for x, _ in points], values + levels, linear=chart.exact)
    drawn, legend = [_rules(up)], []
    for step in across.ticks(6):
        if step == int(step):
            drawn.append(f'<text x="{across(step)}" y="{HEIGHT - 6}" text-anchor="middle">{number(step, 6)}</text>')
    for y in levels:
        drawn.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y)}" y2="{up(y)}"/>')
    for place, (label, points) in enumerate(curves):
        index = place % COLOURS
        last = next((y for _, y in reversed(points) if math.isfinite(y)), math.nan)
        legend.append((f"c{index}", label, number(last)))
        drawn.append(_curve(points, label, index, across, up, smooth=len(curves) < 3 and not chart.exact))
    if levels:
        legend.append(("level", chart.level[0], number(level)))
    unit = ", ".join(filter(None, (chart.unit, "log scale" if up.log else "")))
    opening = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} by step">'
    )
    return Figure(chart.title, unit, legend, f"{opening}{''.join(drawn)}</svg>")


def _curve(points: Points, label: str, index: int, across: Axis, up: Axis, *, smooth: bool) -> str:
    """A curve with its numbers for the script, a mark on the axis for what is not finite, dots where the points are
    few, and a thin moving mean where they are many."""
    thin = _thinned(points)
    finite = [(x, y) for x, y in thin if math.isfinite(y)]
    smooth = smooth and len(points) >= SMOOTHED_FROM
    xs, ys = " ".join(f"{x}" for x, _ in finite), " ".join(f"{y:.5g}" for _, y in finite)
    parts = [f'<path class="bad" d="M{across(x)},{HEIGHT - BOTTOM}v-7"/>' for x, y in thin if not math.isfinite(y)]
    parts.append(
        f'<path class="curve c{index}{" noisy" if smooth else ""}" d="{_path(thin, across, up)}" '
        f'data-label="{escape(label)}" data-x="{xs}" data-y="{ys}"/>'
    )
    if len(finite) <= 12:
        parts += (f'<circle class="c{index}" cx="{across(x)}" cy="{up(y)}" r="2.6"/>' for x, y in finite)
    if smooth:
        parts.append(f'<path class="smooth c{index}" d="{_path(_thinned(_smoothed(points, up.log)), across, up)}"/>')
    return "".join(parts)


def _path(points: Points, across: Axis, up: Axis) -> str:
    out, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            out.append(f"{pen}{across(x)},{up(y)}{'h0' if pen == 'M' else ''}")  # h0: a point alone becomes a dot
            pen = "L"
        else:
            pen = "M"
    return "".join(out)


def _thinned(points: Points) -> Points:
    """At most MAX_POINTS of the finite ones: the lowest and the highest of each bucket. And all that are not finite."""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    if size <= 2:
        return points
    kept: list[int] = []
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        finite = sorted((i for i in bucket if math.isfinite(points[i][1])), key=lambda i: points[i][1])
        kept += sorted({*finite[:1], *finite[-1:], *(set(bucket) - set(finite))})
    return [points[i] for i in kept]


def _smoothed(points: Points, log: bool) -> Points:
    """The mean of the finite neighbours within a twentieth of the run on either side, less at the ends; geometric on a
    logarithmic axis, where one spike would lift the other."""
    if log:
        logs = _smoothed([(x, math.log(y)) for x, y in points], log=False)
        return [(x, math.exp(y)) for x, y in logs]
    most = max(2, len(points) // 20)
    sums = list(accumulate((y if math.isfinite(y) else 0.0 for _, y in points), initial=0.0))
    counts = list(accumulate((math.isfinite(y) for _, y in points), initial=0))
    out = []
    for i, (x, _) in enumerate(points):
        reach = min(most, i, len(points) - 1 - i)
        low, high = i - reach, i + reach + 1
        count = counts[high] - counts[low]
        out.append((x, (sums[high] - sums[low]) / count if count else math.nan))
    return out


def stacked(names: list[str], rows: list[tuple[int, list[float]]]) -> Figure:
    """A stacked bar for each (step, seconds of each name); of a long run, for the means of each few steps."""
    size = math.ceil(len(rows) / MAX_BARS)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    bars = [(group[0][0], [fmean(part) for part in zip(*(row for _, row in group), strict=True)]) for group in groups]
    across = Axis(-0.5, len(bars) - 0.5, LEFT, PHASES_WIDTH - RIGHT)
    up = Axis(0.0, max(sum(bar) for _, bar in bars) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    width = min(30.0, (across(1) - across(0)) * 0.8)
    drawn = [_rules(up, PHASES_WIDTH)]
    for place, (step, seconds) in enumerate(bars):
        for index, (name, top) in enumerate(zip(names, accumulate(seconds), strict=True)):
            height, colour = up(top - seconds[index]) - up(top), index % COLOURS
            text = f"step {step}, {name}: {seconds[index]:.3g} s"
            drawn.append(
                f'<rect class="c{colour}" x="{across(place) - width / 2:.1f}" y="{up(top)}" width="{width:.1f}" '
                f'height="{height:.1f}"><title>{escape(text)}</title></rect>'
            )
        if place % math.ceil(len(bars) / 10) == 0:
            drawn.append(f'<text x="{across(place)}" y="{HEIGHT - 6}" text-anchor="middle">{step}</text>')
    unit = "seconds" if size == 1 else f"seconds, means of {size} records"
    opening = f'<svg viewBox="0 0 {PHASES_WIDTH} {HEIGHT}" role="img" aria-label="phases of each step">'
    return Figure("Time of a step", unit, [], f"{opening}{''.join(drawn)}</svg>")
