"""The sections that the configurations of all programs share, and their changes since a checkpoint."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megarlhf import config as configuration
from megarlhf.checkpoint import CheckpointConfig
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import PathName, UserError
from megarlhf.models.model_config import ModelConfig
from megarlhf.optim import OptimizerConfig
from megarlhf.trackers import MLflow, WandB

RUN_FILE = "run.yaml"
# Changing these does not change a run's numbers (beyond rounding), so a resumed run does not report such changes.
_LAYOUT = (
    "parallel.", "checkpoint.", "log.", "data_cache", "training.micro_batch_tokens", "training.micro_batch_size",
    "training.steps", "run", "reference.kind", "reference.on_host", "critic.on_host", "scoring.on_host",
    "optimizer.state_on_host", "critic.optimizer.state_on_host",
)  # fmt: skip
MICRO_BATCH_TOKENS = 8192  # where the configuration does not say


@dataclass(frozen=True)
class MicroBatchConfig:
    """How much a rank computes at once. Results do not depend on it, beyond rounding."""

    micro_batch_tokens: int | None = None  # tokens, padding not counted; default: 8192. A longer row is computed alone.
    micro_batch_size: int | None = None  # rows of full length; old name of the budget

    def __post_init__(self):
        for name in ("micro_batch_tokens", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        if self.micro_batch_tokens is not None and self.micro_batch_size is not None:
            raise ValueError("micro_batch_size: is the old name of micro_batch_tokens, which is given too; remove it")

    def budget(self, longest: int, section: str = "training.") -> tuple[int, tuple[str, ...]]:
        """(tokens of a micro-batch, notes for the banner). `longest`: tokens of the program's longest row, by which an
        old configuration is converted; `section`: where these keys are."""
        if self.micro_batch_size is None:
            return self.micro_batch_tokens or MICRO_BATCH_TOKENS, ()
        tokens = self.micro_batch_size * longest
        return tokens, (
            f"{section}micro_batch_size: {self.micro_batch_size} rows of {longest} tokens are read as "
            f"{section}micro_batch_tokens: {tokens}; write that",
        )


@dataclass(frozen=True)
class TrainingConfig(MicroBatchConfig):
    """Sizes and lengths. A step is one optimizer update on one global batch."""

    global_batch_size: int = 64  # rows
    epochs: float = 1.0  # passes over the data
    steps: int | None = None  # instead of epochs
    evaluate_every: int = 100  # steps; also before the first and after the last

    def __post_init__(self):
        super().__post_init__()
        for name in ("global_batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.epochs <= 0 or (self.steps is not None and self.steps < 1):
            raise ValueError("epochs: epochs and steps must be positive")

    def total_steps(self, num_rows: int) -> int:
        return self.steps or max(1, round(self.epochs * num_rows / self.global_batch_size))

    def check_batch(self, parallel: ParallelConfig, world_size: int, *, together: int = 1) -> None:
        """Refuse (UserError) a batch that cannot be shared evenly. `together`: adjacent rows that stay on one rank."""
        data_size = parallel.data(world_size)
        if self.global_batch_size % (together * data_size):
            prompts = f"{together} responses a prompt x " if together > 1 else ""
            raise UserError(
                f"training.global_batch_size: {self.global_batch_size} is not a multiple of {prompts}{data_size} "
                f"data-parallel ranks{f' = {together * data_size}' if prompts else ''}; change it or the ranks"
            )


@dataclass(frozen=True)
class LogConfig:
    """TensorBoard and metrics.jsonl are always written to the run directory."""

    every: int = 1  # steps between records
    samples: int = 8  # responses recorded, in programs that sample
    samples_every: int = 10  # steps between these
    profile: tuple[int, int] | None = None  # [N, M]: torch's profiler records steps N to M into RUN/profile
    memory_snapshot: bool = False  # write the allocations before a GPU's memory ran out into RUN/memory
    wandb: str | None = None  # project name; needs `pip install wandb`
    wandb_entity: str | None = None  # team or account; default: the account's own
    mlflow: str | None = None  # experiment; needs `pip install mlflow-skinny`; the server is MLFLOW_TRACKING_URI
    name: str | None = None  # of the run in W&B and MLflow; default: the run directory's
    tags: tuple[str, ...] = ()  # of the run in W&B and MLflow

    def __post_init__(self):
        if self.profile is not None and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]):
            raise ValueError(f"profile: must be [N, M], the first and the last step, not {list(self.profile)}")
        for name in ("every", "samples", "samples_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")

    def check_steps(self, total_steps: int) -> None:
        """Refuse (UserError) to profile steps that a run of `total_steps` steps does not have. Of steps that it has in
        part, those are profiled that there are."""
        if self.profile is not None and self.profile[0] > total_steps:
            raise UserError(
                f"log.profile: begins at step {self.profile[0]}, and the run has {total_steps} steps, so nothing would "
                "be recorded; give earlier steps, or train longer"
            )

    @property
    def trackers(self) -> tuple[WandB | MLflow, ...]:
        """The services that get the numbers."""
        wandb = WandB(self.wandb, self.wandb_entity, self.name, self.tags) if self.wandb else None
        mlflow = MLflow(self.mlflow, self.name, self.tags) if self.mlflow else None
        return tuple(filter(None, (wandb, mlflow)))


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The sections of every program with ranks."""

    seed: int = 0  # of initial weights, dropout, the order of the data and the sampled responses
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self):
        configuration.check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class RunConfig(RanksConfig, abc.ABC):
    """The sections of every program that trains."""

    samples: ClassVar[bool] = False  # the program learns from its own samples
    run: PathName  # directory of this run: checkpoints, metrics, samples, the resolved configuration
    model: ModelConfig
    tokenizer: PathName | None = None  # default: the one that came with model.checkpoint
    # a Jinja template, as text or as the name of a file; default: the tokenizer's. Beside the tokenizer, because all
    # data of a program use it and the checkpoints save the two together.
    chat_template: str | None = None
    # directory of tokenized data, made by all ranks together and reused by later starts; all nodes must see it, and
    # runs may share it; default: data in the run directory
    data_cache: PathName | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    @abc.abstractmethod
    def longest_row(self) -> int:
        """Tokens of the longest row that the trained model may read."""

    @property
    def micro_batch_tokens(self) -> int:
        return self.training.budget(self.longest_row)[0]


@dataclass(frozen=True, kw_only=True)
class OfflineRunConfig(RunConfig):
    """The sections of every program that learns from a data set. `data` is the program's own."""

    training: TrainingConfig = field(default_factory=TrainingConfig)

    @property
    def longest_row(self) -> int:
        return self.data.max_length


def changes(config: RunConfig, step_directory: Path) -> list[str]:
    """Differences between the configuration of a checkpoint and the present one, which a resumed run reports."""
    before = values(step_directory)
    now = flat(configuration.to_dict(config))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(_LAYOUT)
    ]


def values(step_directory: Path) -> dict[str, Any]:
    """{"section.key": value} of the configuration in a step directory, {} if it has none. Raises UserError."""
    path = step_directory / RUN_FILE
    try:
        return flat(yaml.safe_load(path.read_text())) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or "not text"
        raise UserError(f"{path}: damaged ({reason}); resume from another step directory")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"section.key": value} of nested sections."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, sub in tree.items() for key, value in flat(sub, f"{prefix}.{name}".lstrip(".")).items()
    }
