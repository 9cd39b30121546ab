"""megarlhf/plan/ against real ranks: FLOPs as torch's counter has them, and bytes of every collective and message."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from megarlhf.batch import Prompts, Sequences
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.build import HEADS, build
from megarlhf.models.hydra import Hydra
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.model_config import LoraConfig
from megarlhf.models.spec import Architecture
from megarlhf.plan import model_work, phases, sampling
from megarlhf.plan.job import Job, Model, Shape
from megarlhf.plan.work import Traffic, Work, total
from tests import traffic
from tests.distributed.layouts import ADAM, FALCON, GEMMA, GEMMA2, GPT2, LLAMA, NEOX, OLMO2, examples, layout
from tests.distributed.test_hydra_cost import COUNTED as FORWARD

ROWS, P, R = 8, 10, 6  # of the global batch
COUNTED = FORWARD | {  # and what its table leaves out of a backward pass
    torch.ops.aten.addmm_: lambda total, a, b, *_, out_shape=None, **__: 2 * a[0] * a[1] * b[1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *_, out_shape=None, **__: sdpa_backward_flop_count(grad, query, key, value)
    ),
}
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX, "falcon": FALCON, "gemma": GEMMA}
FAMILIES["window"] = dataclasses.replace(LLAMA, family="mistral", sliding_window=7, full_attention_layers=(1, 3))
FAMILIES |= {"gemma2": GEMMA2, "olmo2": OLMO2, "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True)}
FAMILIES["mixtral"] = Architecture(
    "mixtral", num_layers=4, hidden_size=64, ffn_hidden_size=48, num_attention_heads=8, num_query_groups=4,
    vocab_size=503, max_position_embeddings=64, num_experts=4, experts_per_token=2, init_std=0.1,
)  # fmt: skip
FAMILIES["qwen2_moe"] = dataclasses.replace(
    FAMILIES["mixtral"], family="qwen2_moe", num_experts=8, experts_per_token=3, shared_expert_size=40, qkv_bias=True
)
GROUPS = {"tensor_model_parallel": "tensor", "data_parallel": "data", "data_parallel_group_with_cp": "data",
          "pipeline_model_parallel": "pipeline", "embedding": "embedding",
          "expert_model_parallel": "expert", "expert_tensor_and_model_parallel": "expert",
          "expert_data_parallel": "expert_data"}  # fmt: skip
WIDTH = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "float64": 8}


def all_outputs(outputs, rows):
    """Their sum, as a loss that reads every head."""
    return (sum(outputs.values()) * rows.mask).sum(), rows.mask.sum(), {}


def job_for(role: str, family: str, sizes: dict, world: int, *, tokens: int, **more) -> Job:
    trained, samples = more.pop("trained_layers", None), more.pop("samples", 1)
    model = Model(
        role, FAMILIES[family], HEADS[role], trains=True, trained_layers=trained, lora=more.pop("lora", None),
        mlp_values=more.pop("mlp", False),
        trains_router=more.pop("trains_router", True), replays=more.pop("replays", False),
    )  # fmt: skip
    others = ()
    if more.pop("hydra", False):
        others = (Model("reference", FAMILIES[family], "logprobs", trained_layers=trained, borrows=True),)
    shape = Shape(ROWS, P + R, R, tokens, samples, slots=2)
    return Job("test", (model, *others), shape, ParallelConfig(**sizes), world, "fp32", device="cpu", **more)


class Whole:
    """In the place of torch's tracker, which counts FLOPs by module and stumbles over views of received states."""

    parents = frozenset({"Global"})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def found(work) -> tuple[int, dict, Traffic]:
    """(FLOPs, {(collective, group): Traffic}, sent messages) of a call on this rank."""
    counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
    counter.mod_tracker = Whole()
    with traffic.recorded() as log, counter:
        work()
    collectives, sent = {}, Traffic()
    for call in (entry for entry in log if isinstance(entry, traffic.Call)):
        kind, shapes = (call.own or call.what).split(" ", 1)
        first = re.match(r"\[([\d, ]*)\]", shapes)[1]  # what a gather makes, or a reduction's operand
        if call.kind == "reduce_scatter_tensor":
            first = re.search(r"<- \[([\d, ]*)\]", shapes)[1]
        count = 1
        for size in filter(None, first.split(",")):
            count *= int(size)
        if call.kind == "send":
            sent += Traffic(count * WIDTH[kind], 1)
        elif call.kind != "receive" and not is_control(call.kind, kind, count):
            name = call.kind, GROUPS[re.search(r"\((\w+)\)", call.group)[1]]
            collectives[name] = collectives.get(name, Traffic()) + Traffic(count * WIDTH[kind], 1)
    return counter.get_total_flops(), collectives, sent


def is_control(name: str, kind: str, count: int) -> bool:
    """Counts, norms, metrics and Python objects, which the model leaves out: some bytes an update."""
    objects = kind == "uint8" and name != "all_gather_into_tensor"  # which gathers the records of experts
    counts = kind == "int64" and name == "all_reduce"
    return count == 1 or objects or counts or kind == "float64" or name == "all_gather"


def averaged(flops: int, collectives: dict) -> tuple[float, dict]:
    """FLOPs, and what goes to experts and comes back, as means over the ranks that share the experts: which of them a
    token goes to is chance."""
    group, sent = parallel_state.get_expert_model_parallel_group(), ("all_to_all_single", "expert")
    ours = flops, collectives.get(sent, Traffic()).bytes
    both = [ours] * group.size()
    dist.all_gather_object(both, ours, group=group)
    flops, size = (sum(each) / len(both) for each in zip(*both, strict=True))
    return flops, {name: Traffic(size if name == sent else t.bytes, t.calls) for name, t in collectives.items()}


def differences(case: tuple, calls: dict, *, experts: bool = False) -> list[str]:
    """What the model says otherwise than this rank's real `calls`, {name: (function, Work)}. experts: the job's
    model is a mixture of them."""
    lines = []
    for name, (call, work) in calls.items():
        flops, collectives, sent = found(call)
        if experts:
            flops, collectives = averaged(flops, collectives)
        for what, real, said in (
            ("FLOPs", flops, work.flops), ("collectives", collectives, dict(work.collectives)),
            ("messages", sent, work.messages),
        ):  # fmt: skip
            if real != said:
                lines.append(f"{case}, {name}: {what} are {real}, not {said}")
    return lines


def compare(cases):
    """The differences of all cases on this rank; a case: (role, family, sizes, options of the job)."""
    lines = []
    for case in cases:
        role, family, sizes, options = case
        with layout(**sizes) as topology:
            # micro-batches of 3, 3 and 2 rows, or of 2
            job = job_for(role, family, sizes, topology.world_size, tokens=3 * (P + R), **options)
            lines += differences(case, calls_of(job, topology, role), experts=bool(job.mixtures))
    return lines


def calls_of(job: Job, topology, role: str) -> dict:
    model, stage, rows = job.models[0], topology.pipeline_rank, job.rows_here
    engine = build(
        role, model.architecture, topology, micro_batch_tokens=job.shape.micro_batch_tokens, dtype="fp32",
        optimizer=ADAM, recompute=job.recompute, trained_layers=model.trained_layers, adapters=model.lora,
        mlp_values=model.mlp_values,
        router=ExpertsConfig(train_router=model.trains_router),
    )  # fmt: skip
    tokens = torch.randint(0, 503, (rows, P + R))
    counted = torch.ones(rows, R, dtype=torch.bool)
    batch = Sequences(tokens=tokens, mask=counted, segments=torch.ones_like(tokens), prompt_len=P)
    if reference := job.model("reference"):
        works = [phases._forward("evaluate", job, each, stage).work for each in (model, reference)]
        hydra = Hydra(engine, model.trained_layers)
        with_reference = {"beside": (lambda: hydra.beside(batch, temperature=1.0), total(works))}
        alone = dataclasses.replace(job, online=False)  # as offline programs run it
        work = phases._forward("step", alone, reference, stage).work
        return with_reference | ({} if model.scalar else {"reference": (lambda: hydra.forward(batch), work)})
    calls = {
        "forward": (lambda: engine.forward(batch), phases._forward("evaluate", job, model, stage).work),
        "step": (lambda: engine.step(batch, all_outputs), phases._update("learn", job, model, stage).work),
    }
    if role == "actor" and job.recompute == "none":
        samples = job.shape.samples
        sampler = Sampler(
            engine,
            SamplerConfig(response_length=R, micro_batch_size=2, samples_per_prompt=samples),
            prompt_length=P,
            record_experts=model.replays,
        )
        ids = torch.arange(rows // samples)
        prompts = Prompts(tokens=tokens[: len(ids), :P], valid=torch.ones(len(ids), P, dtype=torch.bool),
                          sequence_ids=ids, prompt_ids=ids)  # fmt: skip
        calls["sample"] = lambda: sampler.sample(prompts), total(sampling.sample(job, model, stage).values())
    return calls


ONE = [
    *(("actor", "llama", {}, {"recompute": kind}) for kind in ("none", "selective")),
    *(("actor", family, {}, {}) for family in ("gpt2", "window")),
    ("actor_critic", "llama", {}, {}),
    ("actor", "llama", {}, {"trained_layers": 1, "recompute": "full"}),
    ("actor", "llama", {}, {"samples": 4}),
    ("actor", "mixtral", {}, {}),
    ("actor", "qwen2_moe", {}, {"trains_router": False, "replays": True}),
]
ALL, SOME = LoraConfig(rank=3), LoraConfig(rank=2, targets=("k_proj", "linear_proj", "up_proj"))
MLP = LoraConfig(rank=2, targets=("linear_fc2",))  # no gradient reaches the first layer's attention
ADAPTERS = {
    1: [
        *(("actor", "llama", {}, {"lora": ALL, "recompute": kind}) for kind in ("none", "full")),
        ("critic", "llama", {}, {"lora": MLP, "recompute": "selective"}),
    ],
    2: [
        ("actor", "llama", {"tensor": 2}, {"lora": ALL}),
        ("actor", "llama", {"tensor": 2, "sequence": True}, {"lora": ALL}),
        ("actor", "llama", {"pipeline": 2}, {"lora": SOME}),
    ],
    -1: [
        ("actor", "llama", {}, {"lora": SOME, "samples": 4}),
        *(("actor", family, {}, {"lora": ALL}) for family in ("gpt2", "falcon", "neox")),
        ("actor", "neox", {}, {"lora": MLP}),
    ],
    -2: [
        ("actor_critic", "llama", {"tensor": 2, "sequence": True}, {"lora": SOME, "recompute": "full"}),
        ("actor", "falcon", {"tensor": 2, "sequence": True}, {"lora": MLP}),
        ("actor", "gpt2", {"tensor": 2}, {"lora": SOME, "recompute": "selective"}),
        ("actor", "llama", {"pipeline": 2, "virtual_pipeline": 2}, {"lora": ALL}),
        ("actor", "llama", {"distributed_optimizer": False}, {"lora": ALL}),
    ],
}
Q_HEADS = {
    1: [("actor_q", "llama", {}, {})],
    2: [
        ("actor_q", "llama", {"tensor": 2, "sequence": True}, {}),
        ("actor_q", "llama", {"pipeline": 2}, {"lora": ALL}),
    ],
    -2: [
        ("actor_q", "gpt2", {"tensor": 2}, {"recompute": "selective"}),
        ("actor_q", "gpt2", {"pipeline": 2}, {"trained_layers": 1}),
    ],
}
HYDRA = {
    1: [("actor", "gpt2", {}, {"trained_layers": 2, "hydra": True})],
    # the branch begins in the first stage, and both states travel; it lies in the last
    2: [("actor", "llama", {"pipeline": 2}, {"trained_layers": 3, "hydra": True}),
        ("actor_critic", "llama", {"tensor": 2, "sequence": True}, {"trained_layers": 2, "hydra": True}),
        ("actor", "llama", {"pipeline": 2, "virtual_pipeline": 2}, {"trained_layers": 2, "hydra": True}),
        ("actor", "window", {"pipeline": 2}, {"trained_layers": 2, "hydra": True})],
}  # fmt: skip
VALUES = {  # of a hidden layer
    1: [("critic", "llama", {}, {"mlp": True})],
    2: [(role, "llama", {"tensor": 2, "sequence": sequence}, {"mlp": True})
        for role, sequence in (("critic", True), ("actor_critic", False))],
}  # fmt: skip
NORMS = {
    1: [("actor", family, {}, {}) for family in ("olmo2", "qwen3")],
    2: [("actor", "olmo2", {"tensor": 2}, {"recompute": "full"}), ("actor", "qwen3", {"tensor": 2}, {})],
    -2: [
        *(("actor", family, {"tensor": 2, "sequence": True}, {}) for family in ("olmo2", "gemma2")),
        ("actor", "olmo2", {"tensor": 2}, {"lora": MLP}),
        ("actor", "qwen3", {"tensor": 2, "sequence": True}, {"trained_layers": 2}),
        ("actor", "qwen3", {"tensor": 2}, {"lora": SOME}),
    ],
}
MORE_OF_ONE = [
    ("actor", "llama", {}, {"recompute": "full"}),
    *(("actor", family, {}, {}) for family in ("neox", "falcon", "gemma")),
    ("critic", "llama", {}, {}),
    *(("actor", family, {}, {"trained_layers": 2}) for family in ("llama", "gpt2")),
]
TWO = [
    ("actor", "gpt2", {"tensor": 2}, {}),
    ("actor", "llama", {"tensor": 2, "sequence": True}, {}),
    ("critic", "llama", {"tensor": 2, "sequence": True}, {}),
    ("actor", "gemma", {"pipeline": 2}, {"recompute": "selective"}),
    ("actor", "llama", {}, {}),
]
MORE_OF_TWO = [
    ("actor", "llama", {"tensor": 2}, {}),
    *(("actor", family, {"tensor": 2, "sequence": True}, {}) for family in ("gpt2", "falcon")),
    ("actor", "llama", {"tensor": 2, "sequence": True}, {"recompute": "full"}),
    # the residual of the last layer needs no gradient; the embedding is frozen below all layers
    *(("actor", family, {"tensor": 2, "sequence": True}, {"trained_layers": 1}) for family in ("llama", "falcon")),
    ("actor", "llama", {"tensor": 2, "sequence": True}, {"trained_layers": 4}),
    ("actor", "llama", {"pipeline": 2}, {}),
    ("actor", "llama", {"pipeline": 2}, {"trained_layers": 1, "recompute": "full"}),
    # frozen layers of the first stage that hand gradients down
    *(
        ("actor", "llama", {"pipeline": 2, "virtual_pipeline": 2}, {"trained_layers": 1, "recompute": kind})
        for kind in ("none", "full")
    ),
    ("actor", "llama", {"distributed_optimizer": False}, {}),
]
EXPERTS = [  # of 2 ranks
    ("actor", "mixtral", {"expert": 2}, {}),
    ("actor", "qwen2_moe", {"tensor": 2, "sequence": True, "expert": 2}, {"trains_router": False, "replays": True}),
]
MORE_EXPERTS = [
    ("actor", "qwen2_moe", {"expert": 2}, {"recompute": "full"}),
    ("actor", "qwen2_moe", {"tensor": 2, "sequence": True}, {}),
    ("actor", "mixtral", {"pipeline": 2}, {"replays": True}),
    ("critic", "qwen2_moe", {"expert": 2, "distributed_optimizer": False}, {"recompute": "selective"}),
]
FOUR = [
    ("actor", "llama", {"tensor": 2, "sequence": True, "pipeline": 2}, {}),
    ("actor", "gpt2", {"tensor": 2, "pipeline": 2}, {"recompute": "full"}),
    ("actor", "llama", {"pipeline": 4}, {}),
    ("actor", "llama", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    ("actor", "llama", {"tensor": 4, "sequence": True}, {}),
    ("actor", "mixtral", {"tensor": 2, "sequence": True, "expert": 2}, {"replays": True}),
    ("actor", "mixtral", {"tensor": 2, "sequence": True, "expert": 4}, {}),
    ("actor", "qwen2_moe", {"pipeline": 2, "expert": 2}, {"trains_router": False, "replays": True}),
]
EIGHT = [("actor", "llama", {"tensor": 2, "sequence": True, "pipeline": 2}, {})]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ONE),
        (2, TWO),
        (1, ADAPTERS[1]),
        (2, ADAPTERS[2]),
        (1, Q_HEADS[1]),
        (2, Q_HEADS[2]),
        (1, VALUES[1]),
        (2, VALUES[2]),
        (1, NORMS[1]),
        (2, NORMS[2]),
        (1, HYDRA[1]),
        (2, HYDRA[2]),
        *(
            pytest.param(world, cases, marks=pytest.mark.long)
            for world, cases in (
                (1, MORE_OF_ONE),
                (2, MORE_OF_TWO),
                (1, ADAPTERS[-1]),
                (2, ADAPTERS[-2]),
                (2, Q_HEADS[-2]),
                (2, NORMS[-2]),
                (2, EXPERTS),
                (2, MORE_EXPERTS),
                (4, FOUR),
                (8, EIGHT),
            )
        ),
    ],
)
def test_the_model_counts_what_ranks_do(ranks, world, cases):
    for lines in ranks.run(world, compare, cases):
        assert not lines, "\n".join(lines)


def ragged():
    """FLOPs of a pass over rows of different lengths, in one micro-batch, and what the model says of it."""
    rows, pairs = examples(), []
    lengths = tuple((rows.segments > 0).sum(1).tolist())
    stream = model_work.Stream(lengths, int(rows.mask.sum()))
    with layout() as topology:
        for role in ("actor", "critic"):
            job = job_for(role, "llama", {}, 1, tokens=4096)
            engine = build(role, LLAMA, topology, micro_batch_tokens=4096, dtype="fp32", optimizer=ADAM)
            for call, work in (
                (partial(engine.forward, rows), model_work.forward),
                (partial(engine.step, rows, all_outputs), model_work.train),
            ):
                pairs.append((found(call)[0], work(job, job.models[0], 0, stream).flops))
    return pairs


def test_rows_of_different_lengths(ranks):
    (pairs,) = ranks.run(1, ragged)
    for real, said in pairs:
        assert real == said
    assert len({real for real, _ in pairs}) == 4


def test_work_adds_up():
    job = job_for("actor", "llama", {"tensor": 2}, 2, tokens=64)
    one = model_work.train(job, job.models[0], 0, model_work.Stream((16, 16), 12))
    assert one + one == one * 2 == total([one, one])
    assert one + Work() == one and (one * 0).flops == 0
