"""`megarlhf prm`: a process reward model from solutions with labelled steps, the offline loop on them.

It starts from an SFT model with a new scalar head, whose output at a step's end is the logit of the step being right.
Its checkpoints hold a reward model, which scores responses as a source with `steps` (experience/scorer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarlhf import config
from megarlhf.algorithms.process_reward import process_reward_model
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.steps import StepDataConfig, StepLoader, load_steps
from megarlhf.data.tokenizer import token_id
from megarlhf.models import adapters
from megarlhf.train import data_set, setup
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True, kw_only=True)
class ProcessRewardConfig(OfflineRunConfig):
    """One section for each thing it configures. model.checkpoint: the SFT model."""

    data: StepDataConfig
    # [right, wrong]: the head starts as the difference of the output layer's rows of these two tokens, so that a score
    # is the difference of their logits (Math-Shepherd's "+" and "-")
    reward_tokens: tuple[str, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.reward_tokens is not None and (len(self.reward_tokens) != 2 or len(set(self.reward_tokens)) != 2):
            raise ValueError(f"reward_tokens: must be two different tokens, not {list(self.reward_tokens)}")


@dataclass(frozen=True, kw_only=True)
class Plan(data_set.Plan):
    reward_ids: list[int] | None  # of reward_tokens


def check(settings: ProcessRewardConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    start = data_set.find(settings, world_size, role="reward")
    reward_ids = None
    if settings.reward_tokens is not None:
        if start.source is None:
            raise UserError(
                "reward_tokens: are of the SFT model's output layer, so model.checkpoint is needed; give one"
            )
        reward_ids = [token_id(start.tokenizer, text, "reward_tokens") for text in settings.reward_tokens]
    load = partial(load_steps, tokenizer=start.tokenizer, config=settings.data, cache=start.cache)
    examples, validation, notes = data_set.read(settings.data, load)
    total = data_set.total_steps(settings, examples)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=examples, validation=validation,
        reward_ids=reward_ids,
    )  # fmt: skip


def prepare(settings: ProcessRewardConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    engine = data_set.trained(settings, plan, topology, "reward", fresh=("value_head.",))
    if plan.reward_ids is not None and plan.start.resume_from is None:
        start_from_words(engine, settings, plan)
    return data_set.prepared(
        settings, plan, topology, process_reward_model(), {"reward": engine}, StepLoader, unit="solutions"
    )


@torch.no_grad()
def start_from_words(engine: Engine, settings: ProcessRewardConfig, plan: Plan) -> None:
    """Set the head's weight to the difference of the output layer's rows of the two reward tokens. The SFT model is
    loaded for it, and freed afterwards. Collective."""
    from megarlhf.models.build import build

    topology, options = engine.topology, setup.model_options(settings, trains=False, total_steps=1)
    policy = build("reference", plan.start.architecture, topology, **options)
    adapters.load(policy, plan.start.source)
    for module, source in zip(engine.modules, policy.modules, strict=True):
        if not hasattr(module, "value_head"):  # on the last stage alone
            continue
        shard = source.head_weight()  # this rank's rows of the vocabulary
        difference = torch.zeros_like(shard[:1], dtype=torch.float32)
        for token, sign in zip(plan.reward_ids, (1, -1), strict=True):
            owner, row = divmod(token, len(shard))
            if owner == topology.tensor_rank:
                difference += sign * shard[row]
        dist.all_reduce(difference, group=topology.tensor_group)
        module.value_head.weight.copy_(difference)
    engine.reload_main_weights()


PROGRAM = Program((ProcessRewardConfig,), partial(config.load, ProcessRewardConfig), check, training(prepare))
