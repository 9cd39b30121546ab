"""A mixture of experts in a layer: what its router, its experts and their dispatcher compute, send and hold
(models/experts.py). The shared expert's products are those of a dense MLP, in model_work.py.

The load is taken to be even: each expert gets as many tokens as any other. Sums over the ranks that share the experts
do not depend on that, but the fullest of them holds and computes more.

Legend: K tokens of the stream that the MLP sees, K / parts of them this rank's, H hidden size, F inner size of an
expert, E experts, k of them a token, n = k K / parts rows that this rank sends, and its experts get.
"""

from __future__ import annotations

from collections import Counter

from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Product, Traffic, Work

# As `layer_work.CALLS`, in (the router and the dispatcher, each expert). Transformer Engine's experts are one. Those
# of a GPU are estimates, because none has run a mixture of experts.
CALLS = {
    "cpu": {"forward": (50, 190), "backward": (1500, 150), "step": (0, 125)},
    "cuda": {"forward": (40, 2), "backward": (80, 4), "step": (40, 2)},
}
INDEX_BYTES = 28  # of each of a token's experts: their numbers, their order, and weights
MASK_BYTES = 10  # of a token and an expert: weights and masks of the dispatcher
COUNT_BYTES = 8  # of the number of tokens that a rank sends to an expert


def rows(job: Job, model: Model, kept: int) -> int:
    """n, for K = kept."""
    return kept // job.parts * (model.architecture.experts_per_token or 0)


def here(job: Job, model: Model) -> int:
    """Experts of a layer on this rank."""
    return (model.architecture.num_experts or 0) // job.parallel.expert


def forward(job: Job, model: Model, kept: int, way: str) -> Work:
    """Router, dispatch, experts, and the shared expert's gate. way: of the experts' products."""
    a, own = model.architecture, kept // job.parts
    operations = Counter({Product(own, a.hidden_size, a.num_experts): 1})
    if a.shared_expert_size:
        operations[Product(own, a.hidden_size, 1)] += 1
    for count, weights, times in _parts(job, model, kept):
        for inner, columns in _matrices(model):
            operations[Product(count, inner, columns, way, weights)] += times
    return Work(operations, collectives=_sent(job, model, kept, counts=True), calls=calls(job, model, "forward"))


def backward(job: Job, model: Model, kept: int) -> Work:
    """Gradients of the same."""
    a, own, operations = model.architecture, kept // job.parts, Counter()
    for columns, trains in ((a.num_experts, model.trains_router), (1 if a.shared_expert_size else 0, True)):
        if columns:
            operations[Product(own, columns, a.hidden_size, "input")] += 1
            if trains:
                operations[Product(columns, own, a.hidden_size, "weight")] += 1
    for count, weights, times in _parts(job, model, kept):
        for inner, columns in _matrices(model):
            operations[Product(count, columns, inner, "input", weights)] += times
            operations[Product(columns, count, inner, "weight", weights)] += times
    return Work(operations, collectives=_sent(job, model, kept, counts=False), calls=calls(job, model, "backward"))


def _matrices(model: Model) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of an expert's two layers."""
    a = model.architecture
    return (a.hidden_size, a.ffn_hidden_size * (2 if a.gated_mlp else 1)), (a.ffn_hidden_size, a.hidden_size)


def _parts(job: Job, model: Model, kept: int) -> list[tuple[int, int, int]]:
    """(rows, weights, times) of the products of this rank's experts: one after the other, or Transformer Engine's of
    all experts that have rows."""
    count, experts = rows(job, model, kept), here(job, model)
    if _is_grouped(job, model):
        return [(count, min(count, experts), 1)] if count else []
    small, more = divmod(count, experts)
    return [(size, 1, times) for size, times in ((small + 1, more), (small, experts - more)) if size and times]


def _sent(job: Job, model: Model, kept: int, *, counts: bool) -> dict:
    """Tokens to their experts and back, with their weights; before them how many they are."""
    a, ranks, count = model.architecture, job.parallel.expert, rows(job, model, kept)
    if ranks == 1:
        return {}
    found = {("all_to_all_single", "expert"): Traffic(count * (2 * a.hidden_size * job.size(model) + 4), 3)}
    if counts:
        found["all_gather_into_tensor", "expert"] = Traffic(COUNT_BYTES * ranks * a.num_experts, 1)
    return found


def calls(job: Job, model: Model, kind: str) -> int:
    """Of small operations, in a pass over a layer; 0 for a dense one."""
    if not model.architecture.num_experts:
        return 0
    layer, expert = CALLS[job.device][kind]
    return layer + expert * (here(job, model) if job.device == "cpu" else 1)


def recorded(job: Job, model: Model, tokens: int) -> int:
    """Bytes of the experts of some tokens in the layers of a stage, in 16 bits; 0 if they are not recorded."""
    return 2 * job.layers(model) * (model.architecture.experts_per_token or 0) * tokens if model.replays else 0


def gathered(job: Job, model: Model, tokens: int) -> Work:
    """What sequence-parallel ranks gather of the experts of a pass of the sampler (experience/routes.py)."""
    if job.parts == 1 or not model.replays:
        return Work()
    return Work(collectives={("all_gather_into_tensor", "tensor"): Traffic(recorded(job, model, tokens), 1)})


def elements(job: Job, model: Model) -> int:
    """Weights of a layer's experts on this rank."""
    return here(job, model) * sum(inner * columns for inner, columns in _matrices(model))


def moved(job: Job, model: Model) -> int:
    """Numbers a token of the stream that the experts' activation and the dispatcher read and write in a forward pass:
    tokens are copied in the order of experts, of ranks, and back."""
    a = model.architecture
    each = (7 if a.gated_mlp else 4) * a.ffn_hidden_size + (10 if here(job, model) > 1 else 6) * a.hidden_size
    return each * (a.experts_per_token or 0) // job.parts


def kept(job: Job, model: Model) -> int:
    """Bytes a token of the stream that the MLP keeps for its backward pass: the norm's output where something reads it,
    in float32 for the router; each expert's copy of it, and states before and after the activation; weights and
    indices."""
    a, size, gate = model.architecture, job.size(model), 2 if model.architecture.gated_mlp else 1
    total = size * a.hidden_size * (bool(a.shared_expert_size) or (model.trains_router and size == 4))
    total += 4 * a.hidden_size * (model.trains_router and size != 4)
    total += a.experts_per_token * (size * (a.hidden_size + (gate + 1) * a.ffn_hidden_size) + INDEX_BYTES)
    total += MASK_BYTES * a.num_experts
    if shared := a.shared_expert_size:
        total += size * (a.hidden_size + (gate + 1) * shared * job.parts // job.parallel.tensor)
    return total // job.parts


def gradients(job: Job, model: Model) -> int:
    """Numbers a token of the stream beside those kept, at the fullest moment of the experts in an update: at the end of
    their forward pass, which holds more than gradients of their inputs and outputs do. One order of tokens is kept."""
    a = model.architecture
    return (_orders(job, model) + 1) * a.experts_per_token * a.hidden_size // job.parts


def fleeting(job: Job, model: Model) -> int:
    """Bytes a token of the stream at the fullest moment of the experts' forward pass without gradients: in the last
    one's activation, or when the outputs of all are put together."""
    a, orders, size = model.architecture, _orders(job, model), job.size(model)
    kernels = 1 if _is_grouped(job, model) else here(job, model)
    inner = (4 if a.gated_mlp else 3) * a.ffn_hidden_size + (kernels - 1) * a.hidden_size
    states = orders * a.hidden_size + max(inner // kernels, 2 * a.hidden_size)
    each = a.experts_per_token * (size * states + INDEX_BYTES) + a.num_experts * MASK_BYTES
    return (each + size * a.hidden_size * bool(a.shared_expert_size)) // job.parts


def _orders(job: Job, model: Model) -> int:
    """Copies of the tokens in other orders: by rank, of other ranks' tokens, by expert."""
    return 1 + (job.parallel.expert > 1) + (here(job, model) > 1)


def _is_grouped(job: Job, model: Model) -> bool:
    """Whether Transformer Engine has one kernel for all experts."""
    return job.device == "cuda" and job.size(model) == 2
