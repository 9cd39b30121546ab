"""A decode step by the Triton kernels, in their interpreter: what a step recorded on a GPU launches and moves, and that
models of every kind sample the same tokens as by torch's operations."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megarlhf.batch import Prompts
from megarlhf.cluster import cuda_graphs, operations
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.kernels import decode
from megarlhf.models.build import build
from megarlhf.train import work
from tests.distributed.layouts import LLAMA, layout
from tests.distributed.test_sampler import FAMILIES, ODD, gap, make_engine, make_prompts
from tests.distributed.test_sampler import P as TINY
from tests.ranks import Ranks
from tests.recorder import Recording, as_one

LARGE = dataclasses.replace(
    LLAMA, hidden_size=256, ffn_hidden_size=704, num_query_groups=2, vocab_size=512, max_position_embeddings=256
)
P, R, SLOTS = 250, 4, 8  # of 256 columns: four blocks of the attention kernel, so that it has a second one


@pytest.fixture(scope="module")
def interpreter_ranks():
    """Ranks of their own: Triton reads TRITON_INTERPRET when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = Ranks()
        yield pool
        pool.close()


def by_triton():
    from megarlhf.kernels import triton_decode
    from tests import interpreter

    interpreter.mend()
    return mock.patch.object(decode, "fused_for", lambda x: triton_decode)


def prompts(sizes: torch.Tensor) -> Prompts:
    tokens, ids = torch.randint(0, 512, (len(sizes), P)), torch.arange(len(sizes))
    return Prompts(tokens=tokens, valid=torch.arange(P) >= P - sizes[:, None], sequence_ids=ids, prompt_ids=ids)


def cost(num_layers: int, sizes: torch.Tensor):
    """(operations, bytes) of the third step in bfloat16. A norm counts as one operation: it is one kernel of torch or
    Transformer Engine."""
    recordings = []

    def captured(step):
        recordings.append(Recording(step, kernels=True))
        return recordings[-1]

    with (
        layout() as topology,
        by_triton(),
        mock.patch.multiple(cuda_graphs, captures=lambda: True, captured=captured),
        mock.patch.object(operations, "_cpu", lambda: None),
        mock.patch.object(F, "rms_norm", as_one(F.rms_norm)),
    ):
        architecture = dataclasses.replace(LARGE, num_layers=num_layers)
        engine = build("actor", architecture, topology, micro_batch_tokens=64, dtype="bf16", seed=3)
        sampler = Sampler(engine, SamplerConfig(response_length=R, micro_batch_size=SLOTS), prompt_length=P)
        positions = []
        sampler.sample(prompts(sizes), lambda count: positions.append(sampler.groups[0].positions.clone()))
        assert torch.equal(positions[2][: len(sizes)], sizes - 1 + 3)
        assert not positions[2][len(sizes) :].any()  # of empty slots
        return recordings[0].cost


def cost_of_a_layer(sizes):
    few, many = cost(1, sizes), cost(2, sizes)
    return [b - a for a, b in zip(few, many, strict=True)]


def test_a_layer_of_a_decode_step(interpreter_ranks):
    """Slots of all lengths, of which two are empty."""
    sizes = torch.linspace(2, P, SLOTS - 2).long()
    ((launches, moved),) = interpreter_ranks.run(1, cost_of_a_layer, sizes)
    weights = 2 * work.layer_parameters(LARGE)
    token = 2 * 2 * LARGE.num_query_groups * LARGE.kv_channels
    cache = token * (int(sizes.sum()) + 2 * len(sizes) + 2)  # what the third step sees; an empty slot its first column
    assert launches <= 12  # 11: the norm, 4 products, 4 kernels for attention and MLP, and two sums, one with its norm
    assert moved <= 1.15 * (weights + cache)  # 1.13; the rest is activations, which larger models have fewer of


def sampled_by_each():
    """{family: (the same tokens, largest difference of log-probs)} of torch and the kernels in float32; and the mean
    difference of the kernels' log-probs from the trainer's in bfloat16."""
    found = {}
    with layout() as topology:
        for family, architecture in {**FAMILIES, **ODD}.items():
            full = tuple(layer for layer in architecture.full_attention_layers if layer < 2)
            two = dataclasses.replace(architecture, num_layers=2, full_attention_layers=full)
            engine = make_engine(two, topology)
            config = SamplerConfig(response_length=4, micro_batch_size=3)
            rollouts = []
            for context in (contextlib.nullcontext(), by_triton()):
                with context:
                    rollouts.append(Sampler(engine, config, prompt_length=TINY, seed=1).sample(make_prompts(4)))
            one, other = rollouts
            found[family] = torch.equal(one.tokens, other.tokens), gap(one.logprobs, other.logprobs)
        for family in ("llama", "gemma"):
            architecture = {**FAMILIES, **ODD}[family]
            engine = build("actor", architecture, topology, micro_batch_tokens=64, dtype="bf16", seed=3)
            config = SamplerConfig(response_length=4, micro_batch_size=3)
            with by_triton():
                rollout = Sampler(engine, config, prompt_length=TINY, seed=1).sample(make_prompts(4))
            trained = engine.forward(rollout)["logprobs"]
            found[family, "bf16"] = True, (rollout.logprobs - trained).abs().mean().item()
    return found


def test_models_sample_the_same_by_the_kernels(interpreter_ranks):
    """And in bfloat16 their log-probs are the trainer's, to the step-0 gate's tolerance."""
    (found,) = interpreter_ranks.run(1, sampled_by_each)
    assert len(found) == len({**FAMILIES, **ODD}) + 2
    for case, (same, difference) in found.items():
        tolerance = 0.03 if "bf16" in case else 2e-5
        assert same and 0 < difference < tolerance, (case, same, difference)
