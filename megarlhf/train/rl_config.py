"""The configuration of online programs (`megarlhf rl`, `megarlhf ppo`). The section with an algorithm's name selects it
(ALGORITHMS)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, Literal

from megarlhf import config
from megarlhf.algorithms import ppo, reinforce
from megarlhf.algorithms.interface import OnlineAlgorithm, averaged, share_trunk
from megarlhf.config import PathName, UnknownKeyError, UserError
from megarlhf.data.prompts import PromptsConfig
from megarlhf.data.sft import SFTDataConfig
from megarlhf.experience.gate import GateConfig
from megarlhf.experience.held_out import EvaluationConfig
from megarlhf.experience.sampler import SamplerConfig
from megarlhf.experience.scorer import ScoringConfig
from megarlhf.optim import OptimizerConfig
from megarlhf.train import presets
from megarlhf.train.guard import GuardConfig
from megarlhf.train.settings import MicroBatchConfig, RunConfig


@dataclass(frozen=True)
class Entry:
    """An algorithm that a configuration may name."""

    config: type  # of its section
    algorithm: Callable[[Any], OnlineAlgorithm]  # its section -> the algorithm
    critic: bool = False  # whether the configuration has the section critic
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)


ALGORITHMS = {
    "ppo": Entry(ppo.PPOConfig, ppo.algorithm, critic=True, presets=presets.PPO),
    "reinforce": Entry(reinforce.ReinforceConfig, reinforce.algorithm, presets=presets.REINFORCE),
}


@dataclass(frozen=True)
class CriticConfig:
    """The model that estimates values."""

    # shared: a head on the actor's trunk, one backward, as in 2019; adapters: adapters and a head of its own on the
    # actor's frozen weights, with model.lora
    kind: Literal["separate", "shared", "adapters"] = "separate"
    # separate: a reward model to start from; default: the actor's trunk and a zero head (P2)
    checkpoint: PathName | None = None
    # of a separate critic.
    optimizer: OptimizerConfig | None = field(default=None, metadata=config.like("optimizer"))
    head: Literal["linear", "mlp"] = "linear"  # mlp: one hidden layer of twice the width, as trlX has
    on_host: bool = False  # separate: weights in host memory, on the device only while they are needed

    def __post_init__(self):
        if self.kind == "adapters" and self.checkpoint:
            raise ValueError("checkpoint: a critic of kind adapters starts from the actor's base; remove checkpoint")
        if self.kind == "adapters" and self.on_host:
            raise ValueError("on_host: a critic of kind adapters uses the actor's weights; remove it")
        if self.kind == "shared" and (self.checkpoint or self.optimizer):
            raise ValueError("kind: a shared critic has neither a checkpoint nor an optimizer of its own; remove them")
        if self.kind == "shared" and self.on_host:
            raise ValueError("on_host: a shared critic has no weights but the actor's and a head; remove it")


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model of the KL penalty."""

    # hydra: a frozen copy of the layers that train, on the policy's own trunk; needs model.trained_layers
    kind: Literal["separate", "hydra"] = "separate"
    checkpoint: PathName | None = None  # default: the actor's own start
    on_host: bool = False  # weights in host memory, on the device only while they are needed

    def __post_init__(self):
        if self.kind == "hydra" and self.checkpoint is not None:
            raise ValueError("checkpoint: a hydra reference is the policy's own start; remove checkpoint or kind")


@dataclass(frozen=True)
class PTXConfig:
    """Pretraining text whose loss is added to the policy's (PPO-ptx)."""

    data: SFTDataConfig
    coef: float = 1.0  # of its loss, the mean over its counted tokens
    batch_size: int = 64  # rows an update

    def __post_init__(self):
        if self.coef <= 0:
            raise ValueError(f"coef: must be positive, not {self.coef}; leave the section out to turn it off")


@dataclass(frozen=True)
class OnlineTrainingConfig(MicroBatchConfig):
    """Sizes and lengths. A step samples and learns from one batch of responses (detail P7)."""

    steps: int = 100  # of the whole run
    batch_size: int = 512  # responses a step
    minibatches: int = 1  # updates an epoch
    epochs: int = 4  # passes over the responses of a step

    def __post_init__(self):
        super().__post_init__()
        for name in ("steps", "batch_size", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class OnlineRunConfig(RunConfig):
    """One section for each thing it configures; `preset` sets keys that the file leaves out. model.checkpoint: the
    SFT model. `run_config` adds the algorithm's own section, and critic where it has one."""

    samples = True
    algorithm: ClassVar[str]  # the name of its section
    prompts: PromptsConfig
    scoring: ScoringConfig
    preset: str = "default"
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ptx: PTXConfig | None = None
    evaluation: EvaluationConfig | None = None
    average: float | None = None  # decay per update of an averaged (EMA) actor, saved beside the actor as `average`
    # of a mixture of experts: log-probs and updates of the actor use the experts that its sampler used
    replay_experts: bool = True
    training: OnlineTrainingConfig = field(default_factory=OnlineTrainingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="linear"))  # detail G5

    @property
    def longest_row(self) -> int:
        return self.prompts.length + self.sampler.response_length

    @property
    def value(self) -> OnlineAlgorithm:
        """The algorithm with this configuration's options."""
        made = ALGORITHMS[self.algorithm].algorithm(getattr(self, self.algorithm))
        assert ("values" in made.signals) == ALGORITHMS[self.algorithm].critic, self.algorithm
        made = share_trunk(made) if self.critic_kind == "shared" else made
        return made if self.average is None else averaged(made, self.average)

    @property
    def critic_kind(self) -> Literal["separate", "shared", "adapters"] | None:
        """None: the algorithm has no critic."""
        return self.critic.kind if ALGORITHMS[self.algorithm].critic else None


@functools.cache
def run_config(algorithm: str) -> type[OnlineRunConfig]:
    """The class of an algorithm's configurations."""
    entry = ALGORITHMS[algorithm]
    sections = {algorithm: entry.config} | ({"critic": CriticConfig} if entry.critic else {})
    own = [(name, section, field(default_factory=section)) for name, section in sections.items()]
    name = f"{algorithm}RunConfig"
    return make_dataclass(
        name, own, bases=(OnlineRunConfig,), frozen=True, kw_only=True, namespace={"algorithm": algorithm}
    )


def load(path: str | None, overrides: list[str], *, default: str | None = None) -> OnlineRunConfig:
    """The configuration in a file with overrides. `default`: the only algorithm allowed; its section may be left out.
    Raises UserError."""
    given = config.top_level(path, overrides)
    named = [name for name in given if name in ALGORITHMS]
    if default is not None and any(name != default for name in named):
        other = next(name for name in named if name != default)
        raise UserError(
            f"{given[other].where}: the section '{other}' names another algorithm than 'megarlhf {default}' runs; "
            "remove it, or start the file with 'megarlhf rl'"
        )
    if len(named) > 1:
        where = given[named[1]].where
        raise UserError(f"{where}: the sections {' and '.join(named)} name an algorithm each; keep one")
    preset = given.get("preset", config.Given("default", ""))
    if not named and default is None and preset.value != "default":  # it names its algorithm too
        named = [name for name, entry in ALGORITHMS.items() if preset.value in [*entry.presets]]
        if not named:
            known = [known for entry in ALGORITHMS.values() for known in entry.presets]
            raise UserError(
                f"{preset.where}: there is no preset {preset.value!r}; {config.nearest(str(preset.value), known)}"
            )
    if not named and default is None:
        known = {field.name for name in ALGORITHMS for field in fields(run_config(name))}
        for key in given.keys() - known:  # perhaps it is a file for another program
            raise UnknownKeyError(f"{given[key].where}: unknown key '{key}'; {config.nearest(key, sorted(known))}")
        raise UserError(
            f"{path or 'command line'}: no section names the algorithm; add one of: {', '.join(ALGORITHMS)} (empty for "
            "its defaults), or a preset"
        )
    name = named[0] if named else default
    entry = ALGORITHMS[name]
    if "critic" in given and not entry.critic:
        raise UserError(f"{given['critic'].where}: {name} has no critic; remove the section")
    return config.load(run_config(name), path, overrides, presets={"default": {}, **entry.presets})
