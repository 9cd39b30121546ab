"""A real run accepts every layout that `megarlhf plan --search` may propose, by the programs' own checks."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from megarlhf.cli import find
from megarlhf.config import UserError
from megarlhf.models.spec import Architecture
from megarlhf.plan import choice, hardware, search
from megarlhf.plan.job import Job
from megarlhf.train import planned
from tests.e2e import runs

TINY = dict(
    family="llama", num_layers=12, hidden_size=96, ffn_hidden_size=192, num_attention_heads=12, num_query_groups=6,
    vocab_size=300, max_position_embeddings=64,
)  # fmt: skip
MIXTRAL = TINY | dict(family="mixtral", num_experts=6, experts_per_token=2)
TEXT = {"train": "train.jsonl", "max_length": 64}
PAIRS = {"train": "pairs.jsonl", "max_length": 64}
ONLINE = {
    "prompts": {"path": "train.jsonl", "length": 32}, "sampler": {"response_length": 8, "samples_per_prompt": 2},
    "scoring": {"sources": [{"function": "tests.slurm.judge:score"}]},
    "training": {"batch_size": 96, "minibatches": 2, "micro_batch_tokens": 128},
}  # fmt: skip
LORA = {"lora": {"rank": 2, "quantization": "nf4"}}
# name: (program, sections, those of the model)
CASES = {
    "sft": ("sft", {"data": TEXT, "training": {"global_batch_size": 72}}, {}),
    "experts": ("sft", {"data": TEXT, "training": {"global_batch_size": 48}}, {"architecture": MIXTRAL}),
    "pairs": ("dpo", {"data": PAIRS, "training": {"global_batch_size": 48}}, {}),
    "reward": (
        "reward",
        {"data": PAIRS, "training": {"global_batch_size": 48},
         "normalization": {"prompts": {"path": "train.jsonl", "length": 32}, "samples": 36, "response_length": 8}},
        {"checkpoint": "model"},
    ),
    "ppo": ("ppo", ONLINE, {}),
    "text": ("ppo", {**ONLINE, "ptx": {"data": TEXT, "batch_size": 36}, "critic": {"kind": "shared"}}, {}),
    "top layers": ("ppo", {**ONLINE, "reference": {"kind": "hydra"}}, {"trained_layers": 5}),
    "4 bits": ("ppo", ONLINE, {"checkpoint": "wide", **LORA}),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Texts, preferences, a tokenizer, and two model directories: a small model, and one with blocks for 4 bits."""
    directory = tmp_path_factory.mktemp("proposals")
    runs.prepare(directory)
    rows = [
        {"prompt": review.prompt, "chosen": review.response, "rejected": " no"}
        for review in runs.reviews.reviews(200, seed=1)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wide = TINY | dict(hidden_size=768, ffn_hidden_size=1536)
    for name, architecture in (("model", TINY), ("wide", wide)):
        (directory / name).mkdir()
        Architecture(**architecture).save(directory / name)
    return directory


def loaded(files, case: str, *overrides: str):
    """(program, its configuration)"""
    name, sections, model = CASES[case]
    whole = {} if "checkpoint" in model else {"architecture": TINY}
    values = {"run": "run", "tokenizer": "reviews.model", **sections, "model": whole | model}
    (files / "run.yaml").write_text(yaml.safe_dump(values))
    program = find(name)
    return program, program.load(str(files / "run.yaml"), list(overrides))


def overrides(layout: search.Layout) -> list[str]:
    """What the search prints, as `--config` takes it."""
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in choice.settings(layout).items()
        for key, value in keys.items()
    ]


def proposed(job: Job) -> list[search.Layout]:
    machine = hardware.load("h100")
    return [
        search.measure(dataclasses.replace(job, parallel=parallel), machine)
        for parallel in search.layouts(job, machine.per_node)
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_run_accepts_what_is_proposed(files, case, monkeypatch):
    monkeypatch.chdir(files)
    program, settings = loaded(files, case)
    ranks = 24
    layouts = proposed(planned.job_of(settings, ranks, device="cuda"))
    assert len(layouts) > 8
    for layout in layouts:
        _, given = loaded(files, case, *overrides(layout))
        assert given.parallel == layout.job.parallel
        program.check(given, ranks)


def legal(files, case: str, ranks: int) -> set[tuple[int, int]]:
    """(tensor, pipeline) sizes of all layouts without virtual stages that the program accepts, in nodes of 8."""
    found = set()
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 3, 4, 6, 8, 12, 24):
            given = (
                f"parallel.tensor={tensor}",
                f"parallel.pipeline={pipeline}",
                f"parallel.sequence={str(tensor > 1).lower()}",
            )
            program, settings = loaded(files, case, *given)
            try:
                program.check(settings, ranks)
            except UserError:
                continue
            found.add((tensor, pipeline))
    return found


@pytest.mark.parametrize("case", ["reward", "text"])
def test_what_a_run_accepts_is_proposed(files, case, monkeypatch):
    """36 rows are shared evenly by 1, 2, 3, 4, 6 and 12 ranks, and not by 8 or 24."""
    monkeypatch.chdir(files)
    _, settings = loaded(files, case)
    job = planned.job_of(settings, 24, device="cuda")
    sizes = {(p.tensor, p.pipeline) for p in search.layouts(job, 8) if p.virtual_pipeline is None}
    assert sizes == legal(files, case, 24)
    assert {24 // (tensor * pipeline) for tensor, pipeline in sizes} <= {1, 2, 3, 4, 6, 12}
    free = dataclasses.replace(job, shape=dataclasses.replace(job.shape, shared=()))
    assert len(list(search.layouts(free, 8))) > len(list(search.layouts(job, 8)))
