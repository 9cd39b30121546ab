"""The sections that the configurations of all programs share, and their changes since a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarlhf import config as configuration
from megarlhf.checkpoint import CheckpointConfig
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError
from megarlhf.models.spec import ModelConfig
from megarlhf.optim import OptimizerConfig

RUN_FILE = "run.yaml"
# Changing these does not change a run's numbers (beyond rounding), so a resumed run does not report such changes.
_LAYOUT = ("parallel.", "checkpoint.", "log.", "training.micro_batch_size", "training.steps", "run")


@dataclass(frozen=True)
class TrainingConfig:
    """Sizes and lengths. A step is one optimizer update on one global batch."""

    global_batch_size: int = 64  # rows
    micro_batch_size: int = 1  # rows a rank computes at once
    epochs: float = 1.0
    steps: int | None = None  # instead of epochs
    evaluate_every: int = 100  # steps; also before the first and after the last

    def __post_init__(self):
        for name in ("global_batch_size", "micro_batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.epochs <= 0 or (self.steps is not None and self.steps < 1):
            raise ValueError("epochs: epochs and steps must be positive")

    def total_steps(self, num_rows: int) -> int:
        return self.steps or max(1, round(self.epochs * num_rows / self.global_batch_size))

    def check_batch(self, parallel: ParallelConfig, world_size: int) -> None:
        """Refuse (UserError) batch sizes that do not divide evenly in this layout."""
        data_size = parallel.data(world_size)
        share = self.micro_batch_size * data_size
        if self.global_batch_size % share:
            raise UserError(
                f"training.global_batch_size: {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x {data_size} data-parallel ranks = {share}; change one of them"
            )
        parallel.check_micro_batches("training.global_batch_size", self.global_batch_size // share)


@dataclass(frozen=True)
class LogConfig:
    """TensorBoard and metrics.jsonl are always written to the run directory."""

    every: int = 1  # steps between records
    samples: int = 8  # responses recorded, in programs that sample
    samples_every: int = 10  # steps between these
    wandb: str | None = None  # project name; needs `pip install wandb`

    def __post_init__(self):
        for name in ("every", "samples", "samples_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The sections of every program with ranks."""

    seed: int = 0  # of initial weights, dropout, the order of the data and the sampled responses
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self):
        configuration.check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class RunConfig(RanksConfig):
    """The sections of every program that trains."""

    run: str  # directory of this run: checkpoints, metrics, samples, the resolved configuration
    model: ModelConfig
    tokenizer: str | None = None  # default: the one that came with model.checkpoint
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, kw_only=True)
class OfflineRunConfig(RunConfig):
    """The sections of every program that learns from a data set. `data` is the program's own."""

    training: TrainingConfig = field(default_factory=TrainingConfig)


def changes(config: RunConfig, step_directory: Path) -> list[str]:
    """Differences between the configuration of a checkpoint and the present one, which a resumed run reports."""
    path = step_directory / RUN_FILE
    try:
        before = _flat(yaml.safe_load(path.read_text())) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or "not text"
        raise UserError(f"{path}: damaged ({reason}); resume from another step directory")
    now = _flat(configuration.to_dict(config))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(_LAYOUT)
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, sub in tree.items() for key, value in _flat(sub, f"{prefix}.{name}".lstrip(".")).items()
    }
