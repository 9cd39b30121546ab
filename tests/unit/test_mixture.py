"""What cannot work with a mixture of experts is refused by name, in one line, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.models import mixture
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.model_config import LoraConfig, ModelConfig
from megarlhf.models.spec import Architecture, check_layout
from megarlhf.train import memory, work

SIZES = dict(num_layers=4, hidden_size=64, ffn_hidden_size=48, num_attention_heads=8, num_query_groups=4,
             vocab_size=500, max_position_embeddings=64)  # fmt: skip
DENSE = Architecture("llama", **SIZES)
MIXTRAL = Architecture("mixtral", **SIZES, num_experts=4, experts_per_token=2)
MODEL = ModelConfig(checkpoint="x")

LAYOUTS = {
    "experts": (MIXTRAL, dict(expert=3), "parallel.expert: 3 does not divide the model's 4 experts"),
    "sequence": (MIXTRAL, dict(tensor=2), "parallel.sequence: experts with tensor parallelism"),
    "virtual": (MIXTRAL, dict(pipeline=2, virtual_pipeline=2), "parallel.virtual_pipeline: a mixture of experts"),
    "bias": (replace(MIXTRAL, linear_bias=True), {}, "linear_bias: a mixture of experts"),
    "parallel": (replace(MIXTRAL, parallel_residual=True), {}, "parallel_residual: a mixture of experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_that_cannot_hold_experts(case):
    architecture, sizes, message = LAYOUTS[case]
    with pytest.raises(UserError) as caught:
        check_layout(architecture, ParallelConfig(**sizes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layouts_that_hold_experts():
    for sizes in ({}, dict(expert=4), dict(tensor=2, sequence=True, expert=2, pipeline=4)):
        check_layout(MIXTRAL, ParallelConfig(**sizes))
    check_layout(DENSE, ParallelConfig(expert=2))  # a reward model beside a policy with experts
    check_layout(replace(MIXTRAL, ffn_hidden_size=49), ParallelConfig(tensor=2, sequence=True))  # experts are not cut
    with pytest.raises(UserError, match="shared_expert_size 41"):
        check_layout(replace(MIXTRAL, shared_expert_size=41), ParallelConfig(tensor=2, sequence=True))
    assert ParallelConfig(expert=4, tensor=2, sequence=True, pipeline=2).data(8) == 2
    with pytest.raises(UserError, match=r"parallel.expert: the 4 ranks of a pipeline stage cannot be divided by 3"):
        ParallelConfig(expert=3, pipeline=2).data(8)


REFUSED = {
    "lora": (MIXTRAL, replace(MODEL, lora=LoraConfig()), "model.lora: is not supported with a mixture of experts"),
    "nf4": (MIXTRAL, replace(MODEL, lora=LoraConfig(quantization="nf4")), "model.lora: is not supported"),
    "layers": (MIXTRAL, replace(MODEL, trained_layers=2), "model.trained_layers: is not supported"),
    "balance": (MIXTRAL, replace(MODEL, experts=ExpertsConfig(balance_loss=0.1)), "model.experts.balance_loss: is a"),
    "z": (MIXTRAL, replace(MODEL, experts=ExpertsConfig(z_loss=0.1)), "model.experts.z_loss: is a loss of the router"),
    "dense": (DENSE, replace(MODEL, experts=ExpertsConfig(z_loss=0.1)), "model.experts: the model is dense (llama)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work(case):
    architecture, model, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        mixture.check_model(architecture, model, ParallelConfig(), rl=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_that_work():
    learning = replace(MODEL, experts=ExpertsConfig(train_router=True, balance_loss=0.1))
    mixture.check_model(MIXTRAL, learning, ParallelConfig(expert=2), rl=True)
    mixture.check_model(MIXTRAL, replace(MODEL, experts=ExpertsConfig(z_loss=0.1)), ParallelConfig(), rl=False)
    with pytest.raises(UserError, match="cannot share the experts of a dense model"):
        mixture.check_model(DENSE, MODEL, ParallelConfig(expert=2), rl=True)
    for fields in (dict(balance_loss=-1.0), dict(z_loss=float("nan")), dict(z_loss=0.1, train_router=False)):
        with pytest.raises(ValueError, match=next(iter(fields))):
            ExpertsConfig(**fields)
    with pytest.raises(ValueError, match="shared_expert_size"):
        replace(DENSE, shared_expert_size=8)


def test_the_router_learns_by_default_only_outside_rl():
    assert mixture.trains_router(ExpertsConfig(), rl=False) and not mixture.trains_router(ExpertsConfig(), rl=True)
    assert mixture.trains_router(ExpertsConfig(train_router=True), rl=True)


def test_work_counts_the_experts_that_compute_a_token():
    """Two experts of 48 cost as much as one MLP of 96; and the router."""
    twice = replace(DENSE, ffn_hidden_size=96)
    assert work.layer_parameters(MIXTRAL) == work.layer_parameters(twice) + 4 * 64


def test_a_rank_needs_its_share_of_the_experts():
    large = replace(MIXTRAL, num_experts=1024, hidden_size=8192, ffn_hidden_size=8192, num_layers=64)
    sizes = dict(dtype="bf16", rows=1, micro_batch_tokens=1, length=8)
    with pytest.raises(UserError, match="parameters"):
        memory.check_sizes(large, ParallelConfig(), **sizes)
    memory.check_sizes(large, ParallelConfig(expert=128), **sizes)


def test_the_documentation_has_every_key():
    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    for key in (*ExpertsConfig.__dataclass_fields__, "replay_experts", "parallel.expert"):
        assert f"`{key}" in text, key
