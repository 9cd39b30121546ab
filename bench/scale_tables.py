"""The tables of docs/scale.md: predicted steps of PPO on 8 to 2,048 GPUs.

    python -m bench.scale_tables [--quick] [--write]

Every row is the fastest layout of a search (`megarlhf plan --search`). --write puts the tables into docs/scale.md;
--quick computes the first row of each alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from bench import published, scale
from megarlhf.cli import find
from megarlhf.plan import choice, hardware, memory, phases, search
from megarlhf.plan.job import Job
from megarlhf.plan.search import Layout
from megarlhf.plan.time import Machine
from megarlhf.train import planned
from tools.plans import CONFIGS, LLAMAS, ROOT

DOCUMENT = ROOT / "docs" / "scale.md"
COUNTS = {
    "7b": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "70b": (32, 64, 128, 256, 512, 1024, 2048),
    "405b": (144, 288, 576, 1152, 1792),  # 126 layers have no 4, 8 or 16 stages
}
GPU = "h100"


def job_of(size: str, gpus: int, batch: int = 512) -> Job:
    """PPO with a shared critic as in ppo_70b.yaml: 2 updates, prompts and responses of 512 tokens."""
    overrides = ["parallel={}", f"training.batch_size={batch}"]
    settings = find("ppo").load(str(CONFIGS / "ppo_70b.yaml"), overrides)
    return planned.job_of(settings, gpus, device="cuda", program="ppo", find=lambda path, role: LLAMAS[size])


def best(job: Job, machine: Machine) -> Layout | None:
    found = search.search(job, machine, keep=1, compare=False)
    return found.fitting[0] if found.fitting else None


def utilization(layout: Layout, machine: Machine, phase: str) -> float:
    """Share of the GPUs' peak that a phase's arithmetic is, products that causality masks included."""
    job = layout.job
    flops = sum(
        run.work.flops * job.parallel.tensor * job.data
        for stage in range(job.parallel.pipeline)
        for run in phases.step(job, stage)
        if run.phase == phase
    )
    return flops / (layout.phases[phase].total * job.world_size * machine.flops)


def limits(layout: Layout, count: int = 2) -> str:
    """The largest parts of a step, by phase and kind."""
    parts = {f"{phase} {kind}": value for phase, found in layout.phases.items() for kind, value in vars(found).items()}
    largest = sorted(parts, key=lambda name: parts[name], reverse=True)[:count]
    return ", ".join(f"{name} {parts[name] / layout.seconds:.0%}" for name in largest)


def scaling(size: str, counts: Sequence[int], machine: Machine, batch: int = 512) -> list[str]:
    """Rows of a table. Efficiency: of GPU seconds, against the first row's."""
    names = ("GPUs", "layout", "micro-batch", "in host memory", "GB", "sample", "score, evaluate", "learn", "step, s",
             "efficiency", "learn, of peak", "largest parts")  # fmt: skip
    rows, first = [row(names), row(["---"] * len(names))], None
    for gpus in counts:
        layout = best(job_of(size, gpus, batch), machine)
        if layout is None:
            rows.append(row([f"{gpus:,}", "nothing fits", *[""] * (len(names) - 2)]))
            continue
        job, spent = layout.job, layout.seconds * gpus
        first = first or spent
        forward = layout.phases["score"].total + layout.phases["evaluate"].total
        budget = f"{job.shape.micro_batch_tokens}" + (f", {job.recompute}" if job.recompute != "none" else "")
        rows.append(row([
            f"{gpus:,}", choice.name(job), budget, choice.away(job), f"{layout.memory.peak / 1e9:.0f}",
            f"{layout.phases['sample'].total:.1f}", f"{forward:.1f}", f"{layout.phases['learn'].total:.1f}",
            f"{layout.seconds:.1f}", f"{first / spent:.0%}", f"{utilization(layout, machine, 'learn'):.0%}",
            limits(layout),
        ]))  # fmt: skip
    return rows


def generation(cases: Sequence[tuple[str, int]], machine: Machine) -> list[str]:
    """What sampling takes in the layout that is fastest for a whole step, and in the one that is fastest for it alone
    with nothing but the weights in memory."""
    rows = [row(("model", "GPUs", "training layout", "sample, s", "layout of its own", "sample, s", "weights sent, s")),
            row(["---"] * 7)]  # fmt: skip
    for size, gpus in cases:
        job = job_of(size, gpus)
        whole = best(job, machine)
        if whole is None:
            continue
        alone = dataclasses.replace(job, models=(dataclasses.replace(job.models[0], head="logprobs", trains=False),))
        other = min(search.search(alone, machine, keep=100_000).fitting, key=lambda one: one.phases["sample"].total)
        received = max(2 * memory.elements(other.job, other.job.models[0], stage)
                       for stage in range(other.job.parallel.pipeline))  # fmt: skip
        link = machine.near if gpus <= machine.per_node else machine.far
        rows.append(row([
            size.upper(), f"{gpus:,}", choice.name(whole.job), f"{whole.phases['sample'].total:.1f}",
            choice.name(other.job), f"{other.phases['sample'].total:.1f}", f"{received / link.bandwidth:.2f}",
        ]))  # fmt: skip
    return rows


def fitted(quick: bool) -> list[str]:
    """bench/scale.py's figures."""
    given = published.cells()[: 4 if quick else None]
    whole = scale.fit(published.cells())
    without = scale.left_out(given, whole)
    rows = [row(("figure", "published, s", "model, s", "error", "left out")), row(["---"] * 5)]
    for cell, parameters in zip(given, without, strict=True):
        rows.append(row([cell.name, f"{cell.seconds:g}", f"{cell.predict(whole):.1f}", f"{cell.error(whole):+.0%}",
                         f"{cell.error(parameters):+.0%}"]))  # fmt: skip
    for cell in published.others():
        rows.append(row([cell.name, f"{cell.seconds:g}", f"{cell.predict(whole):.1f}", f"{cell.error(whole):+.0%}",
                         "not in the fit"]))  # fmt: skip
    return rows


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(quick: bool = False) -> dict[str, list[str]]:
    """{name of a place in docs/scale.md: lines}"""
    machine, last = hardware.load(GPU), 1 if quick else None
    made = {size: scaling(size, counts[:last], machine) for size, counts in COUNTS.items()}
    made["70b-4096"] = scaling("70b", COUNTS["70b"][1:][:last], machine, 4096)
    made["generation"] = generation((("7b", 8), ("70b", 64), ("70b", 256), ("405b", 576))[:last], machine)
    made["fit"] = fitted(quick)
    return made


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """A document with other lines in a place."""
    begin, end = f"<!-- table {name}: python -m bench.scale_tables --write -->\n", "\n<!-- end -->"
    before, found, rest = text.partition(begin)
    assert found, f"{DOCUMENT} has no '{begin.strip()}'"
    return before + begin + "\n".join(lines) + end + rest.partition(end)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first row of each table")
    parser.add_argument("--write", action="store_true", help="into docs/scale.md")
    arguments = parser.parse_args()
    made = tables(arguments.quick)
    for name, lines in made.items():
        print(f"{name}\n" + "\n".join(lines) + "\n", flush=True)
    if arguments.write and not arguments.quick:
        text = DOCUMENT.read_text()
        for name, lines in made.items():
            text = put(text, name, lines)
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
