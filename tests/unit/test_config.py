"""Configurations: what a file leaves out is as it is in the program, whatever else it gives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from megarlhf import config
from megarlhf.train.generate import GenerateConfig
from megarlhf.train.ppo import PRESETS, PPORunConfig
from megarlhf.train.reward import RewardConfig
from megarlhf.train.serve_reward import ServeRewardConfig
from megarlhf.train.sft import SFTConfig

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
    "ppo": (PPORunConfig, {**RUN, "prompts": PROMPTS, "scoring": SCORING}),
    "ppo, all sections": (
        PPORunConfig,
        {**RUN, "prompts": PROMPTS, "scoring": SCORING, "critic": {"optimizer": {}}, "ptx": {"data": DATA}},
    ),
    "ppo of 2019": (PPORunConfig, {**RUN, "prompts": PROMPTS, "scoring": SCORING, "preset": "openai_2019"}),
    "generate": (GenerateConfig, {"checkpoint": "model", "out": "out.jsonl", "prompts": PROMPTS}),
    "serve-reward": (ServeRewardConfig, {"function": "a:b"}),
}


def load(name: str, *overrides: str) -> Any:
    cls, values = SMALLEST[name]
    given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return config.load(cls, None, [*given, *overrides], presets=PRESETS if cls is PPORunConfig else None)


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
