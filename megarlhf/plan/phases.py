"""A step of a job: which model does which passes in which phase of the loop (train/clock.py, train/offline.py)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from megarlhf.plan import layer_work, memory, model_work, sampling
from megarlhf.plan.job import Job, Model, micro_batches
from megarlhf.plan.time import Machine, Seconds, seconds
from megarlhf.plan.work import Traffic, Work, total


@dataclass(frozen=True)
class Run:
    """What one model does in a phase, on one rank of a stage."""

    phase: str  # sample, score, evaluate, learn; step of programs that do not sample
    role: str
    kind: str  # prefill, decode, forward, update
    work: Work
    micro_batches: int = 1  # that pass through the pipeline one after the other
    times: int = 1  # so often the pipeline fills and drains


def step(job: Job, stage: int) -> list[Run]:
    """All runs of a step on one rank of a pipeline stage. The gate, evaluations and checkpoints are not in it."""
    found: list[Run] = []
    actor = job.models[0]
    if job.online:
        found += [Run("sample", actor.role, kind, work) for kind, work in sampling.sample(job, actor, stage).items()]
    for model in job.models:
        if model.role.startswith("reward ") and job.online:
            found.append(_forward("score", job, model, stage))
        elif job.online and model.role != "average":
            found.append(_forward("evaluate", job, model, stage))
        elif not model.trains:
            found.append(_forward("step", job, model, stage))
    phase = "learn" if job.online else "step"
    return found + [_update(phase, job, model, stage) for model in job.trained]


def _forward(phase: str, job: Job, model: Model, stage: int) -> Run:
    work, count = passes(job, model, stage, job.rows_here, trains=False)
    if job.parallel.pipeline > 1:  # the last stage sends what it found
        outputs = model.outputs * 4 * job.rows_here * job.shape.counted
        work += Work(collectives={("broadcast", "pipeline"): Traffic(outputs, model.outputs)})
    return Run(phase, model.role, "forward", work + _copies(job, model, stage), count)


def _update(phase: str, job: Job, model: Model, stage: int) -> Run:
    shape = job.shape
    rows = -(-job.rows_here // shape.minibatches)
    work, count = passes(job, model, stage, rows, trains=True)
    times = shape.epochs * shape.minibatches
    work += apply(job, model, stage) + _copies(job, model, stage, trains=True)
    return Run(phase, model.role, "update", work * times, count, times)


def _copies(job: Job, model: Model, stage: int, *, trains: bool = False) -> Work:
    """Of what is in host memory: to the device before it is used, and back where it changes (cluster/offload.py)."""
    both = 2 if trains else 1
    size = both * memory.weights(job, model, stage) if model.weights_on_host else 0
    if trains and model.optimizer_on_host:
        size += both * memory.optimizer_bytes(job, model, stage)
    return Work(memory=Counter({"host": size} if size else {}))


def passes(job: Job, model: Model, stage: int, rows: int, *, trains: bool) -> tuple[Work, int]:
    """(the work of a model over `rows` full rows in micro-batches, their number)."""
    shape, parallel = job.shape, job.parallel
    sizes = micro_batches(rows, shape.length, shape.micro_batch_tokens)
    # Stages pass on streams of one length, so that the shorter ones are padded.
    longest = model_work.rounded(max(sizes) * shape.length, job) if parallel.pipeline > 1 else None
    count, one = sum(sizes.values()), model_work.train if trains else model_work.forward
    parts = []
    for size, times in sizes.items():
        stream = model_work.Stream((shape.length,) * size, size * shape.counted, longest)
        parts.append(one(job, model, stage, stream) * times)
    if missing := -count % parallel.micro_batch_multiple:  # the interleaved schedule's: a token that nobody counts
        empty = model_work.Stream((1,) * (1 if job.online else shape.samples), 0, longest)
        parts.append(one(job, model, stage, empty) * missing)
        count += missing
    if parallel.pipeline > 1:
        each = longest // job.parts * model.architecture.hidden_size * job.size(model)
        sent = parallel.chunks - (stage == parallel.pipeline - 1)
        if trains:
            sent += parallel.chunks - (stage == 0)
        calls = sent * count
        if job.beside(model):  # in the actor's messages, where the branch begins below the last chunk
            in_chunk = model.architecture.num_layers // (parallel.pipeline * parallel.chunks)
            sent, calls = sent * (model.trained_layers > in_chunk), 0
        parts.append(Work(messages=Traffic(each * sent * count, calls)))
    return total(parts), count


def apply(job: Job, model: Model, stage: int) -> Work:
    """Reduce gradients, clip, and apply an update."""
    parallel = job.parallel
    buffers, share = memory.buffers(job, model, stage), memory.shares(job, model, stage)
    padded = sum(buffers.values())
    collectives: dict[tuple[str, str], Traffic] = {}
    for group, count in buffers.items():
        if job.group_size(group) == 1 or not count:
            continue
        if parallel.distributed_optimizer:
            collectives["reduce_scatter_tensor", group] = Traffic(4 * count, parallel.chunks)
            # Experts have an optimizer of their own, and megatron gathers all parameters after the step of each.
            gathered = Traffic(job.size(model) * count, parallel.chunks)
            collectives["all_gather_into_tensor", group] = gathered * sum(map(bool, buffers.values()))
        else:
            collectives["all_reduce", group] = Traffic(4 * count, parallel.chunks)
    part = memory.sequence_elements if job.parts > 1 else memory.head_norm_elements
    if parallel.tensor > 1 and (norms := part(job, model, stage)):
        collectives["all_reduce", "tensor"] = Traffic(4 * norms, 1)
    tied = model.architecture.tie_embeddings and model.words and parallel.pipeline > 1
    if tied and stage in (0, parallel.pipeline - 1) and model.trained_layers is None and model.lora is None:
        size = 4 * model_work.vocabulary(job, model) * model.architecture.hidden_size
        collectives["all_reduce", "embedding"] = Traffic(size, 1)
    # Clear, read for the norm and again to apply; moments and fp32 weight read and written; the model's own written.
    moved = {"gradients": 4 * (padded + 2 * share), "optimizer": 24 * share, "weights": job.size(model) * share}
    if model.q_heads and stage == parallel.pipeline - 1:  # slow copies, in fp32, follow the heads after every update
        each = model_work.vocabulary(job, model) * model.architecture.hidden_size
        moved["weights"] += model.q_heads * each * (2 * 4 + job.size(model))
    calls = layer_work.CALLS[job.device]["update"] * (job.layers(model) + 1)
    return Work(memory=Counter(moved), collectives=collectives, calls=calls)


def phase_seconds(job: Job, machine: Machine) -> dict[str, Seconds]:
    """{phase: seconds} of a step: those of the slowest stage, and what it waits while the pipeline fills and drains."""
    stages = range(job.parallel.pipeline)
    by_stage = [step(job, stage) for stage in stages]
    found: dict[str, Seconds] = {}
    for runs in zip(*by_stage, strict=True):
        each = [seconds(run.work, job, machine) for run in runs]
        slowest = max(each, key=lambda one: one.total)
        run = runs[0]
        waits = (len(stages) - 1) / (run.micro_batches * job.parallel.chunks)
        if run.kind == "decode":
            waits = sampling.waits(job)
        elif run.kind == "prefill":
            waits = 0.0
        here = dataclasses.replace(slowest, bubble=waits * (slowest.total - slowest.copies))
        found[run.phase] = found.get(run.phase, Seconds()) + here
    return found


def cpu_seconds(job: Job, machine: Machine) -> dict[str, float]:
    """{phase: seconds that all ranks together compute and communicate} of a step: on CPU ranks, their CPU time."""
    found: dict[str, float] = {}
    for stage in range(job.parallel.pipeline):
        for run in step(job, stage):
            here = seconds(run.work, job, machine).total * job.parallel.tensor * job.data
            found[run.phase] = found.get(run.phase, 0.0) + here
    return found
