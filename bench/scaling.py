"""Compare the growth of a PPO step's cost with that of its arithmetic. One size changes at a time.

    python -m bench.scaling [--quick] [--json FILE]

`megarlhf ppo` with a separate critic and a reward model, random weights, in fresh processes, one thread each on a CPU;
on a machine with GPUs one rank a GPU, bfloat16, and only the layouts that fit. For each phase: seconds, arithmetic
(train/work.py), and the share of the matrix-product rate measured in the same run. `cost` is the step's CPU seconds
(on GPUs wall seconds) against the base, `work` the same ratio of the FLOPs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.ppo_step import OURS, ROOT, THREADS, medians, models, our_settings

BASE = dict(layers=4, hidden=256, vocab=32000, batch=32, response=24, epochs=4, rows=8)
CASES = {
    "base": {},
    "layers 8": dict(layers=8),
    "hidden 512": dict(hidden=512),
    "response 48": dict(response=48),
    "response 96": dict(response=96),
    "batch 64": dict(batch=64),
    "micro-batch 4": dict(rows=4),
    "micro-batch 16": dict(rows=16),
    "micro-batch 32": dict(rows=32),
}
LAYOUTS = {
    "DP2": (2, []),
    "TP2": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["parallel.pipeline=2"]),
}
PHASES = {"generation": ("sample",), "scoring": ("score", "evaluate"), "training": ("learn",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few cases: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    base = BASE | (dict(vocab=2048, hidden=128, layers=2) if arguments.quick else {})
    names = ["base", "layers 4", "response 48"] if arguments.quick else list(CASES)
    cases = {name: base | CASES.get(name, dict(layers=4)) for name in names}
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, sizes) in enumerate(cases.items()):
            figures[name] = measure(Path(directory) / str(number), sizes, 1, [])
            report(name, figures)
        for name, (processes, overrides) in ({} if arguments.quick else LAYOUTS).items():
            if torch.cuda.is_available() and torch.cuda.device_count() < processes:
                print(f"{name:15} needs {processes} GPUs")
                continue
            figures[name] = measure(Path(directory) / name, base, processes, overrides)
            report(name, figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(directory: Path, sizes: dict, processes: int, overrides: list[str]) -> dict:
    """{"phases": {phase: {"cpu", "wall", "flops", "bytes"}}, "peak", "matmul"} of a median step, over all ranks."""
    directory.mkdir()
    models(directory, sizes)
    out = directory / "out"
    overrides = [*OURS["megarlhf"]["overrides"], *overrides]
    if torch.cuda.is_available():
        overrides.append("model.dtype=bf16")
    spec = {"system": "megarlhf", "out": str(out), **our_settings(directory, sizes, overrides, out, steps=4)}
    (directory / "spec.json").write_text(json.dumps(spec))
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "bench" / "ppo_child.py"), str(directory / "spec.json")],
        env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(done.args)} failed:\n{done.stdout[-4000:]}")
    found = medians([json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(processes)])
    work = json.loads((Path(f"{out}.run") / "work.json").read_text())
    phases = {}
    for phase, parts in PHASES.items():
        todo = [work["phases"][part] for part in parts]
        phases[phase] = {**found[phase], **{kind: sum(part[kind] for part in todo) for kind in ("flops", "bytes")}}
    return {"phases": phases, "peak": found["peak"], "matmul": work["matmul"], "processes": processes}


def report(name: str, figures: dict) -> None:
    kind = "wall" if torch.cuda.is_available() else "cpu"
    if len(figures) == 1:
        print(f"{'':15}" + "".join(f"{phase:>12} s {'GFLOP':>8} {'of peak':>8}" for phase in PHASES), end="")
        print(f"{'step s':>10}{'cost':>7}{'work':>7}{'wall':>8}{'peak MiB':>10}")
    one, base = figures[name], figures["base"]

    def total(case: dict, what: str) -> float:
        return sum(phase[what] for phase in case["phases"].values())

    line = f"{name:15}"
    for phase in one["phases"].values():
        # CPU seconds of all ranks against the rate of one; on GPUs wall seconds against the rate of all
        rate = one["matmul"] if kind == "wall" else one["matmul"] / one["processes"]
        line += f"{phase[kind]:>14.3f} {phase['flops'] / 1e9:>8.1f} {phase['flops'] / phase[kind] / rate:>8.0%}"
    cost, work = (total(one, what) / total(base, what) for what in (kind, "flops"))
    wall = total(one, "wall") / total(base, "wall")
    print(
        f"{line}{total(one, kind):>10.2f}{cost:>7.2f}{work:>7.2f}{wall:>8.2f}{one['peak'] / 2**20:>10.0f}", flush=True
    )


if __name__ == "__main__":
    main()
