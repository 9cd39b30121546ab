"""`megarlhf rounds` as a user runs it: killed within and between stages, the same command ends with the same files."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
import yaml

from tests.e2e.runs import CLI, finish, losses, prepare, start, written

pytestmark = pytest.mark.long

RULES = """
def vowels(prompts, responses, records):
    return [sum(text.count(letter) for letter in "aeiou") + record["bonus"] for text, record in zip(responses, records)]
"""
FILES = ("samples.jsonl", "scored.jsonl", "data.jsonl")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A tiny SFT model and a chain of two rounds of rejection sampling, which was run to its end: (directory, command
    for another directory)."""
    path = tmp_path_factory.mktemp("rounds")
    config = prepare(path)
    done = finish(sys.executable, *CLI, "sft", "--config", str(config))
    assert done.returncode == 0, done.stderr
    texts = ["we saw this film at home .", "we saw this film at home .", "my friends rented this drama"]
    (path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "bonus": 0.5 * row}) + "\n" for row, text in enumerate(texts * 2))
    )
    (path / "rules.py").write_text(RULES)
    (path / "chain.yaml").write_text(yaml.safe_dump({
        "model": str(path / "run"),
        "rounds": 2,
        "generate": {"dtype": "fp32", "prompts": {"path": str(path / "prompts.jsonl"), "length": 16},
                     "sampler": {"samples_per_prompt": 3, "response_length": 12, "stop_at_eos": True}},
        "score": {"dtype": "fp32", "tokenizer": str(path / "reviews.model"), "batch_size": 4,
                  "scoring": {"sources": [{"function": f"{path}/rules.py:vowels"}]}},
        "select": {"kind": "best", "unfinished": "keep"},
        "sft": {"model": {"dtype": "fp32"}, "data": {"max_length": 48}, "optimizer": {"lr": 1e-2},
                "training": {"global_batch_size": 4, "steps": 6}, "checkpoint": {"every": 2}},
    }))  # fmt: skip

    def command(directory, *more):
        return (sys.executable, *CLI, "rounds", "--config", str(path / "chain.yaml"), f"run={directory}", *more)

    done = finish(*command(path / "straight"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"done: the policy is {path}/straight/round_2/sft" in done.stderr
    return path, command


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_a_chain_writes(chain):
    path, _ = chain
    first, second = path / "straight" / "round_1", path / "straight" / "round_2"
    scored, kept = read(first / "scored.jsonl"), read(first / "data.jsonl")
    assert [line["prompt_id"] for line in scored] == [row for row in range(6) for _ in range(3)]
    for line in scored:
        assert line["record"] == {"bonus": 0.5 * line["prompt_id"]}
        assert line["score"] == sum(line["response"].count(letter) for letter in "aeiou") + 0.5 * line["prompt_id"]
    for row, line in enumerate(kept):  # prompts of equal texts are not one group
        group = scored[3 * row : 3 * row + 3]
        best = max(group, key=lambda one: one["score"])
        assert line == {"prompt": best["prompt"], "response": best["response"]}
    assert [line["tokens"] for line in read(second / "samples.jsonl")] != [line["tokens"] for line in scored]
    runs = [yaml.safe_load((part / "sft" / "checkpoints" / "step_00000006" / "run.yaml").read_text())
            for part in (first, second)]  # fmt: skip
    assert [run["model"]["checkpoint"] for run in runs] == [str(path / "run"), str(first / "sft")]
    assert [run["seed"] for run in runs] == [0, 1]


def test_kills_within_and_between_stages(chain):
    path, command = chain
    there = path / "killed"
    for sign in (
        there / "round_1" / "generate.yaml",  # generation has begun
        there / "round_1" / "scored.jsonl",  # scored, not yet selected or just selected
        there / "round_1" / "sft" / "checkpoints" / "step_00000002",
        there / "round_2" / "samples.jsonl",
    ):
        assert not sign.exists()
        process = start(*command(there), start_new_session=True)
        deadline = time.monotonic() + 300
        while not sign.exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = finish(*command(there), timeout=600)
    assert done.returncode == 0, done.stderr
    assert "5 of 8 stages are done" in done.stderr
    for number in (1, 2):
        ours, straight = (path / name / f"round_{number}" for name in ("killed", "straight"))
        for name in FILES:
            assert (ours / name).read_bytes() == (straight / name).read_bytes(), (number, name)
        assert losses(ours / "sft") == losses(straight / "sft")
    assert not list(there.rglob("*.partial"))

    before = written(there)
    again = finish(*command(there))
    assert again.returncode == 0 and "8 of 8 stages are done" in again.stderr
    changed = finish(*command(there, "generate.sampler.temperature=0.5"))
    assert changed.returncode == 2 and "generate.sampler.temperature: was None in round 1" in changed.stderr
    assert written(there) == before


def test_the_list_for_slurm(chain):
    """Nothing is started; the models, prompts and sources are checked."""
    path, command = chain
    there = path / "planned"
    done = finish(*command(there, "plan=true"))
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        [program, f"{there}/round_{number}/{program}.yaml"]
        for number in (1, 2)
        for program in ("generate", "score", "select", "sft")
    ]
    assert {file.name for file in there.glob("*/*")} == {f"{x}.yaml" for x in ("generate", "score", "select", "sft")}
    wrong = finish(*command(path / "wrong", "plan=true", "score.scoring.sources=[{verify: number}]"))
    assert wrong.returncode == 2 and "prompts.jsonl: prompt 1: " in wrong.stderr and "answer" in wrong.stderr
    assert not (path / "wrong").exists()


def test_a_stage_that_fails_ends_the_chain(chain):
    path, command = chain
    there = path / "failing"
    done = finish(*command(there, "score.tokenizer=/no/such/tokenizer"))
    assert done.returncode == 2 and "/no/such/tokenizer: no such tokenizer" in done.stderr
    assert "round 1, score ended with status 2; the same command goes on there" in done.stderr
    assert (there / "round_1" / "samples.jsonl").exists() and not (there / "round_1" / "scored.jsonl").exists()
    shutil.rmtree(there)
