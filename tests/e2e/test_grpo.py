"""`megarlhf rl` with groups of responses: every preset and switch through the loop, the same numbers under every layout
and cut; dynamic sampling with exact resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf.config import UserError
from tests.e2e.runs import CLI, finish
from tests.e2e.test_ppo import settings  # noqa: F401, a fixture
from tests.e2e.test_rl import numbers, run_rl
from tests.ranks import ROOT

JUDGE = """
def score(prompts, responses):
    return [float(len(response) % 3 == 0) for response in responses]

def rarely(prompts, responses):
    return [float(len(response) % 8 == 0) for response in responses]

def never(prompts, responses):
    return [0.25] * len(responses)
"""
EVERYTHING = {
    "reinforce.kl": {"place": "loss", "estimator": "k3", "coef": 0.1, "controller": "adaptive", "horizon": 100},
    "reinforce.clip_range": 0.02, "reinforce.clip_range_high": 0.03, "reinforce.dual_clip": 1.05,
    "reinforce.entropy_coef": 0.01, "reinforce.importance": {"mode": "mask", "low": 0.9, "high": 1.1},
    "reinforce.shaping": {"overlong_buffer": 3, "length_penalty": 0.01},
}  # fmt: skip
CASES = {
    "grpo": ("grpo", EVERYTHING),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {"reinforce.shaping.overlong_buffer": 2, "judge": "rarely"}),
    "rloo": ("rloo", {"reinforce.kl.estimator": "exact", "reinforce.kl.coef": 0.5}),
    "sequence": (
        "rloo",
        {"reinforce.ratio": "sequence", "reinforce.surrogate": "clip", "reinforce.normalization": "sequence"},
    ),
    "reinforce++": ("reinforce++", {}),
    "reinforce++_baseline": ("reinforce++_baseline", {}),
    "gspo": ("gspo", {}),
    "cispo": ("cispo", {"reinforce.clip_range": 0.01, "reinforce.clip_range_high": 0.01}),
    "gdpo": ("grpo", {"reinforce.advantage": "gdpo"}),
    "remax": ("cispo", {"reinforce.advantage": "remax"}),
}
# The ranks and their layouts; all cases run as "one", some under the others.
LAYOUTS = {
    1: {"one": [], "cut": ["training.micro_batch_tokens=30"]},
    2: {"dp2": [], "tp2": ["parallel.tensor=2", "parallel.sequence=true"]},
    4: {"pp2 dp2": ["parallel.pipeline=2"]},
}
FEW = ("grpo", "dapo", "remax")
STEPS = 2


@pytest.fixture(scope="module")
def path(settings, tmp_path_factory) -> Path:  # noqa: F811
    tree = yaml.safe_load(settings.read_text())
    del tree["ppo"]
    directory = tmp_path_factory.mktemp("grpo")
    (directory / "judge.py").write_text(JUDGE)
    tree |= {
        "preset": "grpo",
        "scoring": {"sources": [{"function": f"{directory}/judge.py:score"},
                                {"function": f"{ROOT}/tests/e2e/judge.py:score", "weight": 0.25}]},
        "sampler": tree["sampler"] | {"samples_per_prompt": 4, "stop_at_eos": True},
        "optimizer": {"lr": 1e-3, "eps": 1e-4, "schedule": "constant"},
        "training": {"steps": STEPS, "batch_size": 16, "minibatches": 2, "epochs": 2, "micro_batch_tokens": 256},
        "log": {"samples_every": 100},
    }  # fmt: skip
    (directory / "grpo.yaml").write_text(yaml.safe_dump(tree))
    return directory / "grpo.yaml"


def overrides(path, run, name, more=()):
    preset, options = CASES[name]
    options = dict(options)
    judge = options.pop("judge", None)
    sources = [f"scoring.sources=[{{function: '{path.parent}/judge.py:{judge}'}}]"] if judge else []
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    return [f"preset={preset}", f"run={run}", *given, *sources, *more]


@pytest.mark.long
def test_every_preset_under_every_layout(ranks, path, tmp_path):
    for world_size, layouts in LAYOUTS.items():
        given = [
            overrides(path, tmp_path / f"{name} {layout}", name, more)
            for layout, more in layouts.items() for name in (CASES if layout == "one" else FEW)
        ]  # fmt: skip
        ranks.run(world_size, run_rl, path, given)
    for name in CASES:
        one = numbers(tmp_path / f"{name} one")
        assert len(one) == STEPS and all(record["grad_norm"] > 0 for record in one), name
        for layout in [layout for named in LAYOUTS.values() for layout in named if name in FEW]:
            for expected, got in zip(one, numbers(tmp_path / f"{name} {layout}"), strict=True):
                for key in expected.keys() - {"step", "sampler/gap"}:
                    scale = max(abs(record[key]) for record in one)
                    where = (name, layout, got["step"], key, got[key], expected[key])
                    assert abs(got[key] - expected[key]) <= 3e-5 * max(scale, 0.05), where
    first, last = numbers(tmp_path / "grpo one")
    assert first["reinforce/policy/clipfrac"] > 0 and first["reinforce/policy/dualfrac"] > 0
    assert first["objective/length_penalty"] > 0 and last["reinforce/loss/kl"] > 0
    assert any(record["groups/rounds"] > 1 for record in numbers(tmp_path / "dapo one"))
    assert all(record["groups/score"] != record["objective/scores"] for record in numbers(tmp_path / "dapo one"))
    assert {record["groups/varied"] for record in numbers(tmp_path / "dapo one")} == {1.0}


def test_dynamic_sampling_is_resumed(ranks, path, tmp_path):
    """The cursor of the prompts moves by as many batches as the rounds took."""
    steps = ["training.steps=4", "checkpoint.every=1"]
    cases = [
        overrides(path, tmp_path / "one", "dapo", steps),
        overrides(path, tmp_path / "half", "dapo", ["training.steps=2"]),
        overrides(path, tmp_path / "half", "dapo", steps),
    ]
    ranks.run(2, run_rl, path, cases)
    one = numbers(tmp_path / "one")
    assert len(one) == 4 and numbers(tmp_path / "half") == one
    state = json.loads((tmp_path / "one" / "checkpoints" / "step_00000004" / "state.json").read_text())
    assert state["progress"]["drawn"] == sum(record["groups/rounds"] for record in one) > 4


def test_groups_that_never_vary_end_the_run(path, tmp_path):
    file = tmp_path / "never.yaml"
    tree = yaml.safe_load(path.read_text())
    tree |= {"run": str(tmp_path / "run"), "preset": "dapo"}
    tree["scoring"] = {"sources": [{"function": f"{path.parent}/judge.py:never"}]}
    tree["reinforce"] = {"dynamic_rounds": 3, "shaping": {"overlong_buffer": 2}}
    file.write_text(yaml.safe_dump(tree))
    done = finish(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *CLI, "rl", "--config",
        str(file),
    )  # fmt: skip
    assert done.returncode, done.stderr
    lines = [line for line in done.stderr.splitlines() if "reinforce.dynamic_rounds: in 3 rounds of 4 prompts" in line]
    assert len(lines) == 1 and "mean is 0.25" in lines[0], done.stderr


MISTAKES = {
    "alone": (["sampler.samples_per_prompt=1"], "reinforce compares the responses to a prompt"),
    "filtered": (["sampler.top_p=0.9"], "needs responses sampled from all tokens"),
    "rounds": (["preset=reinforce++", "reinforce.dynamic_rounds=2"], "reinforce does not compare responses"),
    "gdpo": (["preset=rloo", "reinforce.advantage=gdpo"], "gdpo scales the sources each"),
    "ptx": (["ptx={data: {train: x, validation: x, max_length: 8}}"], "reinforce.normalization must be token"),
    "lengthwise": (
        ["reinforce.advantage=reinforce", "reinforce.ratio=sequence_mean"],
        "sequence_mean is of whole",
    ),
    "length": (["reinforce.ratio=sequence"], "a KL in the loss their mean"),
    "twice": (["preset=rloo", "reinforce.ratio=sequence"], "must be sequence with ratio sequence"),
    "overlong": (["preset=dapo"], "overlong_buffer: 4096 must be below sampler.response_length"),
    "entropy": (["reinforce.entropy_coef=-1"], "entropy_coef: must not be negative"),
    "kinds": (["preset=[dapo]"], "there is no preset"),
    "shaping": (["reinforce.advantage=gdpo", "reinforce.shaping.length_penalty=0.1"], "gdpo reads each source's"),
    "unknown": (["preset=grop"], "there is no preset 'grop'; did you mean 'grpo'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(path, tmp_path, name):
    from megarlhf import cli

    more, expected = MISTAKES[name]
    program = cli.find("rl")
    with pytest.raises(UserError, match=expected):
        program.check(program.load(path, [f"run={tmp_path}", *more]), 1)
