"""Fit the efficiencies of `megarlhf plan` to published step times, and print each one's leave-one-out error.

    python -m bench.scale [--quick] [--json FILE]

Eight parameters for the figures of bench/published.py; three of them are the efficiencies of
megarlhf/plan/hardware.yaml (a test compares). The left-out error of a figure is that of a fit to all others. --quick
leaves these out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.published import Cell, Parameters, cells, others

NAMES = [field.name for field in dataclasses.fields(Parameters)]
SHARES = ("matmul", "memory", "link")
# An error much larger than this counts by its size, not by its square: some rows differ for reasons of their own.
USUAL = 0.2
RANGE = 50.0  # a parameter stays within this factor of its start


def fit(given: Sequence[Cell], near: Parameters | None = None) -> Parameters:
    """The parameters with the least sum of 2 (sqrt(1 + (e / USUAL)^2) - 1), e the logarithm of predicted / published.
    Levenberg and Marquardt's method, on the logarithms of the parameters. `near`: where to start."""
    start = np.log([getattr(Parameters(), name) for name in NAMES])
    top = np.array([0.0 if name in SHARES else at + np.log(RANGE) for name, at in zip(NAMES, start, strict=True)])

    def errors(x: np.ndarray) -> np.ndarray:
        p = Parameters(*np.exp(x).tolist())
        return np.log([cell.predict(p) / cell.seconds for cell in given])

    def loss(e: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1 + (e / USUAL) ** 2) - 1))

    x = start if near is None else np.log(dataclasses.astuple(near))
    damping = 1e-2
    now = errors(x)
    for _ in range(200):
        slope = np.stack([(errors(x + 1e-5 * unit) - now) / 1e-5 for unit in np.eye(len(x))], axis=1)
        weight = 1 / np.sqrt(1 + (now / USUAL) ** 2)
        curve, down = slope.T @ (weight[:, None] * slope), slope.T @ (weight * now)
        while damping < 1e9:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve) + 1e-9), down)
            there = np.clip(x - step, start - np.log(RANGE), top)
            after = errors(there)
            if loss(after) < loss(now):
                moved, x, now, damping = np.abs(there - x).max(), there, after, damping / 3
                break
            damping *= 4
        else:
            break
        if moved < 1e-5:
            break
    return Parameters(*np.exp(x).tolist())


def left_out(given: Sequence[Cell], near: Parameters) -> list[Parameters]:
    """For each cell, the parameters fitted to all others."""
    return [fit([*given[:i], *given[i + 1 :]], near) for i in range(len(given))]


def median(errors: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no leave-one-out errors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    given = cells()
    fitted = fit(given)
    without = [] if arguments.quick else left_out(given, fitted)
    print("parameter      fitted" + ("" if arguments.quick else "   range over the fits that leave one figure out"))
    for name in NAMES:
        spread = [getattr(p, name) for p in without]
        print(
            f"{name:10}{getattr(fitted, name):>11.4g}"
            + (f"   {min(spread):.4g} to {max(spread):.4g}" if spread else "")
        )
    print(f"\n{'seconds':47}{'published':>10}{'model':>9}{'fitted':>8}{'left out':>10}")
    rows = []
    for i, cell in enumerate(given):
        left = cell.error(without[i]) if without else None
        rows.append({"cell": cell.name, "phase": cell.phase, "seconds": cell.seconds,
                     "fitted": cell.error(fitted), "left_out": left})  # fmt: skip
        shown = "" if left is None else f"{left:>+10.0%}"
        print(f"{cell.name:47}{cell.seconds:>10.2f}{cell.predict(fitted):>9.2f}{cell.error(fitted):>+8.0%}{shown}")
    print("\nnever fitted")
    checks = [{"cell": cell.name, "seconds": cell.seconds, "error": cell.error(fitted)} for cell in others()]
    for cell, check in zip(others(), checks, strict=True):
        print(f"{cell.name:47}{cell.seconds:>10.2f}{cell.predict(fitted):>9.2f}{check['error']:>+8.0%}")
    kind = "fitted" if arguments.quick else "left_out"
    computed = [row[kind] for row in rows if row["phase"] != "sync"]
    everything = [row[kind] for row in rows]
    print(f"\nmedian absolute error, {kind.replace('_', ' ')}: {median(everything):.1%} of {len(everything)} figures,"
          f" {median(computed):.1%} without the copies of weights to vLLM")  # fmt: skip
    if arguments.json:
        figures = {"parameters": dataclasses.asdict(fitted), "cells": rows, "others": checks}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
