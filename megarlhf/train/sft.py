"""`megarlhf sft`: supervised fine-tuning, the offline loop on given text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megarlhf import config
from megarlhf.algorithms import supervised
from megarlhf.cluster.parallel import Topology
from megarlhf.data.loader import Loader
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.train import data_set
from megarlhf.train.data_set import Plan
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineRunConfig):
    """One section for each thing it configures."""

    data: SFTDataConfig


def check(settings: SFTConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    start = data_set.find(settings, world_size, role="actor")
    load = partial(load_sft, tokenizer=start.tokenizer, config=settings.data, cache=start.cache)
    examples, validation, notes = data_set.read(settings.data, load)
    total = data_set.total_steps(settings, examples)
    return Plan(start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation)


def prepare(settings: SFTConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    models = {"actor": data_set.trained(settings, plan, topology, "actor")}
    return data_set.prepared(settings, plan, topology, supervised.sft(), models, Loader)


PROGRAM = Program((SFTConfig,), partial(config.load, SFTConfig), check, training(prepare))
