"""Each switch that keeps something in host memory: the numbers of a run without it, bit for bit, also resumed; the
bytes of each phase; and a weight that did not come back stops the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from bench.memory import SWITCHES, held
from megarlhf.models.spec import Architecture
from tests.e2e.runs import prepare, write_prompts
from tests.e2e.test_hydra import LLAMA, numbers, run_programs, same

STEPS = 3


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    """A reward model, and a configuration of PPO with it."""
    path = tmp_path_factory.mktemp("offload")
    prepare(path)
    write_prompts(path, prompts=32, pairs=16)
    both = {
        "tokenizer": str(path / "reviews.model"),
        "model": {"dtype": "fp32", "architecture": LLAMA},
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "checkpoint": {"every": 1, "keep": STEPS},
    }
    reward = both | {
        "run": str(path / "reward"),
        "data": {"train": str(path / "pairs.jsonl"), "max_length": 64},
        "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 1},
    }
    ppo = both | {
        "run": str(path / "unused"),
        "prompts": {"path": str(path / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 12, "micro_batch_size": 4, "stop_at_eos": True},
        "scoring": {"sources": [{"checkpoint": str(path / "reward")}]},
        "ppo": {"kl": {"coef": 0.1, "estimator": "exact"}},
        "training": {"steps": STEPS, "batch_size": 8, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 112},
        "gate": {"every": 1},
    }
    for name, config in (("reward", reward), ("ppo", ppo)):
        (path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    ranks.run(1, run_programs, [("reward", path / "reward.yaml", [])])
    return path


def program(directory: Path, name: str, run: str) -> tuple:
    return ("ppo", directory / "ppo.yaml", [*SWITCHES[name], f"run={directory / run}"])


@pytest.mark.long
def test_numbers_and_resume_are_bit_for_bit(ranks, directory):
    ranks.run(1, run_programs, [program(directory, name, name) for name in SWITCHES])
    for name in SWITCHES:
        same(directory / name, directory / "none")
        shutil.copytree(directory / name, directory / f"{name} again")
        for step in range(2, STEPS + 1):
            shutil.rmtree(directory / f"{name} again" / "checkpoints" / f"step_0000000{step}")
        (directory / f"{name} again" / "checkpoints" / "latest").write_text("step_00000001\n")
        gates = [record.get("gate/offloaded") for record in records(directory / name)]
        assert gates == ([None] if name == "none" else [0.0]) * STEPS, name
    ranks.run(1, run_programs, [program(directory, name, f"{name} again") for name in SWITCHES])
    for name in SWITCHES:
        assert len(numbers(directory / f"{name} again")) == STEPS
        same(directory / f"{name} again", directory / "none")


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def counted(directory, cases):
    """[(name, switches)] -> {name: {phase: {kind: bytes}}}"""
    from megarlhf.cluster import parallel
    from megarlhf.cluster.parallel import ParallelConfig

    found = {}
    for name, overrides in cases:
        topology = parallel.start(ParallelConfig())
        more = [*overrides, f"run={directory / f'{name} counted'}", "training.steps=2"]
        found[name] = held(directory / "ppo.yaml", more, topology)
        parallel.stop()
    return found


def test_bytes_of_each_phase(ranks, directory):
    """Known answers: P weights of the policy, and Q of the models with a scalar head, 4 bytes each."""
    (found,) = ranks.run(1, counted, directory, [*SWITCHES.items()])
    architecture = Architecture(**LLAMA)
    rows = architecture.padded_vocab_size(1) * architecture.hidden_size
    body = architecture.num_parameters - 2 * architecture.vocab_size * architecture.hidden_size + rows
    policy, trained = 4 * (body + rows), 4 * (body + architecture.hidden_size + 1)
    scalar = trained + 2 * 4  # with the head's constants, gain and bias of the reward
    plain = found["none"]
    whole = plain["sample"]["weights"]  # trained models lie in buffers with gaps between the weights
    assert 0 <= whole - 2 * policy - 2 * scalar < 2**14
    critic = whole - found["critic.on_host"]["sample"]["weights"]
    assert 0 <= critic - scalar < 2**13
    away = {  # bytes of weights that are not on the device
        "critic.on_host": {"sample": critic, "score": critic},
        "reference.on_host": dict.fromkeys(("sample", "score", "learn", "save"), policy),
        "scoring.on_host": dict.fromkeys(("sample", "evaluate", "learn", "save"), scalar),
    }
    for phase, sizes in plain.items():
        assert sizes["weights"] == whole and sizes["optimizer"] == 2 * (policy + trained), phase
        assert (sizes["caches"] > 0) == (phase == "sample") and (sizes["gradients"] > 0) == (phase == "learn"), phase
        state = found["optimizer.state_on_host"][phase]
        assert state["weights"] == sizes["weights"] and state["gradients"] == sizes["gradients"], phase
        wanted = {"learn": 2 * policy, "save": 2 * policy}.get(phase, 0)  # of one model at a time
        assert state["optimizer"] == wanted, phase
        for name, missing in away.items():
            assert sizes["weights"] - found[name][phase]["weights"] == missing.get(phase, 0), (name, phase)
            assert found[name][phase]["optimizer"] == sizes["optimizer"], (name, phase)
    assert 0 <= plain["learn"]["gradients"] - policy < 2**13
    alone = found["all"]["sample"]
    assert 0 <= alone["weights"] - policy < 2**13 and alone["optimizer"] == 0


def fails(case, victim):
    """The error of a run in which one weight of a model stays behind from the third return on."""
    from megarlhf.cluster import offload
    from megarlhf.config import UserError

    restore = offload._restore

    def all_but_one(kept):
        restore(kept)
        if kept.name == victim:
            returns.append(victim)
            if len(returns) > 2:
                offload._bytes(kept.storage).zero_()

    returns: list[str] = []
    offload._restore = all_but_one
    try:
        run_programs([case])
    except UserError as error:
        return str(error)
    finally:
        offload._restore = restore


VICTIM = "0.decoder.layers.2.mlp.linear_fc1.weight"


@pytest.mark.parametrize("name", ["reference.on_host", "critic.on_host", "scoring.on_host"])
def test_a_weight_that_does_not_come_back_is_caught(ranks, directory, name):
    who = {"reference": "reference's weights", "critic": "critic's weights", "scoring": "reward's weights"}
    # a trained model's weights lie in one buffer, which has the name of the first
    victim = "0.embedding.word_embeddings.weight" if name == "critic.on_host" else VICTIM
    (error,) = ranks.run(1, fails, program(directory, name, f"{name} fails"), victim)
    assert error is not None and "gate: 'offloaded': 1 tensors came back" in error, error
    assert f"{who[name.partition('.')[0]]}: {victim}" in error
