"""A prompt's record reaches a Python function, a reward server and verifiers and is seen in samples.jsonl; what
normalisation remembers survives a resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from megarlhf.data.prompts import PromptsConfig, load_prompts
from megarlhf.data.tokenizer import load_tokenizer
from tests.e2e.test_ppo import records, run_ppo
from tests.scoring import no_namespaces, reward_server

LENGTH = 24
JUDGES = """
def result(record):
    return float(record["answer"].split("####")[1].replace(",", ""))

def number(prompts, responses, records):
    assert all(record["question"] for record in records)
    return [result(record) for record in records]

def steps(prompts, responses, records):
    return [
        [[end, result(record) / 1000] for end in range(1, len(response) + 1, 4)]
        for response, record in zip(responses, records)
    ]
"""


def ours() -> list[dict]:
    """Lines of GSM8K's shape, of words that the tests' tokenizer knows."""
    return [
        {"question": "the " * n + "film. how many words?", "answer": f"{n} + 4 = <<{n}+4={n + 4}>>\n#### {n + 4}"}
        for n in range(1, 17)
    ]


@pytest.mark.parametrize("data", ["ours", pytest.param("gsm8k", marks=pytest.mark.shared)])
def test_answers_reach_functions_and_servers(ranks, straight, tmp_path, request, data):
    sft, _ = straight
    if data == "ours":
        lines = ours()
    else:
        source: Path = request.getfixturevalue("shared") / "data" / "gsm8k" / "train.jsonl"
        lines = [json.loads(line) for line in source.read_text().splitlines()[:32]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "judges.py").write_text(JUDGES)
    with reward_server(tmp_path, function=f"{tmp_path}/judges.py:number") as (url, _):
        settings = {
            "run": str(tmp_path / "unused"),
            "model": {"checkpoint": str(sft), "dtype": "fp32"},
            "prompts": {"path": str(tmp_path / "prompts.jsonl"), "prompt_key": "question", "length": LENGTH,
                        "truncate": "end"},
            "sampler": {"response_length": 8, "micro_batch_size": 8, "samples_per_prompt": 2},
            "scoring": {"sources": [
                {"url": url, "name": "server", "weight": 0.001},
                {"function": f"{tmp_path}/judges.py:number", "clip": [8, 40], "normalize": True},
                {"function": f"{tmp_path}/judges.py:steps"},
            ]},
            "training": {"steps": 3, "batch_size": 8, "epochs": 1, "micro_batch_tokens": 8 * (LENGTH + 8)},
            "optimizer": {"lr": 1e-4, "schedule": "constant"},
            "checkpoint": {"every": 2},
            "log": {"samples": 8, "samples_every": 1},
        }  # fmt: skip
        (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
        ranks.run(1, run_ppo, tmp_path / "ppo.yaml", [[f"run={tmp_path / 'straight'}"]])
        shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
        checkpoints = tmp_path / "resumed" / "checkpoints"
        (checkpoints / "latest").unlink()
        shutil.rmtree(checkpoints / "step_00000003")  # as after a kill in the third step
        ranks.run(1, run_ppo, tmp_path / "ppo.yaml", [[f"run={tmp_path / 'resumed'}"]])
    tokenizer = load_tokenizer(sft.parent / "reviews.model")
    prompts, _ = load_prompts(
        tokenizer,
        PromptsConfig(str(tmp_path / "prompts.jsonl"), prompt_key="question", length=LENGTH, truncate="end"),
    )
    assert len({tuple(ids) for ids in prompts.tokens}) == len(lines)
    queries = [tokenizer.decode(ids[ids != tokenizer.bos_id]) for ids in prompts.tokens]
    samples = [json.loads(line) for line in (tmp_path / "straight" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 24
    for row in samples:
        line = lines[queries.index(row["query"])]
        result = float(line["answer"].split("####")[1].replace(",", ""))
        assert row["record"] == {"answer": line["answer"]}
        steps = len(range(1, len(row["response"]) + 1, 4))
        expected = {"server": result, "number": result, "steps": pytest.approx(steps * result / 1000, rel=1e-5)}
        assert row["scores"] == expected
    first, *_, last = records(tmp_path / "straight")
    assert first["scores/server/mean"] == pytest.approx(sum(row["scores"]["server"] for row in samples[:8]) / 8)
    assert first["scores/number/mean"] == first["scores/server/mean"]
    again = records(tmp_path / "resumed")[-1]
    timed = ("time", "tokens_per_second", "cost/")
    assert {k: v for k, v in again.items() if not k.startswith(timed)} == {
        k: v for k, v in last.items() if not k.startswith(timed)
    }


def test_a_run_with_verified_answers(ranks, straight, tmp_path):
    """Of what a hardly trained model writes, some is right by a record that asks for little: for its first letter."""
    sft, _ = straight
    kinds = ["exact", "number", "regex"] + ["code"] * (no_namespaces() is None)
    lines = [
        {"prompt": "the " * n + "film.", "answer": f"#### {n}", "pattern": f"^.?[{'a-m' if n % 2 else 'n-z'}]",
         "tests": "assert True" if n % 2 else "assert False"}
        for n in range(1, 9)
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "run": str(tmp_path / "run"),
        "model": {"checkpoint": str(sft), "dtype": "fp32"},
        "prompts": {"path": str(path), "length": LENGTH},
        "sampler": {"response_length": 8, "micro_batch_size": 8},
        "scoring": {"sources": [
            *({"verify": kind} for kind in kinds),
            {"verify": "regex", "pattern": ".", "name": "anything", "weight": 0.5},
        ]},
        "training": {"steps": 2, "batch_size": 8, "epochs": 1, "micro_batch_tokens": 8 * (LENGTH + 8)},
        "log": {"samples": 8, "samples_every": 1},
    }  # fmt: skip
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    ranks.run(1, run_ppo, tmp_path / "ppo.yaml", [[]])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    matched = [bool(re.search(row["record"]["pattern"], row["response"])) for row in samples]
    assert [row["scores"]["regex"] for row in samples] == matched and 0 < sum(matched) < len(samples) == 16
    for row in samples:
        response, scores = row["response"], row["scores"]
        assert scores["anything"] == bool(response.replace("\n", ""))
        assert scores["exact"] == scores["number"] == 0 or any(letter.isdigit() for letter in response)
        if "code" in kinds and scores["code"]:  # few words are a program, and no program makes False true
            compile(response, "response", "exec")
            assert row["record"]["tests"] == "assert True"
    (last,) = records(tmp_path / "run")[-1:]
    assert last["scores/anything/mean"] == sum(row["scores"]["anything"] for row in samples[8:]) / 8
