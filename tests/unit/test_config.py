"""Configurations: what a file leaves out is as it is in the program, whatever else it gives."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarlhf import config
from megarlhf.config import UserError
from megarlhf.train import rl_config
from megarlhf.train.generate import GenerateConfig
from megarlhf.train.prm import ProcessRewardConfig
from megarlhf.train.reward import RewardConfig
from megarlhf.train.serve_reward import ServeRewardConfig
from megarlhf.train.sft import SFTConfig

PPO, REINFORCE = map(rl_config.run_config, ("ppo", "reinforce"))

PROMPTS = {"path": "prompts.jsonl"}
SCORING = {"sources": [{"function": "a:b"}]}
MODEL = {"checkpoint": "model"}
RUN = {"run": "run", "model": MODEL}
LLAMA = dict(
    family="llama", num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2,
    vocab_size=300, max_position_embeddings=64,
)  # fmt: skip
DATA = {"train": "train.jsonl"}
# Every program with as little as it takes, with its optional sections, and with each preset.
SMALLEST: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFTConfig, {**RUN, "data": DATA}),
    "sft from nothing": (
        SFTConfig,
        {"run": "run", "model": {"architecture": {**LLAMA, "rope_scaling": {}}}, "tokenizer": "t", "data": DATA},
    ),
    "reward": (RewardConfig, {**RUN, "data": DATA}),
    "reward, normalised": (RewardConfig, {**RUN, "data": DATA, "normalization": {"prompts": PROMPTS}}),
    "prm": (ProcessRewardConfig, {**RUN, "data": DATA}),
    "ppo": (PPO, {**RUN, "prompts": PROMPTS, "scoring": SCORING}),
    "ppo, all sections": (
        PPO,
        {**RUN, "prompts": PROMPTS, "scoring": SCORING, "critic": {"optimizer": {}}, "ptx": {"data": DATA}},
    ),
    "ppo of 2019": (PPO, {**RUN, "prompts": PROMPTS, "scoring": SCORING, "preset": "openai_2019"}),
    "reinforce": (REINFORCE, {**RUN, "prompts": PROMPTS, "scoring": SCORING, "reinforce": {}}),
    "generate": (GenerateConfig, {"checkpoint": "model", "out": "out.jsonl", "prompts": PROMPTS}),
    "serve-reward": (ServeRewardConfig, {"function": "a:b"}),
}


def load(name: str, *overrides: str) -> Any:
    cls, values = SMALLEST[name]
    given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if issubclass(cls, rl_config.OnlineRunConfig):
        return rl_config.load(None, [*given, *overrides], default="ppo" if cls is PPO else None)
    return config.load(cls, None, [*given, *overrides])


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below `settings` that is no section."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", config.to_dict(settings)[field.name]


def sections(settings: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{field.name}"
            yield from sections(value, f"{prefix}{field.name}.")


@pytest.mark.parametrize("name", SMALLEST)
def test_a_key_with_its_default_changes_nothing(name):
    usual = load(name)
    count = 0
    for key, value in leaves(usual):
        assert load(name, f"{key}={json.dumps(value)}") == usual, key
        count += 1
    assert count >= 10


@pytest.mark.parametrize("name", SMALLEST)
def test_a_section_without_keys_is_as_one_that_is_not_there(name):
    """An empty section, and one of which every key is commented out."""
    usual, (_, given) = load(name), SMALLEST[name]
    for section in sections(usual):
        place: Any = given
        for part in section.split("."):
            place = place.get(part, {}) if isinstance(place, dict) else {}
        if not place:  # what must be given has to stay
            assert load(name, f"{section}={{}}") == usual, section
            if section not in ("critic.optimizer", "model.architecture.rope_scaling"):  # null turns these off
                assert load(name, f"{section}=null") == usual, section


def test_another_value_changes_its_key_alone():
    for name in SMALLEST:
        usual = config.to_dict(load(name))
        if "optimizer" in usual:
            changed = config.to_dict(load(name, "optimizer.weight_decay=0.125"))
            usual["optimizer"]["weight_decay"] = 0.125
            if usual.get("critic", {}).get("optimizer"):
                usual["critic"]["optimizer"]["weight_decay"] = 0.125
            assert changed == usual, name
    assert load("ppo", "optimizer.lr=1e-6").optimizer.schedule == "linear"
    assert load("reward", "optimizer.lr=1e-6").optimizer.schedule == "linear"
    assert load("sft", "optimizer.lr=1e-6").optimizer.schedule == "cosine"


def test_the_critics_optimizer_takes_the_actors_for_what_it_does_not_give():
    assert load("ppo").critic.optimizer is None
    for name in ("ppo", "ppo of 2019"):
        kind = "critic.kind=separate"
        actor = load(name, kind, "optimizer.eps=1e-3").optimizer
        critic = load(name, kind, "optimizer.eps=1e-3", "critic.optimizer.lr=1e-4").critic.optimizer
        assert critic == dataclasses.replace(actor, lr=1e-4), name


def test_what_is_written_is_read_back():
    for name, (cls, _) in SMALLEST.items():
        settings = load(name, *(["critic.kind=separate", "critic.optimizer.lr=1e-4"] if name == "ppo" else []))
        assert config.from_dict(cls, config.to_dict(settings), "here") == settings, name


def refusal(path: Path, content: bytes, *overrides: str) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        rl_config.load(path, overrides, default="ppo")
    return str(error.value)


BOMB = b"a0: &a0 [1,1]\n" + b"".join(b"a%d: &a%d [*a%d,*a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 60))
MISTAKES = {  # content: (line, words)
    b"run: a\nseed: \xff\n": (2, "not UTF-8"),
    b"run: a\nseed: !!int abc\n": (2, "'abc' cannot be read as !!int"),
    b"seed: !!int ''\n": (1, "'' cannot be read as !!int"),
    b"run: !mine a\n": (1, "'a' cannot be read as !mine"),
    b"ppo: !mine {}\n": (1, "the tag !mine is not understood"),
    b"\nrun: 2024-13-45\n": (2, "'2024-13-45' cannot be read as !!timestamp"),
    b"run: 2024-10-10\n": (1, "'2024-10-10' is read as a date; quote it"),
    b"\nppo: &a\n  kl: *a\n": (2, "this anchor contains itself"),
    b"ppo: &a\n  <<: *a\n": (1, "this anchor contains itself"),
    b"run: " + b"[" * 5000: (1, "nested too deeply"),
    b"run: a\npreset: [openai_2019]\n": (2, "there is no preset ['openai_2019']"),
    b"preset: {a: 1}\n": (1, "there is no preset {'a': 1}"),
    b"run: a\nppo:\n  <<: 3\n": (3, "'<<' takes a section"),
    b"? [a]\n: 1\n": (1, "is not a name; keys must be words"),
    BOMB: (0, "stand for more than"),
    b"run: a\nseed: 0x" + b"f" * 6000: (2, "seed must be a whole number of 64 bits"),
    b"run: a\nseed: 18446744073709551616\n": (2, "seed must be a whole number of 64 bits"),
    b"optimizer:\n  lr: 1" + b"0" * 400: (2, "optimizer.lr must be a number"),
    b'run: "a\\0b"\n': (1, "without null characters"),
    b"run: a\n" + b"#" * 2**18: (0, "more than 262144 bytes"),
}


@pytest.mark.parametrize("content", MISTAKES, ids=lambda content: repr(content[:20]))
def test_mistakes_in_a_file_are_one_line_with_its_place(tmp_path, content):
    line, words = MISTAKES[content]
    said = refusal(tmp_path / "run.yaml", content)
    assert said.startswith(f"{tmp_path}/run.yaml{f':{line}' if line else ''}") and words in said
    assert "\n" not in said and len(said) < 1000


def test_mistakes_in_overrides():
    for override, words in {
        "seed=!!int x": "'x' cannot be read as !!int",
        "seed=2024-13-45": "cannot be read as !!timestamp",
        "seed=&a [*a]": "this anchor contains itself",
        "seed=" + "[" * 5000: "nested too deeply",
        "seed=[": "not valid YAML",
        "seed=-1": "seed: must not be negative",
        "x" * 5000 + "=1": "unknown key",
    }.items():
        with pytest.raises(UserError) as error:
            load("ppo", override)
        assert str(error.value).startswith("override '") and words in str(error.value) and len(str(error.value)) < 1000


def test_a_file_that_is_none(tmp_path):
    """A pipe that nobody writes to would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        tmp_path / "pipe": "a pipe, a socket or a device",
        Path("/dev/zero"): "a pipe, a socket or a device",
        tmp_path: "a directory",
        tmp_path / "nowhere": "No such file",
        tmp_path / ("x" * 300): "File name too long",
    }.items():
        with pytest.raises(UserError, match=words):
            rl_config.load(path, [], default="ppo")


def test_merge_keys(tmp_path):
    """<<: gives what the section itself does not; of several the first one (yaml.org/type/merge.html)."""
    (tmp_path / "run.yaml").write_text(
        "run: a\nmodel: {checkpoint: b}\nprompts: {path: c}\nscoring: {sources: [{function: 'd:e'}]}\n"
        "optimizer: &adam\n  lr: 1.0e-3\n  eps: 1.0e-4\n"
        "critic:\n  optimizer:\n    <<: [*adam, {eps: 1, weight_decay: 0.5}]\n    lr: 0.25\n"
    )
    critic = rl_config.load(tmp_path / "run.yaml", [], default="ppo").critic.optimizer
    assert (critic.lr, critic.eps, critic.weight_decay) == (0.25, 1e-4, 0.5)
