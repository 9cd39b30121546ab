"""The audit: what a configuration can change of an algorithm, its value in this run, and the published one.

Numbers of PPO's details as in "The N Implementation Details of RLHF with PPO" (Huang et al. 2024), checked against the
original source, openai/lm-human-preferences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from megarlhf import config, records
from megarlhf.algorithms.ppo import OPENAI_2019
from megarlhf.algorithms.reinforce import ReinforceConfig
from megarlhf.experience.scorer import SourceConfig
from megarlhf.models.locate import find_model
from megarlhf.train import presets
from megarlhf.train.rl_config import OnlineRunConfig
from megarlhf.train.settings import RUN_FILE, flat

Row = tuple[str, str, Any, Any]  # number, what, its value in this run, the original's

# Details without a setting: listed, not compared. docs/ppo-details.md names the tests.
BUILT_IN = (
    ("G1", "reward and value heads read query + response, one number a token"),
    ("G3", "position ids follow the mask"),
    ("G5", "the learning rate changes with every update; the original's with every batch"),
    ("G6", "noise is keyed by the sequence; the original's by the rank"),
    ("R1", "scores are read at the last counted token, or at each step_token; the original's in the last column"),
    ("R2", "a reward head starts from normal(0, 1 / sqrt(d + 1))"),
    ("P1", "log-probs are of logits divided by the temperature"),
)


def details(settings: OnlineRunConfig) -> list[Row]:
    """The details that a configuration of PPO can change."""
    s, kl, adam = settings.sampler, settings.ppo.kl, settings.optimizer
    shared = settings.critic.kind == "shared"
    value_start = "zero head" if shared or settings.critic.checkpoint is None else settings.critic.checkpoint
    return [
        ("G2", "query length, cut at; padding is never a sampled id",
         (settings.prompts.length, settings.prompts.truncate), (64, "end")),
        ("G4", "response length", s.response_length, 24),
        ("G4", "sampling goes on past EOS", not s.stop_at_eos, True),
        ("G4", "temperature, top_k, top_p", (s.temperature, s.top_k, s.top_p), (0.7, 0, 1.0)),
        ("G5", "learning rate schedule", adam.schedule, "linear"),
        ("R3", "reward model normalised before and after its training", _normalised(settings.scoring.sources), True),
        ("P2", "value head's start", value_start, "zero head"),
        ("P2", "critic", settings.critic.kind, "shared"),
        ("P2", "value head", settings.critic.head, "linear"),
        ("P3", "queries start and end with", (settings.prompts.start_text, settings.prompts.end_text), (".", ".")),
        ("P4", "dropout", settings.model.dropout, 0.0),
        ("P5", "truncation token, from position", (settings.scoring.truncate_token, settings.scoring.truncate_after),
         (".", 16)),
        ("P5", "score without that token", settings.scoring.penalty, -1.0),
        ("P6", "gamma, lambda", (settings.ppo.gamma, settings.ppo.lam), (1.0, 0.95)),
        ("P7", "batch, minibatches, epochs",
         (settings.training.batch_size, settings.training.minibatches, settings.training.epochs), (512, 1, 4)),
        ("P8", "KL penalty per token, estimator", kl.estimator, "k1"),
        ("P8", "score goes to", settings.ppo.score_position, "last"),
        ("P9", "rewards whitened, mean kept", settings.ppo.whiten_rewards, True),
        ("P9", "advantages whitened", settings.ppo.whiten_advantages, True),
        ("P10", "ratio clip, value clip, value coefficient",
         (settings.ppo.clip_range, settings.ppo.clip_range_value, settings.ppo.vf_coef), (0.2, 0.2, 0.1)),
        ("P11", "KL coefficient: controller, start", (kl.controller, kl.coef), ("adaptive", 0.15)),
        ("P11", "KL coefficient: target, horizon", (kl.target, kl.horizon), (6.0, 10_000)),
        ("P12", "Adam, epsilon", (adam.name, adam.eps), ("tf_adam", 1e-5)),
    ]  # fmt: skip


def later(settings: OnlineRunConfig) -> list[Row]:
    """The switches of PPO that the original does not have."""
    known = ("gamma", "lam", "score_position", "clip_range", "clip_range_value", "vf_coef", "whiten_rewards",
             "whiten_advantages", "kl.coef", "kl.controller", "kl.target", "kl.horizon", "kl.estimator")  # fmt: skip
    now, original = flat(config.to_dict(settings.ppo)), flat(config.to_dict(OPENAI_2019))
    names = [name for name in now if name not in known]
    return [("", f"ppo.{name}", now[name], original.get(name)) for name in names]


def switches(settings: OnlineRunConfig) -> list[Row]:
    """The switches of a policy gradient without a critic, and of sampling and training those that its preset has."""
    preset = presets.REINFORCE.get(settings.preset, {})
    whole = config.from_dict(ReinforceConfig, preset.get("reinforce", {}), f"preset {settings.preset}")
    original = flat(preset | {"reinforce": config.to_dict(whole)})
    now = flat({name: config.to_dict(getattr(settings, name)) for name in {**preset, "reinforce": None}})
    keys = [key for key in now if key in original or key.startswith("reinforce.")]
    return [("", key, now[key], original.get(key)) for key in keys]


# Of an algorithm: its rows, and the first line of its table, with the preset.
AUDITS = {
    "ppo": (
        lambda settings: [*details(settings), *later(settings)],
        "audit of PPO's details (preset {}; * differs from the 2019 original)",
    ),
    "reinforce": (switches, "audit of switches (preset {}; * differs from it)"),
}


def rows_of(settings: OnlineRunConfig) -> list[Row]:
    """The audit of a configuration, [] of an algorithm without one."""
    return AUDITS[settings.algorithm][0](settings) if settings.algorithm in AUDITS else []


def table(rows: list[Row], settings: OnlineRunConfig) -> list[str]:
    """The audit as lines, [] without rows; a star marks differences from the original."""
    if not rows:
        return []
    lines = [AUDITS[settings.algorithm][1].format(settings.preset)]
    for number, what, value, original in rows:
        differs = "" if value == original else f"   * {_shown(original)}"
        lines.append(f"  {number:<4} {what:<64} {_shown(value)}{differs}")
    if settings.algorithm != "ppo":
        return lines
    return [*lines, "built in, without a switch:", *(f"  {number:<4} {what}" for number, what in BUILT_IN)]


def save(rows: list[Row], path: Path, built_in: tuple[tuple[str, str], ...] = ()) -> None:
    """The audit as JSON for `megarlhf report`, values as `table` shows them; built-in details have empty values."""
    shown = [
        {"detail": number, "what": what, "value": _shown(value), "original": _shown(original)}
        for number, what, value, original in rows
    ]
    shown += [{"detail": number, "what": what, "value": "", "original": ""} for number, what in built_in]
    records.replace(path, json.dumps(shown, indent=1) + "\n")


def _normalised(sources: tuple[SourceConfig, ...]) -> bool | str | None:
    """Whether the runs that trained the reward models of `sources` normalised their scores; None without reward models,
    "unknown" if a run's configuration cannot be read."""
    paths = [source.checkpoint for source in sources if source.checkpoint is not None]
    try:
        runs = [yaml.safe_load((find_model(path, "reward").parent / RUN_FILE).read_text()) for path in paths]
        return all(run["normalization"] is not None for run in runs) if runs else None
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        return "unknown"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
