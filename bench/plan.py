"""Predictions of `megarlhf plan` beside measurements, over configurations that differ in one size or switch each.

    python -m bench.plan [--quick] [--rounds N] [--only TEXT] [--json FILE]

`megarlhf ppo` with a separate critic and a reward model on CPU ranks, fresh processes, one thread each. For each phase:
CPU seconds of all ranks without the first and the last step, predicted and measured. Memory: the peak
resident set of the fullest rank less that of a rank with next to no model, predicted and measured. The rates that
predictions need are measured in the same run, right before each configuration (plan/calibrate.py). All configurations
take turns for some rounds, and the least of each figure counts, of all steps: a core of a shared machine is for seconds
or minutes up to twice as slow as when nobody disturbs it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.ppo_step import OURS, ROOT, THREADS, models, our_settings

BASE = dict(layers=4, hidden=256, vocab=8000, batch=16, response=24, epochs=1, rows=8)
TINY = dict(layers=1, hidden=64, vocab=512, batch=4, response=8, epochs=1, rows=2)
CASES: dict[str, tuple[dict, int, list[str]]] = {  # name: (sizes, ranks, overrides)
    "base": ({}, 1, []),
    "layers 8": (dict(layers=8), 1, []),
    "hidden 512": (dict(hidden=512), 1, []),
    "vocabulary 32000": (dict(vocab=32000), 1, []),
    "response 64": (dict(response=64), 1, []),
    "batch 32": (dict(batch=32), 1, []),
    "micro-batch 2": (dict(rows=2), 1, []),
    "recompute full": ({}, 1, ["model.recompute=full"]),
    "recompute selective": ({}, 1, ["model.recompute=selective"]),
    "TP2": ({}, 2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": ({}, 2, ["parallel.pipeline=2"]),
    "DP2": ({}, 2, []),
}
QUICK = ("base", "vocabulary 32000", "DP2")
PHASES = {"generation": ("sample",), "scoring": ("score", "evaluate"), "training": ("learn",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three configurations, smaller: a minute or two")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all configurations (--quick: one)")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name and (not arguments.quick or name in QUICK)]
    base = BASE | (dict(hidden=128, layers=2) if arguments.quick else {})
    rounds: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(1 if arguments.quick else arguments.rounds):
        for name in names:
            sizes, ranks, overrides = CASES[name]
            with tempfile.TemporaryDirectory() as directory:
                rounds[name].append(case(Path(directory), base | sizes, ranks, overrides))
            if arguments.json:
                arguments.json.write_text(json.dumps(rounds, indent=1) + "\n")
    figures = {name: least(each) for name, each in rounds.items()}
    print(f"{'':21}" + "".join(f"{phase:>12} {'said':>8} {'ratio':>6}" for phase in PHASES)
          + f"{'peak MiB':>10} {'said':>8} {'ratio':>6}")  # fmt: skip
    for name, one in figures.items():
        report(name, one)
    for what in (*PHASES, "peak"):
        off = [abs(one[what]["said"] / one[what]["found"] - 1) for one in figures.values()]
        print(f"{what}: off by {statistics.median(off):.0%} at the median, {max(off):.0%} at most")


def least(rounds: list[dict]) -> dict[str, dict[str, float]]:
    """Of each figure of `case`, over rounds."""
    return {
        what: {key: min(one[what][key] for one in rounds) for key in figures} for what, figures in rounds[0].items()
    }


def case(directory: Path, sizes: dict, ranks: int, overrides: list[str]) -> dict[str, dict[str, float]]:
    """{phase or "peak": {"found", "said"}}: CPU seconds of all ranks, bytes of the fullest rank less an idle one's."""
    from megarlhf.plan import calibrate, memory, phases
    from megarlhf.train import planned
    from megarlhf.train.rl import PPO

    models(directory, sizes)
    overrides = [part.format(models=directory) for part in (*OURS["megarlhf"]["overrides"], *overrides)]
    spec = {"system": "megarlhf", "out": str(directory / "out"),
            **our_settings(directory, sizes, overrides, directory / "out", steps=5)}  # fmt: skip
    rows, columns = spec["micro_batch"]
    settings = PPO.load(spec["config"], [*spec["overrides"], f"training.micro_batch_tokens={rows * columns}"])
    job = planned.job_of(settings, ranks, device="cpu", program="ppo")
    seconds = phases.cpu_seconds(job, calibrate.cpu(job))
    held = max(
        (memory.rank(job, stage) for stage in range(job.parallel.pipeline)), key=lambda one: one.total(one.fullest)
    )
    each = measured(directory, spec, ranks)
    figures = {
        phase: {
            "found": sum(min(step[phase]["cpu"] for step in rank[1:-1]) for rank in each),
            "said": sum(seconds[part] for part in parts),
        }
        for phase, parts in PHASES.items()
    }
    return figures | {"peak": {"found": fullest(each) - idle(ranks), "said": held.total(held.fullest)}}


def measured(directory: Path, spec: dict, ranks: int) -> list[list[dict]]:
    """The steps of each rank, as bench/ppo_child.py writes them."""
    (directory / "spec.json").write_text(json.dumps(spec))
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    child(*launcher, str(ROOT / "bench" / "ppo_child.py"), str(directory / "spec.json"))
    return [json.loads(Path(f"{spec['out']}.{rank}.json").read_text()) for rank in range(ranks)]


def child(*arguments: str) -> str:
    """The standard output of a Python process with one thread."""
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(done.args)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


@functools.cache
def idle(ranks: int) -> int:
    """The peak resident set of a rank that runs the same program with next to no model: interpreter, libraries and what
    they load on the way."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        models(directory, TINY)
        overrides = [part.format(models=directory) for part in OURS["megarlhf"]["overrides"]]
        spec = {"system": "megarlhf", "out": str(directory / "out"),
                **our_settings(directory, TINY, overrides, directory / "out", steps=3)}  # fmt: skip
        return fullest(measured(directory, spec, ranks))


def fullest(each: list[list[dict]]) -> int:
    """The peak resident set of the rank that has most, in the steps that count."""
    return max(max(phase["peak"] for step in rank[1:-1] for phase in step.values()) for rank in each)


def report(name: str, one: dict[str, dict[str, float]]) -> None:
    line = f"{name:21}"
    for what in (*PHASES, "peak"):
        found, said = one[what]["found"], one[what]["said"]
        scale, width = (1, 12) if what != "peak" else (2**20, 10)
        digits = 3 if what != "peak" else 0
        line += f"{found / scale:>{width}.{digits}f} {said / scale:>8.{digits}f} {said / found:>6.2f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
