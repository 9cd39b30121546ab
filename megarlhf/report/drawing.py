"""Charts drawn as SVG, whose labels are escaped."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import fmean

from megarlhf.report.charts import Chart
from megarlhf.report.run import Points

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 50, 16, 8, 24
PHASES_WIDTH, MAX_BARS = 760, 120
MAX_POINTS = 1000  # of a curve; longer ones keep the extremes of each bucket
SMOOTHED_FROM = 20  # points
LEAST = 1e-300  # of a span of an axis
COLOURS = 6  # of curves and phases, in base.html
FEW, BINS = 12, 20  # of a histogram: distinct values that have a bar each; bins of more values


@dataclass(frozen=True)
class Figure:
    """A drawing and what stands around it."""

    title: str
    unit: str
    legend: list[tuple[str, str, str]]  # (CSS class of the key, label, value)
    svg: str


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
    # less than LEAST leaves no room for ticks: it is drawn as one value
    pad = next(pad for pad in ((high - low) * 0.06, abs(high) * 0.1, 1.0) if pad > LEAST)
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


def draw(
    chart: Chart, series: Callable[[str], Points], level: float | None = None, *, keep_colours: bool = False
) -> Figure | None:
    """The chart, with a dashed line at `level`; None where the run has none of its numbers. `keep_colours`: a curve has
    the colour of its place in the chart also where others are missing."""
    places = [
        (place, label, points) for place, (name, label) in enumerate(chart.curves.items()) if (points := series(name))
    ]
    curves = [(place if keep_colours else i, label, points) for i, (place, label, points) in enumerate(places)]
    values = [y for *_, points in curves for _, y in points if math.isfinite(y)]
    if not values:
        return None
    levels = [] if level is None else [level]
    across, up = _axes([x for *_, points in curves for x, _ in points], values + levels, linear=chart.exact)
    drawn, legend = [_rules(up)], []
    for step in across.ticks(6):
        if step == int(step):
            drawn.append(f'<text x="{across(step)}" y="{HEIGHT - 6}" text-anchor="middle">{number(step, 6)}</text>')
    for y in levels:
        drawn.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y)}" y2="{up(y)}"/>')
    for place, label, points in curves:
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
    up = Axis(0.0, max(1e-9, max(sum(bar) for _, bar in bars) * 1.05), HEIGHT - BOTTOM, TOP)
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


def histogram(title: str, columns: dict[str, list[float]]) -> Figure:
    """Shares of finite values in common bins, a bar for each column; a column without values keeps its colour. Few
    distinct values have a bin each."""
    distinct = sorted({value for values in columns.values() for value in values})
    bins, apart = _bins(distinct), len(distinct) <= FEW
    shares = {label: _shares(values, bins) for label, values in columns.items() if values}
    colours = {label: f"c{place % COLOURS}" for place, label in enumerate(columns)}
    across = Axis(0.0, float(len(bins)), LEFT + 6, WIDTH - RIGHT)
    up = Axis(0.0, max(max(row) for row in shares.values()) * 1.05, HEIGHT - BOTTOM, TOP)
    drawn, width = [_rules(up)], (across(1) - across(0)) * 0.86 / len(shares)
    for column, (label, row) in enumerate(shares.items()):
        for place, ((low, high), share) in enumerate(zip(bins, row, strict=True)):
            if share:
                left, top = across(place + 0.07) + column * width, up(share)
                where = number(low) if apart else f"{number(low)} to {number(min(high, distinct[-1]))}"
                drawn.append(
                    f'<rect class="{colours[label]}" x="{left:.1f}" y="{top}" width="{width:.1f}" '
                    f'height="{up(0) - top:.1f}"><title>{escape(f"{label}: {share:.1%} {where}")}</title></rect>'
                )
    every = math.ceil(len(bins) / 6)
    for place in range(0, len(bins), every):
        middle = across(place + 0.5) if apart else across(place)
        drawn.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{number(bins[place][0], 3)}</text>')
    legend = [
        (colours[label], label, f"mean {number(fmean(values), 3)} of {len(values)}")
        for label, values in columns.items()
        if values
    ]
    opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="distribution of {escape(title)}">'
    return Figure(title, "share", legend, f"{opening}{''.join(drawn)}</svg>")


def _bins(distinct: list[float]) -> list[tuple[float, float]]:
    """Half-open bins [low, high) that hold sorted distinct values: one for each of a few, else BINS of equal width."""
    if len(distinct) <= FEW:
        return list(zip(distinct, [*distinct[1:], math.inf], strict=True))
    low, width = distinct[0], (distinct[-1] - distinct[0]) / BINS
    edges = [low + i * width for i in range(BINS)]
    return list(zip(edges, [*edges[1:], math.inf], strict=True))


def _shares(values: list[float], bins: list[tuple[float, float]]) -> list[float]:
    """The share of the values that each bin holds."""
    ends = [high for _, high in bins]
    counts = Counter(bisect_right(ends, value) for value in values)
    return [counts[place] / len(values) for place in range(len(bins))]
