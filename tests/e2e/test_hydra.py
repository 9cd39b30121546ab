"""A hydra reference gives the run of a separate reference, bit for bit: records and weights, in layouts, with the exact
KL in the loss, after a resume, and for DPO."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megarlhf import cli
from megarlhf.config import UserError
from megarlhf.convert import torch_dist
from tests.e2e.runs import prepare, write_prompts
from tests.ranks import ROOT

LLAMA = dict(
    family="llama", num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2,
    vocab_size=300, max_position_embeddings=64, init_std=0.1,
)  # fmt: skip
GPT2 = LLAMA | dict(
    family="gpt2", num_query_groups=4, normalization="LayerNorm", activation="gelu_tanh", gated_mlp=False,
    linear_bias=True, position_embedding="learned", tie_embeddings=True,
)  # fmt: skip
PPO = ["ppo.kl.coef=0.1"]
SHARED = ["critic.kind=shared", "ppo.kl.estimator=exact"]  # the exact KL in the rewards
EXACT = ["reinforce.kl={place: loss, estimator: exact, coef: 0.2}", "reinforce.dynamic_rounds=2",
         "reinforce.advantage=grpo", "sampler.samples_per_prompt=4"]  # fmt: skip
# number of ranks: {name: (program, overrides)}
CASES = {
    1: {
        "one": ("ppo", [*PPO, "model.trained_layers=2"]),
        "on host": ("ppo", [*SHARED, "model.trained_layers=1", "reference.on_host=true", "average=0.5"]),
        "dpo": ("dpo", ["model.trained_layers=2", "reference.on_host=true"]),
    },
    2: {
        "tp2": ("ppo", [*PPO, "model.trained_layers=2", "parallel.tensor=2", "parallel.sequence=true"]),
        "dp2": ("rl", [*EXACT, "model.trained_layers=3"]),
        "pp2": ("ppo", [*SHARED, "model.trained_layers=2", "parallel.pipeline=2"]),
        "pp2 wide": ("ppo", [*PPO, "model.trained_layers=3", "parallel.pipeline=2"]),  # over both stages
        "pp2 vp2": ("rl", [*EXACT, "model.trained_layers=4", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
        "dpo pp2": ("dpo", ["model.trained_layers=3", "parallel.pipeline=2"]),
    },
    4: {
        "pp4": ("ppo", [*PPO, "model.trained_layers=3", "parallel.pipeline=4"]),
        "tp2 pp2": ("rl", [*EXACT, "model.trained_layers=3", "parallel.tensor=2", "parallel.sequence=true",
                           "parallel.pipeline=2"]),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Configurations of PPO, GRPO and DPO, without a model to start from: random weights of the seed."""
    path = tmp_path_factory.mktemp("hydra")
    prepare(path)
    write_prompts(path, prompts=32, pairs=32)
    both = {
        "tokenizer": str(path / "reviews.model"),
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "checkpoint": {"every": 1, "keep": 3},
    }
    online = both | {
        "run": "unused",
        "prompts": {"path": str(path / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 12, "micro_batch_size": 4, "stop_at_eos": True},
        "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/judge.py:score"}]},
        "training": {"steps": 3, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 112},
    }
    offline = both | {
        "run": "unused",
        "data": {"train": str(path / "pairs.jsonl"), "max_length": 64},
        "training": {"global_batch_size": 8, "micro_batch_tokens": 128, "steps": 3},
    }
    for program, config in (("ppo", online), ("rl", online | {"reinforce": {}}), ("dpo", offline)):
        for name, architecture in (("", LLAMA), (" gpt2", GPT2)):
            model = {"dtype": "fp32", "architecture": architecture}
            (path / f"{program}{name}.yaml").write_text(yaml.safe_dump(config | {"model": model}))
    return path


def run_programs(cases):
    """[(program, YAML, overrides)] on these ranks, one after the other."""
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    for program, path, overrides in cases:
        found = cli.find(program)
        settings = found.load(path, overrides)
        plan = found.check(settings, dist.get_world_size())
        found.run(settings, plan, parallel.start(settings.parallel))
        parallel.stop()


def cases(directory: Path, world_size: int, kinds=("separate", "hydra")) -> list:
    return [
        (program, directory / f"{program}{' gpt2' if name in ('dp2', 'on host', 'pp4') else ''}.yaml",
         [*overrides, f"reference.kind={kind}", f"run={directory / f'{name} {kind}'}"])
        for name, (program, overrides) in CASES[world_size].items()
        for kind in kinds
    ]  # fmt: skip


def numbers(run: Path) -> list[dict]:
    clocks = ("time", "tokens_per_second", "step_seconds", "cost/", "gate/offloaded")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith(clocks)} for record in records]


def same(left: Path, right: Path) -> None:
    assert numbers(left) == numbers(right) and len(numbers(left)) >= 3, (left, right)
    readers = [torch_dist.Reader(run / "checkpoints" / "step_00000003" / "actor", 300) for run in (left, right)]
    assert readers[0].specs.keys() == readers[1].specs.keys()
    for name in readers[0].specs:
        assert torch.equal(readers[0].read(name), readers[1].read(name)), (right, name)


@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))])
def test_a_hydra_reference_gives_the_run_of_a_separate_one(ranks, directory, world_size):
    ranks.run(world_size, run_programs, cases(directory, world_size), timeout=600)
    for name, (program, _) in CASES[world_size].items():
        same(directory / f"{name} hydra", directory / f"{name} separate")
        kl = [record.get("objective/kl") for record in numbers(directory / f"{name} hydra")]
        assert program == "dpo" or (kl[0] == 0 and kl[2] > 1e-3), (name, kl)


def test_a_resumed_run_has_the_branch_of_the_start(ranks, directory):
    """From step 1 of 3; `directory` has the straight runs."""
    for name in CASES[1]:
        run = directory / f"{name} hydra"
        if not run.exists():
            ranks.run(1, run_programs, cases(directory, 1), timeout=600)
        shutil.copytree(run, directory / f"straight {name} hydra")
        for step in (2, 3):
            shutil.rmtree(run / "checkpoints" / f"step_0000000{step}")
        (run / "checkpoints" / "latest").write_text("step_00000001\n")
    ranks.run(1, run_programs, cases(directory, 1, kinds=["hydra"]), timeout=600)
    for name in CASES[1]:
        same(directory / f"{name} hydra", directory / f"straight {name} hydra")
    found = cli.find("ppo")
    for change, message in {
        "model.trained_layers=1": "model.trained_layers: is 1, and ",
        "critic.head=mlp": "critic.head: is mlp, and ",
    }.items():
        overrides = [*cases(directory, 1, kinds=["hydra"])[0][2], change]
        with pytest.raises(UserError, match=message):
            found.check(found.load(directory / "ppo.yaml", overrides), 1)


def refused(case):
    try:
        run_programs([case])
    except UserError as error:
        return str(error)


def test_another_start_is_refused(ranks, directory):
    """The seed gives the random weights that the run started from, and so the reference, of any kind."""
    (program, path, overrides) = cases(directory, 1, kinds=["hydra"])[0]
    more = [*overrides, f"run={directory / 'another start'}"]
    ranks.run(1, run_programs, [(program, path, [*more, "training.steps=1"])])
    step, found = directory / "another start" / "checkpoints" / "step_00000001", cli.find(program)
    found.check(found.load(path, more), 1)
    for changes, key in (
        (["seed=7"], "model.checkpoint: the model with random weights"),
        (["seed=7", "reference.kind=separate"], "model.checkpoint: the model with random weights"),
        (["reference.kind=separate", f"reference.checkpoint={step}"], f"reference.checkpoint: {step / 'actor'}"),
    ):
        with pytest.raises(UserError, match=f"^{key} is not the reference that this run began with"):
            found.check(found.load(path, [*more, *changes]), 1)

    (step / "reference.json").write_text('{"weights": null}\n')  # of a model without checksums: only its trunk tells
    (step / "checksums.json").unlink()
    (error,) = ranks.run(1, refused, (program, path, [*more, "seed=7"]))
    assert error is not None and "model.checkpoint: its layers that do not train are not those of" in error


REFUSED = {
    "ppo reference.kind=hydra": "reference.kind: hydra shares the layers that do not train, and all do",
    "dpo reference.kind=hydra": "reference.kind: hydra shares the layers that do not train, and all do",
    "ppo model.trained_layers=5": "model.trained_layers: 5 are more than the model's 4 layers",
    "dpo model.trained_layers=0": "trained_layers: must be at least 1",
    "ppo reference.kind=hydra reference.checkpoint=x": "a hydra reference is the policy's own start",
    "dpo reference.kind=hydra reference.checkpoint=x": "a hydra reference is the policy's own start",
    "dpo reference.kind=hydra reference.cache=x": "with a cache the run has no reference model",
    "dpo reference.on_host=true reference.cache=x": "with a cache the run has no reference model",
    "ppo critic.kind=shared critic.on_host=true": "a shared critic has no weights but the actor's",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(directory, case):
    program, *overrides = case.split()
    found = cli.find(program)
    with pytest.raises(UserError) as caught:
        found.check(found.load(directory / f"{program}.yaml", overrides), 1)
    assert REFUSED[case] in str(caught.value) and "\n" not in str(caught.value)
