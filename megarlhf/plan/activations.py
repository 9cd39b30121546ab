"""Bytes of activations: what backward passes keep of each token, and what a layer needs at its fullest moment.

Found by watching what torch allocates on CPU ranks (tests/distributed/test_plan_memory.py). On a GPU the layers are
other kernels, which keep the same tensors.
"""

from __future__ import annotations

from megarlhf.plan import experts, layer_work, model_work
from megarlhf.plan.job import Job, Model

BLOCK_BYTES = 2**19  # of a CPU's operations, which go through memory in blocks (cpu/operations.py)


def updating(job: Job, model: Model, stage: int, tokens: int, counted: int) -> dict[str, int]:
    """The fullest of four moments: in the first backward pass in the heads, in the MLP of the last layer, and in that
    of a layer below it, which sees all tokens; in the forward pass in a layer that has no backward pass."""
    a, size = model.architecture, job.size(model)
    last = stage == job.parallel.pipeline - 1
    hidden, counted_states = a.hidden_size // job.parts, size * counted * a.hidden_size
    kept = micro_batch_kept(job, model, stage, tokens, counted)
    others = kept * (in_flight(job, stage) - 1)  # of the micro-batches whose backward pass comes later
    # Messages: outputs stay until their gradients are there, which are received; or the next input, and a gradient.
    states = size * tokens * hidden
    others += states * (in_flight(job, stage) + 1 if not last else 2 if stage else 0)
    trained = [number for number in job.layer_numbers(model, stage) if job.reached(model, number)]
    one = layer_kept(job, model, tokens, recompute="none")
    gradient = hidden + _gradient(job, model)
    block = _block(job, model)
    moments = []
    if last:
        messages = states if stage else 0  # the next input is not there yet
        heads = {"activations": others - messages + kept + 3 * counted_states}
        if model.words:
            chunk = min(counted, model_work.chunk_rows(job, model)) * model_work.vocabulary(job, model)
            # Each head holds its own; in half precision the gradient of one has memory of its own.
            heads["logits"] = 4 * chunk * (1 + model.q_heads) + (0 if size == 4 else 2 * chunk)
            # What autograd gets for the weight's gradient, which is added to the gradient buffer instead.
            if model.q_heads or model_work.trains_words(model):
                heads["buffers"] = size * a.hidden_size * model_work.vocabulary(job, model)
        moments.append(heads)
        whole = last_kept(job, model, tokens, counted, recompute="none")
        again = whole - last_kept(job, model, tokens, counted) if job.recompute == "full" else 0
        moments.append({"activations": others + kept + again + size * counted * gradient + block})
    if len(trained) > 1 or (trained and not last):
        below = kept - (last_kept(job, model, tokens, counted) + _head_kept(job, model, counted) if last else 0)
        again = one - layer_kept(job, model, tokens) + size * tokens * hidden if job.recompute == "full" else 0
        moments.append({"activations": others + below + again + size * tokens * gradient + block})
    if len(trained) < len(job.layer_numbers(model, stage)):
        # The micro-batch before holds the input of its lowest recomputed layer, and the gradient of that, until this
        # one's loss takes its place.
        before = 2 * states if job.recompute == "full" and trained else 0
        moments.append({"activations": others + before + fleeting(job, model, tokens)})
    if job.device == "cpu" and last and model.words:  # which keeps the memory of a chunk (cpu/memory.py)
        moments = [{"logits": 4 * chunk if size == 4 else 6 * chunk} | moment for moment in moments]
    return max(moments, key=lambda moment: sum(moment.values()), default={})


def in_flight(job: Job, stage: int) -> int:
    """Micro-batches whose backward pass has not run, at the most: 1F1B holds as many as there are stages from this one
    to the last. The interleaved schedule holds more, of a part of the layers each."""
    stages, chunks = job.parallel.pipeline, job.parallel.chunks
    if chunks == 1:
        return stages - stage
    return -(-(2 * (stages - stage - 1) + (chunks - 1) * stages + 1) // chunks)


def micro_batch_kept(job: Job, model: Model, stage: int, tokens: int, counted: int) -> int:
    """Bytes that a stage keeps of one micro-batch for its backward pass."""
    total = 0
    for number in job.layer_numbers(model, stage):
        if not job.reached(model, number):
            continue
        final = number == model.architecture.num_layers - 1
        total += last_kept(job, model, tokens, counted) if final else layer_kept(job, model, tokens)
    if stage == job.parallel.pipeline - 1:
        total += _head_kept(job, model, counted)
    if model.architecture.position_embedding == "rope":
        total += 4 * tokens * model.architecture.kv_channels  # cosines and sines
    return total


def layer_kept(job: Job, model: Model, tokens: int, recompute: str | None = None) -> int:
    """Bytes of a layer for its backward pass: its input, and, unless they are computed again, both norms, the sum after
    attention; queries, keys, values, and what attention makes of them; the MLP's inner states."""
    a, size = model.architecture, job.size(model)
    hidden = a.hidden_size // job.parts
    if (recompute or job.recompute) == "full":
        return size * tokens * hidden
    states = 3 * hidden + _queries(job, model)
    return tokens * (size * states + _inner(job, model) + _attended(job, model, recompute))


def last_kept(job: Job, model: Model, tokens: int, kept: int, recompute: str | None = None) -> int:
    """As `layer_kept`, of a model's last layer, whose projection and MLP see the `kept` tokens that the heads read."""
    a, size = model.architecture, job.size(model)
    hidden = a.hidden_size // job.parts
    if (recompute or job.recompute) == "full":
        return size * tokens * hidden
    before = tokens * (size * 2 * hidden + _attended(job, model, recompute))
    return before + kept * (size * (hidden + _queries(job, model)) + _inner(job, model))


def _head_kept(job: Job, model: Model, counted: int) -> int:
    """The last layer's output, and its norm; without sequence parallelism's shards where the head gathers them."""
    return 2 * job.size(model) * counted * model.architecture.hidden_size // job.parts


def _queries(job: Job, model: Model) -> int:
    """Elements a token of the input of the projection behind attention."""
    return model.architecture.num_attention_heads * model.architecture.kv_channels // job.parallel.tensor


def _inner(job: Job, model: Model) -> int:
    """Bytes a token of the MLP: its input, and states before and after the activation."""
    a, size, hidden = model.architecture, job.size(model), model.architecture.hidden_size // job.parts
    if a.num_experts:
        return experts.kept(job, model)
    return size * (hidden + (layer_work.fc1_columns(a) + a.ffn_hidden_size) // job.parallel.tensor)


def _gradient(job: Job, model: Model) -> int:
    """Elements a token of the gradients that exist at once in the MLP, whose output is gone by then."""
    if model.architecture.num_experts:
        return experts.gradients(job, model)
    return layer_work.fc1_columns(model.architecture) // job.parallel.tensor


def _attended(job: Job, model: Model, recompute: str | None) -> int:
    """Bytes a token of queries, keys and values, and the logarithm of each row's sum. Computed again, attention needs
    the product that values are a part of, and turned queries and keys. Its output is the projection's input."""
    a, tensor, size = model.architecture, job.parallel.tensor, job.size(model)
    queries, keys = (heads * a.kv_channels // tensor for heads in (a.num_attention_heads, a.num_query_groups))
    if (recompute or job.recompute) == "selective":
        return size * (queries + keys + layer_work.qkv_columns(a) // tensor)
    if a.position_embedding == "learned":  # queries and keys are views of the product; values are copied
        return size * (keys + layer_work.qkv_columns(a) // tensor) + 4 * a.num_attention_heads // tensor
    return size * (queries + 2 * keys) + 4 * a.num_attention_heads // tensor


def fleeting(job: Job, model: Model, tokens: int) -> int:
    """What a layer needs at its fullest moment without gradients, in its MLP."""
    a = model.architecture
    rotary = 2 * a.kv_channels if a.position_embedding == "rope" else 0
    states = 4 * a.hidden_size // job.parts + rotary
    if a.num_experts:
        return tokens * (job.size(model) * states + experts.fleeting(job, model))
    inner = (layer_work.fc1_columns(a) + a.ffn_hidden_size) // job.parallel.tensor
    return job.size(model) * tokens * (states + inner) + _block(job, model) // 2


def _block(job: Job, model: Model) -> int:
    """Of the gated activation on a CPU, in a backward pass; half of it in a forward pass."""
    return BLOCK_BYTES if job.device == "cpu" and model.architecture.gated_mlp else 0
