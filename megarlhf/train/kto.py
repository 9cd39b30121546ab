"""`megarlhf kto`: a policy from single responses marked good or bad: the offline loop on ratings
(algorithms/kto.py). Policy and reference start from an SFT model (train/reference.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from megarlhf import config
from megarlhf.algorithms.kto import KTOConfig as LossConfig
from megarlhf.algorithms.kto import kto
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.ratings import RatingDataConfig, RatingLoader, load_ratings
from megarlhf.train import data_set, reference
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.reference import Plan, ReferencedRunConfig


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferencedRunConfig):
    """One section for each thing it configures. model.checkpoint: the SFT model."""

    data: RatingDataConfig
    kto: LossConfig = field(default_factory=LossConfig)


def check(settings: KTOConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    if settings.training.global_batch_size < 2 and settings.kto.loss == "kto":
        raise UserError(
            "training.global_batch_size: kto compares each prompt with the response of another row, so a batch needs "
            "at least 2"
        )
    start = data_set.find(settings, world_size, role="actor")
    load = partial(load_ratings, tokenizer=start.tokenizer, config=settings.data, cache=start.cache)
    examples, validation, notes = data_set.read(settings.data, load, both=True)
    notes += balance(settings.kto, *examples.class_sizes)
    total = data_set.total_steps(settings, examples)
    algorithm = kto(settings.kto)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation,
        algorithm=algorithm,
        reference=reference.check(settings, start, algorithm, (examples, validation), total, loss=settings.kto.loss),
    )  # fmt: skip


def balance(loss: LossConfig, good: float, bad: float) -> list[str]:
    """A note if the weights leave the classes out of balance."""
    ratio = loss.desirable_weight * good / (loss.undesirable_weight * bad)
    if 1 <= ratio <= 4 / 3 + 1e-9:
        return []
    return [
        f"weights: kto.desirable_weight x good responses is {ratio:.2g} times kto.undesirable_weight x bad ones; the "
        "authors advise 1 to 1.33 (arXiv:2402.01306)"
    ]


def prepare(settings: KTOConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    loss = f"{settings.kto.loss}, beta {settings.kto.beta:g}"
    return reference.prepare(settings, plan, topology, make_loader=RatingLoader, banner={"loss": loss})


PROGRAM = Program((KTOConfig,), partial(config.load, KTOConfig), check, training(prepare))
