"""`megarlhf preflight` names each mistake before an allocation is spent; a job's start names what only it can see."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml

from megarlhf import cli
from megarlhf.cluster import preflight
from megarlhf.cluster.preflight import Facts


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
    "batch": (["training.micro_batch_size=3"], "training.global_batch_size: 8 is not a multiple of micro_batch_size 3"),
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
    lose_the_metadata: "its .metadata cannot be read (a file ends too early)",
    another_architecture: "linear_fc1.weight has the shape [2, 128, 32], but architecture.yaml asks for [2, 192, 32]",
    a_key_too_few: "has no tensor decoder.layers.self_attention.linear_qkv.bias",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_damaged_models(model, tmp_path, capsys, damage):
    config, good = model
    shutil.copytree(good, tmp_path / "model")
    damage(tmp_path / "model")
    assert run(config, f"model.checkpoint={tmp_path / 'model'}") == 2
    err = capsys.readouterr().err
    assert DAMAGES[damage] in err and str(tmp_path / "model") in err and "Traceback" not in err


def test_several_mistakes_at_once(model, capsys):
    assert run(model[0], "data.train=/no/such.jsonl", "model.checkpoint=/no/such/model", "run=/proc/version/run") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # the data are looked at when there is a tokenizer
    assert "/no/such/model" in lines[0] and "/proc/version/run" in lines[1]


# --- at the job's start

USUAL = dict(
    clock=1e9, versions={"torch": "2.13.0"}, config="abc", memory_free=int(79e9), memory_total=int(80e9),
    matmul=2e-4, all_reduce=1e-3,
)  # fmt: skip


def facts(**odd) -> list[Facts]:
    """Eight ranks on two nodes, of which rank 5 on node2 is `odd`."""
    ranks = [Facts(rank, f"node{1 + rank // 4}", **USUAL) for rank in range(8)]
    ranks[5] = dataclasses.replace(ranks[5], **odd)
    return ranks


def test_equal_ranks_are_silent():
    assert preflight.judge(facts()) == ([], [])


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch differs: rank 5 on node2 has 2.12.0, the others 2.13.0"),
        ({"config": "def"}, "the configuration's hash differs: rank 5 on node2 has def, the others abc"),
        ({"memory_free": int(20e9)}, "rank 5 on node2: only 20.0 of 80.0 GB of its device are free"),
    ],
)
def test_what_must_stop_a_run(odd, expected):
    (error,), _ = preflight.judge(facts(**odd))
    assert error.startswith(expected)


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"clock": 1e9 - 3600}, "rank 5 on node2: its clock is 3600 s behind"),
        ({"matmul": 4e-4}, "rank 5 on node2 is slow: matmul took 0.40 ms, the median 0.20 ms"),
        ({"all_reduce": 2e-3}, "rank 5 on node2 is slow: all_reduce took 2.00 ms"),
        ({"memory_total": int(40e9), "memory_free": int(40e9)}, "rank 5 on node2: its device has 40 GB, others 80 GB"),
    ],
)
def test_what_is_worth_a_remark(odd, expected):
    errors, (remark,) = preflight.judge(facts(**odd))
    assert errors == [] and remark.startswith(expected)
