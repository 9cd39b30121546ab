"""Memory of activations and time of an update against the tokens of a row.

    python -m bench.attention [--quick] [--runs N] [--old DIR] [--json FILE]

Forward and backward passes and the optimizer's step of a small model (L2 H128 V2048, float32, one thread) over one row,
half of it the response; each measurement in a fresh process. Memory is the peak resident set of an update minus the
resident set before it, after an update with a short row. Time is CPU seconds, the median of several updates. `old` is
the megarlhf of another checkout, DIR; the systems alternate, and the ratios are of the runs with the same number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
LENGTHS = (1024, 2048, 4096, 8192)
MODEL = dict(family="llama", num_layers=2, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4,
             num_query_groups=4, vocab_size=2048, max_position_embeddings=8192)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter rows, one run of each: under a minute")
    parser.add_argument("--runs", type=int, default=3, help="of each length and system")
    parser.add_argument("--old", type=Path, metavar="DIR", help="another checkout of this project, to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    arguments = parser.parse_args()
    if arguments.length:
        print(json.dumps(measure(arguments.length)))
        return
    systems = {"megarlhf": ROOT} | ({"old": arguments.old.resolve()} if arguments.old else {})
    figures = []
    for length in LENGTHS[:2] if arguments.quick else LENGTHS:
        found = {name: [] for name in systems}
        for number in range(1 if arguments.quick else arguments.runs):
            for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(in_a_process(systems[name], length))
        figures.append({"length": length, "systems": found})
        report(figures)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def in_a_process(root: Path, length: int) -> dict:
    command = [sys.executable, str(ROOT / "bench" / "attention.py"), "--length", str(length)]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(length: int) -> dict:
    """{"bytes", "cpu"} of an update over one row of so many tokens."""
    import one_rank  # beside this script

    topology = one_rank.start()
    import torch

    from megarlhf.batch import Sequences
    from megarlhf.models.spec import Architecture
    from megarlhf.optim import OptimizerConfig

    engine = one_rank.build(
        "actor", Architecture(**MODEL), topology, rows=1, columns=length, optimizer=OptimizerConfig()
    )

    def update(length: int) -> None:
        tokens = torch.randint(MODEL["vocab_size"], (1, length))
        rows = Sequences(tokens, torch.ones(1, length // 2, dtype=torch.bool), torch.ones_like(tokens), length // 2)
        engine.step(rows, loss)

    def loss(outputs, rows):
        total, count = -outputs["logprobs"].sum(), rows.mask.sum()
        return total, count, {"loss": (total.detach(), count)}

    update(64)  # what is allocated once
    with one_rank.peak_memory() as found:
        update(length)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        update(length)
        seconds.append(time.process_time() - start)
    return {"bytes": found[0], "cpu": statistics.median(seconds)}


def report(figures: list[dict]) -> None:
    """The line of the last length."""
    if len(figures) == 1:
        names = figures[0]["systems"]
        print(
            f"{'tokens a row':>12}" + "".join(f"{f'{name}: MiB':>15} (growth) {'CPU s':>8}" for name in names), end=""
        )
        print("   megarlhf / old, MiB and CPU" if "old" in names else "")
    medians = [
        {
            name: {kind: statistics.median(run[kind] for run in runs) for kind in ("bytes", "cpu")}
            for name, runs in figure["systems"].items()
        }
        for figure in figures
    ]
    now, line = medians[-1], f"{figures[-1]['length']:>12}"
    for name, one in now.items():
        growth = f"({one['bytes'] / medians[-2][name]['bytes']:.2f}x)" if len(medians) > 1 else ""
        line += f"{one['bytes'] / 2**20:>15.1f} {growth:8} {one['cpu']:>8.3f}"
    systems = figures[-1]["systems"]
    if "old" in systems:
        for kind in ("bytes", "cpu"):
            ratios = [own[kind] / other[kind] for own, other in zip(systems["megarlhf"], systems["old"], strict=True)]
            line += f"   {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(line, flush=True)


if __name__ == "__main__":
    main()
