"""`megarlhf rl`: the section of the configuration that names the algorithm, and REINFORCE through the loop: the same
numbers under every layout, exact resume."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, report
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.locate import find_model
from tests.e2e.runs import CLI, finish, reviews
from tests.e2e.test_ppo import records, settings  # noqa: F401, a fixture
from tests.ranks import ROOT

STEPS = 5


@pytest.fixture(scope="module")
def path(settings, tmp_path_factory) -> Path:  # noqa: F811
    """REINFORCE over the same models and data as PPO's tests, without a reward model."""
    tree = yaml.safe_load(settings.read_text())
    del tree["ppo"]
    tree |= {
        "reinforce": {"kl": {"controller": "adaptive", "horizon": 200}, "whiten_advantages": True},
        "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/judge.py:score"}]},
        "average": 0.5,
        "optimizer": {"lr": 1e-3, "eps": 1e-4, "schedule": "constant"},
    }
    file = tmp_path_factory.mktemp("rl") / "reinforce.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def run_rl(path, cases):
    """Several runs of the program on these ranks, one a case of overrides."""
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    program = cli.find("rl")
    for overrides in cases:
        loaded = program.load(path, overrides)
        program.run(loaded, program.check(loaded, dist.get_world_size()), parallel.start(loaded.parallel))
        parallel.stop()


def numbers(run):
    return timeless(records(run))


def timeless(found):
    timed = ("time", "tokens_per_second", "cost/", "gate/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in found]


@pytest.mark.long
def test_reinforce_under_every_layout_and_resumed(ranks, path, tmp_path):
    layouts = {
        1: {"one": [], "half": ["training.steps=3"]},
        2: {"dp2": []},
        4: {"tp2pp2": ["parallel.tensor=2", "parallel.pipeline=2"]},
    }
    for world_size, cases in layouts.items():
        given = [[*overrides, f"run={tmp_path / name}"] for name, overrides in cases.items()]
        given += [[f"run={tmp_path / 'half'}"]] if world_size == 1 else []
        ranks.run(world_size, run_rl, path, given)
    one = numbers(tmp_path / "one")
    assert len(one) == STEPS and numbers(tmp_path / "half") == one
    assert {"reinforce/loss/policy", "objective/baseline", "objective/kl_coef"} <= one[0].keys()
    assert not any(name.startswith("ppo/") for name in one[0])
    assert one[0]["objective/baseline"] == 0 != one[1]["objective/baseline"]
    assert abs(one[1]["objective/baseline"] - one[0]["objective/scores_total"]) < 1e-9  # of one batch so far
    for name in ("dp2", "tp2pp2"):
        for expected, got in zip(one, numbers(tmp_path / name), strict=True):
            for key in expected:
                if key not in ("step", "sampler/gap"):
                    scale = max(abs(record[key]) for record in one)
                    assert abs(got[key] - expected[key]) <= 3e-5 * scale, (name, got["step"], key)
    assert (tmp_path / "one" / "checkpoints" / f"step_{STEPS:08d}" / "average").is_dir()
    assert not (tmp_path / "one" / "checkpoints" / f"step_{STEPS:08d}" / "critic").exists()


def test_the_score_rises(ranks, path, tmp_path):
    overrides = [
        f"run={tmp_path / 'run'}", "training={steps: 12, batch_size: 64, epochs: 1, micro_batch_tokens: 768}",
        "sampler.micro_batch_size=32", "optimizer.lr=1e-2",
    ]  # fmt: skip
    ranks.run(1, run_rl, path, [overrides])
    curve = [record["objective/scores"] for record in records(tmp_path / "run")]
    assert sum(curve[-3:]) / 3 > curve[0] + 0.2, curve


def test_ppo_by_its_other_name(path, tmp_path):
    """`megarlhf rl` with an empty section ppo is `megarlhf ppo`."""
    tree = yaml.safe_load(path.read_text())
    del tree["reinforce"], tree["average"]
    tree["training"]["steps"] = 1
    for name, section in (("rl", {"ppo": None}), ("ppo", {})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree | section))
        done = finish(sys.executable, *CLI, name, "--config", str(tmp_path / f"{name}.yaml"), f"run={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        assert "audit of PPO" in done.stderr
    assert numbers(tmp_path / "rl") == numbers(tmp_path / "ppo")


def test_another_algorithm_does_not_go_on_with_a_run(path, tmp_path, ranks, capsys):
    ranks.run(1, run_rl, path, [[f"run={tmp_path / 'run'}", "training.steps=2"]])
    tree = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "reinforce"}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(tree | {"run": str(tmp_path / "run")}))
    assert cli.main(["ppo", "--config", str(tmp_path / "ppo.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "state.json: was saved by reinforce, and the configuration asks for ppo; give a new run directory" in line
    page = report.render([tmp_path / "run"])
    assert "megarlhf rl" in page and "not learned from" not in page


def test_a_reference_with_another_tokenizer(path, settings, tmp_path, capsys):  # noqa: F811
    """Reference and critic read the policy's tokens, so they must mean the same to them."""
    source = find_model(yaml.safe_load(path.read_text())["model"]["checkpoint"])
    shutil.copytree(source, tmp_path / "other" / "actor")
    shutil.copytree(source, tmp_path / "other" / "reward")
    texts = [review.response for review in reviews.reviews(200, seed=5)]
    reviews.train_tokenizer(texts, str(tmp_path / "other"), 300)
    load_tokenizer(tmp_path / "other.model").save(tmp_path / "other" / "tokenizer")
    cases = ("rl", path, "reference"), ("ppo", settings, "reference"), ("ppo", settings, "critic")
    for program, file, section in cases:
        assert cli.main([program, "--config", str(file), f"{section}.checkpoint={tmp_path / 'other'}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megarlhf: error: {section}.checkpoint: {tmp_path / 'other'}: token "), line
        assert f"to the {section} model; use a {section} model trained with the policy's tokenizer" in line


MISTAKES = {
    "none": ("rl", ["reinforce"], {}, "no section names the algorithm; add one of: ppo, reinforce"),
    "misspelt": ("rl", ["reinforce"], {"reinforc": {}}, "unknown key 'reinforc'; did you mean 'reinforce'?"),
    "two": ("rl", [], {"ppo": {}}, "the sections reinforce and ppo name an algorithm each; keep one"),
    "another": ("ppo", [], {}, "the section 'reinforce' names another algorithm than 'megarlhf ppo' runs"),
    "critic": ("rl", [], {"critic": {"kind": "shared"}}, "reinforce has no critic; remove the section"),
    "position": ("rl", [], {"reinforce": {"score_position": "last"}}, "reinforce.score_position: 'last' is"),
    "exact": ("rl", [], {"reinforce": {"kl": {"estimator": "exact"}}, "sampler": {"top_k": 3}},
              "sampler: reinforce with these options needs responses sampled from all tokens"),
    "decay": ("rl", [], {"reinforce": {"baseline_decay": 1.0}}, "reinforce.baseline_decay: must be at least 0"),
    "profile": ("rl", [], {"log": {"profile": [99, 99]}}, "log.profile: begins at step 99, and the run has"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(path, tmp_path, capsys, name):
    program, without, more, expected = MISTAKES[name]
    tree = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in without}
    (tmp_path / "run.yaml").write_text(json.dumps(tree | more, indent=1))
    assert cli.main([program, "--config", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    if name not in ("position", "exact", "profile"):  # which sections of different lines decide together
        assert f"{tmp_path}/run.yaml" in line
