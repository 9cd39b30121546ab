"""Whole programs with adapters: exact resume, a reference that equals a separate one, chains of runs, refusals."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.models.adapters import Adapters
from megarlhf.models.locate import find_model
from megarlhf.train import dpo, rl, sft
from tests.e2e.runs import CLI, finish, prepare, write_prompts
from tests.e2e.test_ppo import records

LORA = {"rank": 4, "alpha": 8}
pytestmark = pytest.mark.long


def run(program: str, path: Path, settings: dict, **changes) -> Path:
    """Run a program on `settings` with `changes` by dotted key. Returns its run directory."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    path.write_text(yaml.safe_dump(settings))
    done = finish(sys.executable, *CLI, program, "--config", str(path), *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(changes.get("run", settings.get("run", "")))


@pytest.fixture(scope="module")
def chain(straight, tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """(directory, configurations by program), over the session's SFT run as base; SFT and reward model are trained."""
    base, config = straight
    directory = tmp_path_factory.mktemp("adapters")
    write_prompts(directory, prompts=64, pairs=64)
    pairs = {"train": str(directory / "pairs.jsonl"), "max_length": 64}
    training = {"global_batch_size": 16, "micro_batch_tokens": 512, "steps": 4}
    model = {"checkpoint": str(base), "dtype": "fp32", "lora": LORA}
    common = {"optimizer": {"lr": 1e-2}, "checkpoint": {"every": 2}}
    settings = {
        "sft": {"run": str(directory / "sft"), "model": model | {"lora": LORA | {"dropout": 0.1}}, "training": training,
                "data": {"train": yaml.safe_load(config.read_text())["data"]["train"], "max_length": 64}, **common},
        "reward": {"run": str(directory / "reward"), "model": model, "data": pairs, "training": training, **common,
                   "normalization": {"prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
                                     "samples": 32, "response_length": 8}},
        "dpo": {"run": str(directory / "dpo"), "model": model, "data": pairs, "training": training, **common},
        "ppo": {
            "run": str(directory / "ppo"), "model": model,
            "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
            "sampler": {"response_length": 12, "micro_batch_size": 8, "stop_at_eos": True},
            "scoring": {"sources": [{"checkpoint": str(directory / "reward")}]},
            "critic": {"checkpoint": str(directory / "reward")}, "gate": {"every": 1}, "average": 0.5,
            "training": {"steps": 4, "batch_size": 16, "minibatches": 2, "epochs": 2, "micro_batch_tokens": 112},
            **common,
        },
    }  # fmt: skip
    for program in ("sft", "reward", "ppo"):
        run(program, directory / f"{program}.yaml", settings[program])
    return directory, settings


def numbers(directory: Path) -> list[dict]:
    """The records without what depends on the clock."""
    clocks = ("time", "tokens_per", "step_seconds", "cost/")
    return [{key: value for key, value in record.items() if not key.startswith(clocks)}
            for record in records(directory)]  # fmt: skip


def tensors(directory: Path) -> dict[str, str]:
    """{file: hash} of the newest checkpoint's tensors."""
    _, files = checksums.find(find_model(directory))
    return {name: value.sha256 for name, value in files.items() if name.endswith(checksums.DATA)}


def test_resume_is_exact(chain):
    directory, settings = chain
    again = directory / "again"
    shutil.copytree(directory / "ppo", again)
    shutil.rmtree(again / "checkpoints" / "step_00000004")
    (again / "checkpoints" / "latest").write_text("step_00000002\n")
    run("ppo", directory / "ppo.yaml", settings["ppo"], run=str(again))
    assert numbers(again) == numbers(directory / "ppo")
    assert tensors(again) == tensors(directory / "ppo")
    roles = {path.parent.name for path in (again / "checkpoints" / "step_00000004").glob("*/adapter.yaml")}
    assert roles == {"actor", "critic", "average"}
    assert Adapters.of(find_model(again, "critic")).base == str(find_model(directory / "reward", "reward").resolve())


def test_a_critic_on_the_actors_base(chain):
    """As a separate critic from the same start, to the bit; so is a resumed run."""
    directory, settings = chain
    path, bare = directory / "ppo.yaml", {**settings["ppo"], "average": None}
    runs = {kind: run("ppo", path, bare, run=str(directory / f"critic_{kind}"), critic={"kind": kind})
            for kind in ("separate", "adapters")}  # fmt: skip
    assert numbers(runs["adapters"]) == numbers(runs["separate"])
    assert tensors(runs["adapters"]) == tensors(runs["separate"])
    again = directory / "critic_again"
    shutil.copytree(runs["adapters"], again)
    shutil.rmtree(again / "checkpoints" / "step_00000004")
    (again / "checkpoints" / "latest").write_text("step_00000002\n")
    run("ppo", path, bare, run=str(again), critic={"kind": "adapters"})
    assert numbers(again) == numbers(runs["adapters"])
    assert tensors(again) == tensors(runs["adapters"])


def test_the_reference_equals_a_separate_one(chain):
    directory, settings = chain
    base = settings["ppo"]["model"]["checkpoint"]
    other = directory / "separate"
    run("ppo", directory / "ppo.yaml", settings["ppo"], run=str(other), **{"reference.checkpoint": base})
    found = numbers(directory / "ppo")
    assert all(record.pop("gate/reference") == 0 for record in found if "gate/reference" in record)
    assert numbers(other) == found
    assert tensors(other) == tensors(directory / "ppo")


def test_chains_of_runs(chain):
    """Adapters are merged into the next run's base, or go on; the policy starts at its reference either way."""
    directory, settings = chain
    model, dpo = settings["dpo"]["model"], directory / "dpo.yaml"
    merged = run("dpo", dpo, settings["dpo"], **{"model.checkpoint": str(directory / "sft")})
    going = run("dpo", dpo, settings["dpo"],
                **{"run": str(directory / "going"), "model.lora.checkpoint": str(directory / "sft")})  # fmt: skip
    for finished in (merged, going):
        first = numbers(finished)[0]
        assert abs(first["loss"] - 0.6931472) < 1e-6, first  # ln 2: the policy is the reference
    assert Adapters.of(find_model(merged)).base == str(find_model(directory / "sft").resolve())
    assert Adapters.of(find_model(going)).base == str(find_model(model["checkpoint"]).resolve())
    for source in (merged, going):
        run("generate", directory / "generate.yaml", {
            "checkpoint": str(source), "dtype": "fp32", "out": str(directory / f"{source.name}.jsonl"),
            "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16}, "sampler": {"response_length": 4},
        })  # fmt: skip
    full = {**settings["dpo"], "run": str(directory / "full"), "model": {"checkpoint": str(merged), "dtype": "fp32"}}
    run("dpo", dpo, full, **{"optimizer.state_on_host": True})
    assert Adapters.of(find_model(directory / "full")) is None
    assert abs(numbers(directory / "full")[0]["loss"] - 0.6931472) < 1e-6


def test_refused(chain):
    directory, settings = chain

    def refused(program, message, **changes):
        settings_of = {"ppo": rl.PPO, "dpo": dpo.PROGRAM, "sft": sft.PROGRAM}[program]
        path = directory / "refused.yaml"
        path.write_text(yaml.safe_dump(settings[program]))
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        with pytest.raises(UserError, match=message):
            settings_of.check(settings_of.load(str(path), overrides), 1)

    new = str(directory / "new")
    kind, reward = "adapters", str(directory / "reward")
    refused("ppo", "critic of kind adapters starts", run=new, critic={"kind": kind, "checkpoint": reward})
    refused("ppo", "critic of kind adapters uses the actor", run=new, critic={"kind": kind, "on_host": True})
    refused("ppo", "give model.lora, or another kind", run=new, critic={"kind": kind}, **{"model.lora": None})
    refused("ppo", "model.lora.dropout: must be 0", run=new, **{"model.lora.dropout": 0.1})
    refused("ppo", "reference.on_host: with model.lora", run=new, **{"reference.on_host": True})
    going = {"model.lora.checkpoint": str(directory / "sft")}
    refused("dpo", "reference.on_host: with model.lora", run=new, **going, **{"reference.on_host": True})
    refused("dpo", "reference.cache: the reference has the adapters", run=new, **going, **{"reference.cache": new})
    refused("sft", "targets: 'q' is no linear layer", run=new, **{"model.lora.targets": ["q"]})
    refused("sft", "rank: must be from 1", run=new, **{"model.lora.rank": 0})
    refused("sft", "adapters with rank 4, alpha 8", run=new,
            **{"model.lora.checkpoint": str(directory / "sft"), "model.lora.rank": 2})  # fmt: skip
    base = settings["sft"]["model"]["checkpoint"]
    refused("sft", "holds a whole model and no adapters", run=new, **{"model.lora.checkpoint": base})
    refused("sft", "holds adapters, so it cannot be resumed", **{"model.lora": None})
    refused("sft", "has adapters of another rank", **{"model.lora.rank": 8})
    refused("ppo", "has other weights than the model", **{"model.checkpoint": str(directory / "sft")})


def test_a_quantized_base(tmp_path):
    """Resume is exact, generate runs the quantized model, and a merged run goes on from the same function."""
    path = prepare(tmp_path, **{"model.architecture.hidden_size": 64, "training.steps": 2})
    settings = yaml.safe_load(path.read_text())
    base = run("sft", path, settings)
    lora = LORA | {"quantization": "nf4"}
    own = {**settings, "model": {"checkpoint": str(base), "dtype": "fp32", "lora": lora}}
    del own["tokenizer"]
    own["training"] |= {"steps": 4, "evaluate_every": 4}
    whole = run("sft", path, own, run=str(tmp_path / "whole"))
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000004")
    (again / "checkpoints" / "latest").write_text("step_00000002\n")
    run("sft", path, own, run=str(again))
    assert numbers(again) == numbers(whole) and tensors(again) == tensors(whole)
    held_out = [record["validation/loss"] for record in numbers(whole) if "validation/loss" in record][-1]
    merged = {**own, "model": {"checkpoint": str(whole), "dtype": "fp32"}}
    run("sft", path, merged, run=str(tmp_path / "merged"))
    first = next(record["validation/loss"] for record in numbers(tmp_path / "merged") if "validation/loss" in record)
    assert first == pytest.approx(held_out, abs=1e-5)
    own["model"]["lora"] = lora | {"checkpoint": str(whole)}
    run("sft", path, own, run=str(tmp_path / "going"))
    first = next(record["validation/loss"] for record in numbers(tmp_path / "going") if "validation/loss" in record)
    assert first == pytest.approx(held_out, abs=1e-6)
