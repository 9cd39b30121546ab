"""megarlhf/plan/memory.py against what CPU ranks hold: weights, gradients, optimizer state and caches exactly, and all
else by the storages that torch allocates."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarlhf.batch import Sequences
from megarlhf.cluster import gradients
from megarlhf.cpu import memory as spare
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.build import HEADS, build
from megarlhf.models.hydra import Hydra
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.model_config import LoraConfig
from megarlhf.plan import memory
from megarlhf.plan.job import Job, Model, Shape
from tests.distributed.layouts import ADAM, GEMMA, GEMMA2, GPT2, LLAMA, OLMO2, layout
from tests.distributed.test_plan import all_outputs

SIZES = dict(hidden_size=256, ffn_hidden_size=704, vocab_size=2048, max_position_embeddings=128)
WIDE = dataclasses.replace(LLAMA, **SIZES)
FAMILIES = {
    "llama": WIDE,
    # Each token goes to all experts, so that all ranks have the same load.
    "mixtral": dataclasses.replace(WIDE, family="mixtral", ffn_hidden_size=320, num_experts=4, experts_per_token=4),
    "qwen2_moe": dataclasses.replace(
        WIDE, family="qwen2_moe", ffn_hidden_size=160, num_experts=4, experts_per_token=4, shared_expert_size=320
    ),
    "words": dataclasses.replace(WIDE, vocab_size=16000, num_layers=2),
    "qwen3": dataclasses.replace(WIDE, family="qwen3", qk_norm=True),
    "gemma": dataclasses.replace(GEMMA, **SIZES),
    "gemma2": dataclasses.replace(
        GEMMA2, **SIZES, sliding_window=None, full_attention_layers=(), local_rotary_base=None, attention_softcap=None
    ),
    "olmo2": dataclasses.replace(OLMO2, **SIZES),
    "gpt2": dataclasses.replace(GPT2, hidden_size=256, ffn_hidden_size=1024, max_position_embeddings=128),
}


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations have made and that still live; `peak`: the most."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = weakref.WeakKeyDictionary(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        output = function(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is None or storage in self.seen or any(storage is other for other in given):
                continue
            self.seen[storage], size = True, storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._gone, size)
        self.peak = max(self.peak, self.now)
        return output

    def _gone(self, size: int) -> None:
        self.now -= size


def held(cases):
    """[(case, {what: (bytes on this rank, bytes that the model says)})]"""
    return [(case, _held(*case)) for case in cases]


def _held(
    family: str, role: str, sizes: dict, recompute: str, prompt: int, trained: int | None = None, router: bool = True,
    lora: LoraConfig | None = None, mlp: bool = False, hydra: bool = False,
):  # fmt: skip
    rows, response = 8, 88 - prompt
    tokens = torch.randint(0, 503, (rows, 88))
    mask = torch.ones(rows, response, dtype=torch.bool)
    batch = Sequences(tokens=tokens, mask=mask, segments=torch.ones_like(tokens), prompt_len=prompt)
    replays = FAMILIES[family].num_experts is not None
    model = Model(
        role, FAMILIES[family], HEADS[role], trains=True, trained_layers=trained, trains_router=router, replays=replays,
        lora=lora, mlp_values=mlp,
    )  # fmt: skip
    models = (model,)
    if hydra:
        models += (Model("reference", FAMILIES[family], HEADS["reference"], trained_layers=trained, borrows=True),)
    gradients._memory.clear(), gradients._sizes.clear(), spare._spare.clear()  # of another case's model
    with layout(**sizes) as topology:
        job = Job("test", models, Shape(rows, 88, response, 4 * 88, slots=3), topology.parallel,
                  topology.world_size, "fp32", recompute, device="cpu")  # fmt: skip
        engine = build(
            role, model.architecture, topology, micro_batch_tokens=4 * 88, dtype="fp32", optimizer=ADAM,
            recompute=recompute, trained_layers=trained, router=ExpertsConfig(train_router=router),
            adapters=lora, mlp_values=mlp,
        )  # fmt: skip
        phases = memory.rank(job, topology.pipeline_rank).phases

        def used(phase: str) -> int:
            return sum(phases[phase].get(kind, 0) for kind in ("activations", "logits", "buffers"))

        engine.step(batch, all_outputs)
        gradients.allocate()
        reference = Hydra(engine, trained) if hydra else None
        own = sum(held.resident()["weights"] for held in (engine, reference) if held is not None)
        found = {"weights": (own, phases["learn"]["weights"]),
                 "optimizer": (engine.resident()["optimizer"], phases["learn"]["optimizer"]),
                 "gradients": (gradients.resident(), phases["learn"]["gradients"])}  # fmt: skip
        if role == "actor":
            sampler = Sampler(
                engine, SamplerConfig(response_length=response, micro_batch_size=3), prompt_length=prompt,
                record_experts=replays,
            )  # fmt: skip
            caches = sum(cache.keys.nbytes + cache.values.nbytes + cache.experts.nbytes for cache in sampler.caches)
            found["caches"] = caches, phases["sample"]["caches"]
        with Allocations() as update:
            engine.step(batch, all_outputs)
        with Allocations() as forward:
            reference.beside(batch, temperature=1.0) if hydra else engine.forward(batch)
        return found | {"update": (update.peak, used("learn")), "forward": (forward.peak, used("evaluate"))}


ONE = [
    *(("llama", "actor", {}, recompute, 64) for recompute in ("selective", "full")),
    ("llama", "critic", {}, "none", 24),
    ("words", "actor", {}, "none", 64),
]
MORE_OF_ONE = [
    ("llama", "actor", {}, "none", 64),
    ("llama", "actor", {}, "full", 24),
    ("llama", "actor", {}, "none", 64, 2),
    ("llama", "actor", {}, "full", 64, 1),
    ("gpt2", "actor", {}, "none", 64),
    ("mixtral", "actor", {}, "none", 64),
]
LORA = LoraConfig(rank=8)
SOME = LoraConfig(rank=3, targets=("q_proj", "linear_fc2"))
ADAPTERS = {
    1: [
        (*case, None, True, LORA) for case in (("llama", "actor", {}, "none", 64), ("llama", "critic", {}, "full", 24))
    ],
    2: [
        ("llama", "actor", {"tensor": 2, "sequence": True}, "none", 64, None, True, LORA),
        ("llama", "actor", {"pipeline": 2}, "none", 24, None, True, SOME),
    ],
    -2: [
        ("llama", "actor", {"tensor": 2}, "selective", 64, None, True, SOME),
        ("gpt2", "actor", {}, "none", 24, None, True, LORA),
        ("words", "actor_critic", {"distributed_optimizer": False}, "none", 64, None, True, LORA),
    ],
}
DROPS = LoraConfig(rank=8, dropout=0.1)
OF_MLP = LoraConfig(rank=8, targets=("linear_fc1", "linear_fc2"))
OF_ATTENTION = LoraConfig(rank=8, targets=("linear_qkv", "linear_proj"))
MORE_ADAPTERS = [("llama", "actor", {}, "none", 64, None, True, lora) for lora in (DROPS, OF_MLP, OF_ATTENTION)] + [
    ("qwen3", "actor", {}, "none", 24, None, True, LORA),
    ("gemma2", "actor", {}, "none", 24, None, True, LORA),
]
NORMS = {
    1: [("olmo2", "actor", {}, "none", 64), ("gemma2", "actor", {}, "none", 24)],
    -1: [
        ("qwen3", "actor", {}, "none", 64),
        ("qwen3", "critic", {}, "selective", 64),
        ("gemma", "actor", {}, "none", 24),
        ("gemma2", "critic", {}, "full", 64),
        ("olmo2", "actor", {}, "selective", 24),
    ],
    2: [
        ("olmo2", "actor", {"tensor": 2, "sequence": True}, "none", 64),
        ("gemma2", "actor", {"pipeline": 2}, "none", 24),
    ],
}
MLP_VALUES = [
    ("llama", "critic", {}, "none", 24, None, True, None, True),
    ("llama", "critic", {}, "full", 24, 1, True, None, True),
]
HYDRA = {
    1: [("llama", "actor", {}, "none", 64, trained, True, None, False, True) for trained in (1, 2)],
    2: [("llama", "actor", {"pipeline": 2}, "none", 64, 3, True, None, False, True)],
}
Q_HEADS = {
    1: [("llama", "actor_q", {}, "none", 64), ("words", "actor_q", {}, "full", 24)],
    2: [
        ("llama", "actor_q", {"tensor": 2, "sequence": True}, "none", 24),
        ("gpt2", "actor_q", {"pipeline": 2}, "none", 64),
    ],
}
TWO = [
    ("llama", "actor", {"tensor": 2, "sequence": True}, "none", 64),
    ("llama", "actor", {"pipeline": 2}, "full", 64),
    ("llama", "actor", {}, "none", 64),
    ("mixtral", "actor", {"expert": 2}, "full", 64),
]
EXPERTS = [
    ("qwen2_moe", "actor", {"expert": 2}, "none", 24, None, False),
    ("qwen2_moe", "actor", {"tensor": 2, "sequence": True}, "none", 24),
    ("qwen2_moe", "actor", {"tensor": 2, "sequence": True, "expert": 2}, "full", 24),
    ("mixtral", "critic", {"tensor": 2, "sequence": True, "expert": 2}, "selective", 64),
    ("mixtral", "actor", {"pipeline": 2}, "none", 64),
]
MORE_OF_TWO = [
    ("llama", "actor", {"tensor": 2}, "none", 24),
    ("llama", "actor", {"pipeline": 2}, "none", 64),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ONE),
        (2, TWO),
        (1, ADAPTERS[1]),
        (2, ADAPTERS[2]),
        pytest.param(2, ADAPTERS[-2], marks=pytest.mark.long),
        pytest.param(1, MORE_ADAPTERS, marks=pytest.mark.long),
        (1, NORMS[1]),
        pytest.param(1, NORMS[-1], marks=pytest.mark.long),
        pytest.param(2, NORMS[2], marks=pytest.mark.long),
        (1, MLP_VALUES),
        (1, HYDRA[1]),
        pytest.param(2, HYDRA[2], marks=pytest.mark.long),
        (1, Q_HEADS[1]),
        pytest.param(2, Q_HEADS[2], marks=pytest.mark.long),
        pytest.param(1, MORE_OF_ONE, marks=pytest.mark.long),
        pytest.param(2, MORE_OF_TWO, marks=pytest.mark.long),
        pytest.param(2, EXPERTS, marks=pytest.mark.long),
    ],
)
def test_memory_is_what_ranks_hold(ranks, world, cases):
    wrong = []
    for rank, answers in enumerate(ranks.run(world, held, cases)):
        for case, found in answers:
            for what, (real, said) in found.items():
                exact = what in ("weights", "gradients", "caches")
                # the optimizer's counts of steps are a few bytes
                rest = 0.08 if FAMILIES[case[0]].num_experts else 0.05
                if abs(said / real - 1) > (0 if exact else 1e-3 if what == "optimizer" else rest):
                    wrong.append(f"rank {rank}, {case}: {what} are {real}, not {said} ({said / real:.3f})")
    assert not wrong, "\n".join(wrong)
