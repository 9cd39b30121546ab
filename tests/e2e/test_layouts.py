"""Whole programs under many layouts: reward with its normalisation, PPO, REINFORCE, generate, and the programs over
preferences, ratings, labelled steps and rewarded responses give the numbers of one rank with three and four pipeline
stages, the interleaved schedule, four tensor ranks, all kinds of parallelism at once, several samples a prompt and
overlapped communication. A run that four stages wrote goes on under any other layout."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from megarlhf import cli
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from tests.distributed.layouts import GPT2, LLAMA, layout
from tests.e2e import runs
from tests.ranks import ROOT

pytestmark = pytest.mark.long
# Twelve layers are shared evenly by 2, 3, 4, 6 and 12 (virtual) stages. The weights are large, so that distributions
# are far from flat.
SIZES = dict(num_layers=12, hidden_size=48, ffn_hidden_size=72, num_attention_heads=12, num_query_groups=12,
             vocab_size=300, init_std=0.1)  # fmt: skip
MODELS = {"llama": dataclasses.replace(LLAMA, **SIZES), "gpt2": dataclasses.replace(GPT2, **SIZES)}
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
# number of ranks: {name: (parallel, rows of a micro-batch, models)}. A batch has 24 rows.
LAYOUTS = {
    1: {"one": ({}, 12, "llama gpt2")},
    2: {
        "pp2 vp2": (dict(pipeline=2, virtual_pipeline=2), 5, "llama"),
        "dp2 overlap": (OVERLAP, 6, "gpt2"),
    },
    3: {
        "pp3": (dict(pipeline=3), 8, "gpt2"),
        "pp3 vp2": (dict(pipeline=3, virtual_pipeline=2), 4, "llama"),
        "tp3 sequence": (dict(tensor=3, sequence=True), 12, "gpt2"),
    },
    4: {
        "pp4": (dict(pipeline=4), 8, "llama gpt2"),
        "pp4 vp3": (dict(pipeline=4, virtual_pipeline=3), 6, "gpt2"),
        "tp4 sequence": (dict(tensor=4, sequence=True), 12, "llama"),
        "pp2 vp2 dp2 overlap": (dict(pipeline=2, virtual_pipeline=2, **OVERLAP), 6, "llama"),
    },
    8: {
        "tp2 pp2 dp2": (dict(tensor=2, sequence=True, pipeline=2), 6, "llama"),
        "pp4 dp2 overlap": (dict(pipeline=4, **OVERLAP), 4, "gpt2"),
    },
}
REINFORCE = ("one", "pp3 vp2", "pp4", "tp2 pp2 dp2")  # the layouts of `megarlhf rl` and of OFFLINE
ONLINE = ("rl", "grpo")  # its configurations
OFFLINE = ("dpo", "kto", "prm", "ilql")  # programs in these layouts too
NAMES = {name: size for size, named in LAYOUTS.items() for name in named}


def save_model(directory, family):
    """A random model with its tokenizer, where `megarlhf sft` would have left one. That of REINFORCE ends its responses
    at many places."""
    from megarlhf.data.tokenizer import load_tokenizer
    from megarlhf.models.build import build

    tokenizer = load_tokenizer(directory / "reviews.model")
    architecture = MODELS["llama" if family == "ending" else family]
    with layout() as topology:
        engine = build("actor", architecture, topology, micro_batch_tokens=1, dtype="fp32", seed=3)
        if family == "ending":  # EOS has often the highest logit, and often the lowest
            engine.modules[0].output_layer.weight.data[tokenizer.eos_id] *= 6

        def write(path):
            architecture.save(path / "actor")
            tokenizer.save(path / "tokenizer")

        Checkpoints(directory / family, CheckpointConfig()).save(1, {"actor": engine}, {}, write)


def run_programs(cases):
    """[(program, YAML, overrides)] on these ranks, one after the other."""
    import torch.distributed as dist

    for program, path, overrides in cases:
        found = cli.find(program)
        settings = found.load(path, overrides)
        plan = found.check(settings, dist.get_world_size())
        with layout(**dataclasses.asdict(settings.parallel)) as topology:
            found.run(settings, plan, topology)


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    return prepare(ranks, tmp_path_factory.mktemp("layouts"))


def prepare(ranks, path: Path) -> Path:
    """Models, data, and the configurations of the programs: PPO of Llama with a critic of its own, and of GPT-2 (tied
    embeddings, learned positions) with everything that is optional; and REINFORCE with three kinds of scores."""
    runs.prepare(path)
    reviews = runs.reviews
    for family in (*MODELS, "ending"):
        ranks.run(1, save_model, path, family)
    prompts = [{"prompt": review.prompt} for review in reviews.reviews(31, seed=5)]
    pairs = [{"prompt": prompt, "chosen": better, "rejected": worse}
             for prompt, better, worse in reviews.preferences(29, seed=6)]  # fmt: skip
    questions = [{"question": row["prompt"], "answer": str(number)} for number, row in enumerate(prompts)]
    rated = [{"prompt": pair["prompt"], "response": pair[kind], "label": kind == "chosen", "reward": number / 10}
             for number, pair in enumerate(pairs) for kind in ("chosen", "rejected")]  # fmt: skip
    steps = [{"prompt": row["prompt"], "steps": row["response"].split(","),
              "labels": [number % 3 > 0] * (row["response"].count(",") + 1)}
             for number, row in enumerate(rated)]  # fmt: skip
    data = dict(prompts=prompts, pairs=pairs, questions=questions, rated=rated, steps=steps)
    for name, rows in data.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    optimizer = {"lr": 1e-3, "eps": 1e-4, "schedule": "linear"}
    draw = {"response_length": 4, "stop_at_eos": True, "temperature": 0.8}
    ask = {"path": str(path / "prompts.jsonl"), "length": 8}
    write(path / "reward.yaml", {
        "run": "", "model": {"checkpoint": str(path / "llama"), "dtype": "fp32"},
        "data": {"train": str(path / "pairs.jsonl"), "validation": str(path / "pairs.jsonl"), "max_length": 64},
        "normalization": {"prompts": ask, "response_length": 4, "samples": 10},
        "optimizer": optimizer,
        "training": {"global_batch_size": 24, "steps": 1},
    })  # fmt: skip
    offline = {
        "dpo": {"data": {"train": "pairs"}, "dpo": {"loss": "dpo"}},
        "kto": {"data": {"train": "rated"}},
        "prm": {"data": {"train": "steps", "separator": ","}},
        "ilql": {"data": {"train": "rated"}, "ilql": {"target_period": 1, "target_alpha": 0.3}},
    }
    for program, sections in offline.items():
        rows = str(path / f"{sections['data']['train']}.jsonl")
        write(path / f"{program}.yaml", sections | {
            "run": "", "model": {"checkpoint": str(path / "llama"), "dtype": "fp32"},
            "data": sections["data"] | {"train": rows, "validation": rows, "max_length": 64},
            "optimizer": optimizer,
            "training": {"global_batch_size": 24, "steps": 3},
        })  # fmt: skip
    ppo = {
        "run": "", "prompts": ask, "sampler": draw | {"samples_per_prompt": 2},
        "scoring": {"sources": [{"checkpoint": str(path / "reward one")},
                                {"function": f"{ROOT}/tests/e2e/judge.py:score", "weight": 0.5}]},
        "ppo": {"whiten_rewards": True},
        "gate": {"rows": 7},
        "training": {"steps": 2, "batch_size": 24, "epochs": 2},
        "optimizer": optimizer,
        "checkpoint": {"every": 1},
        "log": {"samples": 24, "samples_every": 1},
    }  # fmt: skip
    text = {"train": str(path / "train.jsonl"), "max_length": 20}
    optional = {
        "critic": {"kind": "shared"}, "average": 0.5, "reference": {"on_host": True},
        "ptx": {"data": text, "coef": 0.5, "batch_size": 24}, "ppo": {"kl": {"estimator": "exact"}},
    }  # fmt: skip
    for family in MODELS:
        model = {"checkpoint": str(path / family), "dtype": "fp32"}
        write(path / f"{family}.ppo.yaml", ppo | {"model": model} | (optional if family == "gpt2" else {}))
        write(path / f"{family}.generate.yaml", {
            "checkpoint": str(path / f"{family} one"), "out": "", "dtype": "fp32", "prompts": ask,
            "sampler": draw | {"samples_per_prompt": 2, "micro_batch_size": 4},
        })  # fmt: skip
    judge = f"{ROOT}/tests/e2e/judge.py"
    rl = {
        "run": "", "model": {"checkpoint": str(path / "ending"), "dtype": "fp32"},
        "prompts": {"path": str(path / "questions.jsonl"), "prompt_key": "question", "length": 8},
        "sampler": {"response_length": 8, "stop_at_eos": True, "samples_per_prompt": 2, "micro_batch_size": 2},
        "scoring": {"sources": [
            {"checkpoint": str(path / "reward one")},
            {"function": f"{judge}:answers", "weight": 0.1},
            {"function": f"{judge}:steps", "normalize": True, "clip": [-3, 5]},
        ]},
        "reinforce": {"kl": {"estimator": "exact", "controller": "adaptive", "horizon": 100}},
        "training": {"steps": 4, "batch_size": 24, "epochs": 1, "minibatches": 2},
        "optimizer": optimizer,
        "log": {"samples": 24, "samples_every": 1},
    }  # fmt: skip
    write(path / "rl.yaml", rl)
    held_out = {"path": str(path / "pairs.jsonl"), "prompt_key": "prompt"}  # 29, which no number of ranks divides
    write(path / "grpo.yaml", rl | {
        "sampler": rl["sampler"] | {"samples_per_prompt": 3},
        "scoring": {"sources": [{"function": f"{judge}:parity", "name": "even"}]},
        "reinforce": {"advantage": "grpo", "surrogate": "clip", "clip_range": 0.02, "clip_range_high": 0.03,
                      "dynamic_rounds": 6, "entropy_coef": 0.01, "shaping": {"overlong_buffer": 3},
                      "kl": {"place": "loss", "estimator": "exact", "coef": 0.2}},
        "evaluation": {"prompts": held_out, "every": 2, "samples": 3, "k": [1, 2], "source": "even"},
    })  # fmt: skip
    return path


def write(path: Path, values: dict) -> None:
    path.write_text(yaml.safe_dump(values))


def cases(directory: Path, name: str) -> list:
    """All programs under one layout, each from what one rank left."""
    sizes, micro, families = LAYOUTS[NAMES[name]][name]
    common = [f"parallel.{key}={json.dumps(value)}" for key, value in sizes.items()]
    batches = [*common, f"training.micro_batch_tokens={12 * micro}"]
    made = []
    for family in families.split():
        if family == "llama":
            made.append(("reward", directory / "reward.yaml", [*batches, f"run={directory / f'reward {name}'}"]))
            if name in REINFORCE:
                made += [
                    (kind if kind in OFFLINE else "rl", directory / f"{kind}.yaml",
                     [*batches, f"run={directory / f'{kind} {name}'}"])
                    for kind in (*ONLINE, *OFFLINE)
                ]  # fmt: skip
        ppo = [*batches, "sampler.micro_batch_size=6", f"run={directory / f'{family} {name}'}"]
        out = [*common, f"out={directory / f'{family} {name}.jsonl'}"]
        made += [
            ("ppo", directory / f"{family}.ppo.yaml", ppo),
            ("generate", directory / f"{family}.generate.yaml", out),
        ]
    return made


def numbers(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    records = runs.recorded(run)
    clocks = ("time", "tokens_per_second", "step_seconds", "cost/")
    return [{key: value for key, value in record.items() if not key.startswith(clocks)} for record in records]


def same(found: list[dict], expected: list[dict], name: str) -> None:
    assert len(found) == len(expected) > 0
    for got, one in zip(found, expected, strict=True):
        assert got.keys() == one.keys(), name
        for key in one:
            assert got[key] == pytest.approx(one[key], rel=1e-3, abs=2e-6), (name, one["step"], key)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def responses(samples: list[dict]) -> list[str]:
    return [sample["response"] for sample in samples]


@pytest.fixture(scope="module")
def truth(ranks, directory) -> Path:
    ranks.run(1, run_programs, cases(directory, "one"), timeout=600)
    return directory


@pytest.mark.parametrize("world_size", [size for size in LAYOUTS if size > 1])
def test_programs_do_not_depend_on_the_layout(ranks, truth, world_size):
    ranks.run(
        world_size, run_programs, [case for name in LAYOUTS[world_size] for case in cases(truth, name)], timeout=600
    )
    for name, (_, _, families) in LAYOUTS[world_size].items():
        more = ["reward"] * ("llama" in families) + [*ONLINE, *OFFLINE] * (name in REINFORCE)
        for run in [*families.split(), *more]:
            same(numbers(truth / f"{run} {name}"), numbers(truth / f"{run} one"), f"{run} {name}")
        for family in families.split():
            found, expected = (lines(truth / f"{family} {of}.jsonl") for of in (name, "one"))
            assert len(found) == 2 * 31
            assert [line["tokens"] for line in found] == [line["tokens"] for line in expected], (family, name)
            found, expected = (lines(truth / f"{family} {of}" / "samples.jsonl") for of in (name, "one"))
            rows = len(found) // 2  # of a step: those of the first data-parallel rank
            assert rows in (12, 24) and len(expected) == 2 * 24
            assert responses(found) == responses(expected[:rows] + expected[24 : 24 + rows]), (family, name)
        for kind in ONLINE if name in REINFORCE else ():
            found, expected = (lines(truth / f"{kind} {of}" / "samples.jsonl") for of in (name, "one"))
            rows = len(found) // 4
            assert responses(found) == [text for step in range(4) for text in
                                        responses(expected[24 * step : 24 * step + rows])], (kind, name)  # fmt: skip


def test_reinforce_has_what_it_needs(truth):
    """Responses of many lengths, and scores that are clipped and are not."""
    records, samples = numbers(truth / "rl one"), lines(truth / "rl one" / "samples.jsonl")
    assert len(records) == 4 and len(samples) == 4 * 24
    assert len({len(sample["response"]) for sample in samples}) > 8
    assert all(record["objective/kl_exact"] > 0 for record in records[1:])
    assert {sample["record"]["answer"] for sample in samples} == {str(number) for number in range(31)}
    assert len({tuple(sample["scores"].items()) for sample in samples}) > 48


def test_grpo_has_what_it_needs(truth):
    """Groups that are replaced, a KL that is not 0, clipped ratios, and evaluations."""
    found = numbers(truth / "grpo one")
    steps = [record for record in found if "objective/kl" in record]
    assert len(steps) == 4 and len(found) == 4 + 3
    assert all(record["groups/rounds"] > 1 for record in steps)
    assert all(record["reinforce/loss/kl"] > 1e-4 for record in steps[1:])
    assert any(record["reinforce/policy/clipfrac"] > 0 for record in steps)
    assert all(0 < record["evaluation/pass@2"] < 1 for record in found if "evaluation/pass@2" in record)


def test_what_four_stages_wrote_goes_on_elsewhere(ranks, truth):
    """From step 1 of 2, with optimizers, an averaged model, and a reward model of the interleaved schedule."""
    judge = {"function": f"{ROOT}/tests/e2e/judge.py:score", "weight": 0.5}
    scoring = {"sources": [{"checkpoint": str(truth / "reward pp3 vp2"), "name": "reward-one"}, judge]}
    for family, size, sizes in (("gpt2", 1, {}), ("llama", 3, dict(pipeline=3))):
        run = truth / f"{family} resumed"
        shutil.copytree(truth / f"{family} pp4", run)
        shutil.rmtree(run / "checkpoints" / "step_00000002")
        (run / "checkpoints" / "latest").write_text("step_00000001\n")
        overrides = [f"parallel.{key}={json.dumps(value)}" for key, value in sizes.items()]
        overrides += [f"run={run}", "training.micro_batch_tokens=96", f"scoring={json.dumps(scoring)}"]
        ranks.run(size, run_programs, [("ppo", truth / f"{family}.ppo.yaml", overrides)])
        same(numbers(run)[1:], numbers(truth / f"{family} one")[1:], f"{family} resumed")


REFUSED = {  # on 2 ranks, before there is a process group
    "ppo batch": ("ppo", [], ["training.batch_size=21"],
                  "training.batch_size: 21 is not a multiple of minibatches 1 x 2 data-parallel ranks = 2"),
    "ptx batch": ("ppo", [], ["ptx.batch_size=9"], "ptx.batch_size: 9 is not a multiple of 2 data-parallel ranks"),
    "ptx length": ("ppo", [], ["ptx.data.max_length=65"], "ptx.data.max_length: rows of 65 tokens are longer than"),
    "reward batch": ("reward", [], ["training.global_batch_size=6"], "training.global_batch_size: 6 is not a multiple "
                     "of 2 responses a prompt x 2 data-parallel ranks = 4"),
    "samples": ("reward", [], ["normalization.samples=9"],
                "normalization.samples: 9 cannot be shared evenly by 2 data-parallel ranks"),
    "response length": ("reward", [], ["normalization.response_length=0"],
                        "normalization.response_length: must be at least 1, not 0"),
    "positions": ("reward", [], ["model.checkpoint=gpt2", "normalization.response_length=90"],
                  "normalization: prompts.length + response_length: rows of 98 tokens are longer than the model's 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_run_is_refused_before_it_starts(truth, monkeypatch, name):
    program, sizes, more, message = REFUSED[name]
    monkeypatch.chdir(truth)  # where models are
    path = truth / ("gpt2.ppo.yaml" if program == "ppo" else "reward.yaml")
    overrides = ["run=refused", *(f"parallel.{size}" for size in sizes), *more]
    with pytest.raises(UserError) as caught:
        found = cli.find(program)
        found.check(found.load(path, overrides), 2)
    assert message in str(caught.value) and "\n" not in str(caught.value)
