"""`megarlhf prm` as a user runs it: it learns, it survives kill -9 exactly, and its model is a reward of the online
loop, with the same numbers under every layout."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from megarlhf import cli
from tests.e2e.runs import CLI, finish, losses, recorded, reviews, start
from tests.e2e.test_rl import numbers, run_rl

pytestmark = pytest.mark.long

POSITIVE = set(reviews.POSITIVE)


def solutions(count: int, seed: int) -> list[dict]:
    """Reviews whose clauses are steps; a step is right if its adjective is a positive one."""
    rows = []
    for review in reviews.reviews(count, seed=seed):
        steps = [step.strip() for step in review.response.split(",")]
        labels = [bool(POSITIVE & set(step.replace(".", "").split())) for step in steps]
        rows.append({"prompt": review.prompt, "steps": steps, "labels": labels})
    return rows


@pytest.fixture(scope="module")
def trained(straight, tmp_path_factory) -> tuple[Path, Path]:
    """(run directory, configuration) of one uninterrupted `megarlhf prm` on one process."""
    directory = tmp_path_factory.mktemp("prm")
    for name, rows in (("train", solutions(64, 3)), ("validation", solutions(24, 4))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": str(directory / "run"),
        "model": {"checkpoint": str(straight[0]), "dtype": "fp32"},
        "data": {"train": str(directory / "train.jsonl"), "validation": str(directory / "validation.jsonl"),
                 "separator": ",", "max_length": 64},
        "optimizer": {"lr": 1e-2},
        "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 8, "evaluate_every": 4},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    config = directory / "prm.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = finish(sys.executable, *CLI, "prm", "--config", str(config))
    assert done.returncode == 0, done.stderr
    return directory / "run", config


def held_out(run: Path, name: str) -> list[float]:
    records = recorded(run)
    return [record[f"validation/{name}"] for record in records if f"validation/{name}" in record]


def test_it_learns_and_writes_what_it_says(trained):
    run, _ = trained
    curve = held_out(run, "loss")
    assert len(curve) == 3 and curve[2] < 0.9 * curve[0]
    shares = [sum(held_out(run, f"solutions/{name}")) / 3 for name in ("wrong", "right")]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    for step in range(3):
        found = held_out(run, "solutions/wrong_found")[step] + held_out(run, "solutions/right_found")[step]
        assert held_out(run, "first_error")[step] == pytest.approx(found)
    step = run / "checkpoints" / "step_00000008"
    assert {path.name for path in step.iterdir()} == {
        "reward", "tokenizer", "run.yaml", "state.json", "checksums.json", "data.json",
    }  # fmt: skip


def test_kill_9_and_resume_equals_a_straight_run(trained, tmp_path):
    run, config = trained
    command = (sys.executable, *CLI, "prm", "--config", str(config), f"run={tmp_path / 'run'}")
    process = start(*command)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoints" / "step_00000004").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = finish(*command)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(run)
    for name in ("loss", "accuracy", "first_error"):
        assert held_out(tmp_path / "run", name) == held_out(run, name)


def test_rewards_of_steps_in_the_online_loop(ranks, trained, straight, tmp_path):
    """PPO gets each step's score at its last token, REINFORCE a response's least; the same under every layout."""
    run, _ = trained
    prompts = [json.dumps({"prompt": review.prompt}) for review in reviews.reviews(64, seed=5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    tree = {
        "run": str(tmp_path / "unused"),
        "model": {"checkpoint": str(straight[0]), "dtype": "fp32"},
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 12, "micro_batch_size": 8, "samples_per_prompt": 2},
        "scoring": {"sources": [{"checkpoint": str(run), "name": "steps", "steps": "each", "separator": ","}]},
        "training": {"steps": 2, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 112},
        "optimizer": {"lr": 1e-3, "eps": 1e-4, "schedule": "constant"},
        "checkpoint": {"every": 2},
        "log": {"samples": 16, "samples_every": 1},
    }  # fmt: skip
    file = tmp_path / "rl.yaml"
    sums = {"preset": "rloo"}
    for name, more in (("ppo", {"ppo": {"gamma": 0.9}}), ("rloo", sums)):
        how = {"scoring": {"sources": [tree["scoring"]["sources"][0] | ({"steps": "min"} if more is sums else {})]}}
        file.write_text(yaml.safe_dump(tree | more | how))
        layouts = {1: {"one": []}, 2: {"dp2": [], "tp2": ["parallel.tensor=2"], "pp2": ["parallel.pipeline=2"]}}
        for world_size, cases in layouts.items():
            given = [[*overrides, f"run={tmp_path / name / case}"] for case, overrides in cases.items()]
            ranks.run(world_size, run_rl, file, given)
        one = numbers(tmp_path / name / "one")
        assert len(one) == 2
        for case in layouts[2]:
            for expected, got in zip(one, numbers(tmp_path / name / case), strict=True):
                for key in expected.keys() - {"step", "sampler/gap"}:
                    scale = max(abs(record[key]) for record in one)
                    assert abs(got[key] - expected[key]) <= 5e-5 * scale + 1e-9, (name, case, got["step"], key)
    for name in ("ppo", "rloo"):
        samples = list(map(json.loads, (tmp_path / name / "one" / "samples.jsonl").read_text().splitlines()))
        for sample in samples:
            steps = [step for step in sample["response"].split(",") if step.strip()]
            assert sample["scores"]["steps"] == pytest.approx(sample["score"], rel=1e-5)
            if name == "ppo":  # the sum of probabilities, one a step
                assert 0 < sample["score"] < max(1, len(steps))
            else:
                assert 0 < sample["score"] < 1
        assert any("," in sample["response"] for sample in samples)


def from_words(path, cases):
    """(scores at the ends of steps before and after an update without a learning rate, differences of the SFT model's
    log-probs of the two reward tokens there)."""
    import torch
    import torch.distributed as dist

    from megarlhf import checkpoint
    from megarlhf.algorithms.process_reward import step_loss
    from megarlhf.batch import Sequences
    from megarlhf.cluster import parallel
    from megarlhf.data.steps import StepLoader
    from megarlhf.models.build import build
    from megarlhf.train import prm

    results = []
    for overrides in cases:
        settings = prm.PROGRAM.load(path, [*overrides, "optimizer.lr=1e-20"])
        plan = prm.check(settings, dist.get_world_size())
        topology = parallel.start(settings.parallel)
        engine = prm.prepare(settings, plan, topology).models["reward"]
        rows = next(StepLoader(plan.validation, global_batch=4).epoch_batches())
        before = engine.forward(rows)["scores"]
        engine.step(rows, step_loss)
        after = engine.forward(rows)["scores"]
        policy = build("actor", plan.start.architecture, topology, micro_batch_tokens=64, dtype="fp32")
        checkpoint.load(policy, plan.start.source, weights_only=True)
        expected = torch.zeros_like(before)
        for row, column in rows.mask.nonzero().tolist():
            texts = [torch.cat([rows.tokens[row, : column + 2], torch.tensor([token])]) for token in plan.reward_ids]
            mask = torch.zeros(2, column + 2, dtype=torch.bool)
            mask[:, -1] = True
            right, wrong = policy.forward(Sequences(torch.stack(texts), mask))["logprobs"][:, -1]
            expected[row, column] = right - wrong
        results.append((before, after, expected))
        parallel.stop()
    return results


def test_a_head_of_two_reward_tokens(ranks, trained, tmp_path):
    """The head starts as the word head's difference of two tokens."""
    import torch

    given = [f"run={tmp_path / 'run'}", 'reward_tokens=["e", "o"]']
    layouts = {1: [given], 2: [[*given, "parallel.tensor=2"], [*given, "parallel.pipeline=2"]]}
    for world_size, cases in layouts.items():
        for answers in ranks.run(world_size, from_words, trained[1], cases):
            for before, after, expected in answers:
                assert expected.std() > 0.05
                torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


BAD = {
    "one reward token": (['reward_tokens=["a", "a"]'], "reward_tokens: must be two different tokens, not ['a', 'a']"),
    "no reward token": (['reward_tokens=["a", "a b c"]'], "reward_tokens: 'a b c' is not one token"),
    "no separator": (["data.separator="], "data.separator"),
    "nothing is left": (["data.max_length=6"], "no solution is left: give a file with labels, or raise max_length"),
    "data of sft": (["data.train={sft}"], "no key 'steps' (found: prompt, response); 160 of 160 lines are malformed"),
    "batch": (["training.global_batch_size=0"], "training.global_batch_size: must be at least 1, not 0"),
    "loss": (["loss=steps"], "unknown key 'loss'"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_line(trained, straight, capsys, name):
    overrides, expected = BAD[name]
    overrides = [override.format(sft=straight[1].parent / "train.jsonl") for override in overrides]
    assert cli.main(["prm", "--config", str(trained[1]), *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megarlhf: error: ") and expected in line


def test_preflight_finds_the_program(trained, tmp_path, capsys):
    assert cli.main(["preflight", "--config", str(trained[1]), "--gpus-per-node", "2", f"run={tmp_path / 'new'}"]) == 0
    assert "'megarlhf prm' on 1 x 2 = 2 ranks" in capsys.readouterr().out
