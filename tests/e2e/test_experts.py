"""Whole programs with mixtures of experts: PPO and GRPO give the numbers of one rank under every layout, a resumed run
continues bit for bit, and checkpoints go from any layout to any other. All with the step-0 gate."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, config
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from megarlhf.models.spec import Architecture
from megarlhf.train.resuming import check_trained_layers
from megarlhf.train.settings import RUN_FILE
from tests.distributed.layouts import layout
from tests.e2e.runs import prepare, recorded, write_prompts
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))

SIZES = dict(num_layers=4, hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=300,
             max_position_embeddings=64, init_std=0.1)  # fmt: skip
MODELS = {
    "mixtral": Architecture("mixtral", ffn_hidden_size=40, num_experts=4, experts_per_token=2, **SIZES),
    "qwen2_moe": Architecture(
        "qwen2_moe", ffn_hidden_size=24, num_experts=8, experts_per_token=3, renormalize_experts=False,
        shared_expert_size=32, qkv_bias=True, **SIZES,
    ),
}  # fmt: skip
SEQUENCE = ["parallel.tensor=2", "parallel.sequence=true"]
LAYOUTS = {
    1: {"one": [], "cut": ["training.micro_batch_tokens=30", "sampler.micro_batch_size=2"]},
    2: {"ep2": ["parallel.expert=2"], "tp2": SEQUENCE},
    4: {
        "tp2 ep2": [*SEQUENCE, "parallel.expert=2"],
        "tp2 ep4": [*SEQUENCE, "parallel.expert=4"],
        "pp2 ep2": ["parallel.pipeline=2", "parallel.expert=2"],
    },
}
NOT_COMPARED = (
    "step",
    "time",
    "tokens_per_second",
    "cost/",
    "gate/",
    "sampler/gap",
    "ppo/policy/clipfrac",
    "ppo/val/clipfrac",
)


def save_model(directory, name):
    """A random model with its tokenizer, where `megarlhf sft` would have left one."""
    from megarlhf.data.tokenizer import load_tokenizer
    from megarlhf.models.build import build

    tokenizer = load_tokenizer(directory / "reviews.model")
    with layout() as topology:
        engine = build("actor", MODELS[name], topology, micro_batch_tokens=1, dtype="fp32", seed=3)
        engine.modules[0].output_layer.weight.data[tokenizer.eos_id] *= 4  # responses of many lengths

        def write(path):
            MODELS[name].save(path / "actor")
            tokenizer.save(path / "tokenizer")

        Checkpoints(directory / name, CheckpointConfig()).save(1, {"actor": engine}, {}, write)


def run_programs(cases):
    """[(program, YAML, overrides)] on these ranks, one after the other."""
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    for name, path, overrides in cases:
        program = cli.find(name)
        loaded = program.load(path, overrides)
        program.run(loaded, program.check(loaded, dist.get_world_size()), parallel.start(loaded.parallel))
        parallel.stop()


@pytest.fixture(scope="module")
def files(ranks, tmp_path_factory) -> dict[str, Path]:
    """{"ppo mixtral": YAML, ...}"""
    directory = tmp_path_factory.mktemp("experts")
    prepare(directory)  # data and a tokenizer
    write_prompts(directory, prompts=32, pairs=8)
    (directory / "held_out.jsonl").write_text("\n".join((directory / "prompts.jsonl").read_text().splitlines()[::3]))
    for name in MODELS:
        ranks.run(1, save_model, directory, name)
    found = {}
    for program, section in (("ppo", {"kl": {"coef": 0.1}}), ("grpo", {})):
        for name in MODELS:
            tree = {
                "run": str(directory / "unused"),
                "model": {"checkpoint": str(directory / name), "dtype": "fp32"},
                "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
                "sampler": {"response_length": 12, "micro_batch_size": 4, "stop_at_eos": True},
                "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/judge.py:score"}]},
                "training": {"steps": 4, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 112},
                # With a smaller epsilon an update whose gradient is rounding alone (GRPO where all scores of a
                # minibatch are equal) would be of visible size.
                "optimizer": {"lr": 3e-3, "eps": 1e-2, "schedule": "constant"},
                "checkpoint": {"every": 2},
                "gate": {"every": 1, "tolerance": 1e-5},
                **({"ppo": section} if program == "ppo" else {"preset": "grpo"}),
            }  # fmt: skip
            if program == "grpo":
                tree["sampler"]["samples_per_prompt"] = 4
            path = directory / f"{program}-{name}.yaml"
            path.write_text(yaml.safe_dump(tree))
            found[f"{program} {name}"] = path
    return found


def numbers(run):
    timed = ("time", "tokens_per_second", "cost/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in recorded(run)]


@pytest.mark.long
@pytest.mark.parametrize("case", ["ppo mixtral", "grpo mixtral", "grpo qwen2_moe"])
def test_the_layout_does_not_matter(ranks, files, tmp_path, case):
    program = "ppo" if case.startswith("ppo") else "rl"
    curves = {}
    for world_size, layouts in LAYOUTS.items():
        given = [(program, files[case], [*more, f"run={tmp_path / name}"]) for name, more in layouts.items()]
        ranks.run(world_size, run_programs, given)
        curves |= {name: recorded(tmp_path / name) for name in layouts}
    one = curves["one"]
    scales = {key: max(abs(record[key]) for record in one) for key in one[-1] if not key.startswith(NOT_COMPARED)}
    assert len(scales) > 15
    for name, curve in curves.items():
        assert len(curve) == 4
        for expected, got in zip(one, curve, strict=True):
            assert got["gate/sampler"] < 1e-5 and got["gate/micro_batch"] < 1e-5
            for key, scale in scales.items():
                assert abs(got[key] - expected[key]) <= 1e-4 * scale, (name, got["step"], key, got[key], expected[key])


@pytest.mark.long
@pytest.mark.parametrize("train", [[], ["model.experts.train_router=true"]], ids=["frozen", "trained"])
def test_a_resumed_run_continues_bit_for_bit_and_in_any_layout(ranks, files, tmp_path, train):
    """Two steps under expert parallelism; then the rest under it, bit for bit, and on one rank. And back."""
    path, ep2 = files["grpo mixtral"], ["parallel.expert=2"]
    ranks.run(2, run_programs, [
        ("rl", path, [*ep2, *train, f"run={tmp_path / 'straight'}"]),
        ("rl", path, [*ep2, *train, f"run={tmp_path / 'half'}", "training.steps=2"]),
    ])  # fmt: skip
    for name in ("same", "one"):
        shutil.copytree(tmp_path / "half", tmp_path / name)
    ranks.run(2, run_programs, [("rl", path, [*ep2, *train, f"run={tmp_path / 'same'}"])])
    ranks.run(1, run_programs, [("rl", path, [*train, f"run={tmp_path / 'one'}", "training.steps=3"])])
    shutil.copytree(tmp_path / "one", tmp_path / "back")
    ranks.run(2, run_programs, [("rl", path, [*ep2, *train, f"run={tmp_path / 'back'}"])])
    straight = numbers(tmp_path / "straight")
    assert numbers(tmp_path / "same") == straight
    for name in ("one", "back"):
        for expected, got in zip(straight, numbers(tmp_path / name), strict=False):
            for key in expected.keys() - {"sampler/gap"}:
                if not key.startswith("gate/"):
                    scale = max(abs(record[key]) for record in straight)
                    assert abs(got[key] - expected[key]) <= 1e-4 * scale, (name, got["step"], key)
    assert len(numbers(tmp_path / "back")) == 4
    done = json.loads((tmp_path / "same" / "metrics.jsonl").read_text().splitlines()[-1])
    assert done["step"] == straight[-1]["step"]


@pytest.mark.long
def test_other_programs(ranks, files, tmp_path):
    """SFT with losses of the routers, a reward model, DPO, and generate: the same under expert parallelism. The
    optimizer's state and frozen models in host memory, an averaged actor and held-out prompts: the same in PPO."""
    base = next(iter(files.values())).parent
    common = {
        "model": {"checkpoint": str(base / "mixtral"), "dtype": "fp32"},
        "optimizer": {"lr": 1e-3, "eps": 1e-2},
        "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 3, "evaluate_every": 3},
    }
    pairs = {"train": str(base / "pairs.jsonl"), "max_length": 64}
    rows = {"train": str(base / "train.jsonl"), "validation": str(base / "validation.jsonl"), "max_length": 64}
    trees = {
        "sft": {**common, "data": rows, "model": {**common["model"], "experts": {"balance_loss": 0.1, "z_loss": 0.01}}},
        "reward": {**common, "data": pairs},
        "dpo": {**common, "data": pairs},
    }
    for name, tree in trees.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"run": str(tmp_path / "unused"), **tree}))
    host = ["reference.on_host=true", "critic.on_host=true", "optimizer.state_on_host=true", "average=0.5",
            f"evaluation.prompts.path={base / 'held_out.jsonl'}", "evaluation.every=2", "training.steps=2"]  # fmt: skip
    runs = {1: ("one", []), 2: ("ep2", ["parallel.expert=2"])}
    for world_size, (label, more) in runs.items():
        cases = [(name, tmp_path / f"{name}.yaml", [*more, f"run={tmp_path / label / name}"]) for name in trees]
        cases.append(("ppo", files["ppo mixtral"], [*more, *host, f"run={tmp_path / label / 'ppo'}"]))
        ranks.run(world_size, run_programs, cases)
        given = [f"checkpoint={base / 'mixtral'}", f"prompts.path={base / 'prompts.jsonl'}", "prompts.length=16",
                 "sampler.response_length=12", "dtype=fp32", f"out={tmp_path / label / 'out.jsonl'}"]  # fmt: skip
        ranks.run(world_size, run_programs, [("generate", None, [*more, *given])])
    for name in (*trees, "ppo"):
        one, other = (recorded(tmp_path / label / name) for label in ("one", "ep2"))
        assert len(one) == len(other) > 0
        for expected, got in zip(one, other, strict=True):
            for key in expected:
                if not key.startswith((*NOT_COMPARED, "memory")):
                    scale = max(abs(record.get(key, 0)) for record in one)
                    assert abs(got[key] - expected[key]) <= 1e-4 * scale, (name, got["step"], key)
    one, other = ((tmp_path / label / "out.jsonl").read_text() for label in ("one", "ep2"))
    texts = [[json.loads(line)["response"] for line in text.splitlines()] for text in (one, other)]
    assert texts[0] == texts[1] and len(texts[0]) == 32


def test_mistakes(files):
    """Through the program, in one line."""
    for overrides, message in (
        (["parallel.expert=3"], "parallel.expert: "),
        (["model.lora.rank=4"], "model.lora: is not supported with a mixture of experts"),
        (["model.trained_layers=2", "reference.kind=hydra"], "model.trained_layers: is not supported with a mixture"),
        (["model.experts.z_loss=0.1"], "model.experts.z_loss: is a loss of the router"),
    ):
        program = cli.find("ppo")
        with pytest.raises(UserError) as caught:
            program.check(program.load(files["ppo mixtral"], overrides), 1)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_resumed_run_trains_its_router_as_before(files, tmp_path):
    """Whether the key is left out or says the same."""
    load, path = cli.find("ppo").load, files["ppo mixtral"]
    (tmp_path / RUN_FILE).write_text(config.dump(load(path, [])))
    check_trained_layers(load(path, ["model.experts.train_router=false"]), tmp_path)
    with pytest.raises(UserError, match="train_router: is true, and .* was saved with false"):
        check_trained_layers(load(path, ["model.experts.train_router=true"]), tmp_path)


def test_preflight_knows_the_weights(files, capsys):
    assert cli.main(["preflight", "--config", str(files["ppo mixtral"]), "--nodes", "1", "--gpus-per-node", "1"]) == 0
    assert "ok: model.checkpoint" in capsys.readouterr().out
