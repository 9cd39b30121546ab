"""One pass of a model over one stream of tokens on one rank: forward, and backward.

It follows models/gpt.py, models/layers.py and kernels/linear.py: the last layer computes projection and MLP of the
tokens that a head reads alone, the head computes those in chunks, and a backward pass computes the logits of all chunks
but the last again.

Legend: T tokens, K <= T tokens that the last layer hands on, N <= K counted tokens, H hidden size, V' vocabulary rows
of this rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarlhf.kernels.products import CHUNK_BYTES
from megarlhf.models.cache import VECTOR
from megarlhf.models.spec import Architecture
from megarlhf.plan import adapters, experts
from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Attention, Product, Traffic, Work, total
from megarlhf.stream import Blocks

# What a layer's passes (a head's, the draw of a token, an update of a layer's weights) take beside arithmetic. On a GPU
# in kernels launched; "step", of decoding, is recorded as a graph there. On a CPU in the time of one small operation of
# torch, with all of Python around: measured with layers too small to compute anything, as the difference of two depths.
CALLS = {
    "cpu": {"forward": 600, "backward": 700, "step": 310, "head": 350, "draw": 750, "update": 550},
    "cuda": {"forward": 20, "backward": 40, "step": 7, "head": 15, "draw": 10, "update": 10},
}


@dataclass(frozen=True)
class Stream:
    """The tokens of one micro-batch, as far as they cost something."""

    lengths: tuple[int, ...]  # of its rows
    counted: int  # N
    padded: int | None = None  # T, with padding; None: the rows' own, rounded for sequence parallelism

    @property
    def real(self) -> int:
        return sum(self.lengths)


def rounded(tokens: int, job: Job) -> int:
    """As `Engine._rounded`."""
    parts = job.parts * (8 if job.device == "cuda" else 1)
    return -(-tokens // parts) * parts


def qkv_columns(architecture: Architecture) -> int:
    return (architecture.num_attention_heads + 2 * architecture.num_query_groups) * architecture.kv_channels


def fc1_columns(architecture: Architecture) -> int:
    return architecture.ffn_hidden_size * (2 if architecture.gated_mlp else 1)


def vocabulary(job: Job, model: Model) -> int:
    """V'"""
    return model.architecture.padded_vocab_size(job.parallel.tensor) // job.parallel.tensor


def chunk_rows(job: Job, model: Model) -> int:
    """Rows of logits that exist at once, as `kernels.products.default_chunk`."""
    fitting = CHUNK_BYTES[job.device] // (4 * vocabulary(job, model))
    return max(64, 1 << max(fitting, 1).bit_length() - 1)


# ------------------------------------------------------------------------------------------- one pass


def forward(job: Job, model: Model, stage: int, stream: Stream) -> Work:
    """Without gradients: of the stage's layers, and of the head on the last stage. Of a model beside the actor what it
    adds to the actor's pass."""
    return _pass(job, model, stage, stream, 0, grads=False)


def train(job: Job, model: Model, stage: int, stream: Stream) -> Work:
    """Forward and backward pass of a micro-batch."""
    trained = model.trained_layers or model.architecture.num_layers
    return _pass(job, model, stage, stream, trained, grads=True)


def _pass(job: Job, model: Model, stage: int, stream: Stream, trained: int, *, grads: bool) -> Work:
    tokens = rounded(stream.real, job) if stream.padded is None else stream.padded
    last = stage == job.parallel.pipeline - 1
    counted = stream.counted
    read = -(-max(counted, 1) // job.parts) * job.parts if not counted or job.parts > 1 else counted
    if not grads:
        body = _layers(job, model, stage, tokens, read if last else None, stream.lengths)
        entered = Work() if job.beside(model) else _embedding(job, model, stage, tokens)
        return total((entered, body, _heads(job, model, read, counted) if last else Work()))
    first_trained = model.architecture.num_layers - trained  # the lowest layer that trains, over all stages
    parts = [_embedding(job, model, stage, tokens)]
    recomputed = job.recompute == "full"  # the first pass is without gradients
    kinds = Counter(
        (
            last and number == model.architecture.num_layers - 1,
            number >= first_trained,
            model.architecture.window(number),
            # a frozen embedding gives the first layer an input that no gradient reaches
            number > 0 or recomputed or model.lora is None,
        )
        for number in job.layer_numbers(model, stage)
    )
    for (final, trains, window, given), times in kinds.items():
        sizes = tokens, read if final else None, stream.lengths
        parts.append(layer_forward(job, model, *sizes, window=window, grads=not recomputed) * times)
        # A later stage hands gradients to the stage before also where none of its own layers train.
        if not trains and stage == 0:
            continue
        if recomputed:
            parts.append(layer_forward(job, model, *sizes, window=window, grads=True) * times)
        elif job.recompute == "selective" and adapters.needed(job, model, given=given)["linear_qkv"][1]:
            parts.append(Work(Counter(_attention(job, model, stream.lengths, window))) * times)
        parts.append(layer_backward(job, model, *sizes, window=window, trains=trains, given=given) * times)
    if stage == 0 and trained == model.architecture.num_layers and model.lora is None:
        parts.append(_embedding_backward(job, model, tokens))
    if last:
        parts += [_heads(job, model, read, counted), _heads_backward(job, model, read, counted)]
    return total(parts)


def _layers(
    job: Job, model: Model, stage: int, tokens: int, read: int | None, lengths: Sequence[int], *, attends: bool = True
) -> Work:
    """The layers of a stage over T tokens; `read`: K on the last stage, None on others. `attends`: the last layer's
    attention is computed."""
    windows = [model.architecture.window(number) for number in job.branch(model, stage)]
    final = [] if read is None else [windows.pop()]
    parts = [layer_forward(job, model, tokens, None, lengths, window=window) * times
             for window, times in Counter(windows).items()]  # fmt: skip
    parts += [layer_forward(job, model, tokens, read, lengths if attends else (), window=window) for window in final]
    return total(parts)


# ------------------------------------------------------------------------------------------- one layer


def layer_forward(
    job: Job, model: Model, tokens: int, read: int | None, lengths: Sequence[int], *, window: int | None,
    grads: bool = False,
) -> Work:  # fmt: skip
    """A layer over T tokens, with attention within rows of these `lengths`. `read`: K in a model's last layer.
    `window`: of its attention. `grads`: a backward pass follows."""
    kept = tokens if read is None else read
    operations: Counter = Counter()
    for rows, inner, columns in _linears(job, model, tokens, kept):
        operations[Product(rows, inner, columns, "plain" if grads else "linear")] += 1
    operations += Counter(_attention(job, model, lengths, window))
    cut = (kept,) if _cuts_mlp(model) else ()
    collectives = _collectives(job, model, forward_columns=(tokens, *cut), forward_rows=(kept, *cut))
    if read is not None and job.parts > 1:
        for _ in range(_selections(model)):
            collectives = _add(collectives, "all_gather_into_tensor", _states(job, model, tokens))
    collectives = _joint_norms(job, model, tokens, collectives)
    moved = {"activations": _moved(job, model, tokens, kept)}
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
    input needs a gradient, which all do but the first one's of a model with adapters."""
    kept = tokens if read is None else read
    trains = trains and model.lora is None  # the layer's own weights
    reached = adapters.needed(job, model, given=given)
    operations: Counter = Counter()
    linears = zip(_linears(job, model, tokens, kept), reached.values(), strict=False)
    for (rows, inner, columns), (needs_input, _) in linears:
        operations[Product(rows, columns, inner, "input")] += needs_input
        operations[Product(columns, rows, inner, "weight")] += trains
    if reached["linear_qkv"][1]:
        for attention, times in _attention(job, model, lengths, window).items():
            operations[dataclasses.replace(attention, backward=True)] += times
    collectives: dict = {}
    if job.parallel.tensor > 1:
        columns = [(tokens, reached["linear_qkv"]), *([(kept, reached["linear_fc1"])] if _cuts_mlp(model) else ())]
        for rows, (needs_input, _) in columns:  # of the column-parallel layers' inputs
            if not needs_input:
                continue
            if job.parts > 1:
                if trains:
                    collectives = _add(collectives, "all_gather_into_tensor", _states(job, model, rows))
                collectives = _add(collectives, "reduce_scatter_tensor", _states(job, model, rows))
            else:
                collectives = _add(collectives, "all_reduce", _states(job, model, rows))
        if job.parts > 1:
            # of the row-parallel layers' outputs, and of what the last layer selects
            outputs = reached["linear_proj"][0] + (_cuts_mlp(model) and reached["linear_fc2"][0])
            for _ in range(outputs + (0 if read is None or not given else _selections(model))):
                collectives = _add(collectives, "all_gather_into_tensor", _states(job, model, kept))
        if reached["linear_qkv"][1]:
            collectives = _joint_norms(job, model, tokens, collectives)
    moved = {"activations": 2 * _moved(job, model, tokens, kept)}
    if trains:  # what every micro-batch adds to in the gradients
        moved["gradients"] = 2 * 4 * sum(inner * columns for _, inner, columns in _linears(job, model, 1, 1))
        moved["gradients"] += 2 * 4 * experts.elements(job, model)
    work = Work(+operations, Counter(moved), collectives, calls=CALLS[job.device]["backward"])
    if model.lora is not None:
        work += adapters.backward(job, model, tokens, kept, given=given)
    return work + experts.backward(job, model, kept) if model.architecture.num_experts else work


def _joint_norms(job: Job, model: Model, tokens: int, collectives: dict) -> dict:
    """The sums over all heads of queries' squares, and of keys', which the ranks make together in both directions."""
    if model.architecture.qk_norm_joint and job.parallel.tensor > 1:
        for _ in range(2):
            collectives = _add(collectives, "all_reduce", 4 * tokens)
    return collectives


def _selections(model: Model) -> int:
    """Tensors of which the last layer selects the tokens read: the residual, and the norm that attention and MLP
    share."""
    return 2 if model.architecture.shared_norm else 1


def _cuts_mlp(model: Model) -> bool:
    """Whether tensor parallelism cuts an MLP of a layer: a dense one, or a shared expert."""
    return not model.architecture.num_experts or bool(model.architecture.shared_expert_size)


def _linears(job: Job, model: Model, tokens: int, kept: int) -> list[tuple[int, int, int]]:
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


def _attention(job: Job, model: Model, lengths: Sequence[int], window: int | None) -> dict[Attention, int]:
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


def _moved(job: Job, model: Model, tokens: int, kept: int) -> int:
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


# ------------------------------------------------------------------------------------------- below and above the layers


def _embedding(job: Job, model: Model, stage: int, tokens: int) -> Work:
    if stage:
        return Work()
    states, collectives = _states(job, model, tokens), {}
    if job.parallel.tensor > 1:
        learned = model.architecture.position_embedding == "learned"
        scatters = job.parts > 1 and not learned
        collectives = {("reduce_scatter_tensor" if scatters else "all_reduce", "tensor"): Traffic(states, 1)}
    return Work(memory=Counter({"activations": 2 * states}), collectives=collectives, calls=8)


def _embedding_backward(job: Job, model: Model, tokens: int) -> Work:
    states = _states(job, model, tokens)
    gathers = {("all_gather_into_tensor", "tensor"): Traffic(states, 1)} if job.parts > 1 else {}
    rows = tokens * model.architecture.hidden_size * 4
    return Work(memory=Counter({"activations": states, "gradients": 2 * rows}), collectives=gathers, calls=8)


def _heads(job: Job, model: Model, read: int, counted: int) -> Work:
    """The final norm and the heads of the last stage: log-probs, values or scores."""
    a, tensor = model.architecture, job.parallel.tensor
    work = Work(memory=Counter({"activations": 5 * _states(job, model, read) // job.parts}), calls=10)
    gathered = {}
    if job.parts > 1:
        gathered = {("all_gather_into_tensor", "tensor"): Traffic(_states(job, model, read), 1)}
    if model.scalar:
        collectives = dict(gathered)
        if model.mlp_values and tensor > 1:  # the ranks' parts of the values
            collectives = _add(collectives, "all_reduce", 4 * counted)
        products = Counter(Product(counted, inner, columns) for inner, columns in _value_head(job, model))
        work += Work(products, collectives=collectives, calls=15 + 4 * model.mlp_values)
    if not model.words:
        return work
    columns, collectives = vocabulary(job, model), dict(gathered)
    if tensor > 1:
        collectives = _add(collectives, "all_gather_into_tensor", tensor * counted * 4 * 4)
    moved = {"logits": 2 * 4 * counted * columns}  # maxima; exponentials and their sums
    words = Work(_head_products(job, model, counted), Counter(moved), collectives, calls=CALLS[job.device]["head"])
    work += words * (1 + model.q_heads)
    if model.q_heads:  # of their slow copies the taken tokens' values alone
        collectives = dict(gathered)
        for _ in range(model.q_heads if tensor > 1 else 0):
            collectives = _add(collectives, "all_reduce", 4 * counted)
        moved = {"activations": model.q_heads * counted * a.hidden_size * (4 * job.size(model) + 3 * 4)}
        work += Work(memory=Counter(moved), collectives=collectives, calls=15 * model.q_heads)
    return work


def _value_head(job: Job, model: Model) -> list[tuple[int, int]]:
    """(inputs, outputs) of the layers of a value head on this rank."""
    hidden = model.architecture.hidden_size
    units = 2 * hidden // job.parallel.tensor
    return [(hidden, units), (units, 1)] if model.mlp_values else [(hidden, 1)]


def _head_products(job: Job, model: Model, counted: int) -> Counter:
    found: Counter = Counter()
    step, inner, columns = chunk_rows(job, model), model.architecture.hidden_size, vocabulary(job, model)
    for start in range(0, counted, step):
        found[Product(min(step, counted - start), inner, columns)] += 1
    return found


def trains_words(model: Model) -> bool:
    """Whether the output layer's weight trains: not below adapters, nor tied to an embedding that is frozen."""
    return model.lora is None and not (model.architecture.tie_embeddings and model.trained_layers is not None)


def _heads_backward(job: Job, model: Model, read: int, counted: int) -> Work:
    work = Work(memory=Counter({"activations": 10 * _states(job, model, read) // job.parts}), calls=15)
    if model.scalar:
        products: Counter = Counter()
        for inner, columns in _value_head(job, model):
            products += Counter([Product(counted, columns, inner), Product(columns, counted, inner)])
        collectives = {}
        if model.mlp_values and job.parallel.tensor > 1:  # of its input, to which each rank gives a part
            kind = "reduce_scatter_tensor" if job.parts > 1 else "all_reduce"
            collectives = _add(collectives, kind, _states(job, model, read))
        work += Work(products, collectives=collectives, calls=15 + 8 * model.mlp_values)
    if not model.words:
        return work
    work += _words_backward(job, model, read, counted, trains=trains_words(model))
    return work + _words_backward(job, model, read, counted, trains=True) * model.q_heads


def _words_backward(job: Job, model: Model, read: int, counted: int, *, trains: bool) -> Work:
    """Of the output layer, or a Q head."""
    hidden, columns, operations, logits = model.architecture.hidden_size, vocabulary(job, model), Counter(), 0
    chunks = [product for product, times in _head_products(job, model, counted).items() for _ in range(times)]
    for number, product in enumerate(chunks):
        if number < len(chunks) - 1:
            operations[product] += 1  # its logits are computed again
        operations[Product(product.rows, columns, product.inner, "input")] += 1
        if trains:
            operations[Product(columns, product.rows, product.inner, "weight")] += 1
        logits += 2 * 4 * product.rows * columns
    collectives: dict = {}
    if job.parts > 1:
        states = _states(job, model, read)
        collectives = _add(collectives, "all_gather_into_tensor", states)
        collectives = _add(collectives, "reduce_scatter_tensor", states)
    elif job.parallel.tensor > 1:
        collectives = _add(collectives, "all_reduce", _states(job, model, counted))
    moved = {"logits": logits, "gradients": 2 * 4 * hidden * columns * len(chunks) * trains}
    return Work(operations, Counter(moved), collectives, calls=CALLS[job.device]["head"])


# ------------------------------------------------------------------------------------------- collectives


def _states(job: Job, model: Model, tokens: int) -> int:
    """Bytes of the hidden states of some tokens, all of them."""
    return tokens * model.architecture.hidden_size * job.size(model)


def _collectives(job: Job, model: Model, *, forward_columns: Sequence[int], forward_rows: Sequence[int]) -> dict:
    """Of the column- and row-parallel layers of a forward pass, over so many tokens each."""
    found: dict = {}
    if job.parallel.tensor == 1:
        return found
    if job.parts > 1:
        for tokens in forward_columns:
            found = _add(found, "all_gather_into_tensor", _states(job, model, tokens))
    for tokens in forward_rows:
        kind = "reduce_scatter_tensor" if job.parts > 1 else "all_reduce"
        found = _add(found, kind, _states(job, model, tokens))
    return found


def _add(collectives: dict, kind: str, size: int, group: str = "tensor") -> dict:
    name = kind, group
    return collectives | {name: collectives.get(name, Traffic()) + Traffic(size, 1)}
