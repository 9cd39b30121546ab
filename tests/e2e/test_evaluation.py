"""Evaluation within the online loop: the same numbers in every layout, training that does not notice it, the best step
that is kept, early stopping and exact resume of all that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, report
from megarlhf.models.locate import find_model
from tests.e2e.runs import CLI, finish
from tests.e2e.test_rl import numbers, run_rl
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import reviews

STEPS, HELD_OUT = 6, 7


@pytest.fixture(scope="module")
def path(straight, tmp_path_factory) -> Path:
    """REINFORCE over the session's SFT run, evaluated on prompts that no number of ranks divides."""
    directory = tmp_path_factory.mktemp("evaluation")
    for name, count, seed in (("prompts", 64, 5), ("held_out", HELD_OUT, 11)):
        lines = [{"prompt": review.prompt, "answer": i % 3} for i, review in enumerate(reviews.reviews(count, seed=seed))]
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


def test_smoke(ranks, path, tmp_path):
    ranks.run(1, run_rl, path, [[f"run={tmp_path / 'one'}", "log.samples=99"]])
    for r in evaluations(tmp_path / "one"):
        print(r)
    print(state(tmp_path / "one"))
    for r in (tmp_path / "one" / "held_out.jsonl").read_text().splitlines()[:3]: print(r)
    assert 0
