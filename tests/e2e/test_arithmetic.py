"""examples/arithmetic: its sums, and a few steps of both stages as run.py starts them."""

from __future__ import annotations

import importlib.util
import json
import sys

from megarlhf.experience.answers import final_number
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import pipeline

FOLDER = ROOT / "examples" / "arithmetic"
spec = importlib.util.spec_from_file_location("arithmetic", FOLDER / "run.py")
arithmetic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arithmetic)


def value(text: str) -> int:
    """Of a written sum."""
    return sum(map(int, text.replace("-", "+-").split("+")))


def test_the_files_and_a_few_steps(tmp_path, capfd):
    arithmetic.write_data(tmp_path)
    solved, others, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "prompts", "held_out")
    )
    sets = [{row["prompt"] for row in rows} for rows in (solved, others, held_out)]
    assert sum(map(len, sets)) == len(set.union(*sets)) and len(sets[2]) == len(held_out) > 200
    assert all(int(row["answer"]) == value(row["prompt"][:-1]) for row in others + held_out)
    right = 0
    for row in solved:
        true = value(row["prompt"][:-1])
        right += final_number(row["response"]) == true  # as the verifier reads it
        assert "=" not in row["response"] or {*map(value, row["response"].split("="))} == {true}
    assert right * (arithmetic.ROUGH + 1) == len(solved)  # no rough response is right

    small = ["training.micro_batch_tokens=1024", "optimizer.warmup_steps=1"]
    pipeline.stage("sft", FOLDER / "sft.yaml", tmp_path, "training.steps=2", *small)
    pipeline.stage("rl", FOLDER / "rl.yaml", tmp_path, "training.steps=2", "training.batch_size=64", *small)
    capfd.readouterr()
    arithmetic.summary(tmp_path, 60.0)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "%" in line and "step" not in line] == ["0", "2"], lines
