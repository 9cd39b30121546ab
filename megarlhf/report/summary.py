"""What a run is and what it was judged by: the facts at the top of a page, and its numbers at both ends."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from megarlhf.report.drawing import number
from megarlhf.report.run import Run, finite

LAST_TIME = 253402300800  # seconds since the epoch: the year 10000, which has no date
# {a key that run.yaml of a program alone has: the program}, the first one that fits.
PROGRAMS = {"ppo": "ppo", "scoring": "rl", "dpo": "dpo", "kto": "kto", "ilql": "ilql", "normalization": "reward",
            "reward_tokens": "prm"}  # fmt: skip
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


def facts(run: Run) -> dict[str, Any]:
    """What the page says of the run at its top."""
    program = next((name for key, name in PROGRAMS.items() if key in run.config), "sft")
    times = [time for record in run.records if finite(time := record.get("time")) and 0 <= time < LAST_TIME]
    done = max((record["step"] for record in run.records), default=0)
    total = run.setting("training.steps")  # None: epochs are configured
    total = total if finite(total) else None
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
        worst = max((y for name in gates for _, y in run.series(name) if finite(y)), default=math.nan)
        facts["step-0 gate"] = f"passed, largest difference {number(worst, 2)} nats a token"
    learned = ("grad_norm", "ppo/val/grad_norm")  # the critic alone in its warmup
    refused = sum("objective/scores" in record and not record.keys() & {*learned} for record in run.records)
    if refused:
        facts["batches not learned from"] = refused
    return facts


def _why(run: Run) -> str:
    """What the page says of a run that has steps left."""
    patience, points = run.setting("evaluation.patience"), run.series("evaluation/best_step")
    if finite(patience) and points and sum(step > points[-1][1] for step, _ in points) >= patience:
        return ", stopped by evaluation.patience"
    return ", not finished"


def tile(run: Run, label: str, name: str, better: int) -> dict[str, Any] | None:
    """The first and the last value of a number; None if the run has none."""
    points = [point for point in run.series(name) if finite(point[1])]
    if not points:
        return None
    (start, first), (end, last) = points[0], points[-1]
    kind = "" if not better or first == last else "good" if (last > first) == (better > 0) else "bad"
    before = number(first, 3) if len(points) > 1 else ""
    return {"label": label, "first": before, "last": number(last, 3), "kind": kind, "start": start, "end": end}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
