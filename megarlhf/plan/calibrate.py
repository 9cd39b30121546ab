"""This CPU as a `Machine`: the operations of a job, timed one by one for a few seconds, on one thread.

Not pure: it computes and reads the clock. Times are of the process (CPU seconds), which other processes change less.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megarlhf.cluster import backend, operations
from megarlhf.kernels import products, torch_rows
from megarlhf.plan import layer_work, model_work, phases, sampling
from megarlhf.plan.job import Job
from megarlhf.plan.time import Link, Machine
from megarlhf.plan.work import Attention, Operation, Product

SECONDS = 0.02  # spent on each operation
MOST = 80  # operations that are timed: those with the most FLOPs; others are taken to be as fast as one alike
COLD = 2**28  # bytes that no cache holds
MOST_COPIES = 16  # of an operation's operands
# Of a collective in shared memory: seconds, waiting for the others included (fitted as `layer_work.CALLS`); times that
# its bytes are copied or added there.
LATENCY, COPIES = 8e-5, 4


def cpu(job: Job, per_node: int | None = None) -> Machine:
    """Nodes like this one with so many CPU ranks (default: all of the job), one thread each, with its rates at the
    shapes of `job`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _measured(job, min(per_node or job.world_size, job.world_size))
    finally:
        torch.set_num_threads(threads)


def roughly(rate: float, ranks: int) -> Machine:
    """This machine without its time being taken: `rate`, FLOP/s of a rank in large matrix products, is known, and a
    copy and a small operation are timed. What job.py calls a device is the one that this rank has."""
    device = backend.device()
    source = torch.ones(2**22, device=device)
    other = torch.empty_like(source)

    def copy() -> None:
        other.copy_(source)
        backend.synchronize()

    bandwidth = 2 * source.nbytes / seconds(copy, rounds=1, clock=time.perf_counter)
    call = 2.5e-6 if device.type == "cuda" else seconds(_small(), rounds=1) / 3
    link = Link(bandwidth / COPIES, LATENCY)
    return Machine(
        name="this machine", device=device.type, memory=_memory(), flops=rate, bandwidth=bandwidth, call=call,
        near=link, far=link, per_node=ranks,
    )  # fmt: skip


def _measured(job: Job, per_node: int) -> Machine:
    stages = range(job.parallel.pipeline)
    counts: Counter = Counter()
    for run in (run for stage in stages for run in phases.step(job, stage)):
        for operation, times in run.work.operations.items():
            counts[operation] += times * operation.flops
    dtype = torch.float32 if job.dtype == "fp32" else torch.bfloat16
    chosen = [operation for operation, _ in counts.most_common(MOST) if operation.flops]
    measured = {operation: seconds(_operation(operation, dtype, _copies(operation, job))) for operation in chosen}
    rate = max((operation.flops / taken for operation, taken in measured.items()), default=1e10)
    copied = torch.ones(2**23)
    other = torch.empty_like(copied)
    bandwidth = 2 * copied.nbytes / seconds(lambda: other.copy_(copied))
    link = Link(bandwidth / COPIES, LATENCY)
    return Machine(
        name="this CPU", device="cpu", memory=_memory() // per_node, flops=rate,
        bandwidth=bandwidth, call=seconds(_small()) / 3, near=link, far=link, per_node=per_node,
        measured=measured, rates=_rates(job, dtype),
    )  # fmt: skip


def seconds(work: Callable[[], object], *, rounds: int = 5, clock: Callable[[], float] = time.process_time) -> float:
    """Of one call by `clock`, by default CPU seconds: the least of a few rounds, which others disturbed least."""
    work()
    started = clock()
    work()
    count = max(1, int(SECONDS / rounds / max(clock() - started, 1e-6)))
    taken = []
    for _ in range(rounds):
        started = clock()
        for _ in range(count):
            work()
        taken.append((clock() - started) / count)
    return max(min(taken), 1e-9)


def _copies(operation: Operation, job: Job) -> int:
    """Of its operands, at the most, so that they are in a cache if and only if a rank's are: between two uses of an
    operand a step of decoding goes through all weights and caches of a stage."""
    one = operation.batch if isinstance(operation, Attention) and operation.queries != operation.keys else 0
    rows = operation.rows if isinstance(operation, Product) and operation.way == "linear" else one
    if not job.online or rows != sampling.slots(job):
        return MOST_COPIES
    steps = sampling.schedule(job)[1].total()
    decode = sampling.sample(job, job.models[0], 0)["decode"].operations
    return max(1, sum(each.elements * times for each, times in decode.items()) // (steps * operation.elements))


def _operation(operation: Operation, dtype: torch.dtype, copies: int) -> Callable[[], object]:
    if isinstance(operation, Attention):
        return _attention(operation, dtype, copies)
    rows, inner, columns = operation.rows, operation.inner, operation.columns

    def make(*shapes: tuple[int, int]) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)

    if operation.way == "weight":
        given = lambda: (torch.zeros(rows, columns), torch.randn(inner, rows), torch.randn(inner, columns))  # noqa: E731
        return _in_turn(given, lambda total, grad, x: products.accumulate(total, grad.t(), x), copies)
    if operation.way == "input":
        return _in_turn(make((rows, inner), (inner, columns)), torch.mm, copies)
    multiply = operations.linear if operation.way == "linear" else lambda x, weight: torch.mm(x, weight.t())
    return _in_turn(make((rows, inner), (columns, inner)), multiply, copies)


def _in_turn(make: Callable[[], tuple], work: Callable[..., object], copies: int) -> Callable[[], object]:
    """`work` on other operands each time, and with results that stay a while: a pass over layers finds its weights and
    activations in no cache either, unless they all are small."""
    first = make()
    count = min(copies, max(1, COLD // 4 // sum(x.nbytes for x in first)))
    following = itertools.cycle([first, *(tuple(x.clone() for x in first) for _ in range(count - 1))])
    kept: deque = deque(maxlen=4)
    return lambda: kept.append(work(*next(following)))


def _attention(shape: Attention, dtype: torch.dtype, copies: int) -> Callable[[], object]:
    """Rows of a stream, of which heads are the third dimension; or the slots of a cache, of which they are the
    second."""
    decodes = shape.queries != shape.keys

    def make() -> tuple[torch.Tensor, ...]:
        sizes = ((shape.heads, shape.queries), (shape.groups, shape.keys), (shape.groups, shape.keys))
        if decodes:
            return tuple(torch.randn(shape.batch, *size, shape.channels).to(dtype) for size in sizes)
        made = (torch.randn(shape.batch, length, heads, shape.channels).to(dtype) for heads, length in sizes)
        return tuple(x.transpose(1, 2) for x in made)

    mask = torch.zeros(shape.batch, 1, 1, shape.keys, dtype=dtype) if decodes else None
    if not shape.backward:
        return _in_turn(make, lambda *given: operations.attend(*given, mask), copies)
    given = [x.requires_grad_() for x in make()]
    with torch.enable_grad():
        output = operations.attend(*given, mask)
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, given, gradient, retain_graph=True)


def _rates(job: Job, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second of what is no product, by kind: each kind's operations at the sizes of the job's first model, each
    time on other memory, as in a pass over layers."""
    model, shape = job.models[0], job.shape
    a, tensor = model.architecture, job.parallel.tensor
    tokens = max(1, min(shape.micro_batch_tokens, job.rows_here * shape.length) // shape.length) * shape.length
    sizes = a.hidden_size, layer_work.fc1_columns(a) // tensor, a.num_attention_heads * a.kv_channels // tensor
    copies = max(2, int(COLD / (4 * tokens * sum(sizes))))
    rows = [[torch.randn(tokens, size).to(dtype) for size in sizes] for _ in range(min(copies, 64))]
    weight, following = torch.ones(a.hidden_size).to(dtype), itertools.cycle(rows)

    def layer() -> None:  # what `layer_work.moved_bytes` counts
        hidden, inner, head = next(following)
        for _ in range(2):
            F.rms_norm(hidden, weight.shape, weight) if dtype != torch.float32 else _norm(hidden, weight)
            torch.add(hidden, hidden)
        head.mul(2.0).add_(head)
        if a.gated_mlp:
            gate, up = inner.chunk(2, -1)
            torch.mul(F.silu(gate), up)
        else:
            F.gelu(inner)

    dense = dataclasses.replace(a, num_experts=None, experts_per_token=None, shared_expert_size=None)
    moved = layer_work.moved_bytes(job, dataclasses.replace(model, architecture=dense), tokens, tokens)
    found = {"activations": moved / seconds(layer)}
    if model.words:
        counted = min(max(1, tokens // shape.length) * shape.counted, model_work.chunk_rows(job, model))
        logits = torch.randn(counted, model_work.vocabulary(job, model))
        labels = torch.zeros(counted, dtype=torch.int64)
        taken = seconds(lambda: torch_rows.logprob_stats(logits, labels, temperature=1.0, with_entropy=False))
        found["logits"] = 2 * logits.nbytes / taken
    size = min(COLD // 16, 4 * a.num_parameters)
    state = [torch.ones(size) for _ in range(4)]
    adam = seconds(lambda: _adam(*state))
    return found | {"optimizer": 24 * size / adam, "gradients": 2 * 4 * size / seconds(lambda: state[0].mul_(1.0))}


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(1e-5).rsqrt_()
    return torch.mul(x, scale).mul_(weight)


def _adam(weight: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    step = [torch.tensor(1.0)]
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], step, lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def _small() -> Callable[[], object]:
    """Three small operations as a layer makes them: the unit in which `layer_work.CALLS` counts."""
    x = torch.randn(4, 1, 16)

    def three() -> torch.Tensor:
        return (x + x).view(4, 16).unsqueeze(1)

    return three


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
