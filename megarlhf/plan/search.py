"""All layouts of a job on a number of GPUs, ranked by predicted seconds among those that fit.

What varies: tensor, pipeline, virtual pipeline and expert sizes, tokens of a micro-batch, recomputation, what is in
host memory between its uses, and, as a comparison, a shared critic. Sequence parallelism is on wherever tensor
parallelism is: it moves the same bytes and holds less.

Most of a layout's cost does not depend on all of its settings, and is computed once for all that share it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megarlhf.config import UserError
from megarlhf.models import adapters
from megarlhf.models.spec import check_layout
from megarlhf.plan import memory, phases, sampling
from megarlhf.plan.job import Job, Model
from megarlhf.plan.memory import Memory
from megarlhf.plan.time import Machine, Seconds, seconds

BUDGETS = (2048, 4096, 8192, 16384)  # tokens of a micro-batch, beside a single row
RECOMPUTE = ("none", "selective", "full")
MOST_CHUNKS = 8  # of a virtual pipeline


@dataclass(frozen=True)
class Layout:
    """A layout, and what the model says of it."""

    job: Job
    memory: Memory
    host: int  # bytes of a node's host memory
    phases: dict[str, Seconds] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.total for phase in self.phases.values())

    def lacks(self, machine: Machine) -> tuple[float, float]:
        """Bytes that a GPU lacks, and a node's host memory."""
        return max(0, self.memory.peak - machine.memory), max(0, self.host - machine.host_memory)

    def fits(self, machine: Machine) -> bool:
        return not any(self.lacks(machine))


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    fitting: list[Layout]  # that fit, the fastest first
    smallest: Layout | None  # of those that do not fit, the one that lacks least
    tried: int  # layouts
    shared: Layout | None = None  # the fastest with a shared critic, where the job has a separate one


def search(job: Job, machine: Machine, *, keep: int = 50, compare: bool = True) -> Found:
    """Rank the layouts of `job` on its number of ranks. `job` gives the models, the batch and whether the critic is
    shared; its layout, budget, recomputation and host memory are not read. keep: so many are returned. compare:
    also with a shared critic, where the job has a separate one."""
    job = dataclasses.replace(job, shape=dataclasses.replace(job.shape, slots=None))
    found = _rank(job, machine, keep)
    other = with_shared_critic(job) if compare else None
    shared = _rank(other, machine, 1).fitting if other is not None else []
    return dataclasses.replace(found, shared=shared[0] if shared else None)


def with_shared_critic(job: Job) -> Job | None:
    """The job with the value head on the policy; None if it has no critic of its own."""
    critic = job.model("critic")
    if critic is None or critic.borrows:
        return None
    actor = dataclasses.replace(job.models[0], head="logprobs+values", mlp_values=critic.mlp_values)
    return dataclasses.replace(job, models=(actor, *(model for model in job.models[1:] if model is not critic)))


def _rank(job: Job, machine: Machine, keep: int) -> Found:
    clock, fitting, smallest, tried = Clock(machine), [], None, 0
    for parallel in layouts(job, machine.per_node):
        here = dataclasses.replace(job, parallel=parallel)
        sizes, away = budgets(here), offloads(here)
        tried += len(sizes) * len(RECOMPUTE) * len(away)
        least = measure(_variant(here, min(sizes), "full", away[-1]), machine)
        if not least.fits(machine):
            smallest = least if smallest is None else min(smallest, least, key=lambda one: one.lacks(machine))
            if least.lacks(machine)[0]:  # of a GPU; with less in host memory a node may have enough
                continue
        # Neither micro-batches nor recomputation change what the sampler has.
        slots = {roles: memory.with_slots(_variant(here, sizes[0], "none", roles), machine.memory).shape.slots
                 for roles in away}  # fmt: skip
        for budget in sizes:
            fitting += _placed(here, budget, slots, machine)
    timed = [dataclasses.replace(layout, phases=clock.phases(layout.job)) for layout in fitting]
    return Found(sorted(timed, key=lambda layout: layout.seconds)[:keep], smallest, tried)


def _placed(job: Job, budget: int, slots: Mapping[frozenset[str], int | None], machine: Machine) -> list[Layout]:
    """For each kind of recomputation the layout with as little as possible in host memory, and those with more there
    that give the sampler more slots; none that recomputes more than one that fits and copies nothing. slots: by what is
    in host memory."""
    found: list[Layout] = []
    for recompute in RECOMPUTE:
        most = 0  # slots of those that fit so far
        for roles, number in slots.items():
            variant = _variant(job, budget, recompute, roles, number)
            useful = sampling.slots(variant) if job.online else 1
            if useful > most and (layout := _held(variant, machine)).fits(machine):
                found.append(layout)
                most = useful
        if found and found[0].host == 0:
            break
    return found


# ------------------------------------------------------------------------------------------- what is legal


def budgets(job: Job) -> list[int]:
    """Tokens of a micro-batch, from a row to all rows of an update."""
    row, rows = job.shape.length, -(-job.rows_here // job.shape.minibatches)
    return sorted({row, *(budget for budget in BUDGETS if row < budget <= rows * row)})


def layouts(job: Job, per_node: int) -> Iterator:
    """Every legal `ParallelConfig` of a job."""
    world, trained = job.world_size, job.models[0]
    whole = trained.architecture.num_experts or 1
    for tensor, pipeline in itertools.product(_divisors(min(world, per_node)), _divisors(world)):
        if world % (tensor * pipeline) or per_node % tensor:
            continue
        shared = [expert for expert in _divisors(world // pipeline) if whole % expert == 0]
        for expert, chunks in itertools.product(shared, (None, *range(2, MOST_CHUNKS + 1))):
            if chunks and (pipeline == 1 or trained.architecture.num_layers % (pipeline * chunks)):
                continue
            parallel = dataclasses.replace(
                job.parallel, tensor=tensor, pipeline=pipeline, virtual_pipeline=chunks, sequence=tensor > 1,
                expert=expert, distributed_optimizer=True,
            )  # fmt: skip
            if _accepted(dataclasses.replace(job, parallel=parallel)):
                yield parallel


def _accepted(job: Job) -> bool:
    """Whether the program accepts the layout."""
    try:
        check(job)
    except UserError:
        return False
    return True


def check(job: Job) -> None:
    """Refuse (UserError) a layout that the program refuses."""
    job.check_batch()
    for architecture, lora in {(model.architecture, model.lora) for model in job.models}:
        check_layout(architecture, job.parallel)
        if lora is not None and lora.quantization == "nf4":
            adapters.check_blocks(architecture, job.parallel.tensor)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ------------------------------------------------------------------------------------------- what fits


def measure(job: Job, machine: Machine) -> Layout:
    """The memory of a job as it stands, with the slots of the sampler that fit."""
    return _held(memory.with_slots(job, machine.memory), machine)


def _held(job: Job, machine: Machine) -> Layout:
    held = max((memory.rank(job, stage) for stage in _stages(job)), key=lambda one: one.peak)
    return Layout(job, held, host_bytes(job, machine.per_node))


def offloads(job: Job) -> list[frozenset[str]]:
    """Sets of what may be in host memory, by role; those whose copies take least come first. Frozen weights are copied
    once a step, optimizer states both ways each update, a critic's weights then, too."""
    frozen = [model.role for model in job.models if not model.trains and not model.borrows and model.role != "average"]
    sets = [[], frozen, [*frozen, "optimizer"]]
    critic = job.model("critic")
    if critic is not None and not critic.borrows:
        sets.append([*frozen, "optimizer", "critic"])
    return list(dict.fromkeys(map(frozenset, sets)))


def _variant(job: Job, budget: int, recompute: str, away: frozenset[str], slots: int | None = None) -> Job:
    models = tuple(
        dataclasses.replace(
            model, weights_on_host=model.role in away, optimizer_on_host=model.trains and "optimizer" in away
        )
        for model in job.models
    )
    shape = dataclasses.replace(job.shape, micro_batch_tokens=budget, slots=slots)
    return dataclasses.replace(job, models=models, shape=shape, recompute=recompute)


def host_bytes(job: Job, per_node: int) -> int:
    """Pinned memory of a node's ranks for what is in host memory, at the most."""

    def rank(stage: int) -> int:
        weights = sum(memory.weights(job, model, stage) for model in job.models if model.weights_on_host)
        return weights + sum(memory.optimizer_bytes(job, model, stage) for model in job.models
                             if model.optimizer_on_host)  # fmt: skip

    return min(per_node, job.world_size) * max(map(rank, _stages(job)))


def _stages(job: Job) -> list[int]:
    """The stages that differ: the first, one between, the last."""
    last = job.parallel.pipeline - 1
    return sorted({0, min(1, last), last})


# ------------------------------------------------------------------------------------------- how long it takes


class Clock:
    """Seconds of jobs on a machine, as `phases.phase_seconds`; what several layouts share is computed once."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.known: dict[tuple[str, Job], Seconds] = {}

    def phases(self, job: Job) -> dict[str, Seconds]:
        """{phase: seconds}"""
        found: dict[str, Seconds] = {}
        for number, model in enumerate(job.models):
            for phase, here in self._of_model(job, model, number == 0):
                found[phase] = found.get(phase, Seconds()) + here
        return found

    def _of_model(self, job: Job, model: Model, first: bool) -> Iterator[tuple[str, Seconds]]:
        bare = dataclasses.replace(model, weights_on_host=False, optimizer_on_host=False)
        if job.online and first:
            shape = dataclasses.replace(job.shape, slots=sampling.slots(job), micro_batch_tokens=1)
            alone = dataclasses.replace(job, models=(bare,), shape=shape, recompute="none")
            yield "sample", self._once("sample", alone)
        alone = dataclasses.replace(job, models=(bare,), shape=dataclasses.replace(job.shape, slots=None))
        if (job.online or not model.trains) and model.role != "average":
            phase = "step" if not job.online else "score" if model.role.startswith("reward ") else "evaluate"
            one = self._once("forward", dataclasses.replace(alone, recompute="none"))
            yield phase, dataclasses.replace(one, copies=self._copies(job, model, trains=False))
        if model.trains:
            one, times = self._once("update", alone), job.shape.epochs * job.shape.minibatches
            copies = times * self._copies(job, model, trains=True)
            yield "learn" if job.online else "step", dataclasses.replace(one, copies=copies)

    def _copies(self, job: Job, model: Model, *, trains: bool) -> float:
        if not model.weights_on_host and not model.optimizer_on_host:
            return 0.0
        sizes = [phases._copies(job, model, stage, trains=trains).memory.get("host", 0) for stage in _stages(job)]
        return max(sizes) / self.machine.host

    def _once(self, kind: str, job: Job) -> Seconds:
        if (kind, job) not in self.known:
            self.known[kind, job] = self._sample(job) if kind == "sample" else self._passes(kind, job)
        return self.known[kind, job]

    def _sample(self, job: Job) -> Seconds:
        stages = [sampling.sample(job, job.models[0], stage) for stage in _stages(job)]
        found = Seconds()
        for kind in stages[0]:
            slowest = max((seconds(stage[kind], job, self.machine) for stage in stages), key=lambda one: one.total)
            waits = sampling.waits(job) if kind == "decode" else 0.0
            found += dataclasses.replace(slowest, bubble=waits * slowest.total)
        return found

    def _passes(self, kind: str, job: Job) -> Seconds:
        make = phases._forward if kind == "forward" else phases._update
        runs = [make("", job, job.models[0], stage) for stage in _stages(job)]
        slowest = max((seconds(run.work, job, self.machine) for run in runs), key=lambda one: one.total)
        waits = (job.parallel.pipeline - 1) / (runs[0].micro_batches * job.parallel.chunks)
        return dataclasses.replace(slowest, bubble=waits * slowest.total)
