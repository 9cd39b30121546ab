"""Small SFT runs of the real program, started the way users start it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from megarlhf.data.unused import MARK
from tests.ranks import ENVIRONMENT, ROOT

sys.path.insert(0, str(ROOT / "examples"))
import reviews

CLI = ("-m", "megarlhf")


def prepare(directory: Path, **changes) -> Path:
    """Data, a tokenizer and `run.yaml` for a tiny Llama; `changes` are values by dotted key. Returns the YAML path."""
    texts = list(reviews.reviews(200, seed=1))
    for name, part in (("train", texts[:160]), ("validation", texts[160:])):
        rows = [json.dumps({"prompt": review.prompt, "response": review.response}) for review in part]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    reviews.train_tokenizer([review.prompt + review.response for review in texts], str(directory / "reviews"), 300)
    config = {
        "run": str(directory / "run"),
        "tokenizer": str(directory / "reviews.model"),
        "model": {
            "dtype": "fp32",
            "architecture": dict(
                family="llama", num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4,
                num_query_groups=2, vocab_size=300, max_position_embeddings=64,
            ),
        },
        "data": {"train": str(directory / "train.jsonl"), "validation": str(directory / "validation.jsonl"),
                 "max_length": 64},
        "optimizer": {"lr": 1e-2},
        "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 8, "evaluate_every": 4},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    for key, value in changes.items():
        section = config
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(*command: str, **options) -> subprocess.Popen:
    """`command` from the root of the checkout, with one thread a rank and its output in pipes."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER_", "OMPI", "PMI", "RANK"))}
    environment = {**outer, **ENVIRONMENT, **options.pop("environment", {})}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


def finish(*command: str, timeout: float = 300, **options) -> subprocess.CompletedProcess[str]:
    process = start(*command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def written(directory: Path) -> dict[Path, int]:
    """{file: when it was written} of all files but those that say when a table of data was last used."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != MARK)
    return {path: path.stat().st_mtime_ns for path in files}


def write_prompts(directory: Path, prompts: int, pairs: int) -> None:
    """prompts.jsonl and pairs.jsonl with so many lines."""
    rows = [json.dumps({"prompt": review.prompt}) for review in reviews.reviews(prompts, seed=5)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    rows = [
        json.dumps({"prompt": prompt, "chosen": better, "rejected": worse})
        for prompt, better, worse in reviews.preferences(pairs, seed=6)
    ]
    (directory / "pairs.jsonl").write_text("\n".join(rows) + "\n")


def recorded(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, of which docs/metrics.md must have every name."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    unknown = {name for record in records for name in record if not documented().fullmatch(name)}
    assert not unknown, f"docs/metrics.md does not have {', '.join(sorted(unknown))}"
    return records


@functools.cache
def documented() -> re.Pattern:
    """The names in the first column of the tables of docs/metrics.md; words in capitals stand for any name."""
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    patterns = [re.sub("NAME", ".+", re.sub("ALGORITHM", "(ppo|reinforce)", re.escape(name))) for name in names]
    return re.compile("|".join(patterns))


def losses(run: Path) -> dict[int, float]:
    """{step: training loss} as recorded."""
    records = recorded(run)
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def perplexities(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["validation/perplexity"] for r in records if "validation/perplexity" in r}
