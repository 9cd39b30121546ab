"""Tables of responses: the first and the last recorded step side by side."""

from __future__ import annotations

import json
from itertools import zip_longest
from statistics import fmean
from typing import Any

from megarlhf.report.drawing import number
from megarlhf.report.run import finite

SHOWN, UNFOLDED = 100, 8  # rows of the table of samples
RECORD = 300  # characters of a prompt's record beside a sample


def sides_of(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Responses of the first and of the last recorded step: those to the same query first, then in recorded order."""
    steps = sorted({row["step"] for row in samples})
    if not steps:
        return None
    sides = {step: [row for row in samples if row["step"] == step] for step in (steps[0], steps[-1])}
    rows = paired(list(sides.values()))
    return {"sides": sides, "unfolded": rows[:UNFOLDED], "folded": rows[UNFOLDED:SHOWN], "count": len(rows)}


def paired(sides: list[list[dict[str, Any]]]) -> list[tuple[dict[str, Any] | None, ...]]:
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


def averages(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(label, mean over samples) of score and KL, and of what each source said."""
    said = [row["scores"] if isinstance(row.get("scores"), dict) else {} for row in rows]
    columns = [("score", [row.get("score") for row in rows])]
    if any("kl" in row for row in rows):
        columns.append(("KL", [row.get("kl") for row in rows]))
    for name in dict.fromkeys(name for scores in said for name in scores):
        columns.append((f"score of {name}", [scores.get(name) for scores in said]))
    found = []
    for label, column in columns:
        values = [value for value in column if finite(value)]
        found.append((label, number(fmean(values), 3) if values else "not finite"))
    return found


def record_text(row: dict[str, Any]) -> str:
    """The record of a sample's prompt, cut to a few words; "" without one."""
    record = row.get("record")
    shown = json.dumps(record, ensure_ascii=False) if isinstance(record, dict) and record else ""
    return shown if len(shown) <= RECORD else shown[:RECORD] + "…"
