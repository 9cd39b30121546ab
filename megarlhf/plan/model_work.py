"""One pass of a model over one stream of tokens on one rank: forward, and backward.

It follows models/gpt.py, models/layers.py and kernels/linear.py: the last layer computes projection and MLP of the
tokens that a head reads alone, the head computes those in chunks, and a backward pass computes the logits of all chunks
but the last again.

Legend: T tokens, K <= T tokens that the last layer hands on, N <= K counted tokens, H hidden size, V' vocabulary rows
of this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.kernels.products import CHUNK_BYTES
from megarlhf.plan import adapters, layer_work
from megarlhf.plan.job import Job, Model
from megarlhf.plan.work import Product, Traffic, Work, total


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
        body = layers(job, model, stage, tokens, read if last else None, stream.lengths)
        entered = Work() if job.beside(model) else embedding(job, model, stage, tokens)
        return total((entered, body, _heads(job, model, read, counted) if last else Work()))
    first_trained = model.architecture.num_layers - trained  # the lowest layer that trains, over all stages
    in_chunk = model.architecture.num_layers // (job.parallel.pipeline * job.parallel.chunks)
    trains_embedding = model.trained_layers is None and model.lora is None
    parts = [embedding(job, model, stage, tokens)]
    recomputed = job.recompute == "full"  # the first pass is without gradients
    kinds = Counter(
        (
            last and number == model.architecture.num_layers - 1,
            number >= first_trained,
            job.reached(model, number),
            model.architecture.window(number),
            # No gradient reaches the input of the lowest layer that trains, unless it is received or computed again.
            number > first_trained or number >= in_chunk or recomputed or trains_embedding,
        )
        for number in job.layer_numbers(model, stage)
    )
    for (final, trains, reached, window, given), times in kinds.items():
        sizes = tokens, read if final else None, stream.lengths
        parts.append(layer_work.layer_forward(job, model, *sizes, window=window, grads=not recomputed) * times)
        if not reached:
            continue
        if recomputed:
            parts.append(layer_work.layer_forward(job, model, *sizes, window=window, grads=True) * times)
        elif job.recompute == "selective" and adapters.needed(job, model, given=given)["linear_qkv"][1]:
            parts.append(Work(Counter(layer_work.attentions(job, model, stream.lengths, window))) * times)
        parts.append(layer_work.layer_backward(job, model, *sizes, window=window, trains=trains, given=given) * times)
    if stage == 0 and trains_embedding:
        parts.append(_embedding_backward(job, model, tokens))
    if last:
        parts += [_heads(job, model, read, counted), _heads_backward(job, model, read, counted)]
    return total(parts)


def layers(
    job: Job, model: Model, stage: int, tokens: int, read: int | None, lengths: Sequence[int], *, attends: bool = True
) -> Work:
    """The layers of a stage over T tokens; `read`: K on the last stage, None on others. `attends`: the last layer's
    attention is computed."""
    windows = [model.architecture.window(number) for number in job.branch(model, stage)]
    final = [] if read is None else [windows.pop()]
    parts = [layer_work.layer_forward(job, model, tokens, None, lengths, window=window) * times
             for window, times in Counter(windows).items()]  # fmt: skip
    parts += [
        layer_work.layer_forward(job, model, tokens, read, lengths if attends else (), window=window)
        for window in final
    ]
    return total(parts)


# ------------------------------------------------------------------------------------------- below and above the layers


def embedding(job: Job, model: Model, stage: int, tokens: int) -> Work:
    if stage:
        return Work()
    states, collectives = layer_work.states(job, model, tokens), {}
    if job.parallel.tensor > 1:
        learned = model.architecture.position_embedding == "learned"
        scatters = job.parts > 1 and not learned
        collectives = {("reduce_scatter_tensor" if scatters else "all_reduce", "tensor"): Traffic(states, 1)}
    return Work(memory=Counter({"activations": 2 * states}), collectives=collectives, calls=8)


def _embedding_backward(job: Job, model: Model, tokens: int) -> Work:
    states = layer_work.states(job, model, tokens)
    gathers = {("all_gather_into_tensor", "tensor"): Traffic(states, 1)} if job.parts > 1 else {}
    rows = tokens * model.architecture.hidden_size * 4
    return Work(memory=Counter({"activations": states, "gradients": 2 * rows}), collectives=gathers, calls=8)


def _heads(job: Job, model: Model, read: int, counted: int) -> Work:
    """The final norm and the heads of the last stage: log-probs, values or scores."""
    a, tensor = model.architecture, job.parallel.tensor
    work = Work(memory=Counter({"activations": 5 * layer_work.states(job, model, read) // job.parts}), calls=10)
    gathered = {}
    if job.parts > 1:
        gathered = {("all_gather_into_tensor", "tensor"): Traffic(layer_work.states(job, model, read), 1)}
    if model.scalar:
        collectives = dict(gathered)
        if model.mlp_values and tensor > 1:  # the ranks' parts of the values
            collectives = layer_work.add(collectives, "all_reduce", 4 * counted)
        products = Counter(Product(counted, inner, columns) for inner, columns in _value_head(job, model))
        work += Work(products, collectives=collectives, calls=15 + 4 * model.mlp_values)
    if not model.words:
        return work
    columns, collectives = vocabulary(job, model), dict(gathered)
    if tensor > 1:
        collectives = layer_work.add(collectives, "all_gather_into_tensor", tensor * counted * 4 * 4)
    moved = {"logits": 2 * 4 * counted * columns}  # maxima; exponentials and their sums
    words = Work(
        _head_products(job, model, counted), Counter(moved), collectives, calls=layer_work.CALLS[job.device]["head"]
    )
    work += words * (1 + model.q_heads)
    if model.q_heads:  # of their slow copies the taken tokens' values alone
        collectives = dict(gathered)
        for _ in range(model.q_heads if tensor > 1 else 0):
            collectives = layer_work.add(collectives, "all_reduce", 4 * counted)
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
    work = Work(memory=Counter({"activations": 10 * layer_work.states(job, model, read) // job.parts}), calls=15)
    if model.scalar:
        products: Counter = Counter()
        for inner, columns in _value_head(job, model):
            products += Counter([Product(counted, columns, inner), Product(columns, counted, inner)])
        collectives = {}
        if model.mlp_values and job.parallel.tensor > 1:  # of its input, to which each rank gives a part
            kind = "reduce_scatter_tensor" if job.parts > 1 else "all_reduce"
            collectives = layer_work.add(collectives, kind, layer_work.states(job, model, read))
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
        states = layer_work.states(job, model, read)
        collectives = layer_work.add(collectives, "all_gather_into_tensor", states)
        collectives = layer_work.add(collectives, "reduce_scatter_tensor", states)
    elif job.parallel.tensor > 1:
        collectives = layer_work.add(collectives, "all_reduce", layer_work.states(job, model, counted))
    moved = {"logits": logits, "gradients": 2 * 4 * hidden * columns * len(chunks) * trains}
    return Work(operations, Counter(moved), collectives, calls=layer_work.CALLS[job.device]["head"])
