"""Bytes of activations: what backward passes keep of each token, and what a layer needs at its fullest moment.

Found by watching what torch allocates on CPU ranks (tests/distributed/test_plan_memory.py). On a GPU the layers are
other kernels, which keep the same tensors.
"""

from __future__ import annotations

from megarlhf.plan import adapters, experts, layer_work, model_work
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
    moments, tied = [], {}
    if last:
        messages = states if stage else 0  # the next input is not there yet
        heads = {"activations": others - messages + kept + 3 * counted_states}
        if model.words:
            chunk = min(counted, model_work.chunk_rows(job, model)) * model_work.vocabulary(job, model)
            # Each head holds its own; in half precision, or capped, the gradient of one has memory of its own.
            own = 2 * chunk if size == 2 else 4 * chunk if a.logit_softcap else 0
            heads["logits"] = 4 * chunk * (1 + model.q_heads) + own
            # What autograd gets for the weight's gradient, which is added to the gradient buffer instead.
            if model.q_heads or model_work.trains_words(model):
                heads["buffers"] = size * a.hidden_size * model_work.vocabulary(job, model)
            # ... and keeps of a tied embedding until the embedding's own is there.
            if a.tie_embeddings and model_work.trains_words(model) and job.parallel.pipeline == 1:
                tied = {"buffers": heads["buffers"]}
        moments.append(heads)
        whole = last_kept(job, model, tokens, counted, recompute="none")
        again = whole - last_kept(job, model, tokens, counted) if job.recompute == "full" else 0
        if job.recompute == "full":  # its output as well
            again += size * counted * hidden
        # What the head keeps is gone by then.
        inside = kept + again - _head_kept(job, model, counted)
        moments.append(tied | {"activations": others + inside + _beside(job, model, counted)})
    if len(trained) > 1 or (trained and not last):
        below = kept - (last_kept(job, model, tokens, counted) + _head_kept(job, model, counted) if last else 0)
        again = one - layer_kept(job, model, tokens) + size * tokens * hidden if job.recompute == "full" else 0
        moments.append(tied | {"activations": others + below + again + _beside(job, model, tokens)})
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
        given = number > 0 or model.lora is None or job.recompute == "full"
        total += last_kept(job, model, tokens, counted) if final else layer_kept(job, model, tokens, given=given)
    if stage == job.parallel.pipeline - 1:
        total += _head_kept(job, model, counted)
    if model.architecture.position_embedding == "rope":
        total += 4 * tokens * model.architecture.kv_channels  # cosines and sines
    return total


def layer_kept(job: Job, model: Model, tokens: int, recompute: str | None = None, *, given: bool = True) -> int:
    """Bytes of a layer for its backward pass: its input, and, unless they are computed again, both norms, the sum after
    attention; queries, keys, values, and what attention makes of them; the MLP's inner states. `given`: whether a
    backward pass reaches the layer's input, see adapters.py."""
    if (recompute or job.recompute) == "full":
        return job.size(model) * tokens * model.architecture.hidden_size // job.parts
    before, behind, context = _kept(job, model, recompute, given)
    # Attention keeps its output, which is the projection's input; computed again, the projection alone keeps it.
    again = (recompute or job.recompute) == "selective" or not adapters.needed(job, model, given=given)["linear_qkv"][1]
    copied = model.lora is not None and model.lora.dropout
    return tokens * (before + behind + context * bool(again or copied))


def last_kept(job: Job, model: Model, tokens: int, kept: int, recompute: str | None = None) -> int:
    """As `layer_kept`, of a model's last layer, whose projection and MLP see the `kept` tokens that the heads read."""
    if (recompute or job.recompute) == "full":
        return job.size(model) * tokens * model.architecture.hidden_size // job.parts
    before, behind, context = _kept(job, model, recompute, True)
    return tokens * before + kept * (behind + context)


def _kept(job: Job, model: Model, recompute: str | None, given: bool) -> tuple[int, int, int]:
    """Bytes a token: up to attention, behind it, and of the projection's input. A linear layer keeps its input where
    its weight trains or an adapter's does."""
    a, size = model.architecture, job.size(model)
    hidden, reached = size * a.hidden_size // job.parts, adapters.needed(job, model, given=given)
    keeps = {linear: model.lora is None or linear in adapters.of(job, model) for linear in reached}
    norm = hidden if a.norms != "after" else 0  # a norm's output, with norms after the input is the linear layer's
    before = given * (hidden + _centred(job, model) * bool(norm)) + norm * keeps["linear_qkv"]
    before += _low(job, model, ("linear_qkv",), given)
    if reached["linear_qkv"][1]:
        before += _attended(job, model, recompute)
    behind = hidden + _inner(job, model, norm * keeps["linear_fc1"], keeps["linear_fc2"])
    behind += _low(job, model, ("linear_proj", "linear_fc1", "linear_fc2"), True)
    behind += _centred(job, model) * bool(norm)
    if a.norms != "before":  # what attention and MLP add to the residual, of which norms are taken
        behind += 2 * (hidden + _centred(job, model))
    return before, behind, size * _queries(job, model) * keeps["linear_proj"]


def _low(job: Job, model: Model, linears: tuple[str, ...], given: bool) -> int:
    """Bytes a token that adapters keep beside the inputs of their layers: what is between A and B; masks of dropout."""
    total = 0
    for adapter in adapters.of(job, model).values():
        if adapter.linear not in linears:
            continue
        total += job.size(model) * adapter.low // (1 if adapter.column else job.parts)
        if model.lora.dropout and given:  # torch has numbers for a mask on a CPU
            inputs = adapter.inputs // (job.parts if adapter.column else 1)
            total += inputs * (job.size(model) if job.device == "cpu" else 1)
    return total


def _centred(job: Job, model: Model) -> int:
    """Bytes a token of a norm centred at zero, which keeps its output before the scale, in float32; in half precision
    its input in float32 too. Transformer Engine's keep neither."""
    a, size = model.architecture, job.size(model)
    if not a.zero_centered_norm or model.lora is not None or (job.device == "cuda" and size == 2):
        return 0
    return (4 if size == 4 else 8) * a.hidden_size // job.parts


def _head_kept(job: Job, model: Model, counted: int) -> int:
    """The last layer's output, and its norm; without sequence parallelism's shards where the head gathers them; a value
    head's units, in float32."""
    units = 4 * 2 * model.architecture.hidden_size // job.parallel.tensor if model.mlp_values else 0
    states = 2 * job.size(model) * model.architecture.hidden_size // job.parts
    return counted * (states + _centred(job, model) + units)


def _queries(job: Job, model: Model) -> int:
    """Elements a token of the input of the projection behind attention."""
    return model.architecture.num_attention_heads * model.architecture.kv_channels // job.parallel.tensor


def _inner(job: Job, model: Model, norm: int, keeps_last: bool) -> int:
    """Bytes a token of the MLP: its input (`norm`), and states before and after the activation. A gate that is not
    silu's keeps both factors (megatron fuses that of silu alone)."""
    a, size = model.architecture, job.size(model)
    if a.num_experts:
        return experts.kept(job, model)
    states = layer_work.fc1_columns(a) + a.ffn_hidden_size * (keeps_last + 2 * _is_plain_gate(model))
    return norm + size * states // job.parallel.tensor


def _is_plain_gate(model: Model) -> bool:
    return model.architecture.gated_mlp and model.architecture.activation != "silu"


def _beside(job: Job, model: Model, tokens: int) -> int:
    """Bytes beside what is kept at the fullest moment of an MLP: the gradient of its output, or the layer's input, and
    the most of what exists in its backward pass and, with adapters, in its forward pass."""
    a, size, tensor = model.architecture, job.size(model), job.parallel.tensor
    hidden = a.hidden_size // job.parts
    if a.num_experts:
        return size * tokens * (hidden + experts.gradients(job, model)) + _block(job, model)
    columns, inner = layer_work.fc1_columns(a) // tensor, a.ffn_hidden_size // tensor
    found = adapters.of(job, model)
    # The gradient of the output takes the place of the output where that was kept.
    freed = inner if model.lora is None or "linear_fc2" in found else 0
    most = size * tokens * (columns + inner - freed) + _block(job, model)
    if model.lora is None:  # what autograd gets for the second weight's gradient, before the output is gone
        most = max(most, size * inner * (tokens + a.hidden_size))
    if "linear_fc1" in found:
        most = max(most, size * tokens * (_added(found["linear_fc1"]) - columns - freed))
    return size * tokens * hidden + most


def _added(adapter: adapters.Adapter) -> int:
    """Elements a token at the end of a linear layer with an adapter: both outputs and their sum, or one's parts."""
    return 3 * adapter.all_outputs + adapter.low


def _attended(job: Job, model: Model, recompute: str | None) -> int:
    """Bytes a token of queries, keys and values, of attention's output, and the logarithm of each row's sum. Computed
    again, attention needs the product that values are a part of, and turned queries and keys."""
    a, tensor, size = model.architecture, job.parallel.tensor, job.size(model)
    queries, keys = (heads * a.kv_channels // tensor for heads in (a.num_attention_heads, a.num_query_groups))
    again, product = (recompute or job.recompute) == "selective", layer_work.qkv_columns(a) // tensor
    normed = 0
    if a.qk_norm:  # the norms' inputs: queries are copied, keys are a part of the product
        normed = size * (queries + (0 if again else product))
        normed += _centred(job, model) * (queries + keys) * job.parts // a.hidden_size
    if a.qk_norm_joint:  # both are copied; norms over several ranks keep their outputs before the scale, in float32
        normed = (queries + keys) * (size if tensor == 1 else 8)
    if again:
        return size * (queries + keys + product) + normed
    output = size * queries + 4 * a.num_attention_heads // tensor
    return size * (queries + 2 * keys) + output + normed


def fleeting(job: Job, model: Model, tokens: int) -> int:
    """What a layer needs at its fullest moment without gradients, in its MLP, or where an adapter's output is added."""
    a, size, found = model.architecture, job.size(model), adapters.of(job, model)
    hidden, rotary = a.hidden_size // job.parts, 2 * a.kv_channels if a.position_embedding == "rope" else 0
    # The model's input, the layer's, the sum after attention, and its norm. A layer of our own order (models/layers.py)
    # holds the first norm as well; without norms before, neither.
    states = 4 * hidden + rotary
    if a.norms != "before" or a.residual_multiplier != 1:
        states += hidden if a.norms != "after" else -hidden
    if a.num_experts:
        return tokens * (size * states + experts.fleeting(job, model))
    factors = 2 * a.ffn_hidden_size * _is_plain_gate(model)
    inner = (layer_work.fc1_columns(a) + a.ffn_hidden_size + factors) // job.parallel.tensor
    most = size * tokens * (states + inner) + _block(job, model) // 2
    for linear, less in (("linear_fc1", 0), ("linear_qkv", hidden)):
        if linear in found:
            most = max(most, size * tokens * (states - less + _added(found[linear])))
    return most


def _block(job: Job, model: Model) -> int:
    """Of the gated activation on a CPU, in a backward pass; half of it in a forward pass."""
    gated = model.architecture.gated_mlp and not _is_plain_gate(model)
    return BLOCK_BYTES if job.device == "cpu" and gated else 0
