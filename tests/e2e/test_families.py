"""Whole programs on models of transformers' families: converted, two steps of PPO behind the gate, resumed, with
adapters and with a hydra reference, and back to transformers. Rows are longer than the windows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megarlhf.convert import convert, torch_dist
from tests.distributed.test_huggingface import NEW, hf_logprobs, hf_model, our_logprobs
from tests.e2e.runs import prepare, write_prompts
from tests.e2e.test_hydra import numbers, run_programs
from tests.ranks import ROOT

TOKENS = dict(vocab_size=300, pad_token_id=None, bos_token_id=1, eos_token_id=2)
FIRST, SECOND = "step_00000001", "step_00000002"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    prepare(path)
    write_prompts(path, prompts=32, pairs=32)
    return path


def ppo(family: str, texts: Path, directory: Path) -> Path:
    """The configuration of two steps from a converted model of the family."""
    hf_model(family, **TOKENS).save_pretrained(directory / "hf")
    convert.hf2megatron(directory / "hf", directory / "base")
    config = {
        "run": "unused",
        "tokenizer": str(texts / "reviews.model"),
        "model": {"checkpoint": str(directory / "base"), "dtype": "fp32"},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "checkpoint": {"every": 1, "keep": 3},
        "prompts": {"path": str(texts / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 12, "micro_batch_size": 4},
        "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/judge.py:score"}]},
        "gate": {"every": 1},
        "training": {"steps": 2, "batch_size": 8, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 112},
    }
    path = directory / "ppo.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def same_weights(left: Path, right: Path) -> None:
    readers = [torch_dist.Reader(run / "checkpoints" / SECOND / "actor", 300) for run in (left, right)]
    assert readers[0].specs.keys() == readers[1].specs.keys()
    for name in readers[0].specs:
        assert torch.equal(readers[0].read(name), readers[1].read(name)), name


def check(ranks, texts: Path, directory: Path, family: str, world_size: int = 1, *overrides: str) -> None:
    """The sampler is the trainer, before and after an update; a resumed run is the straight one, bit for bit; and
    transformers computes the trained model as we do."""
    path, run, again = ppo(family, texts, directory), directory / "run", directory / "again"
    ranks.run(world_size, run_programs, [("ppo", path, [*overrides, f"run={run}"])])
    first, second = numbers(run)[:2]
    assert max(first["gate/sampler"], second["gate/sampler"]) < 1e-5 and first["gate/reference"] == 0
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / SECOND)
    (again / "checkpoints" / "latest").write_text(f"{FIRST}\n")
    ranks.run(world_size, run_programs, [("ppo", path, [*overrides, f"run={again}"])])
    assert numbers(again) == numbers(run)
    same_weights(run, again)

    convert.megatron2hf(run, directory / "back")
    model = AutoModelForCausalLM.from_pretrained(directory / "back", attn_implementation="eager").eval()
    before = AutoModelForCausalLM.from_pretrained(directory / "hf", attn_implementation="eager").eval()
    tokens = torch.randint(0, 300, (4, 30), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    expected = hf_logprobs(model, tokens, valid)
    assert (expected - hf_logprobs(before, tokens, valid)).abs().max() > 1e-3  # it has learnt
    if "lora" not in " ".join(overrides):
        (((_, got),),) = ranks.run(1, our_logprobs, run / "checkpoints" / SECOND, tokens, valid, [{}])
        assert (got - expected).abs().max() < 1e-4


# make test has one family; the others are long tests.
@pytest.mark.parametrize(
    "family", [family if family == "gemma2" else pytest.param(family, marks=pytest.mark.long) for family in NEW]
)
def test_ppo_resumed_and_back(ranks, texts, tmp_path, family):
    check(ranks, texts, tmp_path, family)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "olmo2", "granite"])
@pytest.mark.parametrize("sizes", [["parallel.tensor=2", "parallel.sequence=true"], ["parallel.pipeline=2"]], ids=str)
def test_ppo_in_layouts(ranks, texts, tmp_path, family, sizes):
    check(ranks, texts, tmp_path, family, 2, *sizes, "ppo.kl.estimator=exact")


@pytest.mark.long
def test_adapters(ranks, texts, tmp_path):
    """On every linear layer, one of which has a norm of all queries behind it."""
    check(ranks, texts, tmp_path, "olmo2", 2, "model.lora={rank: 2}", "parallel.tensor=2")


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "granite"])
def test_a_hydra_reference_gives_the_run_of_a_separate_one(ranks, texts, tmp_path, family):
    """With the exact KL, whose logits are capped or divided in three places."""
    path = ppo(family, texts, tmp_path)
    options = ["model.trained_layers=2", "critic.kind=shared", "ppo.kl={estimator: exact, coef: 0.1}"]
    cases = [("ppo", path, [*options, f"reference.kind={kind}", f"run={tmp_path / kind}"])
             for kind in ("separate", "hydra")]  # fmt: skip
    ranks.run(1, run_programs, cases)
    assert numbers(tmp_path / "hydra") == numbers(tmp_path / "separate")
    same_weights(tmp_path / "hydra", tmp_path / "separate")
