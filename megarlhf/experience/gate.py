"""The step-0 gate: measure, before the first update, differences that must be 0.

Some errors of RLHF are silent: a sampler that disagrees with the trainer, a reference that is not the start, rows that
see each other. Each check below measures one such difference on the first rollout and refuses to train with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.batch import Rollout, Signals
from megarlhf.cluster.offload import Offloaded
from megarlhf.config import UserError

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class GateConfig:
    """When to check, and the tolerance of the mean absolute difference of token log-probs."""

    enabled: bool = True  # false: no checks
    every: int = 0  # steps between further checks; 0: only before the first step
    tolerance: float | None = None  # nats; default: 1e-4 in fp32, 0.03 in bf16
    rows: int = 64  # of this rank's rollout, for the checks that compute again

    def __post_init__(self):
        if self.rows < 1 or self.every < 0:
            raise ValueError("rows: rows must be positive and every must not be negative")
        if self.tolerance is not None and self.tolerance <= 0:
            raise ValueError(f"tolerance: must be positive, not {self.tolerance}")

    def due(self, step: int) -> bool:
        """Whether to check before update number `step` (from 0)."""
        return self.enabled and (step == 0 or (self.every > 0 and step % self.every == 0))


def run_gate(
    rollout: Rollout,
    signals: Signals,
    *,
    actor: Engine,
    at_start: bool,
    temperature: float,
    config: GateConfig,
    offloaded: list[Offloaded] = (),
) -> dict[str, float]:
    """The measured differences by name, on every rank. Collective.

    `at_start`: the actor still equals the reference, so their KL must be 0. `offloaded`: what is kept in host memory
    must come back bit for bit. Raises UserError with the difference and
    the likely cause where one is too large.
    """
    tolerance = config.tolerance or (1e-4 if actor.config.params_dtype is torch.float32 else 0.03)
    mask = rollout.mask
    some, before = rollout.select(slice(config.rows)), signals.logprobs[: config.rows]

    def logprobs(rows: Rollout) -> Tensor:
        return actor.forward(rows, temperature=temperature)["logprobs"]

    measured = {
        "sampler": (
            _difference(rollout.logprobs, signals.logprobs, mask, actor),
            "the sampler's log-probs are not the trainer's: weights out of date in the sampler, another temperature, "
            "or (in bf16) a tolerance that is too tight",
        ),
        "ratio": (
            _difference(logprobs(some), before, some.mask, actor),
            "the same weights give two answers, so the first ratio is not 1: dropout or a random operation",
        ),
        "micro_batch": (
            _difference(_alone(actor, some, logprobs), before, some.mask, actor),
            "a row alone gives another result than among others: an attention kernel that ignores the bounds of rows, "
            "or positions that go on over them",
        ),
    }
    if at_start:
        measured["reference"] = (
            _difference(signals.logprobs, signals.ref_logprobs, mask, actor),
            "the policy does not start at the reference: reference.checkpoint is another model than model.checkpoint",
        )
    for name, (difference, cause) in measured.items():
        if not difference <= tolerance:
            raise UserError(
                f"step-0 gate: '{name}' differs by {difference:.3g} nats a token (tolerance {tolerance:g}): {cause}; "
                "mend that, or set gate.tolerance if the difference is understood"
            )
    found = {f"gate/{name}": difference for name, (difference, _) in measured.items()}
    return found | ({"gate/offloaded": check_offloaded(offloaded)} if offloaded else {})


def check_offloaded(parts: list[Offloaded]) -> float:
    """0, the number of tensors that came back from host memory with other bits. Collective. Raises UserError, on every
    rank alike, if it is another."""
    wrong = [f"{part.name}: {name}" for part in parts for name in part.changed()]
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    named = [f"rank {rank}: {name}" for rank, names in enumerate(everyone) for name in names]
    if named:
        raise UserError(
            f"gate: 'offloaded': {len(named)} tensors came back from host memory with other bits than they left the "
            f"device with (the first: {named[0]}): something wrote to them there, or their copy failed; turn off "
            "on_host and state_on_host, or replace the node's memory"
        )
    return 0.0


def _difference(left: Tensor, right: Tensor, mask: Tensor, engine: Engine) -> float:
    """The mean absolute difference over the tokens that count, of all data-parallel ranks; NaN counts as different."""
    sums = torch.stack([torch.where(mask, (left - right).abs(), 0).double().sum(), mask.double().sum()])
    dist.all_reduce(sums, group=engine.topology.data_group)
    return (sums[0] / sums[1]).item()


def _alone(engine: Engine, rows: Rollout, logprobs: Callable[[Rollout], Tensor]) -> Tensor:
    """`logprobs` with every row in a micro-batch of its own."""
    before, engine.micro_batch_tokens = engine.micro_batch_tokens, 1
    try:
        return logprobs(rows)
    finally:
        engine.micro_batch_tokens = before
