"""`megarlhf preflight` names each mistake before an allocation is spent; a job's start names what only it can see."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml

from megarlhf import cli
from megarlhf.algorithms import ppo
from megarlhf.algorithms.kl import KLConfig
from megarlhf.cluster import job_checks
from megarlhf.cluster.job_checks import Facts, Speed
from megarlhf.config import UserError
from megarlhf.train import preflight
from megarlhf.train.actions import Progress
from megarlhf.train.rl import read_progress


@pytest.fixture(scope="module")
def model(straight, tmp_path_factory) -> tuple[Path, Path]:
    """(configuration that starts from a checkpoint, that checkpoint's directory, which may be damaged)."""
    run, config = straight
    directory = tmp_path_factory.mktemp("preflight")
    shutil.copytree(run / "checkpoints" / "step_00000008", directory / "model")
    settings = yaml.safe_load(config.read_text())
    settings |= {"run": str(directory / "run"), "tokenizer": None}
    settings["model"] = {"checkpoint": str(directory / "model"), "dtype": "fp32"}
    (directory / "run.yaml").write_text(yaml.safe_dump(settings))
    return directory / "run.yaml", directory / "model"


def run(config: Path, *arguments: str) -> int:
    return cli.main(["preflight", "--config", str(config), "--gpus-per-node", "2", *arguments])


def test_a_good_configuration(model, capsys):
    config, directory = model
    assert run(config) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "a configuration for 'megarlhf sft' on 1 x 2 = 2 ranks" in out
    assert f"ok: model.checkpoint {directory}" in out
    assert not (directory.parent / "run").exists()  # it looks and changes nothing


MISTAKES = {
    "a misspelt key": (["optimizer.learning_rate=1"], "unknown key 'optimizer.learning_rate'"),
    "no such data": (["data.train=/no/such.jsonl"], "/no/such.jsonl: cannot read the examples"),
    "no such model": (["model.checkpoint=/no/such/model"], "/no/such/model: no such directory"),
    "no such tokenizer": (["tokenizer=/no/such/tokenizer"], "/no/such/tokenizer: no such tokenizer"),
    "heads": (["parallel.tensor=8", "--gpus-per-node=8"], "parallel.tensor: 8 does not divide the model's"),
    "layers": (["parallel.pipeline=4", "--gpus-per-node=4"], "2 layers cannot be shared evenly by 4 pipeline stages"),
    "ranks": (["parallel.tensor=2", "--gpus-per-node=3"], "3 ranks cannot be divided by tensor 2"),
    "tensor parallelism across nodes": (
        ["parallel.tensor=4", "--gpus-per-node=2", "--nodes=2"],
        "parallel.tensor: groups of 4 ranks do not fit evenly into nodes of 2",
    ),
    "nodes": (["--nodes=0"], "--nodes: must be at least 1, not 0"),
    "ranks a node": (["--gpus-per-node=0"], "--gpus-per-node: must be at least 1, not 0"),
    "batch": (
        ["training.global_batch_size=7"],
        "training.global_batch_size: 7 is not a multiple of 2 data-parallel ranks",
    ),
    "a directory that cannot be written": (["run=/proc/version/run"], "run: /proc/version/run cannot be written"),
    "disk": (["checkpoint.keep=1000000000"], "+ 1 checkpoints of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_configuration(model, capsys, name):
    arguments, expected = MISTAKES[name]
    assert run(model[0], *arguments) == 2
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err


def truncate(directory: Path) -> None:
    data = max((directory / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1000])


def lose_a_file(directory: Path) -> None:
    max((directory / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size).unlink()


def lose_the_metadata(directory: Path) -> None:
    (directory / "actor" / ".metadata").write_bytes(b"")


def another_architecture(directory: Path) -> None:
    path = directory / "actor" / "architecture.yaml"
    path.write_text(path.read_text().replace("ffn_hidden_size: 64", "ffn_hidden_size: 96"))


def a_key_too_few(directory: Path) -> None:
    path = directory / "actor" / "architecture.yaml"
    path.write_text(path.read_text().replace("qkv_bias: false", "qkv_bias: true"))


DAMAGES = {
    truncate: "the checkpoint is damaged; use another one",
    lose_a_file: "is missing: the checkpoint is damaged",
    lose_the_metadata: ".metadata: damaged (EOFError",
    another_architecture: "linear_fc1.weight has the shape [2, 128, 32], but architecture.yaml asks for [2, 192, 32]",
    a_key_too_few: "has no tensor decoder.layers.self_attention.linear_qkv.bias",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_damaged_models(model, tmp_path, capsys, damage):
    """What the files say is enough, where there are no checksums."""
    config, good = model
    shutil.copytree(good, tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink()
    damage(tmp_path / "model")
    assert run(config, f"model.checkpoint={tmp_path / 'model'}") == 2
    err = capsys.readouterr().err
    assert DAMAGES[damage] in err and str(tmp_path / "model") in err and "Traceback" not in err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_flipped_bits(model, tmp_path, capsys):
    """In a small file always, in one with tensors if it is asked for."""
    config, good = model
    copy = shutil.copytree(good, tmp_path / "model")
    overrides = [f"model.checkpoint={copy}"]
    assert run(config, *overrides, "--verify") == 0
    assert "ok: checksums of model.checkpoint: " in capsys.readouterr().out
    tokenizer = next(path.name for path in (good / "tokenizer").iterdir())
    for small in ("actor/architecture.yaml", "actor/common.pt", f"tokenizer/{tokenizer}", "checksums.json"):
        whole = (copy / small).read_bytes()
        flip(copy / small)
        assert run(config, *overrides) == 2
        err = capsys.readouterr().err
        assert str(copy / small) in err and "the checkpoint is damaged; use another one" in err, err
        (copy / small).write_bytes(whole)
    data = next((copy / "actor").glob("*.distcp"))
    flip(data)
    assert run(config, *overrides) == 0
    capsys.readouterr()
    assert run(config, *overrides, "--verify") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{data}: is not what was written" in line


AT_RESUME = {
    "state.json": (b"[1]", "state.json: missing or damaged (it has no 'step')"),
    "run.yaml": (b"a: [", "run.yaml: damaged ("),
    "actor/architecture.yaml": (b"family: \xff", "architecture.yaml:1: not UTF-8 (byte 9 of the file)"),
    "actor/common.pt": (b"PK", "common.pt: damaged ("),
    "actor/metadata.json": (b"[", "metadata.json: damaged ("),
}


def test_damage_at_resume(straight, tmp_path, capsys):
    """One line that names the file; by what is in it where there are no checksums."""
    done, config = straight
    again = shutil.copytree(done, tmp_path / "run")
    step = again / "checkpoints" / "step_00000008"
    assert run(config, f"run={again}") == 0
    for checked in (True, False):
        if not checked:
            (step / "checksums.json").unlink()
        for name, (content, expected) in AT_RESUME.items():
            whole = (step / name).read_bytes()
            (step / name).write_bytes(content)
            assert run(config, f"run={again}") == 2, name
            err = capsys.readouterr().err
            (step / name).write_bytes(whole)
            assert str(step / name) in err and "Traceback" not in err and len(err.splitlines()) == 1, err
            assert (f"has {len(content)} of " if checked else expected) in err, err
    (again / "checkpoints" / "latest").unlink()
    assert run(config, f"run={again}", "checkpoint.resume=false") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint.resume: false, but" in line and "(step_00000008, metrics.jsonl" in line
    assert (again / "metrics.jsonl").read_bytes() == (done / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"step": 3}', "its 'progress' is not that of an online run"),
        ('{"step": 3, "progress": {"step": 2, "kl_coef": 0.1}}', "its 'progress' is not that of an online run"),
        ('{"step": 3, "progress": {"step": 3}}', "its 'progress' is not that of an online run"),
        (
            '{"step": 3, "progress": {"step": 3, "algorithm": "reinforce", "state": {}}}',
            "was saved by reinforce, and the configuration asks for ppo; give a new run directory",
        ),
        ('{"step": 3, "progress": {"step": 3, "state": {"kl_coef": "high"}}}', "kl_coef must be a number, not 'high'"),
        ('{"step": 3, "progress": {"step": 3, "kl_coef": NaN}}', "kl_coef must be a finite number"),
    ],
)
def test_damaged_progress(tmp_path, content, expected):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError) as error:
        read_progress(tmp_path, "ppo", ppo.algorithm(ppo.PPOConfig()))
    assert str(tmp_path / "state.json") in str(error.value) and expected in str(error.value)


def test_progress_of_older_checkpoints(tmp_path):
    (tmp_path / "state.json").write_text('{"step": 3, "progress": {"step": 3, "kl_coef": 0.25, "refused": 1}}')
    for controller, coef in (("adaptive", 0.25), ("fixed", 0.05)):  # a fixed one is the configuration's
        algorithm = ppo.algorithm(ppo.PPOConfig(kl=KLConfig(controller=controller)))
        progress = read_progress(tmp_path, "ppo", algorithm)
        assert progress == Progress("ppo", step=3, drawn=3, state={"kl_coef": coef}, refused=1)


@pytest.mark.parametrize("content", ["reinforce: {}", "reinforce:", "reinforce: {gamma: 0.9}", "preset: grpo", ""])
def test_the_program_is_found_by_the_algorithms_section(tmp_path, content):
    """Also one without keys, one that a preset stands for, or one that an override gives."""
    (tmp_path / "run.yaml").write_text(f"run: r\nprompts: {{path: p}}\nscoring: {{}}\n{content}\n")
    programs = {name: cli.find(name) for name in cli.TRAINING}
    overrides = [] if content else ["reinforce.gamma=1"]
    counts = preflight.matches(str(tmp_path / "run.yaml"), programs, overrides)
    assert max(counts, key=lambda name: counts[name]) == "rl"
    counts = preflight.matches(str(tmp_path / "run.yaml"), programs, ["ppo.gamma=1", "critic.kind=shared"])
    assert content or max(counts, key=lambda name: counts[name]) == "ppo"


def test_several_mistakes_at_once(model, capsys):
    assert run(model[0], "data.train=/no/such.jsonl", "model.checkpoint=/no/such/model", "run=/proc/version/run") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # the data are looked at when there is a tokenizer
    assert "/no/such/model" in lines[0] and "/proc/version/run" in lines[1]


# --- at the job's start

USUAL = dict(
    clock=1e9, versions={"torch": "2.13.0"}, config="abc", memory_free=int(79e9), memory_total=int(80e9),
)  # fmt: skip


def facts(**odd) -> list[Facts]:
    """Eight ranks on two nodes, of which rank 5 on node2 is `odd`."""
    ranks = [Facts(rank, f"node{1 + rank // 4}", **USUAL) for rank in range(8)]
    ranks[5] = dataclasses.replace(ranks[5], **odd)
    return ranks


def test_equal_ranks_are_silent():
    assert job_checks.judge(facts()) == ([], [])


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch differs: rank 5 on node2 has 2.12.0, the others 2.13.0"),
        ({"memory_free": int(20e9)}, "rank 5 on node2: only 20.0 of 80.0 GB of its device are free"),
    ],
)
def test_what_must_stop_a_run(odd, expected):
    (error,), _ = job_checks.judge(facts(**odd))
    assert error.startswith(expected)


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"clock": 1e9 - 3600}, "rank 5 on node2: its clock is 3600 s behind"),
        ({"memory_total": int(40e9), "memory_free": int(40e9)}, "rank 5 on node2: its device has 40 GB, others 80 GB"),
    ],
)
def test_what_is_worth_a_remark(odd, expected):
    errors, (remark,) = job_checks.judge(facts(**odd))
    assert errors == [] and remark.startswith(expected)


def speeds(matmul: float, all_reduce: float = 1e-3) -> list[Speed]:
    """Eight ranks, of which rank 5 is odd; three of them a little slower than the others."""
    ranks = [Speed(2.6e-4 if rank < 3 else 2e-4, 1e-3) for rank in range(8)]
    ranks[5] = Speed(matmul, all_reduce)
    return ranks


def test_a_rank_is_slow_when_it_always_is():
    """The median of the remark is that of the line of figures."""
    assert job_checks.slow(facts(), [speeds(4e-4), speeds(2e-4), speeds(4e-4)]) == []
    assert job_checks.slow(facts(), [speeds(4e-4), speeds(5e-4)]) == [
        "rank 5 on node2 is slow: matmul took 0.50 ms, the median 0.20 ms"
    ]
    (remark,) = job_checks.slow(facts(), [speeds(2e-4, 2e-3)] * 3)
    assert remark.startswith("rank 5 on node2 is slow: all-reduce took 2.00 ms, the median 1.00")


def test_configurations_that_differ():
    """By key, with both values; ranks that differ alike share a part."""
    usual = "run: runs/x\noptimizer:\n  lr: 0.001\n  betas: [0.9, 0.95]\nmodel:\n  architecture: null\n"
    odd = usual.replace("0.001", "0.01").replace("architecture: null", "architecture: {layers: 2}")
    ranks = facts(config="def")
    configs = [usual] * 5 + [odd] + [usual] * 2
    assert job_checks.differences(ranks, configs) == (
        "the configuration differs: rank 5 on node2 with optimizer.lr=0.01 instead of 0.001, "
        "model.architecture.layers=2 instead of None; give every node the same files and overrides"
    )
    ranks[6] = dataclasses.replace(ranks[6], config="def")
    configs[6] = odd
    assert "rank 5 on node2, rank 6 on node2 with optimizer.lr=0.01 instead" in job_checks.differences(ranks, configs)
