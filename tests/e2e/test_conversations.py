"""A run on conversations with a given chat template, in files with weights; what starts from it has the template."""

import json
import sys

import pytest

from megarlhf import cli
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.locate import find_tokenizer
from tests.e2e.runs import CLI, finish, losses, prepare
from tests.unit.test_data import CHATML, save_hf

ASKED = [{"role": "user", "content": "What is two plus two?"}]
WORDS = ["four", "slow", "five", "brown", "lazy", "quick", "sea"]


def rows(path, made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def answer(number):
    return {"role": "assistant", "content": f"It is {WORDS[number % 7]}."}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of an SFT run, and its configuration."""
    directory = tmp_path_factory.mktemp("conversations")
    (directory / "chat.jinja").write_text(CHATML)
    first = rows(directory / "a.jsonl", [{"messages": [*ASKED, answer(k)]} for k in range(6)])
    second = rows(
        directory / "b.jsonl", [{"prompt": ASKED, "response": [answer(k), *ASKED, answer(k + 1)]} for k in range(8)]
    )
    changes = {
        "tokenizer": str(save_hf(directory / "hf")),
        "chat_template": str(directory / "chat.jinja"),
        "model.architecture.vocab_size": 320,
        "model.architecture.max_position_embeddings": 128,
        "data.train": [first, {"path": second, "weight": 0.5}],
        "data.validation": None,
        "data.max_length": 128,
        "training.steps": None,
        "training.global_batch_size": 5,
    }
    config = prepare(directory, **changes)
    done = finish(sys.executable, *CLI, "sft", "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert f"{first}: 6 examples" in done.stderr and f"  {second}: 8 examples" in done.stderr
    assert "weight 0.5: 4 of 8 an epoch" in done.stderr
    return directory, config


def test_an_epoch_has_weighted_rows(trained):
    assert sorted(losses(trained[0] / "run")) == [1, 2]  # 6 + 4 rows, 5 a step


def test_generate_renders_with_the_template_of_the_run(trained):
    directory, _ = trained
    prompts = rows(directory / "prompts.jsonl", [{"messages": ASKED}, {"prompt": [*ASKED, answer(0), *ASKED]}])
    texts = rows(directory / "texts.jsonl", [{"prompt": "The sea"}])
    done = finish(
        sys.executable, *CLI, "generate", "--checkpoint", str(directory / "run"), "--out", str(directory / "out.jsonl"),
        f"prompts.path=[{prompts}, {texts}]", "dtype=fp32", "prompts.length=64", "sampler.response_length=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    said = [line["prompt"] for line in written]
    turn = "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n"
    assert said == [ASKED, [*ASKED, answer(0), *ASKED], "The sea"]  # which other programs read as they are
    tokenizer = load_tokenizer(find_tokenizer(directory / "run"))
    read = [tokenizer.decode(line["prompt_tokens"]) for line in written]
    assert read == [turn, f"{turn}It is four.<|im_end|>\n{turn}", "<s>The sea"]
    assert "2 prompts" in done.stderr and "1 prompts" in done.stderr and "cut or changed" not in done.stderr


def test_a_reward_model_learns_from_public_shapes(trained):
    directory, _ = trained
    pairs = [
        {"prompt": ASKED[0]["content"], "chosen": [*ASKED, answer(k)], "rejected": [*ASKED, answer(k + 1)],
         "messages": [*ASKED, answer(k)], "score_chosen": 8.0, "score_rejected": 2.5} for k in range(6)
    ]  # fmt: skip
    talk = "\n\nHuman: What is two plus two?\n\nAssistant:"
    pairs += [{"chosen": f"{talk} {WORDS[k]}.", "rejected": f"{talk} It is {WORDS[k]}."} for k in range(2)]
    (directory / "pairs").mkdir()
    config = prepare(
        directory / "pairs", run=str(directory / "reward"),
        model={"checkpoint": str(directory / "run"), "dtype": "fp32"},
        tokenizer=None, data={"train": rows(directory / "pairs.jsonl", pairs), "max_length": 64},
        training={"global_batch_size": 8, "steps": 2},
    )  # fmt: skip
    done = finish(sys.executable, *CLI, "reward", "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert "8 prompts x 2 responses" in done.stderr and "malformed" not in done.stderr
    assert sorted(losses(directory / "reward")) == [1, 2]
    saved = json.loads((directory / "reward/checkpoints/step_00000002/tokenizer/tokenizer_config.json").read_text())
    assert saved["chat_template"] == CHATML


def test_a_resumed_run_keeps_its_template(trained, capsys):
    _, config = trained
    other = CHATML.replace("<|im_start|>", "<s>")
    assert cli.main(["sft", "--config", str(config), f"chat_template={json.dumps(other)}", "training.steps=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "chat_template: is another one than that of the checkpoint" in line and "new run directory" in line


def test_conversion_keeps_the_template(trained):
    from transformers import AutoTokenizer

    from megarlhf.convert.convert import megatron2hf

    directory, _ = trained
    megatron2hf(directory / "run", directory / "exported")
    tokenizer = AutoTokenizer.from_pretrained(directory / "exported")
    rendered = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompts.path={d}/a.jsonl"], "a.jsonl:1: 'messages' ends with the assistant's message"),
        (["prompts.path=[{{path: {d}/a.jsonl, weight: 2}}]"], "prompts.path: every prompt is answered, each as often"),
        (["prompts.path=[{d}/a.jsonl, {d}/out2.jsonl]"], "out: {d}/out2.jsonl is the file of the prompts"),
        (["prompts.path={d}/a.jsonl", "chat_template='{{% for'"], "chat_template: the given text, line 1: not a Jinja"),
        (["prompts.path={d}/a.jsonl", "chat_template=/no.jinja"], "/no.jinja: cannot read the chat template (No such"),
    ],
)
def test_mistakes(trained, capsys, overrides, message):
    directory, _ = trained
    (directory / "out2.jsonl").write_text("")
    arguments = ["--checkpoint", str(directory / "run"), "--out", str(directory / "out2.jsonl"), "prompts.length=64",
                 "sampler.response_length=8"]  # fmt: skip
    assert cli.main(["generate", *arguments, *(given.format(d=directory) for given in overrides)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(d=directory) in line
