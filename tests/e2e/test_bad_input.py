"""Mistakes: one line that says what, where and what to do; a nonzero exit, on every rank, in seconds."""

import gzip
import json
import os
import shutil
import sys

import pytest

from megarlhf import cli
from tests.e2e.runs import CLI, finish, prepare


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("bad"))


ONE_RANK = {
    "unknown key": (["model.dtpye=fp32"], "unknown key 'model.dtpye'; did you mean 'dtype'?"),
    "wrong type": (["training.steps=many"], "training.steps must be a whole number, not 'many'"),
    "not a choice": (["optimizer.schedule=cosin"], "optimizer.schedule must be one of constant, linear, cosine"),
    "no such checkpoint": (
        ["model.architecture=null", "model.checkpoint=/no/such/model"],
        "/no/such/model: no such directory; give a model, a checkpoint or a run directory",
    ),
    "no such data": (["data.train=/no/such.jsonl"], "/no/such.jsonl: cannot read the examples (No such file"),
    "no such tokenizer": (["tokenizer=/no/such/tokenizer"], "/no/such/tokenizer: no such tokenizer; give a"),
    "vocabulary": (["model.architecture.vocab_size=100"], "the model's vocabulary has 100 entries; use the tokenizer"),
    "batch": (["training.global_batch_size=0"], "training.global_batch_size: must be at least 1, not 0"),
    "micro-batch": (["training.micro_batch_tokens=0"], "training.micro_batch_tokens: must be at least 1, not 0"),
    "old micro-batch": (
        ["training.micro_batch_tokens=null", "training.micro_batch_size=0"],
        "training.micro_batch_size: must be at least 1, not 0",
    ),
    "micro-batch twice": (
        ["training.micro_batch_size=4"],
        "training.micro_batch_size: is the old name of micro_batch_tokens, which is given too; remove it",
    ),
    "sequence parallelism": (["parallel.sequence=true"], "parallel.sequence: splits the sequence over tensor-parallel"),
    "context parallelism": (["parallel.context=2"], "parallel.context: context parallelism is not supported yet"),
    "ranks": (["parallel.pipeline=2"], "1 ranks cannot be divided by tensor 1 x pipeline 2 = 2; start a multiple of 2"),
    "no run directory": (["run="], "run must be a string, not None"),
    "an empty run directory": (["run=''"], "run: is empty; name a directory"),
    "a run directory in /proc": (["run=/proc/x"], "run: /proc/x cannot be written (No such file or directory)"),
    "a run directory that is a file": (["run=/etc/passwd"], "run: /etc/passwd cannot be written (Not a directory)"),
    "a run directory in a file": (["run=/etc/passwd/run"], "run: /etc/passwd/run cannot be written (Not a directory)"),
    "a long run directory": (["run=" + "x" * 300], "xxx cannot be written (File name too long); give another"),
    "seed": (["seed=-1"], "seed: must not be negative, not -1"),
    "warm-up": (["optimizer.warmup_steps=9"], "optimizer.warmup_steps: 9 are more than the run's 8 updates"),
    "positions": (
        ["data.max_length=65"],
        "data.max_length: rows of 65 tokens are longer than the model's 64 positions",
    ),
    "memory": (
        ["training.micro_batch_tokens=256000000000", "training.global_batch_size=4000000000"],
        "a micro-batch of 256,000,000,000 tokens, and no device has more than",
    ),
    "rotary_percent": (["model.architecture.rotary_percent=3"], "rotary_percent: must be above 0 and at most 1, not 3"),
    "odd rotary": (["model.architecture.rotary_percent=0.5", "model.architecture.head_dim=6"], "channels are 3"),
    "init_std": (["model.architecture.init_std=-1"], "init_std: must be above 0"),
    "norm_epsilon": (["model.architecture.norm_epsilon=-1"], "norm_epsilon: must be above 0"),
    "layers": (["model.architecture.num_layers=100000000"], "num_layers: must be from 1 to 16383"),
    "rope_scaling": (["model.architecture.rope_scaling.low_freq_factor=4"], "below high_freq_factor 4"),
    "override": (["training.steps"], "override 'training.steps': must have the form key.sub=value"),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_line(config, capsys, name):
    overrides, expected = ONE_RANK[name]
    assert cli.main(["sft", "--config", str(config), *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megarlhf: error: ") and expected in line


def test_where_in_the_files(config, tmp_path, capsys):
    """A key's line in the YAML, a row's line in the JSONL, a damaged checkpoint's file."""
    text = config.read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text(text.replace("  lr: 0.01", "  lr: fast"))
    number = 1 + text.splitlines().index("  lr: 0.01")
    assert cli.main(["sft", "--config", str(bad)]) == 2
    assert f"{bad}:{number}: optimizer.lr must be a number, not 'fast'" in capsys.readouterr().err

    rows = (config.parent / "train.jsonl").read_text().splitlines()
    rows[6] = json.dumps({"prompt": "no response"})
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(rows) + "\n")
    assert cli.main(["sft", "--config", str(config), f"data.train={data}", "data.max_bad_fraction=0"]) == 2
    assert f"{data}:7: no key 'response' (found: prompt); 1 of 160 lines" in capsys.readouterr().err

    (tmp_path / "model" / "actor").mkdir(parents=True)
    (tmp_path / "model" / "actor" / "architecture.yaml").write_text("family: llama\nnum_layers: two\n")
    overrides = ["model.architecture=null", f"model.checkpoint={tmp_path / 'model'}"]
    assert cli.main(["sft", "--config", str(config), *overrides]) == 2
    assert "architecture.yaml:2: num_layers must be a whole number, not 'two'" in capsys.readouterr().err


def test_a_file_of_another_program(config, capsys):
    assert cli.main(["ppo", "--config", str(config)]) == 2
    assert "unknown key 'data'" in (said := capsys.readouterr().err)
    assert said.endswith("the file looks like a configuration for 'megarlhf sft'\n") and len(said.splitlines()) == 1
    assert cli.main(["sft", "--config", str(config), "dta.train=x"]) == 2
    assert "looks like" not in capsys.readouterr().err


OTHER_FORMATS = {
    "array.json": (b'[{"prompt": "a", "response": "b"}]', "is a JSON array, not JSONL"),
    "pretty.json": (b'{\n "prompt": "a",\n "response": "b"\n}\n', "an object over several lines"),
    "a.jsonl.gz": (gzip.compress(b"{}")[:-5], "is a damaged gzip file"),
    "a.parquet": (b"PAR1" + bytes(100), "is a damaged or unknown Parquet file"),
    "utf16.jsonl": ("{}".encode("utf-16"), "is text in UTF-16, not JSONL"),
}


def test_data_of_another_format(config, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name, (content, expected) in OTHER_FORMATS.items():
        (tmp_path / name).write_bytes(content)
        assert cli.main(["sft", "--config", str(config), f"data.train={tmp_path / name}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / name}" in line and expected in line and "max_bad_fraction" not in line
    assert cli.main(["sft", "--config", str(config), f"data.train={tmp_path / 'pipe'}"]) == 2
    assert "cannot read the examples (a pipe," in capsys.readouterr().err


EVERY_RANK = {
    "heads": (["parallel.tensor=2", "model.architecture.num_query_groups=1"], "parallel.tensor: 2 does not divide"),
    "layers": (["parallel.pipeline=2", "model.architecture.num_layers=3"], "3 layers cannot be shared evenly by 2"),
    "truncated checkpoint": (["model.architecture=null", "model.checkpoint={broken}"], "is damaged; use another"),
}


@pytest.mark.parametrize("name", EVERY_RANK)
def test_every_rank_ends(config, straight, tmp_path, name):
    """Both ranks end by themselves with status 2 (no launcher is there to end them)."""
    run, _ = straight
    broken = tmp_path / "broken"
    shutil.copytree(run / "checkpoints" / "step_00000008", broken)
    data = max((broken / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    overrides, expected = EVERY_RANK[name]
    overrides = [override.format(broken=broken) for override in overrides]
    script = (
        'for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank "$@" & pids="$pids $!"; done; '
        'for pid in $pids; do wait $pid; echo "status $?"; done'
    )
    done = finish(
        "bash", "-c", script, "_", sys.executable, *CLI, "sft", "--config", str(config), *overrides,
        environment=dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611"),
        timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["status 2", "status 2"], done.stderr
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    # once ranks are joined, the first error is shown once; before, nobody can ask who speaks
    assert len(lines) == (1 if "preflight: 2 ranks" in done.stderr else 2), done.stderr
    assert all(expected in line for line in lines), done.stderr
    assert "Traceback" not in done.stderr


def test_launch_errors_come_before_anything(config):
    done = finish(sys.executable, *CLI, "sft", "--config", str(config), environment={"RANK": "0"}, timeout=60)
    assert done.returncode == 2 and "WORLD_SIZE" in done.stderr and "Traceback" not in done.stderr


def test_help_is_instant():
    """No torch, no megatron before a program starts."""
    code = (
        "import sys\nfrom megarlhf import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = finish(sys.executable, "-c", code)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
