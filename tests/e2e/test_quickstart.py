"""A newcomer's first day: docs/quickstart.md, its files and commands as they stand there, with a model and
conversations of the newcomer's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import recorded
from tests.ranks import ENVIRONMENT, ROOT
from tests.unit.test_data import CHATML, save_hf

PAGE = ROOT / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = ["four", "slow", "five", "brown", "lazy", "quick", "sea"]


def own_things(directory: Path) -> None:
    """What the page's table lists."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory / "my-model")
    save_hf(directory / "my-model", template=CHATML)

    def asked(number: int) -> dict[str, str]:
        return {"role": "user", "content": f"Say {WORDS[number % 7]}, {number}."}

    def write(name: str, rows: list[dict]) -> None:
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    answers = [{"role": "assistant", "content": f"It is {word}."} for word in WORDS]
    write("chats.jsonl", [{"messages": [asked(n), answers[n % 7]]} for n in range(64)])
    write("prompts.jsonl", [{"messages": [asked(n)], "answer": WORDS[n % 7]} for n in range(100, 124)])
    write("held_out.jsonl", [{"messages": [asked(n)], "answer": WORDS[n % 7]} for n in range(200, 208)])


def commands_on_the_path(directory: Path) -> str:
    """`megarlhf` and `torchrun` of this checkout and this Python."""
    for name, module in (("megarlhf", "megarlhf"), ("torchrun", "torch.distributed.run")):
        (directory / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.long
def test_the_page_from_its_first_line_to_its_last(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own_things(tmp_path)
    (tmp_path / "bin").mkdir()
    environment = {**os.environ, **ENVIRONMENT, "PATH": commands_on_the_path(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    said = {}
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind != "sh":
            name, _, content = text.removeprefix("# ").partition("\n")
            assert re.fullmatch(r"\w+\.(yaml|py)", name), text
            (tmp_path / name).write_text(content)
            continue
        for command in text.splitlines():
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
            assert "Traceback" not in done.stderr and "\r" not in done.stderr
            said[command] = done.stdout + done.stderr

    def line(start: str, text: str) -> str:
        """The output of the command that begins so, which must have `text`."""
        (found,) = [output for command, output in said.items() if command.startswith(start)]
        assert text in found, found
        return found

    # trained: the loss on the conversations falls, and two ranks learn the same
    one, two = recorded(tmp_path / "runs/sft"), recorded(tmp_path / "runs/sft2")
    assert one[7]["loss"] < one[0]["loss"] - 0.1
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one[:8]], rel=1e-4)
    assert [row["step"] for row in one] == list(range(1, 11))  # each step once, in spite of the way back
    assert (tmp_path / "runs/sft/after_step_8/checkpoints/step_00000010").is_dir()
    line("megarlhf convert verify", "log-probs")
    first = line("torchrun", "8 of 8 steps are done; saved: runs/sft2/checkpoints/step_00000008")
    assert "step 8 of 8: loss" in first and "GFLOP/s" in first and "next: megarlhf generate" in first
    assert "saved runs/sft2/checkpoints/step_00000008 (" in first

    # evaluated
    trained = line("megarlhf rl", "exported runs/rl/hf/step_00000006 for transformers")
    assert "held-out score" in trained or "held-out greedy" in trained
    evaluated = [row["step"] for row in recorded(tmp_path / "runs/rl") if "evaluation/score" in row]
    assert evaluated == [0, 3, 6] and (tmp_path / "runs/rl/report.html").is_file()
    responses = [json.loads(row) for row in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert len(responses) == 8 and all(0 < len(row["tokens"]) <= 32 for row in responses)

    # exported
    for directory in ("my-policy", "runs/rl/hf/step_00000006"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / directory)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Say sea."}], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)["input_ids"]  # fmt: skip
        assert model.generate(ids, max_new_tokens=4).shape[1] > ids.shape[1]
