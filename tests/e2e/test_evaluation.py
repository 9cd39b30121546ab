"""Evaluation within the online loop: the same numbers in every layout, training that does not notice it, the best step
that is kept, early stopping and exact resume of all that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, report
from megarlhf.config import UserError
from megarlhf.models.locate import find_model
from tests.e2e.runs import CLI, finish
from tests.e2e.test_rl import numbers, run_rl
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import reviews

STEPS, HELD_OUT = 4, 7


@pytest.fixture(scope="module")
def path(straight, tmp_path_factory) -> Path:
    """REINFORCE over the session's SFT run, evaluated on prompts that no number of ranks divides."""
    directory = tmp_path_factory.mktemp("evaluation")
    for name, count, seed in (("prompts", 64, 5), ("held_out", HELD_OUT, 11)):
        found = enumerate(reviews.reviews(count, seed=seed))
        lines = [{"prompt": review.prompt, "answer": i % 3} for i, review in found]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judge = f"{ROOT}/tests/e2e/judge.py"
    tree = {
        "run": str(directory / "unused"),
        "model": {"checkpoint": str(straight[0]), "dtype": "fp32"},
        "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 8, "micro_batch_size": 4, "stop_at_eos": True},
        "scoring": {"sources": [{"function": f"{judge}:score", "normalize": True},
                                {"function": f"{judge}:matched", "name": "right", "weight": 0.5}]},
        "reinforce": {},
        "training": {"steps": STEPS, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 96},
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "schedule": "constant"},
        "evaluation": {"prompts": {"path": str(directory / "held_out.jsonl")}, "every": 2, "samples": 5, "k": [1, 3],
                       "temperature": 1.5, "response_length": 10, "source": "right", "best": "evaluation/pass@3"},
        "checkpoint": {"every": 2, "keep": 1},
    }  # fmt: skip
    file = directory / "rl.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def evaluations(run):
    return [record for record in numbers(run) if "evaluation/greedy" in record]


def trained(run):
    return [record for record in numbers(run) if "evaluation/greedy" not in record]


def state(run):
    (last,) = sorted((run / "checkpoints").glob("step_*"))[-1:]
    return json.loads((last / "state.json").read_text())


LAYOUTS = {
    1: {"one": []},
    2: {"dp2": [], "tp2": ["parallel.tensor=2", "parallel.sequence=true"], "pp2": ["parallel.pipeline=2"]},
}


@pytest.mark.long
def test_any_layout_a_resume_and_no_trace_in_training(ranks, path, tmp_path):
    plain = ["evaluation=null", f"run={tmp_path / 'plain'}"]
    half = [[f"run={tmp_path / 'half'}", *more] for more in (["training.steps=2"], [])]
    for world_size, layouts in LAYOUTS.items():
        cases = [[*more, "log.samples=99", f"run={tmp_path / name}"] for name, more in layouts.items()]
        ranks.run(world_size, run_rl, path, [*cases, *([plain, *half] if world_size == 1 else [])])
    one = tmp_path / "one"
    assert trained(one) == numbers(tmp_path / "plain") and len(trained(one)) == STEPS
    assert state(one)["progress"]["scorer"] == state(tmp_path / "plain")["progress"]["scorer"]
    assert numbers(tmp_path / "half") == numbers(one) and state(tmp_path / "half") == state(one)
    expected = evaluations(one)
    assert [record["step"] for record in expected] == [0, 2, 4]
    for world_size, layouts in LAYOUTS.items():
        for name in layouts:  # counts of right responses, which rounding does not change
            assert evaluations(tmp_path / name) == expected, (world_size, name)
            assert state(tmp_path / name)["progress"]["best"] == state(one)["progress"]["best"], name
    counted_once(one, expected)
    times = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert all(("time/evaluation" in record) != ("time/step" in record) for record in times)


def counted_once(run, expected):
    """The recorded responses, all of them, give the recorded means."""
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    for record in expected:
        mine = [row for row in rows if row["step"] == record["step"]]
        right = [row["scores"]["right"] for row in mine]
        assert len(mine) == len({row["query"] for row in mine}) == HELD_OUT
        assert record["evaluation/greedy"] == record["evaluation/score"] == pytest.approx(sum(right) / HELD_OUT)
        assert 0 < record["evaluation/pass@1"] < record["evaluation/pass@3"] < 1


def test_one_token_to_choose_from_is_greedy(ranks, path, tmp_path):
    """pass@k of equal samples is the share of prompts that greedy decoding gets right; every k, in one evaluation."""
    more = ["evaluation.top_k=1", "evaluation.k=[1, 2, 5]", "evaluation.best=evaluation/pass@5", "training.steps=2"]
    ranks.run(1, run_rl, path, [[f"run={tmp_path / 'run'}", *more]])
    for record in evaluations(tmp_path / "run"):
        assert len({round(record[f"evaluation/{name}"], 9) for name in ("greedy", "pass@1", "pass@2", "pass@5")}) == 1


def test_the_best_step_stays(ranks, path, tmp_path):
    """Beside one newest checkpoint, also where no checkpoint was due."""
    run = tmp_path / "run"
    ranks.run(1, run_rl, path, [[f"run={run}", "evaluation.every=1", "checkpoint.every=100"]])
    found = {record["step"]: record["evaluation/pass@3"] for record in evaluations(run)}
    best = max(found, key=lambda step: found[step])  # the first of equal ones
    assert 0 < best < STEPS, found
    names = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert names == [f"step_{best:08d}", f"step_{STEPS:08d}"]
    assert find_model(run / "best") == run / "checkpoints" / names[0] / "actor"
    assert [record["evaluation/best_step"] for record in evaluations(run)][-1] == best
    assert "pass@3" in report.render([run])


def test_early_stopping(ranks, path, tmp_path):
    """Nothing is better than nothing: the run ends well, stays ended, and goes on if it may."""
    never = ["evaluation.threshold=9", "evaluation.patience=2", "evaluation.every=1", "checkpoint.every=5"]
    overrides = [f"run={tmp_path / 'run'}", "evaluation.samples=0", "evaluation.k=null", "evaluation.temperature=null",
                 "evaluation.best=evaluation/greedy", *never]  # fmt: skip
    command = [sys.executable, *CLI, "rl", "--config", str(path), *overrides]
    done = finish(*command)
    said = "2 evaluations in a row had no better evaluation/greedy than 0.0000 after step 0"
    assert done.returncode == 0 and f"step 2: training stops, since {said}" in done.stderr, done.stderr
    assert len(trained(tmp_path / "run")) == 2 and state(tmp_path / "run")["step"] == 2
    again = finish(*command)
    assert again.returncode == 0 and f"has done 2 steps, then stopped, since {said}: nothing is left" in again.stderr
    assert "raise evaluation.patience" in again.stderr and len(trained(tmp_path / "run")) == 2
    ranks.run(1, run_rl, path, [[*overrides, "evaluation.patience=3"]])
    assert len(trained(tmp_path / "run")) == 3
    with pytest.raises(UserError, match="this run has no best checkpoint"):
        find_model(tmp_path / "run" / "best")


MISTAKES = {
    "no prompts": ({"prompts": None}, "evaluation.prompts: is missing"),
    "no path": ({"prompts": {"length": 16}}, "is the file of the training prompts; give a file of prompts that"),
    "every": ({"every": 0}, "evaluation.every: must be at least 1, not 0"),
    "nothing": ({"greedy": False, "samples": 0, "k": None}, "evaluation.samples: with greedy: false give the number"),
    "no samples": ({"samples": 0}, "evaluation.k: is of sampled responses, but samples is 0"),
    "k": ({"k": [1, 6]}, "evaluation.k: must be from 1 to samples, 5, not 6"),
    "k twice": ({"k": [2, 2]}, "evaluation.k: must be one or more different numbers, not [2, 2]"),
    "temperature": ({"temperature": 0.0}, "evaluation.temperature: must be finite and positive, not 0.0"),
    "source": ({"source": "rigth"}, "evaluation.source: there is no source 'rigth'; did you mean 'right'?"),
    "best": ({"best": "evaluation/pass@2"}, "evaluation.best: there is no metric 'evaluation/pass@2'; did you mean"),
    "patience": ({"best": None, "patience": 2}, "evaluation.patience: needs the metric that should become better"),
    "length": ({"response_length": 99}, "evaluation.prompts.length + evaluation.response_length: rows of 115 tokens"),
    "file": ({"prompts": {"path": "/no/such"}}, "/no/such: cannot read"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(path, tmp_path, capsys, name):
    change, expected = MISTAKES[name]
    tree = yaml.safe_load(path.read_text())
    tree["evaluation"] |= change
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["rl", "--config", str(tmp_path / "rl.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_records_of_held_out_prompts_are_checked(path, tmp_path, capsys):
    deep = "[" * 20 + "]" * 20
    (tmp_path / "deep.jsonl").write_text(f'{{"prompt": "the film", "answer": {deep}}}\n')
    more = f"evaluation.prompts.path={tmp_path / 'deep.jsonl'}"
    assert cli.main(["rl", "--config", str(path), more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "deep.jsonl:1" in line and "within each other" in line


def test_prompts_that_are_not_held_out_are_counted(path, tmp_path):
    known = path.parent.joinpath("prompts.jsonl").read_text().splitlines()[:2]
    (tmp_path / "mixed.jsonl").write_text("\n".join([*known, '{"prompt": "the film"}']))
    program = cli.find("rl")
    plan = program.check(program.load(str(path), [f"evaluation.prompts.path={tmp_path / 'mixed.jsonl'}"]), 1)
    assert plan.notes[-1].startswith("2 of 3 held-out prompts are prompts of training, too")
