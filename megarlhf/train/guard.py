"""Refused batches: they change no weights and are written to the run directory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf import metrics
from megarlhf.batch import Batch, Experience
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.metrics import Metric


@dataclass(frozen=True)
class GuardConfig:
    """When a batch is refused. A refused batch changes no weights and is written to the run directory."""

    max_kl: float = 100.0  # nats a response, mean of the batch
    patience: int = 3  # consecutive refused batches that stop the run

    def __post_init__(self):
        if self.max_kl <= 0 or self.patience < 1:
            raise ValueError("max_kl: max_kl and patience must be positive")


def refusal(means: dict[str, Metric], config: GuardConfig) -> str | None:
    """The reason to refuse a batch, or None; the same on every rank. Means of nothing are none."""
    values = metrics.values(means)
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        return f"{', '.join(bad)} is not finite"
    kl = values["objective/kl"]
    return f"objective/kl is {kl:.1f}, beyond guard.max_kl {config.max_kl:g}" if kl > config.max_kl else None


def save(why: str, batch: Batch, experience: Experience, directory: Path, topology: Topology, step: int) -> None:
    """Write this rank's share of the batch to a file for replay, once for each copy of the model."""
    if topology.tensor_rank == 0 and topology.first_stage:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "why": why,
                **{name: vars(part) for name, part in vars(batch).items() if name != "extra"},
                "extra": batch.extra,
                "experience": vars(experience),
            },
            directory / f"step_{step:08d}_rank_{topology.data_rank}.pt",
        )


def stop(why: str, count: int, directory: Path, step: int) -> UserError:
    """The error that ends the run after too many refused batches."""
    return UserError(
        f"step {step}: {count} batches in a row could not be learned from, the last because {why}; they are in "
        f"{directory}; resume from an earlier checkpoint with a lower optimizer.lr or a higher kl.coef of the algorithm"
    )
