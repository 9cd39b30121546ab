"""What algorithms/ and the metrics do over ranks: the same numbers as one rank with all the rows."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megarlhf import metrics
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.masked import whiten
from megarlhf.algorithms.policy_loss import PolicyLossConfig
from megarlhf.algorithms.policy_loss import policy_loss as general_loss
from megarlhf.algorithms.ppo import PPOConfig, value_loss, whiten_minibatch
from megarlhf.algorithms.reward import normalisation
from megarlhf.batch import CriticExperience, Experience
from megarlhf.experience.rollout import compared
from megarlhf.metrics import Max, Mean, Min, Variance
from megarlhf.models.build import build
from megarlhf.optim import OptimizerConfig
from tests.distributed.layouts import ADAM, LLAMA, examples, layout, share

CONFIG = PPOConfig(whiten_rewards=True)
policy_loss = partial(general_loss, kl=CONFIG.kl, name="ppo")


def reductions():
    """Rank r holds rows [r B, (r + 1) B) of 8 with different numbers of tokens; the last rank's are few."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 4, 5, 3, 1, 1, 2, 1])[:, None]
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    part, kept = values[mine], mask[mine]
    wide = part[kept].double()
    found = {
        "mean": Mean(wide.sum().item(), len(wide)),
        "max": Max(wide.max().item()),
        "variance": Variance(wide.sum().item(), (wide**2).sum().item(), len(wide)),
        "min": Min(wide.min().item()),
    }
    reduced = metrics.all_reduce(found, dist.group.WORLD, torch.device("cpu"))
    return (
        [whiten(part, kept, shift_mean=shift, group=dist.group.WORLD) for shift in (True, False)],
        {name: metric.value for name, metric in reduced.items()},
        normalisation(part[:, 0], group=dist.group.WORLD),
    )


def test_statistics_are_of_the_whole_minibatch(ranks):
    ((whitened, reduced, gain_bias),) = ranks.run(1, reductions)
    parts = ranks.run(2, reductions)
    for number in range(2):
        together = torch.cat([part[0][number] for part in parts])
        torch.testing.assert_close(together, whitened[number], rtol=0, atol=1e-6)
    for _, got, got_gain_bias in parts:
        assert got == pytest.approx(reduced, rel=1e-12) and got_gain_bias == pytest.approx(gain_bias, rel=1e-6)


def learn(cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> metrics of two PPO updates of an actor and of a critic."""
    results = []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            steps = []
            for role, loss in (("actor", policy_loss), ("critic", value_loss)):
                engine = build(role, LLAMA, topology, micro_batch_tokens=24 * micro, dtype="fp32", optimizer=ADAM,
                               total_steps=2, seed=7)  # fmt: skip
                batch = examples()
                generator = torch.Generator().manual_seed(1)
                noise = [torch.randn(batch.mask.shape, generator=generator) * batch.mask for _ in range(3)]
                old = engine.forward(share(batch, topology))
                minibatch = CriticExperience(
                    **vars(batch), logprobs=-6.2 + 0.1 * noise[0], values=noise[1], rewards=noise[2],
                    advantages=noise[2], returns=noise[2], correction=noise[2],
                )  # fmt: skip
                minibatch = whiten_minibatch(share(minibatch, topology), config=CONFIG, group=topology.data_group)
                if role == "actor":
                    minibatch = CriticExperience(**{**vars(minibatch), "logprobs": old["logprobs"]})
                for _ in range(2):
                    found = engine.step(minibatch, partial(loss, config=CONFIG))
                    steps.append({name: metric.value for name, metric in found.items()})
            results.append(steps)
    return results


CASES = {
    1: [(1, {}), (4, {})],
    2: [(2, {}), (4, dict(tensor=2)), (2, dict(pipeline=2))],
}


def test_ppo_metrics_do_not_depend_on_the_layout(ranks):
    ((truth,),) = ranks.run(1, learn, [(8, {})])
    assert truth[0]["ppo/policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert truth[1]["ppo/policy/ratio_max"] > 1.01 > 0.99 > truth[1]["ppo/policy/ratio_min"]
    for world_size, cases in CASES.items():
        for answer in ranks.run(world_size, learn, cases):  # every rank
            for case, steps in zip(cases, answer, strict=True):
                for got, expected in zip(steps, truth, strict=True):
                    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5), (world_size, case)


# All that a policy's loss can divide by, with everything that is added to it.
LOSSES = [
    (PolicyLossConfig(ratio=ratio, normalization=how, entropy_coef=0.05, clip_range=0.05),
     KLConfig(place="loss", estimator=estimator))
    for ratio, how, estimator in (
        ("token", "token", "k2"), ("token", "sequence", "k2"), ("token", "sequence_sum", "k2"),
        ("token", "constant", "k2"), ("sequence", "sequence", "k2"), ("sequence_mean", "token", "k2"),
        ("token", "token", "exact"), ("token", "sequence", "exact"),
    )
]  # fmt: skip
CUTS = {
    1: [(1, {}), (3, {})],
    2: [(2, {}), (4, dict(tensor=2, sequence=True)), (2, dict(pipeline=2))],
    4: [(1, {}), (2, dict(tensor=2)), (2, dict(pipeline=2))],
}


def gradients(cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> for each of LOSSES the loss, its gradient's norm, and the
    global batch's log-probs after an update, whose every weight has moved by its gradient."""
    results = []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            found = []
            other = build("reference", LLAMA, topology, micro_batch_tokens=24 * micro, dtype="fp32", seed=8)
            for config, kl in LOSSES:
                engine = build("actor", LLAMA, topology, micro_batch_tokens=24 * micro, dtype="fp32",
                               optimizer=OptimizerConfig(name="adam", lr=1e-2, eps=1.0, schedule="constant"),
                               total_steps=1, seed=7)  # fmt: skip
                batch = examples()
                noise = torch.randn(3, *batch.mask.shape, generator=torch.Generator().manual_seed(1)) * batch.mask
                own = engine.forward(share(batch, topology))["logprobs"]
                rows = share(Experience(**vars(batch), logprobs=noise[0], advantages=noise[1], ref_logprobs=noise[2],
                                        weights=noise[0].exp(), kl_coef=0.3), topology)  # fmt: skip
                rows = dataclasses.replace(
                    rows, logprobs=own + 0.1 * rows.logprobs, ref_logprobs=own + 0.5 * rows.ref_logprobs
                )
                options = {}
                if kl.estimator == "exact":
                    rows, options, _ = compared(rows, other, temperature=1.0)
                loss = partial(general_loss, config=config, kl=kl, name="x")
                metrics = engine.step(rows, loss, with_entropy=True, **options)
                after = engine.forward(batch)["logprobs"]
                found.append(([metrics[name].value for name in ("x/loss/policy", "x/loss/kl", "grad_norm")], after))
            results.append(found)
    return results


def test_the_gradient_of_each_normalisation_does_not_depend_on_the_cut(ranks):
    ((truth,),) = ranks.run(1, gradients, [(8, {})])
    assert len({round(numbers[2], 6) for numbers, _ in truth}) == len(LOSSES)
    for world_size, cases in CUTS.items():
        for answer in ranks.run(world_size, gradients, cases):
            for case, found in zip(cases, answer, strict=True):
                for loss, (numbers, after), (expected, logprobs) in zip(LOSSES, found, truth, strict=True):
                    assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6), (world_size, case, loss)
                    torch.testing.assert_close(after, logprobs, rtol=1e-5, atol=1e-5)
