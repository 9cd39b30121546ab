"""`megarlhf generate`, started as users start it: the same responses from one process and from two pipeline stages."""

import json
import sys

import pytest
import torch

from megarlhf import cli
from tests.e2e.runs import CLI, finish
from tests.unit.test_data import save_hf

TEXTS = [f"Question {number}: what is {number} plus two?" for number in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A converted random Llama with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megarlhf.convert.convert import hf2megatron

    directory = tmp_path_factory.mktemp("generate")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3),
    ).save_pretrained(directory / "hf")  # fmt: skip
    save_hf(directory / "hf")
    hf2megatron(directory / "hf", directory / "model")
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return directory


def command(model, name, *overrides):
    return [
        *CLI, "generate", "--checkpoint", str(model / "model"), "--prompts", str(model / "prompts.jsonl"),
        "--out", str(model / name), "dtype=fp32", "prompts.length=32",
        "sampler.response_length=24", "sampler.samples_per_prompt=2", "sampler.micro_batch_size=6", *overrides,
    ]  # fmt: skip


def responses(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate(model):
    done = finish(sys.executable, *command(model, "one.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "7 prompts" in done.stderr and "tokens/s" in done.stderr and "\r" not in done.stderr
    assert "14 responses" in done.stderr and not done.stdout
    one = responses(model / "one.jsonl")
    assert [line["prompt"] for line in one] == [text for text in TEXTS for _ in range(2)]
    assert len({tuple(line["tokens"]) for line in one}) == 14
    assert all(1 <= len(line["tokens"]) <= 24 and line["logprob"] < 0 for line in one)

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, sizes in (("stages.jsonl", "parallel.pipeline=2"), ("data.jsonl", "parallel.pipeline=1")):
        done = finish(*torchrun, *command(model, name, sizes))
        assert done.returncode == 0, done.stderr
        two = responses(model / name)
        assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
        assert [line["response"] for line in two] == [line["response"] for line in one]
        assert max(abs(a["logprob"] - b["logprob"]) for a, b in zip(one, two, strict=True)) < 1e-4
    assert not list(model.glob("*.partial"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("out=/no/such/directory/o.jsonl", "out: /no/such/directory/o.jsonl must be a file in a directory that exists"),
        ("out={model}/prompts.jsonl", "prompts.jsonl is the file of the prompts, which it would replace"),
        ("out={model}/../{model.name}/link.jsonl", "link.jsonl is the file of the prompts, which it would replace"),
        ("out=/proc/x", "out: /proc/x cannot be written (No such file or directory)"),
        ("out={model}", "is not a file; give the name of one"),
        ("out=/dev/null", "out: /dev/null is not a file"),
        ("out={model}/" + "x" * 250, "xxx cannot be written (File name too long)"),  # with .partial behind it
        ("prompts.path=/no/such.jsonl", "/no/such.jsonl: cannot read"),
        ("sampler.top_p=0", "sampler.top_p: must be in (0, 1]"),
        ("parallel.tensor=8", "cannot be divided by tensor 8"),
    ],
)
def test_mistakes(model, capsys, override, message):
    (model / "link.jsonl").unlink(missing_ok=True)
    (model / "link.jsonl").symlink_to("prompts.jsonl")
    override = override.format(model=model)
    assert cli.main([*command(model, "x.jsonl", override)[2:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_prompts_are_needed(model, capsys):
    assert cli.main(["generate", "--checkpoint", str(model / "model"), "--out", str(model / "x.jsonl")]) == 2
    assert "'prompts' is missing" in capsys.readouterr().err
