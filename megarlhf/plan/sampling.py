"""Prefill and decoding of a step's responses on one rank, as experience/sampler.py does them with responses of full
length.

Legend: N rows of this data-parallel rank, s slots of a group, n of them active, P prompt and R response tokens.
"""

from __future__ import annotations

from collections import Counter

from megarlhf.experience.sampler import PREFILL_TOKENS
from megarlhf.experience.slot_memory import SLOTS
from megarlhf.models.cache import VECTOR
from megarlhf.plan import experts, layer_work, model_work
from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Attention, Product, Traffic, Work, total


def slots(job: Job) -> int:
    """s. A GPU's are limited by memory as well, which the sampler finds when it is built."""
    wanted = job.shape.slots or (SLOTS if job.device == "cpu" else 256)
    fitting = min(wanted, -(-job.rows_here // job.parallel.pipeline))
    return -(-fitting // job.parts) * job.parts


def waits(job: Job) -> float:
    """What a stage waits in decoding, as a share of what it works: with fewer groups of slots than stages, so many of
    these have nothing to do at any time."""
    groups = min(job.parallel.pipeline, -(-job.rows_here // slots(job)))
    return job.parallel.pipeline / groups - 1


def sample(job: Job, model: Model, stage: int) -> dict[str, Work]:
    """{"prefill": Work, "decode": Work} of a stage."""
    prefills, steps = schedule(job)
    prefill = total(_prefill(job, model, stage, lengths) * times for lengths, times in prefills.items())
    slots_of: Counter = Counter()
    attention: Counter = Counter()
    for (active, column), times in steps.items():
        slots_of[active] += times
        attention[_attention(job, model, active, column)] += times * job.layers(model)
    decode = total(_step(job, model, stage, active) * times for active, times in slots_of.items()) + Work(attention)
    if job.parallel.pipeline > 1:  # the results, to all stages
        rows = job.rows_here * job.shape.counted
        decode += Work(collectives={("broadcast", "pipeline"): Traffic(12 * rows, 2)})
        if model.replays:
            every = job.parallel.pipeline * experts.recorded(job, model, job.rows_here * job.shape.length)
            decode += Work(collectives={("all_gather_into_tensor", "pipeline"): Traffic(every, 1)})
    return {"prefill": prefill, "decode": decode}


def schedule(job: Job) -> tuple[Counter, Counter]:
    """({lengths of the prompts that are computed at once: times}, {(active slots, tokens of each with its newest): so
    many steps}) over all groups of slots."""
    shape, rows, size = job.shape, job.rows_here, slots(job)
    prefills: Counter = Counter()
    steps: Counter = Counter()
    actives: Counter = Counter()
    for first in range(0, rows, size):  # groups take their rows in turn, and all of a group end together
        used = min(size, rows - first)
        starting = -(-(first + used) // shape.samples) - -(-first // shape.samples)
        budget, at_once = PREFILL_TOKENS[job.device], shape.prompt - 1
        fit = max(1, budget // at_once) if at_once else 0
        while starting > 0 and at_once:
            prefills[(at_once,) * min(fit, starting)] += 1
            starting -= fit
        # A step of a mixture of experts is no CUDA graph, and has the active slots alone.
        wanted = size if job.device == "cuda" and not job.models[0].architecture.num_experts else used
        actives[-(-wanted // job.parts) * job.parts] += 1
    for active, times in actives.items():
        for number in range(shape.counted):
            steps[active, shape.prompt + number] += times
    return prefills, steps


def _prefill(job: Job, model: Model, stage: int, lengths: tuple[int, ...]) -> Work:
    """Keys and values of some prompts. Nothing reads the model's output: the last layer computes `parts` tokens."""
    tokens, last = -(-sum(lengths) // job.parts) * job.parts, stage == job.parallel.pipeline - 1
    read = job.parts if last else None
    work = model_work.embedding(job, model, stage, tokens)
    work += model_work.layers(job, model, stage, tokens, read, lengths, attends=False)
    a, size = model.architecture, job.size(model)
    stored = 2 * 2 * tokens * a.num_query_groups * a.kv_channels * size // job.parallel.tensor
    work += Work(memory=Counter({"cache": stored * job.layers(model)}), calls=30)
    chunks = job.parallel.chunks - last
    work += experts.gathered(job, model, tokens)
    return work + Work(messages=Traffic(tokens // job.parts * a.hidden_size * size, 1) * chunks)


def _attention(job: Job, model: Model, active: int, column: int) -> Attention:
    """Of one layer in a step of n slots whose newest token is number `column`."""
    a, tensor = model.architecture, job.parallel.tensor
    heads, groups = a.num_attention_heads // tensor, a.num_query_groups // tensor
    width = -(-column // VECTOR) * VECTOR if job.device == "cpu" else column
    # The heads of a group attend as the tokens of a span do.
    return Attention(active, groups, groups, heads // groups, width, a.kv_channels)


def _step(job: Job, model: Model, stage: int, active: int) -> Work:
    """One step of n slots, without attention."""
    a, tensor, size = model.architecture, job.parallel.tensor, job.size(model)
    last = stage == job.parallel.pipeline - 1
    one = layer_work.layer_forward(job, model, active, None, (), window=None)
    if not a.num_experts or job.device == "cpu":  # on a GPU experts are in no graph
        table = layer_work.CALLS[job.device]
        fewer = experts.calls(job, model, "step") - experts.calls(job, model, "forward")
        one += Work(calls=table["step"] - table["forward"] + fewer)
    work = model_work.embedding(job, model, stage, active) + one * job.layers(model)
    work += experts.gathered(job, model, active)
    states = active // job.parts * a.hidden_size * size
    work += Work(messages=Traffic(states, 1) * (job.parallel.chunks - last), calls=20)
    if not last:
        return work
    columns, collectives = model_work.vocabulary(job, model), {}
    if job.parts > 1:
        collectives = layer_work.add(collectives, "all_gather_into_tensor", active * a.hidden_size * size)
    if tensor > 1:
        collectives = layer_work.add(collectives, "all_gather_into_tensor", tensor * active * 6 * 4)
    product = Counter({Product(active, a.hidden_size, columns, "linear"): 1})
    moved = Counter({"logits": 4 * 4 * active * columns})
    sent = Traffic(8 * active, 1) if job.parallel.pipeline > 1 else Traffic()  # tokens, back to the first stage
    return work + Work(product, moved, collectives, sent, layer_work.CALLS[job.device]["draw"])
