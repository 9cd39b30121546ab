"""A critic with adapters of its own on the actor's frozen weights: as a separate one, to the bit."""

import dataclasses

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.cluster.offload import distinct, named_weights
from megarlhf.models import lora, quantized
from megarlhf.models.build import build
from megarlhf.models.model_config import LoraConfig
from tests.distributed.layouts import ADAM, LLAMA, examples, full_weights, layout, share

WIDE = dataclasses.replace(LLAMA, num_layers=4, hidden_size=128, init_std=0.05)


def value_loss(outputs, rows):
    values = outputs["values"]
    total = ((values - 1).square() * rows.mask).sum()
    return total, rows.mask.sum(), {"loss": (total.detach(), rows.mask.sum())}


def storages(modules):
    """{address: bytes} of all parameters and NF4 buffers."""
    return {storage.data_ptr(): storage.nbytes() for _, storage in distinct(named_weights(modules, lambda name: True))}


def train(cases):
    """[(quantization, ParallelConfig fields)]: updates of actor and critic in turn, with either kind of critic."""
    for quantization, sizes in cases:
        found = []
        for borrows in (False, True):
            with layout(**sizes) as topology:
                options = dict(
                    micro_batch_tokens=48, dtype="fp32", seed=7, optimizer=ADAM, total_steps=3,
                    adapters=LoraConfig(rank=3, quantization=quantization),
                )  # fmt: skip
                actor = build("actor", WIDE, topology, **options)
                if quantization == "nf4":
                    quantized.quantize(actor.modules)
                critic = build("critic", WIDE, topology, **options, trunk=actor if borrows else None)
                if quantization == "nf4" and not borrows:
                    quantized.quantize(critic.modules)
                numbers = []
                for step in range(3):
                    rows = share(examples(seed=step), topology)
                    numbers += [actor.step(rows, sft_loss), critic.step(rows, value_loss)]
                values = critic.forward(rows)["values"]
                weights = [{name: value for name, value in full_weights(engine).items() if lora.trains(name)}
                           for engine in (actor, critic)]  # fmt: skip
                found.append(([(m["loss"].value, m["grad_norm"].value) for m in numbers], values, *weights))
                if borrows:
                    its, own = storages(actor.modules), storages(critic.modules)
                    mine = sum(size for place, size in own.items() if place not in its)
                    trained = sum(p.nbytes for m in critic.modules for n, p in m.named_parameters() if lora.trains(n))
                    assert trained <= mine == critic.resident()["weights"] < 2 * trained < sum(own.values())
                    for module, other in zip(critic.modules, actor.modules, strict=True):
                        theirs = dict(other.named_parameters())
                        frozen = {n: p for n, p in module.named_parameters() if not lora.trains(n)}
                        assert frozen and all(p is theirs[n] and not p.requires_grad for n, p in frozen.items())
                    assert any(torch.any(value) for name, value in weights[1].items() if ".b_" in name)
        (separate, values, *weights), (borrowed, its_values, *its_weights) = found
        assert borrowed == separate, sizes
        assert torch.equal(its_values, values), sizes
        for left, right in zip(weights, its_weights, strict=True):
            assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left), sizes
    return len(cases)


CASES = {
    1: [("none", {}), ("nf4", {})],
    8: [("none", dict(tensor=2, pipeline=2, sequence=True))],
    4: [("none", dict(tensor=2, pipeline=2, sequence=True)), ("nf4", dict(tensor=2)), ("none", dict(pipeline=4))],
    2: [("none", dict(tensor=2, sequence=True)), ("none", dict(pipeline=2)), ("nf4", dict(tensor=2, sequence=True)),
        ("nf4", dict(pipeline=2)), ("none", dict(overlap_param_gather=True, overlap_grad_reduce=True))],
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4, 8))])
def test_as_a_separate_critic(ranks, world_size):
    assert set(ranks.run(world_size, train, CASES[world_size])) == {len(CASES[world_size])}
