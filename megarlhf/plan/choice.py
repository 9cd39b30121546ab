"""The result of a search as text: a table, the configuration's keys and the job script's header; or what would make
the job fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megarlhf import config
from megarlhf.plan.job import Job
from megarlhf.plan.search import Found, Layout, search, with_shared_critic
from megarlhf.plan.time import Machine

SHOWN = 10  # layouts
MOST_TIMES = 64  # so many times the GPUs are tried where the job does not fit
EVEN = "Experts are taken to get equal numbers of tokens: otherwise the fullest rank takes more memory and time."
HEADER = """#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --gpus-per-node={per_node}
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
"""


def text(found: Found, job: Job, machine: Machine, others: Mapping[str, Machine] | None = None) -> str:
    """What `megarlhf plan --search` prints. others: further machines by name, for what would make it fit."""
    where = f"{job.world_size} x {machine.name} ({nodes(job, machine)})"
    if not found.fitting:
        return _nothing(found, job, machine, others or {}, where)
    best = found.fitting[0]
    spread = 1 + machine.spread
    near = sum(layout.seconds < spread * best.seconds for layout in found.fitting)
    lines = [
        f"{where}: {found.tried:,} layouts, the fastest that fit:", "",
        *table(found.fitting[:SHOWN], machine), "",
        f"Seconds are uncertain by {machine.spread:.0%}, as published reruns of one job are: {near} of the "
        f"{len(found.fitting)} fastest lie within that of the first. A measurement of the first few decides.",
        *([EVEN] if job.mixtures else []),
    ]  # fmt: skip
    if found.shared is not None:
        lines.append(
            f"With critic.kind: shared, another algorithm: {found.shared.seconds:.1f} s ({name(found.shared.job)})."
        )
    lines += ["", "# Keys of the configuration", config.dump_values(settings(best)).rstrip(), "", "# The job script",
              header(best.job, machine).rstrip()]  # fmt: skip
    return "\n".join(lines) + "\n"


def nodes(job: Job, machine: Machine) -> str:
    count = -(-job.world_size // machine.per_node)
    return f"{count} node{'s' if count > 1 else ''} of {min(job.world_size, machine.per_node)}"


def name(job: Job) -> str:
    """A layout in short: TP4 PP8 VP2 DP2; EP8: ranks share experts out, of the others."""
    parallel = job.parallel
    sizes = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "VP": parallel.chunks,
        "EP": parallel.expert,
        "DP": job.data,
    }
    return " ".join(f"{key}{size}" for key, size in sizes.items() if key == "DP" or size > 1)


def away(job: Job) -> str:
    """What is in host memory, in words."""
    roles = [model.role for model in job.models if model.weights_on_host]
    rewards = [role for role in roles if role.startswith("reward ")]
    words = [role for role in roles if role not in rewards] + (["reward models"] if rewards else [])
    words += ["optimizer"] if any(model.optimizer_on_host for model in job.models) else []
    return ", ".join(words) or "-"


def table(layouts: list[Layout], machine: Machine) -> list[str]:
    """One line a layout, below a line of names."""
    phases = [*layouts[0].phases]
    rows = [("seconds", *phases, "layout", "tokens", "recompute", "GB", "in host memory")]
    for layout in layouts:
        job = layout.job
        each = (f"{layout.phases[phase].total:.1f}" for phase in phases)
        rows.append((f"{layout.seconds:.1f}", *each, name(job), f"{job.shape.micro_batch_tokens}", job.recompute,
                     f"{layout.memory.peak / 1e9:.1f}", away(job)))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = {len(phases) + 1, len(phases) + 3, len(phases) + 5}  # columns that are not numbers
    return [
        "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def settings(layout: Layout) -> dict[str, Any]:
    """The keys of the configuration that a layout stands for; all others stay as they are."""
    job, parallel = layout.job, layout.job.parallel
    without = {"context"} if job.mixtures else {"context", "expert"}
    given: dict[str, Any] = {
        "parallel": {key: value for key, value in vars(parallel).items() if key not in without},
        "training": {"micro_batch_tokens": job.shape.micro_batch_tokens},
        "model": {"recompute": job.recompute},
        "optimizer": {"state_on_host": any(model.optimizer_on_host for model in job.models)},
    }
    sections = {"critic": "critic", "reference": "reference", "reward 0": "scoring"}
    for model in job.models:
        if model.role in sections and not model.borrows and not (model.trains and model.role != "critic"):
            given[sections[model.role]] = {"on_host": model.weights_on_host}
    return given


def header(job: Job, machine: Machine) -> str:
    """The #SBATCH lines of a job (examples/slurm/)."""
    per_node = min(job.world_size, machine.per_node)
    return HEADER.format(nodes=-(-job.world_size // per_node), per_node=per_node)


# ------------------------------------------------------------------------------------------- nothing fits


def _nothing(found: Found, job: Job, machine: Machine, others: Mapping[str, Machine], where: str) -> str:
    if found.smallest is None:
        return (
            f"{where}: no layout is legal. Tensor sizes must divide the model's heads, key/value groups and a node's "
            f"GPUs, pipeline sizes its {job.models[0].architecture.num_layers} layers, and the batch of "
            f"{job.shape.rows} must be a multiple of minibatches x data-parallel ranks"
            + "".join(f", {key} {rows} of the latter" for key, rows in job.shape.shared)
            + ": change the number of GPUs or the batch\n"
        )
    best, lines = found.smallest, []
    kind, size = best.memory.largest
    lacks, host = best.lacks(machine)
    if lacks:
        lines.append(
            f"{where}: nothing fits. The layout that lacks least, {name(best.job)} with micro-batches of "
            f"{best.job.shape.micro_batch_tokens} tokens, full recomputation and everything possible in host memory, "
            f"needs {best.memory.peak / 1e9:.1f} GB of {machine.memory / 1e9:.0f} in phase {best.memory.fullest}, "
            f"{size / 1e9:.1f} of them for {kind}."
        )
    else:
        lines.append(f"{where}: nothing fits. {name(best.job)} lacks {host / 1e9:.0f} GB of a node's host memory.")
    lines.append("What would fit:")
    lines += [f"  {line}" for line in remedies(job, machine, others)] or ["  nothing that was tried: a smaller model"]
    return "\n".join(lines) + "\n"


def remedies(job: Job, machine: Machine, others: Mapping[str, Machine]) -> list[str]:
    """Changes with which some layout fits: more GPUs, GPUs with more memory, a shared critic, fewer trained layers."""
    lines = []
    times = 2
    while times <= MOST_TIMES:
        if layout := _first(dataclasses.replace(job, world_size=job.world_size * times), machine):
            lines.append(f"{layout.job.world_size} x {machine.name}: {name(layout.job)}, {layout.seconds:.1f} s")
            break
        times *= 2
    for other in others.values():
        if other.memory > machine.memory and (layout := _first(job, other)):
            lines.append(f"{job.world_size} x {other.name}: {name(layout.job)}, {layout.seconds:.1f} s")
    shared = with_shared_critic(job)
    if shared is not None and (layout := _first(shared, machine)):
        lines.append(f"critic.kind: shared (another algorithm): {name(layout.job)}, {layout.seconds:.1f} s")
    if job.mixtures or job.models[0].lora is not None:  # which the programs refuse with trained_layers
        return lines
    layers = max(1, job.models[0].architecture.num_layers // 8)
    models = tuple(dataclasses.replace(model, trained_layers=layers) if model.trains or model.hydra else model
                   for model in job.models)  # fmt: skip
    if layout := _first(dataclasses.replace(job, models=models), machine):
        lines.append(f"model.trained_layers: {layers} (another model): {name(layout.job)}, {layout.seconds:.1f} s")
    return lines


def _first(job: Job, machine: Machine) -> Layout | None:
    found = search(job, machine, keep=1, compare=False)
    return found.fitting[0] if found.fitting else None
