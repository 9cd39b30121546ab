"""From a rollout to updates: the models' outputs for it, and the minibatches of a step.

Legend: B rows of this data-parallel rank, G of the global batch, P prompt columns, R response columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.batch import Experience, Rollout, Sequences, Signals, Stage
from megarlhf.cluster.parallel import Topology
from megarlhf.models.hydra import Hydra
from megarlhf.stream import num_tokens, shares

if TYPE_CHECKING:
    from megarlhf.engine import Engine

SequencesT = TypeVar("SequencesT", bound=Sequences)


def evaluate(
    rollout: Rollout,
    *,
    actor: Engine,
    reference: Engine | Hydra,
    critic: Engine | None,
    temperature: float,
    signals: frozenset[str] = frozenset(),
) -> Signals:
    """Log-probs of the sampled tokens under the policy and the reference, at the sampling temperature (detail P1), and
    what `signals` names: values, and kl, the exact KL. The models see the untruncated response. `critic` None: the
    actor's own head gives the values. The exact KL takes a second head pass, and room for the reference's hidden
    states, (B, R, H), on every stage. A hydra reference takes one pass of the trunk with the policy. Collective."""
    if isinstance(reference, Hydra):
        outputs = reference.beside(rollout, temperature=temperature, with_kl="kl" in signals)
        ref_logprobs = outputs["ref_logprobs"]
    else:
        batch, options = rollout, {}
        if "kl" in signals:
            batch, options, others = compared(rollout, reference, temperature=temperature)
        else:
            others = reference.forward(rollout, temperature=temperature)
        outputs, ref_logprobs = actor.forward(batch, temperature=temperature, **options), others["logprobs"]
    values = None
    if "values" in signals:
        values = (outputs if critic is None else critic.forward(rollout))["values"].masked_fill(~rollout.mask, 0)
    return Signals(outputs["logprobs"], ref_logprobs, values, outputs.get("kl"))


def compared(
    rows: SequencesT, reference: Engine | Hydra, *, temperature: float
) -> tuple[SequencesT, dict[str, Tensor], dict[str, Tensor]]:
    """(rows, options of the head) with which a policy's outputs have "kl", its exact KL to the reference; and the
    reference's own outputs. Collective."""
    options = {}
    with reference.present("weights"):
        outputs = reference.forward(rows, temperature=temperature, with_states=True)
        if reference.topology.last_stage:
            weight = reference.head_weight()
            # a copy stays on the device when the weights leave it
            options["ref_weight"] = weight.clone() if reference.is_on_host("weights") else weight
    return dataclasses.replace(rows, ref_states=outputs["states"]), options, outputs


def minibatches(
    experience: Experience, *, epochs: int, count: int, seed: int, step: int, topology: Topology
) -> Iterator[Experience]:
    """This rank's share of each minibatch of a step: `epochs` times the batch in `count` parts, reshuffled in each
    epoch (detail P7). The order is that of the global batch, a function of (seed, step, epoch), so that a minibatch has
    the same rows in every layout. All ranks get as many rows and about as many tokens. `experience`: this rank's B
    rows."""
    whole = gather(experience, topology)
    rows, lengths = len(whole), num_tokens(whole).cpu().numpy()
    for epoch in range(epochs):
        generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, step, epoch))))
        for minibatch in generator.permutation(rows).reshape(count, rows // count):
            mine = minibatch[shares(lengths[minibatch], topology.data_size)[topology.data_rank]]
            yield whole.select(torch.from_numpy(mine).to(whole.tokens.device))


def gather(rows: Stage, topology: Topology) -> Stage:
    """The rows of the global batch, in the order of the data-parallel ranks, on every rank."""
    if topology.data_size == 1:
        return rows

    def collect(value: Tensor) -> Tensor:
        bits = value.contiguous()
        if value.dtype is torch.int16:  # gloo has none
            bits = bits.view(torch.uint8)
        parts = [torch.empty_like(bits) for _ in range(topology.data_size)]
        dist.all_gather(parts, bits, group=topology.data_group)
        return torch.cat(parts).view(value.dtype)

    return rows.map(collect)
