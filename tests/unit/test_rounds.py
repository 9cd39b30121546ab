"""`megarlhf rounds`: the stages of a chain, what is left of it, and one line for each mistake."""

import json

import pytest
import yaml

from megarlhf import cli, config
from megarlhf.config import UserError
from megarlhf.train import rounds

CHAIN = {
    "run": "chain",
    "model": "first",
    "rounds": 2,
    "seed": 5,
    "generate": {"prompts": {"path": "p.jsonl"}, "sampler": {"samples_per_prompt": 4, "stop_at_eos": True}},
    "score": {"scoring": {"sources": [{"verify": "number"}]}},
    "select": {"kind": "pairs"},
    "dpo": {"data": {"max_length": 32}, "training": {"steps": 3}},
}


def write(tmp_path, **changes):
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({**CHAIN, **changes}))
    return tmp_path / "chain.yaml"


def chain(tmp_path, **changes):
    path = write(tmp_path, **changes)
    return rounds.stages(config.load(rounds.RoundsConfig, path), str(path))


def finish(stage, tmp_path):
    """Write the output of a stage, as its program does."""
    stage.file.parent.mkdir(parents=True, exist_ok=True)
    stage.file.write_text(yaml.safe_dump(stage.values))
    if stage.program in rounds.TRAINERS:
        done = stage.output / "checkpoints" / "step_00000003"
        done.mkdir(parents=True)
        (done / "state.json").write_text(json.dumps({"step": 3, "total_steps": 3}))
    else:
        stage.output.write_text("")


def test_the_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = chain(tmp_path)
    assert [stage.name for stage in found] == [
        f"round {number}, {program}" for number in (1, 2) for program in ("generate", "score", "select", "dpo")
    ]
    generate, score, select, dpo, again, *_, last = found
    assert generate.values["checkpoint"] == "first" and again.values["checkpoint"] == "chain/round_1/dpo"
    assert generate.values["seed"] == 5 and again.values["seed"] == 6  # other noise in each round
    assert score.values["input"] == generate.values["out"] and select.values["input"] == score.values["out"]
    assert dpo.values["data"] == {"max_length": 32, "train": "chain/round_1/data.jsonl"}
    assert dpo.values["model"]["checkpoint"] == "first" and "reference" not in dpo.values
    assert last.values["model"]["checkpoint"] == "chain/round_1/dpo"
    assert last.values["training"] == {"steps": 3}
    for stage in chain(tmp_path, reference="first"):
        if stage.program == "dpo":
            assert stage.values["reference"] == {"checkpoint": "first"}


def test_what_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = chain(tmp_path)
    for number, stage in enumerate(found):
        assert [one.name for one in rounds.unfinished(found)] == [one.name for one in found[number:]]
        finish(stage, tmp_path)
    assert not list(rounds.unfinished(found))
    more = chain(tmp_path, rounds=3)
    assert next(stage.name for stage in rounds.unfinished(more)) == "round 3, generate"
    state = found[3].output / "checkpoints" / "step_00000003" / "state.json"
    state.write_text(json.dumps({"step": 2, "total_steps": 3}))  # but round 2 has files already
    with pytest.raises(UserError, match=r"round_2/samples.jsonl: is there, but chain/round_1/dpo is not complete"):
        list(rounds.unfinished(found))


def test_prompts_are_read_as_they_were_sampled_from(tmp_path):
    prompts = {"path": "p.jsonl", "chat": True, "add_bos": False}
    given = CHAIN["generate"] | {"prompts": prompts, "chat_template": "template.jinja"}
    trained = chain(tmp_path, generate=given)[3].values
    assert trained["data"] | {"chat": True, "add_bos": False} == trained["data"]
    assert trained["chat_template"] == "template.jinja"


def test_an_unfinished_stage_goes_on_as_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = chain(tmp_path)
    for stage in stages[:3]:
        finish(stage, tmp_path)
    stages[3].output.mkdir(parents=True)  # a run that has begun
    stages[3].file.write_text(yaml.safe_dump(stages[3].values))
    assert next(rounds.unfinished(stages)).name == "round 1, dpo"
    with pytest.raises(UserError, match=r"dpo.data.max_length: was 32 in round 1, whose output exists, and is 16 now"):
        list(rounds.unfinished(chain(tmp_path, dpo=CHAIN["dpo"] | {"data": {"max_length": 16}})))


def test_a_changed_configuration(tmp_path, monkeypatch):
    """Complete stages were not made with it; layouts do not matter, nor do stages that are left."""
    monkeypatch.chdir(tmp_path)
    for stage in chain(tmp_path)[:3]:
        finish(stage, tmp_path)
    layout = CHAIN["generate"] | {"parallel": {"tensor": 2}}
    left = list(rounds.unfinished(chain(tmp_path, generate=layout, dpo={"training": {"steps": 9}})))
    assert left[0].name == "round 1, dpo" and left[0].values["training"]["steps"] == 9
    hotter = {"prompts": {"path": "p.jsonl"}, "sampler": CHAIN["generate"]["sampler"] | {"samples_per_prompt": 8}}
    with pytest.raises(
        UserError, match=r"generate.sampler.samples_per_prompt: was 4 in round 1, whose output exists, and"
    ):
        list(rounds.unfinished(chain(tmp_path, generate=hotter)))


MISTAKES = {
    "rounds": ({"rounds": 0}, "rounds: must be at least 1, not 0"),
    "both": ({"sft": {"data": {}}}, "sft: give one of the sections sft and dpo"),
    "kind": ({"select": {"kind": "best"}}, "select: kind must be pairs for dpo, not best"),
    "conditional": ({"dpo": None, "sft": {}, "select": {"kind": "conditional"}}, "rounds: must be 1 with kind"),
    "reference": ({"dpo": None, "sft": {}, "select": {"kind": "best"}, "reference": "first"}, "reference: is for dpo"),
    "wired": (
        {"score": CHAIN["score"] | {"out": "x"}},
        "chain.yaml: section score: out is set by the chain; remove it",
    ),
    "no EOS": (
        {"generate": {"prompts": {"path": "p.jsonl"}, "sampler": {"stop_at_eos": False}}},
        "generate: sampler.stop_at_eos must be true",
    ),
    "one sample": (
        {"generate": {"prompts": {"path": "p.jsonl"}, "sampler": {"stop_at_eos": True}}},
        "generate: sampler.samples_per_prompt must be at least 2 for pairs",
    ),
    "cut prompts": (
        {"generate": CHAIN["generate"] | {"prompts": {"path": "p.jsonl", "end_text": "."}}},
        "generate: prompts.end_text cuts the prompts that are sampled from, but dpo would learn with the whole ones",
    ),
    "launch": ({"launch": 'torchrun "'}, "launch: cannot be split into words (No closing quotation)"),
    "unknown": ({"generate": CHAIN["generate"] | {"temperature": 1}}, "unknown key 'temperature'"),
    "nested": ({"dpo": {"training": {"stps": 3}}}, "section dpo"),
    "no model": ({}, "first: no such directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    changes, message = MISTAKES[name]
    assert cli.main(["rounds", "--config", str(write(tmp_path, **changes))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line, line
    assert not (tmp_path / "chain").exists()


def test_preflight_names_the_check_of_a_chain(tmp_path, capsys):
    assert cli.main(["preflight", "--config", str(write(tmp_path))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a chain of megarlhf rounds; 'megarlhf rounds --config" in line and "plan=true' checks it" in line
