"""`megarlhf ilql`: resumed runs are straight runs, bit for bit; its checkpoints in other programs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megarlhf import cli
from megarlhf.cli import find
from megarlhf.convert import torch_dist
from tests.distributed.layouts import layout
from tests.e2e import runs

pytestmark = pytest.mark.long

CHANGES = {"optimizer.schedule": "constant", "training.evaluate_every": 8, "checkpoint.every": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Data with rewards, a tokenizer, and run.yaml of a random Llama."""
    path = tmp_path_factory.mktemp("ilql")
    runs.prepare(path, **CHANGES)
    for name, count, seed in (("train", 60, 1), ("validation", 10, 2)):
        rows = [
            {"prompt": text.prompt, "response": text.response, "reward": runs.reviews.judge(text.response)}
            for text in runs.reviews.reviews(count, seed)
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / f"{name}.prompts.jsonl").write_text("".join(json.dumps({"prompt": r["prompt"]}) + "\n" for r in rows))
    return path


def run_program(name, path, overrides):
    import torch.distributed as dist

    program = find(name)
    settings = program.load(path, overrides)
    plan = program.check(settings, dist.get_world_size())
    with layout(**dataclasses.asdict(settings.parallel)) as topology:
        program.run(settings, plan, topology)


def train(ranks, directory, run, *overrides, world_size=1):
    ranks.run(world_size, run_program, "ilql", str(directory / "run.yaml"), [f"run={directory / run}", *overrides])
    return directory / run


def weights(run, step):
    """{name: tensor} of a checkpoint's actor, optimizer states included."""
    reader = torch_dist.Reader(run / "checkpoints" / f"step_{step:08}" / "actor", None)
    return {name: reader.read(name) for name in reader.specs}


def metrics(run):
    rows = runs.recorded(run)
    timed = ("seconds", "tokens_per_second", "time", "cost/")
    return [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in rows]


@pytest.fixture(scope="module")
def straight(ranks, directory):
    return train(ranks, directory, "straight", "ilql.target_period=3", "ilql.target_alpha=0.25")


def test_a_resumed_run_is_a_straight_one_bit_for_bit(ranks, directory, straight):
    same = ("ilql.target_period=3", "ilql.target_alpha=0.25")
    run = train(ranks, directory, "resumed", *same, "training.steps=4")  # between two moves of the slow copies
    resumed = train(ranks, directory, "resumed", *same)
    expected, found = weights(straight, 8), weights(resumed, 8)
    assert expected.keys() == found.keys()
    assert {f"q_heads.{name}" for name in ("first", "second", "slow_first", "slow_second")} <= expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name in ("first", "second"):  # slow copies have moved, at updates 3 and 6, and are not the heads
        earlier = weights(run, 4)[f"q_heads.slow_{name}"]
        assert not torch.equal(expected[f"q_heads.slow_{name}"], earlier)
        assert not torch.equal(expected[f"q_heads.slow_{name}"], expected[f"q_heads.{name}"])
    theirs = [row for row in metrics(resumed) if "validation/loss" not in row]
    assert theirs == [row for row in metrics(straight) if "validation/loss" not in row]
    losses = [row["loss"] for row in theirs if "loss" in row]
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_two_tensor_ranks_go_on_with_the_same(ranks, directory, straight):
    """From a checkpoint of one rank, whose vocabulary has less padding."""
    train(ranks, directory, "tensor", "ilql.target_period=3", "ilql.target_alpha=0.25", "training.steps=4")
    run = train(ranks, directory, "tensor", "ilql.target_period=3", "ilql.target_alpha=0.25", "parallel.tensor=2",
                "parallel.sequence=true", world_size=2)  # fmt: skip
    assert runs.losses(run) == pytest.approx(runs.losses(straight), rel=1e-4)
    expected, found = weights(straight, 8), weights(run, 8)
    for name in (name for name in expected if name.startswith("q_heads.")):
        assert len(expected[name]) == 384 and len(found[name]) == 512
        torch.testing.assert_close(found[name][:300], expected[name][:300], rtol=0, atol=1e-3)


def test_heads_are_new_for_an_sft_model_and_kept_for_an_ilql_model(ranks, directory, straight):
    from megarlhf.train import ilql

    base = ["tokenizer=null", "model.architecture=null", f"model.checkpoint={straight}", "training.steps=1"]
    program = find("ilql")
    plan = program.check(program.load(str(directory / "run.yaml"), [f"run={directory / 'x'}", *base]), 1)
    assert plan.fresh == () and any("its value and Q heads are kept" in note for note in plan.notes)
    kept = train(ranks, directory, "kept", *base, "optimizer.lr=1e-9", "ilql.target_alpha=1e-9")
    for name in ("first", "slow_first"):
        torch.testing.assert_close(weights(kept, 1)[f"q_heads.{name}"], weights(straight, 8)[f"q_heads.{name}"])

    ranks.run(1, run_program, "sft", str(directory / "run.yaml"), [f"run={directory / 'sft'}", *base])
    assert not any(name.startswith(("q_heads", "value_head")) for name in weights(directory / "sft", 1))
    base[2] = f"model.checkpoint={directory / 'sft'}"
    plan = program.check(program.load(str(directory / "run.yaml"), [f"run={directory / 'x'}", *base]), 1)
    assert plan.fresh == ilql.HEADS and any("has no Q heads; new ones" in note for note in plan.notes)
    fresh = train(ranks, directory, "fresh", *base, "optimizer.lr=1e-9")
    assert not torch.equal(weights(fresh, 1)["q_heads.first"], weights(straight, 8)["q_heads.first"])


def generate(ranks, directory, source, name, *overrides):
    ranks.run(1, run_program, "generate", None, [
        f"checkpoint={source}", f"prompts.path={directory / 'validation.prompts.jsonl'}", f"out={directory / name}",
        "prompts.length=24", "sampler.response_length=8", "sampler.top_k=20", "dtype=fp32", *overrides,
    ])  # fmt: skip
    return [json.loads(line)["tokens"] for line in (directory / name).read_text().splitlines()]


def test_generate(ranks, directory, straight, capsys):
    plain = generate(ranks, directory, straight, "plain.jsonl")
    assert generate(ranks, directory, straight, "zero.jsonl", "sampler.q_beta=0") == plain
    for dtype in ("fp32", "bf16"):
        assert generate(ranks, directory, straight, "q.jsonl", "sampler.q_beta=30", f"dtype={dtype}") != plain
    ranks.run(1, run_program, "sft", str(directory / "run.yaml"), [f"run={directory / 'no_heads'}", "training.steps=1"])
    for source, value, message in (
        (directory / "no_heads", "1", "actor has no Q heads; give a checkpoint of 'megarlhf ilql', or remove the key"),
        (straight, "-1", "sampler.q_beta: must not be negative, not -1"),
    ):
        assert cli.main(["generate", "--checkpoint", str(source), "--out", str(directory / "x.jsonl"), "--prompts",
                         str(directory / "validation.prompts.jsonl"), f"sampler.q_beta={value}"]) == 2  # fmt: skip
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_conversion_leaves_the_heads_out(directory, straight, capsys):
    """The rest is the policy, bit for bit."""
    from megarlhf.convert.__main__ import main

    assert main(["megatron2hf", str(straight), str(directory / "hf")]) == 0
    said = capsys.readouterr().out
    assert "left out: value_head.weight, " in said and "left out: q_heads.first, " in said
    assert main(["hf2megatron", str(directory / "hf"), str(directory / "back")]) == 0
    capsys.readouterr()
    reader, policy = torch_dist.Reader(directory / "back" / "actor", 300), weights(straight, 8)
    for name in reader.specs:
        value = reader.read(name)
        assert torch.equal(value, policy[name][: len(value)]), name


def test_preflight_and_report(directory, straight, capsys):
    """The file's program is found by its keys; the disk must have room for the heads, too."""
    from megarlhf import report

    config = ["--config", str(directory / "run.yaml"), "--gpus-per-node", "1", f"run={directory / 'x'}"]
    found = {}
    for name, override in (("ilql", "ilql.tau=0.8"), ("sft", "data.packing=false")):
        assert cli.main(["preflight", *config, override]) == 0
        said = capsys.readouterr().out
        assert f"a configuration for 'megarlhf {name}' on 1 x 1 = 1 ranks" in said
        found[name] = float(said.split("checkpoints of ")[1].split(" MB")[0])
    assert found["ilql"] - found["sft"] == pytest.approx(2 * 300 * 32 * 20 / 1e6, abs=0.11)
    assert "megarlhf ilql" in report.render([straight])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ilql.tau=1", "ilql.tau: must be between 0 and 1, not 1"),
        ("ilql.target_alpha=0", "ilql.target_alpha: must be above 0 and at most 1"),
        ("data.train={directory}/bad.jsonl", "bad.jsonl:1: no key 'reward' (found: prompt, response)"),
        ("data.train={directory}/equal.jsonl", "data.normalize: all rewards of "),
        ("data.max_length=4", "0 responses, 0 tokens; 60 dropped (more than 4 tokens)"),
        ("optimizer.warmup_steps=9", "optimizer.warmup_steps: 9 are more than the run's 8 updates"),
    ],
)
def test_mistakes(directory, capsys, override, message):
    (directory / "bad.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    row = json.dumps({"prompt": "the plot", "response": " was dull .", "reward": 2}) + "\n"
    (directory / "equal.jsonl").write_text(row * 3)
    override = override.format(directory=directory)
    command = [
        "ilql",
        "--config",
        str(directory / "run.yaml"),
        f"run={directory / 'x'}",
        "data.normalize=true",
        override,
    ]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
