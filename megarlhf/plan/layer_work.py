"""A layer over the tokens of a stream on one rank: forward, and backward. It follows models/layers.py.

Legend: T tokens, K <= T tokens that the last layer hands on, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from megarlhf.models.cache import VECTOR
from megarlhf.models.spec import Architecture
from megarlhf.plan import adapters, experts
from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Attention, Product, Traffic, Work
from megarlhf.stream import Blocks

# What a layer's passes (a head's, the draw of a token, an update of a layer's weights) take beside arithmetic. On a GPU
# in kernels launched; "step", of decoding, is recorded as a graph there. On a CPU in the time of one small operation of
# torch, with all of Python around: fitted to the configurations of bench/plan.py and to layers too small to compute
# anything, of two depths.
CALLS = {
    "cpu": {"forward": 1100, "backward": 900, "step": 750, "head": 2000, "draw": 1800, "update": 2700},
    "cuda": {"forward": 20, "backward": 40, "step": 7, "head": 15, "draw": 10, "update": 10},
}


def qkv_columns(architecture: Architecture) -> int:
    return (architecture.num_attention_heads + 2 * architecture.num_query_groups) * architecture.kv_channels


def fc1_columns(architecture: Architecture) -> int:
    return architecture.ffn_hidden_size * (2 if architecture.gated_mlp else 1)


def layer_forward(
    job: Job, model: Model, tokens: int, read: int | None, lengths: Sequence[int], *, window: int | None,
    grads: bool = False,
) -> Work:  # fmt: skip
    """A layer over T tokens, with attention within rows of these `lengths`. `read`: K in a model's last layer.
    `window`: of its attention. `grads`: a backward pass follows."""
    kept = tokens if read is None else read
    operations: Counter = Counter()
    for rows, inner, columns in linear_layers(job, model, tokens, kept):
        operations[Product(rows, inner, columns, "plain" if grads else "linear")] += 1
    operations += Counter(attentions(job, model, lengths, window))
    cut = (kept,) if _cuts_mlp(model) else ()
    collectives = layer_collectives(job, model, forward_columns=(tokens, *cut), forward_rows=(kept, *cut))
    if read is not None and job.parts > 1:
        for _ in range(_selections(model)):
            collectives = add(collectives, "all_gather_into_tensor", states(job, model, tokens))
    collectives = _joint_norms(job, model, tokens, collectives)
    moved = {"activations": moved_bytes(job, model, tokens, kept)}
    work = Work(operations, Counter(moved), collectives, calls=CALLS[job.device]["forward"])
    if model.lora is not None:
        work += adapters.forward(job, model, tokens, kept)
    if model.architecture.num_experts:
        work += experts.forward(job, model, kept, "plain" if grads else "linear")
    return work


def layer_backward(
    job: Job, model: Model, tokens: int, read: int | None, lengths: Sequence[int], *, window: int | None,
    trains: bool = True, given: bool = True,
) -> Work:  # fmt: skip
    """Gradients of a layer's input and weights; of its input alone if it does not train. `given`: whether the layer's
    input needs a gradient, which all do but the lowest one's that trains above frozen ones or a frozen embedding."""
    kept = tokens if read is None else read
    trains = trains and model.lora is None  # the layer's own weights
    reached = adapters.needed(job, model, given=given)
    operations: Counter = Counter()
    linears = zip(linear_layers(job, model, tokens, kept), reached.values(), strict=False)
    for (rows, inner, columns), (needs_input, _) in linears:
        operations[Product(rows, columns, inner, "input")] += needs_input
        operations[Product(columns, rows, inner, "weight")] += trains
    if reached["linear_qkv"][1]:
        for attention, times in attentions(job, model, lengths, window).items():
            operations[dataclasses.replace(attention, backward=True)] += times
    collectives: dict = {}
    if job.parallel.tensor > 1:
        columns = [(tokens, reached["linear_qkv"]), *([(kept, reached["linear_fc1"])] if _cuts_mlp(model) else ())]
        for rows, (needs_input, _) in columns:  # of the column-parallel layers' inputs
            if not needs_input:
                continue
            if job.parts > 1:
                if trains:
                    collectives = add(collectives, "all_gather_into_tensor", states(job, model, rows))
                collectives = add(collectives, "reduce_scatter_tensor", states(job, model, rows))
            else:
                collectives = add(collectives, "all_reduce", states(job, model, rows))
        if job.parts > 1:
            # of the row-parallel layers' outputs, and of what the last layer selects
            outputs = reached["linear_proj"][0] + (_cuts_mlp(model) and reached["linear_fc2"][0])
            selected = _selections(model) if given else _selections(model) - 1 if trains else 0  # a trained norm's
            for _ in range(outputs + (0 if read is None else selected)):
                collectives = add(collectives, "all_gather_into_tensor", states(job, model, kept))
        if reached["linear_qkv"][1]:
            collectives = _joint_norms(job, model, tokens, collectives)
    moved = {"activations": 2 * moved_bytes(job, model, tokens, kept)}
    if trains:  # what every micro-batch adds to in the gradients
        moved["gradients"] = 2 * 4 * sum(inner * columns for _, inner, columns in linear_layers(job, model, 1, 1))
        moved["gradients"] += 2 * 4 * experts.elements(job, model)
    work = Work(+operations, Counter(moved), collectives, calls=CALLS[job.device]["backward"])
    if model.lora is not None:
        work += adapters.backward(job, model, tokens, kept, given=given)
    return work + experts.backward(job, model, kept) if model.architecture.num_experts else work


def _joint_norms(job: Job, model: Model, tokens: int, collectives: dict) -> dict:
    """The sums over all heads of queries' squares, and of keys', which the ranks make together in both directions."""
    if model.architecture.qk_norm_joint and job.parallel.tensor > 1:
        for _ in range(2):
            collectives = add(collectives, "all_reduce", 4 * tokens)
    return collectives


def _selections(model: Model) -> int:
    """Tensors of which the last layer selects the tokens read: the residual, and the norm that attention and MLP
    share."""
    return 2 if model.architecture.shared_norm else 1


def _cuts_mlp(model: Model) -> bool:
    """Whether tensor parallelism cuts an MLP of a layer: a dense one, or a shared expert."""
    return not model.architecture.num_experts or bool(model.architecture.shared_expert_size)


def linear_layers(job: Job, model: Model, tokens: int, kept: int) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of the linear layers on this rank that see the stream's tokens: not of the experts among
    which they are divided."""
    a, tensor = model.architecture, job.parallel.tensor
    context = a.num_attention_heads * a.kv_channels // tensor
    attention = [(tokens, a.hidden_size, qkv_columns(a) // tensor), (kept, context, a.hidden_size)]
    inner = a.shared_expert_size if a.num_experts else a.ffn_hidden_size
    if not inner:
        return attention
    gate = 2 if a.gated_mlp else 1
    return [*attention, (kept, a.hidden_size, gate * inner // tensor), (kept, inner // tensor, a.hidden_size)]


def attentions(job: Job, model: Model, lengths: Sequence[int], window: int | None) -> dict[Attention, int]:
    """On a CPU in blocks of rows of similar length (models/attention.py); on a GPU each row by itself."""
    if not lengths:
        return {}
    a, tensor, found = model.architecture, job.parallel.tensor, Counter()
    heads, groups = a.num_attention_heads // tensor, a.num_query_groups // tensor
    if job.device == "cpu":
        multiple = 1 if job.size(model) > 2 else VECTOR
        shapes = Blocks.of(tuple(lengths), torch.device("cpu"), multiple).shapes
    else:
        shapes = [(times, length) for length, times in Counter(lengths).items()]
    for rows, length in shapes:
        if window is None or length <= window:
            found[Attention(rows, heads, groups, length, length, a.kv_channels)] += 1
            continue
        for start in range(0, length, window):
            stop, first = min(start + window, length), max(0, start - window + 1) // VECTOR * VECTOR
            end = min(-(-stop // VECTOR) * VECTOR, length)
            found[Attention(rows, heads, groups, stop - start, end - first, a.kv_channels)] += 1
    return found


def moved_bytes(job: Job, model: Model, tokens: int, kept: int) -> int:
    """Bytes that a layer's operations beside its products read and write in a forward pass: norms, rotary positions,
    the activation, sums. Each operand of an operation once."""
    a, tensor, size = model.architecture, job.parallel.tensor, job.size(model)
    norms = 5 * a.hidden_size // job.parts  # two passes of reading, two of writing, one between
    norms *= 2 if a.norms == "both" else 1
    of_heads = 5 * (a.num_attention_heads + a.num_query_groups) * a.kv_channels // tensor
    sums = 3 * a.hidden_size // job.parts
    turned = 4 * (a.num_attention_heads + a.num_query_groups) * a.kv_channels // tensor
    activation = (5 if a.gated_mlp else 2) * (a.shared_expert_size or 0 if a.num_experts else a.ffn_hidden_size)
    activation = activation // tensor + experts.moved(job, model)
    turned += of_heads * (a.qk_norm or a.qk_norm_joint)
    return size * (tokens * (norms + turned) + kept * (norms + 2 * sums + activation))


# ------------------------------------------------------------------------------------------- collectives


def states(job: Job, model: Model, tokens: int) -> int:
    """Bytes of the hidden states of some tokens, all of them."""
    return tokens * model.architecture.hidden_size * job.size(model)


def layer_collectives(job: Job, model: Model, *, forward_columns: Sequence[int], forward_rows: Sequence[int]) -> dict:
    """Of the column- and row-parallel layers of a forward pass, over so many tokens each."""
    found: dict = {}
    if job.parallel.tensor == 1:
        return found
    if job.parts > 1:
        for tokens in forward_columns:
            found = add(found, "all_gather_into_tensor", states(job, model, tokens))
    for tokens in forward_rows:
        kind = "reduce_scatter_tensor" if job.parts > 1 else "all_reduce"
        found = add(found, kind, states(job, model, tokens))
    return found


def add(collectives: dict, kind: str, size: int, group: str = "tensor") -> dict:
    name = kind, group
    return collectives | {name: collectives.get(name, Traffic()) + Traffic(size, 1)}
