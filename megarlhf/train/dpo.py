"""`megarlhf dpo`: a policy from pairs of responses, without a reward model: the offline loop on comparisons.

It has DPO and the losses that followed it (algorithms/preference.py). The policy starts from an SFT model, and so does
the reference, if the loss has one (train/reference.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarlhf import config
from megarlhf.algorithms.preference import PreferenceConfig, preference
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.files import Files, paths
from megarlhf.data.preferences import PreferenceDataConfig, PreferenceLoader, Preferences, load_preferences
from megarlhf.train import data_set, reference
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.reference import Plan, ReferencedRunConfig


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferencedRunConfig):
    """One section for each thing it configures. model.checkpoint: the SFT model."""

    data: PreferenceDataConfig
    dpo: PreferenceConfig = field(default_factory=PreferenceConfig)


def check(settings: DPOConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    if settings.data.num_responses != 2:
        raise UserError(
            f"data.num_responses: {settings.dpo.loss} compares 2 responses, not {settings.data.num_responses}; give "
            "pairs, or train a reward model on rankings with megarlhf reward"
        )
    start = data_set.find(settings, world_size, role="actor", together=2)

    def load(files: Files) -> tuple[Preferences, Any]:
        pairs, report = load_preferences(files, start.tokenizer, settings.data, counted="response", cache=start.cache)
        if pairs.margins.any() and not settings.dpo.form.margins:
            raise UserError(
                f"{', '.join(paths(files))}: has margins, which the loss {settings.dpo.loss} does not use; choose "
                "dpo, or give data.margin_key a name that the data does not have"
            )
        return pairs, report

    pairs, validation, notes = data_set.read(settings.data, load)
    total = data_set.total_steps(settings, pairs)
    algorithm = preference(settings.dpo)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=pairs, validation=validation, algorithm=algorithm,
        reference=reference.check(settings, start, algorithm, (pairs, validation), total, loss=settings.dpo.loss),
    )  # fmt: skip


def prepare(settings: DPOConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    loss = f"{settings.dpo.loss}, beta {settings.dpo.b:g}, {settings.dpo.normalization} of log-probs"
    return reference.prepare(settings, plan, topology, make_loader=PreferenceLoader, banner={"loss": loss})


PROGRAM = Program((DPOConfig,), partial(config.load, DPOConfig), check, training(prepare))
