"""Bytes that a rank holds in each phase of a step, by kind, at the fullest moment.

Weights, gradients, optimizer state and caches are exact (cluster/residency.py counts the same). Activations are what
the backward pass keeps of each token, and what one layer needs at its fullest.

Legend: T tokens of a micro-batch, H hidden size, F inner size of the MLP, V' vocabulary rows of this rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megarlhf.experience.slot_memory import FREE
from megarlhf.models import mixture
from megarlhf.models.cache import VECTOR
from megarlhf.models.model_config import HEADS, in_top_layers
from megarlhf.plan import activations, adapters, experts, layer_work, model_work, sampling
from megarlhf.plan.job import Job, Model, micro_batches

JOINT_NORMS = ("query_norm.weight", "key_norm.weight")  # of all heads together, cut as the heads are
KINDS = ("weights", "gradients", "optimizer", "activations", "caches", "logits", "buffers", "margin")
MARGIN = {"cpu": 0.0, "cuda": 0.04}  # of a device, lost to the allocator's fragments
CONTEXT = {"cpu": 350 * 2**20, "cuda": 2**30}  # of a process: interpreter and libraries; CUDA context and communicators


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    phases: dict[str, dict[str, int]] = field(default_factory=dict)  # {phase: {kind: bytes}}
    context: int = 0  # what a process takes that holds nothing

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def fullest(self) -> str:
        """The phase with the most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """With the context."""
        return self.total(self.fullest) + self.context

    @property
    def largest(self) -> tuple[str, int]:
        """The largest kind at the fullest moment."""
        kinds = self.phases[self.fullest]
        kind = max(kinds, key=lambda kind: kinds[kind])
        return kind, kinds[kind]


def rank(job: Job, stage: int) -> Memory:
    """Of one rank of a pipeline stage."""
    phases = {}
    for phase in ("sample", "score", "evaluate", "learn", "save") if job.online else ("step", "save"):
        phases[phase] = {kind: size for kind, size in _held(job, stage, phase).items() if size}
    return Memory(phases, CONTEXT[job.device])


def with_slots(job: Job, device_bytes: int) -> Job:
    """The job with as many slots of the sampler as fit beside the rest, where the configuration leaves that to the
    sampler: on a GPU it takes 0.9 of what is free (experience/slot_memory.py), for no more rows than there are."""
    if not job.online or job.device == "cpu" or job.shape.slots is not None:
        return job
    free, slot = math.inf, 1
    for stage in range(job.parallel.pipeline):
        one = dataclasses.replace(job, shape=dataclasses.replace(job.shape, slots=job.parts))
        held = _held(one, stage, "sample")
        rest = sum(size for kind, size in held.items() if kind not in ("caches", "logits"))
        free = min(free, FREE * (device_bytes - rest - CONTEXT[job.device]))
        actor = job.models[0]
        slot = max(slot, job.parallel.pipeline * cache_bytes(job, actor) + 8 * model_work.vocabulary(job, actor))
    slots = max(job.parts, int(free / slot) // job.parts * job.parts)
    return dataclasses.replace(job, shape=dataclasses.replace(job.shape, slots=slots))


def fullest(job: Job) -> Memory:
    """Of the rank that holds most."""
    return max((rank(job, stage) for stage in range(job.parallel.pipeline)), key=lambda memory: memory.peak)


def refusal(held: Memory, capacity: int, owner: str) -> str | None:
    """Why a device of so many bytes, `owner`'s, cannot hold this, with the arithmetic in one line; None if it can. The
    margin is not counted, because it is not certain."""
    found = held.phases[held.fullest]
    needed = held.peak - found.get("margin", 0)
    if needed <= capacity:
        return None
    parts = sorted(((size, kind) for kind, size in found.items() if kind != "margin"), reverse=True)
    terms = " + ".join(f"{size / 1e9:,.1f} {kind}" for size, kind in parts if size >= 5e7)
    return (
        f"{held.fullest} needs {needed / 1e9:,.1f} GB a rank ({terms} + {held.context / 1e9:.1f} process), and {owner} "
        f"has {capacity / 1e9:,.1f}"
    )


def _held(job: Job, stage: int, phase: str) -> dict[str, int]:
    """{kind: bytes} in a phase, the moments of its runs taken together at the largest."""
    held = dict.fromkeys(KINDS, 0)
    learns = phase in ("learn", "step")
    # One model after the other is updated or run; what it brings to the device counts while it is the largest.
    moments = []
    for active in job.models:
        if not _takes_part(job, active, phase):
            continue
        here = optimizer = 0
        for model in job.models:
            if not model.weights_on_host or model is active:
                here += weights(job, model, stage)
            used = model is active and phase in ("learn", "step", "save")
            if model.trains and (used or not model.optimizer_on_host):
                optimizer += optimizer_bytes(job, model, stage)
        moment = {"weights": here, "optimizer": optimizer}
        updates = learns and active.trains
        if updates:
            moment["gradients"] = max(4 * buffer_elements(job, model, stage) for model in job.trained)
        if phase != "save":
            moment |= _computed(job, active, stage, phase, updates)
        moments.append(moment)
    for kind, size in max(moments, key=lambda moment: sum(moment.values()), default={}).items():
        held[kind] += size
    if (learns and job.device == "cpu") or (phase != "sample" and job.online and job.device == "cpu"):
        # a CPU rank keeps its gradient buffer
        held["gradients"] = max((4 * buffer_elements(job, model, stage) for model in job.trained), default=0)
    held["buffers"] += 17 * job.rows_here * job.shape.length  # tokens, segments and masks of a batch
    held["buffers"] += job.parallel.pipeline * experts.recorded(job, job.models[0], job.rows_here * job.shape.length)
    held["margin"] = int(MARGIN[job.device] * sum(held.values()))
    return held


def _takes_part(job: Job, model: Model, phase: str) -> bool:
    if phase == "sample":
        return model is job.models[0]
    if phase == "score":
        return model.role.startswith("reward ") or model is job.models[0]
    if phase == "evaluate":
        return not model.role.startswith("reward ") and model.role != "average"
    return model.trains or (phase == "step" and not job.online)


def _computed(job: Job, model: Model, stage: int, phase: str, updates: bool) -> dict[str, int]:
    """Activations, caches and logits while a model runs."""
    last = stage == job.parallel.pipeline - 1
    columns = model_work.vocabulary(job, model)
    if phase == "sample":
        slots = sampling.slots(job)
        logits = 2 * 4 * slots * columns if last else 0
        return {"caches": cache_bytes(job, model) * slots * job.parallel.pipeline, "logits": logits,
                "activations": activations.fleeting(job, model, min(1024 if job.device == "cpu" else 16384,
                                                         job.shape.rows * job.shape.prompt))}  # fmt: skip
    rows = -(-job.rows_here // job.shape.minibatches) if updates else job.rows_here
    largest = max(micro_batches(rows, job.shape.length, job.shape.micro_batch_tokens))
    tokens = model_work.rounded(largest * job.shape.length, job)
    counted = largest * job.shape.counted
    if updates:
        return activations.updating(job, model, stage, tokens, counted)
    one = job.size(model) * tokens * model.architecture.hidden_size // job.parts
    logits = 4 * min(counted, model_work.chunk_rows(job, model)) * columns
    # A stage still holds what it has sent; the one behind it has no embedding, which megatron's layers hold beside.
    plain = model.architecture.norms == "before" and model.architecture.residual_multiplier == 1
    moment = {"activations": one * ((not last) - (stage > 0 and plain)), "logits": 0}
    if job.beside(model):
        branch = job.branch(model, stage)
        whole = len(branch) - last  # layers that see all tokens
        wide = model.trained_layers > model.architecture.num_layers // (job.parallel.pipeline * job.parallel.chunks)
        moment["activations"] += one * wide * ((not last) + (stage > 0))  # messages of both
        moment["activations"] += one * (whole > 1)  # the trunk's output, which the policy's layers read afterwards
        if whole > 0:  # policy's layers run while the reference's last state exists
            moment["activations"] += one * counted // tokens if last else one
            moment["logits"] = logits if last and job.device == "cpu" else 0
    elif job.device == "cpu" and last and model.words:
        moment["logits"] = logits  # a CPU keeps the memory that the head gave back (cpu/memory.py)
    moment["activations"] += activations.fleeting(job, model, tokens)
    moments = [moment]
    if last and model.words:
        states = tokens * model.architecture.hidden_size // job.parts + 2 * counted * model.architecture.hidden_size
        block = activations.BLOCK_BYTES if job.device == "cpu" else 0  # of the row kernels
        moments.append({"activations": job.size(model) * states, "logits": logits + block})
    return max(moments, key=lambda moment: sum(moment.values()))


def cache_bytes(job: Job, model: Model) -> int:
    """Keys and values of one slot, and the experts of its tokens where they are recorded."""
    a, columns = model.architecture, -(-job.shape.length // VECTOR) * VECTOR
    channels = 2 * job.layers(model) * (a.num_query_groups // job.parallel.tensor) * a.kv_channels
    return channels * columns * job.size(model) + experts.recorded(job, model, columns)


# ------------------------------------------------------------------------------------------- parameters


def parameters(job: Job, model: Model, stage: int) -> Iterator[tuple[str, int]]:
    """(global name, elements on this rank) of the weights of a stage; adapters are not among them."""
    a, tensor = model.architecture, job.parallel.tensor
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    here = set(job.layer_numbers(model, stage))
    for name, shape in a.shapes().items():
        if name.startswith("decoder.layers."):
            if int(name.split(".")[2]) not in here:
                continue
        elif name.startswith("embedding.position"):
            if not first:
                continue
        elif name == "embedding.word_embeddings.weight":
            # a tied one has a copy on the last stage
            if not (first or (last and a.tie_embeddings and model.words)):
                continue
        elif not last or (name == "output_layer.weight" and not model.words):
            continue
        elements = math.prod(shape)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            elements = model_work.vocabulary(job, model) * a.hidden_size
        elif mixture.is_expert(name):  # whole ones; the first rank's stand for all
            if int(name.split(".")[6]) >= experts.here(job, model):
                continue
        elif _is_split(name):
            elements //= tensor
        yield name, elements
    if last and model.scalar:
        units = a.hidden_size
        if model.mlp_values:
            units = 2 * a.hidden_size // tensor
            yield "value_head.hidden_weight", units * a.hidden_size
            yield "value_head.hidden_bias", units
        yield "value_head.weight", units
        yield "value_head.bias", 1
    if last and model.q_heads:
        for name in ("first", "second"):
            yield f"q_heads.{name}", model_work.vocabulary(job, model) * a.hidden_size


def _is_split(name: str) -> bool:
    """Whether tensor-parallel ranks share a weight of a layer."""
    column = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", *JOINT_NORMS)
    return name.endswith((*column, "linear_proj.weight", "linear_fc2.weight"))


def elements(job: Job, model: Model, stage: int) -> int:
    """Parameters on this rank."""
    return _sums(job, model, stage).all


def _trains(model: Model, name: str) -> bool:
    if not model.trains:
        return False
    if model.lora is not None:
        return name.startswith(HEADS)
    if mixture.ROUTER in name and not model.trains_router:
        return False
    return model.trained_layers is None or in_top_layers(model.architecture, model.trained_layers, name)


def trained_elements(job: Job, model: Model, stage: int) -> int:
    """Parameters on this rank that an update changes, adapters included."""
    return _sums(job, model, stage).trained + _adapters(job, model)


def _adapters(job: Job, model: Model) -> int:
    """Elements of a stage's adapters."""
    return job.layers(model) * sum(adapters.elements(job, model))


def buffer_elements(job: Job, model: Model, stage: int) -> int:
    """Of the gradient buffers."""
    return sum(buffers(job, model, stage).values())


def buffers(job: Job, model: Model, stage: int) -> dict[str, int]:
    """{group that reduces it: elements of a gradient buffer}, of the experts and of all else: megatron aligns
    parameters, and pads the whole so that all ranks get equal parts."""
    sums = _sums(job, model, stage)
    if not job.parallel.distributed_optimizer:
        return {"data": sums.trained - sums.experts + _adapters(job, model), "expert_data": sums.experts}
    own = job.layers(model) * sum(-(-count // 64) * 64 for count in adapters.elements(job, model))
    aligned = {"data": sums.aligned - sums.aligned_experts + own, "expert_data": sums.aligned_experts}
    multiples = {group: math.lcm(job.group_size(group), 128) for group in aligned}
    return {group: -(-count // multiples[group]) * multiples[group] for group, count in aligned.items()}


def shares(job: Job, model: Model, stage: int) -> int:
    """Trained parameters whose update this rank computes."""
    count, experts_here = trained_elements(job, model, stage), _sums(job, model, stage).experts
    if not job.parallel.distributed_optimizer:
        return count
    return -(-(count - experts_here) // job.data) - (-experts_here // job.expert_data)


def sequence_elements(job: Job, model: Model, stage: int) -> int:
    """Trained parameters of which each tensor-parallel rank sees a part of the sequence alone: norms, routers, shared
    experts' gates, biases that are added to its shard, and the whole matrix of each adapter."""
    return _sums(job, model, stage).sequence + job.layers(model) * adapters.sequence_elements(job, model)


def head_norm_elements(job: Job, model: Model, stage: int) -> int:
    """Trained parameters of norms of single heads, whose gradients are summed over tensor-parallel ranks in any case:
    each rank has other heads."""
    return _sums(job, model, stage).head_norms


@dataclass(frozen=True)
class _Sums:
    """Elements on a rank, without adapters."""

    all: int
    trained: int
    aligned: int  # trained ones, as the gradient buffer places them
    sequence: int  # see `sequence_elements`
    head_norms: int  # see `head_norm_elements`
    experts: int  # trained ones, of experts
    aligned_experts: int


def _sums(job: Job, model: Model, stage: int) -> _Sums:
    # A search over layouts asks for the same again and again.
    key = (model.architecture, model.head, model.mlp_values, model.trains, model.trained_layers, model.lora,
           model.trains_router, job.parallel, stage)  # fmt: skip
    if key not in _found:
        if len(_found) > 10_000:
            _found.clear()
        listed = [(name, count, _trains(model, name)) for name, count in parameters(job, model, stage)]
        trained = [(name, count) for name, count, trains in listed if trains]
        own = [count for name, count in trained if mixture.is_expert(name)]
        _found[key] = _Sums(
            sum(count for _, count, _ in listed),
            sum(count for _, count in trained),
            sum(-(-count // 64) * 64 for _, count in trained),
            sum(count for name, count in trained
                if ("norm" in name and not name.endswith(JOINT_NORMS)) or mixture.ROUTER in name
                or name.endswith(("linear_proj.bias", "linear_fc2.bias", "gate_weight"))),
            sum(count for name, count in trained if "q_layernorm" in name or "k_layernorm" in name),
            sum(own),
            sum(-(-count // 64) * 64 for count in own),
        )  # fmt: skip
    return _found[key]


_found: dict[tuple, _Sums] = {}


def weights(job: Job, model: Model, stage: int) -> int:
    """Bytes of a model's own weights on this rank."""
    if model.hydra:
        return job.size(model) * trained_elements(job, dataclasses.replace(model, trains=True), stage)
    if model.borrows:
        return job.size(model) * trained_elements(job, model, stage)
    found = job.size(model) * elements(job, model, stage)
    if model.trains and job.parallel.distributed_optimizer:  # those that train are in a buffer, as their gradients are
        found += job.size(model) * (buffer_elements(job, model, stage) - trained_elements(job, model, stage))
    if model.scalar and stage == job.parallel.pipeline - 1:
        found += 8  # gain and bias of rewards
        # the Q heads' slow copies, in fp32
        found += model.q_heads * 4 * model_work.vocabulary(job, model) * model.architecture.hidden_size
    if model.lora is not None:
        if model.lora.quantization == "nf4":  # 4 bits and a scale of 64 weights instead of the linear layers' 16
            linear = sum(rows * columns for _, rows, columns in layer_work.linear_layers(job, model, 1, 1))
            found -= int(linear * job.layers(model) * (job.size(model) - 0.5 - 4 / 64))
        found += job.size(model) * _adapters(job, model)
    return found


def optimizer_bytes(job: Job, model: Model, stage: int) -> int:
    """Adam's moments, and in half precision the fp32 weights."""
    if not model.trains:
        return 0
    return (8 if job.size(model) == 4 else 12) * shares(job, model, stage)
