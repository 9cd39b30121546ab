"""`megarlhf plan`: memory of a rank and seconds of each phase, before a job is submitted.

With --gpu for GPUs of the table (plan/hardware.yaml); without, for CPU ranks on this machine, which is measured for a
few seconds first. With --search the layouts that fit, ranked (plan/search.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megarlhf.config import UserError
from megarlhf.models import mixture
from megarlhf.plan import calibrate, choice, hardware, memory, phases, search
from megarlhf.plan.job import Job, Model
from megarlhf.plan.memory import Memory
from megarlhf.plan.time import Machine, Seconds
from megarlhf.train import planned, preflight
from megarlhf.train.program import Program
from megarlhf.train.settings import RunConfig

LARGER = ("h200", "b200")  # that a search tries where nothing fits
FULL = 0.9  # of a device: what is predicted to take more may well not fit


def main(
    path: str, overrides: list[str], *, programs: dict[str, Program], program: str | None, nodes: int,
    per_node: int | None, gpu: str | None, table: str | None, searches: bool = False,
) -> None:  # fmt: skip
    """Print the plan of a configuration, or with `searches` the layouts in its place that fit. SystemExit(2) if it does
    not fit, or nothing does. Raises UserError."""
    program = preflight.chosen(path, programs, overrides, program)
    settings = programs[program].load(path, overrides)
    machine = hardware.chosen(gpu, table)
    per_node = per_node or (8 if machine is None else machine.per_node)
    for flag, number in (("--nodes", nodes), ("--gpus-per-node", per_node)):
        if number < 1:
            raise UserError(f"{flag}: must be at least 1, not {number}")
    if searches:
        if machine is None:
            raise UserError("--search: ranks the layouts of GPUs; name their kind with --gpu")
        return _search(settings, program, nodes * per_node, dataclasses.replace(machine, per_node=per_node), table)
    device = "cpu" if machine is None else "cuda"
    job = planned.job_of(settings, nodes * per_node, device=device, program=program, find=planned.described)
    mixture.check_expert_ranks(job.models[0].architecture, job.parallel)
    search.check(job)
    machine = calibrate.cpu(job, per_node) if machine is None else dataclasses.replace(machine, per_node=per_node)
    job = memory.with_slots(job, machine.memory)
    held = memory.fullest(job)
    for line in lines(job, machine, held):
        print(line)
    if memory.refusal(held, machine.memory, machine.name) is not None:
        raise SystemExit(2)


def _search(settings: RunConfig, program: str, ranks: int, machine: Machine, table: str | None) -> None:
    # Not the layout of the file, which may be for other ranks.
    one = dict(tensor=1, pipeline=1, virtual_pipeline=None, sequence=False, expert=1)
    settings = dataclasses.replace(settings, parallel=dataclasses.replace(settings.parallel, **one))
    job = planned.job_of(settings, ranks, device="cuda", program=program, find=planned.described)
    found = search.search(job, machine)
    others = {name: hardware.load(name, table) for name in LARGER}
    print(choice.text(found, job, machine, others), end="")
    if not found.fitting:
        raise SystemExit(2)


def lines(job: Job, machine: Machine, held: Memory) -> Iterator[str]:
    """The plan as text."""
    p = job.parallel
    layout = f"tensor {p.tensor}{' with sequence' if p.sequence else ''} x pipeline {p.pipeline} x data {job.data}"
    layout += f", experts on {p.expert} ranks" if job.mixtures else ""
    yield f"plan: 'megarlhf {job.program}' on {job.world_size} ranks of {machine.name}: {layout}"
    if job.mixtures:
        yield choice.EVEN
    yield ""
    of = f"of {machine.memory / 1e9:,.1f}, beside {held.context / 1e9:.1f} of its process"
    yield f"GB of memory of the fullest rank, {of}"
    kinds = [kind for kind in memory.KINDS if any(kind in found for found in held.phases.values())]
    yield _row("phase", [*kinds, "total"])
    for phase, found in held.phases.items():
        yield _row(phase, [f"{found.get(kind, 0) / 1e9:,.2f}" for kind in kinds] + [f"{held.total(phase) / 1e9:,.2f}"])
    kind, size = held.largest
    whole = f"{held.peak / 1e9:,.1f} GB with the process"
    yield f"fullest: {held.fullest}, {whole}; the largest part is {kind}, {size / 1e9:,.1f} GB"
    yield ""
    seconds = phases.phase_seconds(job, machine)
    yield f"seconds of a step; predictions of this kind are off by {machine.spread:.0%} or more"
    parts = [field.name for field in dataclasses.fields(Seconds)]
    parts = [part for part in parts if any(getattr(found, part) for found in seconds.values())]
    yield _row("phase", [*parts, "total"])
    for phase, found in seconds.items():
        yield _row(phase, [f"{getattr(found, part):,.3g}" for part in parts] + [f"{found.total:,.3g}"])
    whole = sum(found.total for found in seconds.values())
    low, high = whole / (1 + machine.spread), whole * (1 + machine.spread)
    yield f"a step: {whole:,.3g} s, between {low:,.3g} and {high:,.3g}"
    yield ""
    why = memory.refusal(held, machine.memory, machine.name)
    if why is not None:
        yield f"does not fit: {why}"
        found = [
            name
            for name, changed in remedies(job, machine.per_node)
            if memory.refusal(memory.fullest(changed), machine.memory, machine.name) is None
        ]
        yield "what would fit, one change each: " + ("; ".join(found) or "none of the usual ones; use more ranks")
    elif held.peak > FULL * machine.memory:
        yield f"fits, but is close: {held.peak / machine.memory:.0%} of a device"
    else:
        yield f"fits: {held.peak / machine.memory:.0%} of a device"


def _row(name: str, cells: list[str]) -> str:
    return f"  {name:<9}" + "".join(f"{cell:>13}" for cell in cells)


def remedies(job: Job, per_node: int) -> Iterator[tuple[str, Job]]:
    """Single changes that take memory from a rank: (what to write, the job with it)."""
    shape, parallel = job.shape, job.parallel
    for tokens in (shape.micro_batch_tokens // 2, shape.micro_batch_tokens // 4):
        if tokens >= shape.length:
            smaller = dataclasses.replace(shape, micro_batch_tokens=tokens)
            yield f"training.micro_batch_tokens={tokens}", dataclasses.replace(job, shape=smaller)
    if job.recompute != "full":
        yield "model.recompute=full", dataclasses.replace(job, recompute="full")
    models = tuple(dataclasses.replace(model, optimizer_on_host=True) for model in job.models)
    if models != job.models and job.trained:
        yield "optimizer.state_on_host=true", dataclasses.replace(job, models=models)
    moved = [model for model in job.models if _can_move(model) and not model.weights_on_host]
    if moved:
        frozen = tuple(
            dataclasses.replace(model, weights_on_host=True) if model in moved else model for model in job.models
        )
        keys = ["reference" if model.role == "reference" else "scoring" for model in moved]
        words = " and ".join(f"{key}.on_host=true" for key in dict.fromkeys(keys))
        yield words, dataclasses.replace(job, models=frozen)
    if job.online and (shape.slots or 0) > 1:
        fewer = dataclasses.replace(shape, slots=max(1, shape.slots // 4))
        yield f"sampler.micro_batch_size={fewer.slots}", dataclasses.replace(job, shape=fewer)
    for name in ("tensor", "pipeline", *(["expert"] if job.mixtures else [])):
        larger = dataclasses.replace(parallel, **{name: 2 * getattr(parallel, name)})
        changed = dataclasses.replace(job, parallel=larger)
        try:
            larger.data(job.world_size)
            search.check(changed)
        except UserError:
            continue
        if per_node % larger.tensor == 0:
            yield f"parallel.{name}={getattr(larger, name)}", changed


def _can_move(model: Model) -> bool:
    """Whether a key puts the weights into host memory: of a reference, and of reward models."""
    return not model.trains and not model.borrows and model.role != "average"
