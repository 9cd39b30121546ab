"""The advantages, losses and switches of online algorithms against plain loops in float64 (tests/online_reference.py),
on ragged responses and with every switch at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarlhf.algorithms import ppo, reinforce
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.policy_loss import ImportanceConfig, PolicyLossConfig, importance_weights
from megarlhf.algorithms.ppo import PPOConfig
from megarlhf.algorithms.reinforce import ReinforceConfig
from megarlhf.algorithms.shaping import ShapingConfig
from tests import online_reference as reference
from tests.online_cases import ASYMMETRIC, COLUMNS, GIVEN, LIMIT, MASK, batch_of, loss_of, wide

# The columns of what is given to the loops are ours
SLOW = {name: torch.nn.functional.pad(value, (0, LIMIT - COLUMNS)) for name, value in GIVEN.items() if value.dim() == 2}
SLOW = GIVEN | SLOW | {"by_source": GIVEN["by_source"], "exact": SLOW["entropy"]}
# Its penalties are float32, hence 1e-6 below
SHAPING = ShapingConfig(overlong_buffer=9, overlong_penalty=0.7, length_penalty=0.03)


@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
@pytest.mark.parametrize(
    ("name", "kl"),
    [(name, kl) for name in ("reinforce", "rloo", "grpo", "dr_grpo", "remax") for kl in ("k1", "exact", "k2")]
    + [("gdpo", "k2")],
)
def test_advantages_are_those_of_the_loops(name, kl, whiten):
    place = "loss" if kl == "k2" else "reward"
    config = ReinforceConfig(
        advantage=name, kl=KLConfig(coef=0.3, place=place, estimator=kl), whiten_advantages=whiten, eps=1e-3,
        gamma=0.9 if name == "reinforce" else 1.0, shaping=ShapingConfig() if name == "gdpo" else SHAPING,
    )  # fmt: skip
    batch = batch_of(greedy=GIVEN["greedy"])
    batch = replace(batch, signals=replace(batch.signals, kl=wide(GIVEN["entropy"])))
    state = {"kl_coef": 0.3, "baseline": 0.4, "baseline_weight": 0.5}
    found = reinforce.make_experience(batch, state, None, config=config).advantages
    rows = reference.advantages(SLOW, config, kl_coef=0.3, baseline=0.4, greedy=GIVEN["greedy"])
    expected = torch.tensor([row + [0.0] * (LIMIT - len(row)) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 2.0])
def test_lengthwise_lambda(alpha):
    """VAPO (arXiv:2504.05118, section 3.2): the critic's returns have lambda 1. Below a length of 1 / alpha the formula
    is negative, and lambda 0."""
    config = PPOConfig(lam=1.0, lam_lengthwise=alpha, gamma=0.9, kl=KLConfig(coef=0.3), shaping=SHAPING)
    batch = batch_of()
    found = ppo.make_experience(batch.rollout, batch.scores, batch.signals, kl_coef=0.3, config=config)
    for row, length in enumerate(reference.lengths_of(MASK)):
        rewards = [-0.3 * (GIVEN["old"][row, t] - GIVEN["ref"][row, t]).item() for t in range(length)]
        rewards[-1] += reference.shaped_score(GIVEN["scores"][row].item(), length, LIMIT, SHAPING)
        values = GIVEN["values"][row, :length].tolist()
        lam = max(0.0, 1 - 1 / (alpha * length))
        expected = reference.advantages_of_row(rewards, values, 0.9, lam)
        torch.testing.assert_close(found.advantages[row, :length].tolist(), expected, rtol=1e-6, atol=1e-6)
        returns = reference.returns_to_go(rewards, 0.9)
        torch.testing.assert_close(found.returns[row, :length].tolist(), returns, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "normalization"),
    [(ratio, how) for ratio in ("token", "sequence_mean") for how in ("token", "sequence", "sequence_sum", "constant")]
    + [("sequence", "sequence")],
)
@pytest.mark.parametrize("surrogate", ["none", "clip", "dual clip", "cispo"])
def test_losses_are_those_of_the_loops(surrogate, ratio, normalization):
    """All switches at once: weights, KL in the loss, entropy. Each level of weights and each KL with half of them."""
    turn = ("none", "clip", "dual clip", "cispo").index(surrogate) + ("token", "sequence").count(ratio)
    importance = ImportanceConfig(*(("token", "mask", 0.5, 5.0), ("sequence", "truncate", 0.0, 2.0))[turn % 2])
    kl = KLConfig(coef=0.3, place="loss", estimator=("k2", "k3")[turn // 2 % 2])
    how = dict(surrogate="clip", dual_clip=3.0) if surrogate == "dual clip" else dict(surrogate=surrogate)
    config = PolicyLossConfig(
        **how, ratio=ratio, normalization=normalization, entropy_coef=0.02, importance=importance, **ASYMMETRIC,
    )  # fmt: skip
    found = importance_weights(wide(GIVEN["old"]), wide(GIVEN["sampler"]), MASK, importance)
    weights = []
    for row, length in enumerate(reference.lengths_of(MASK)):
        differences = (GIVEN["old"] - GIVEN["sampler"])[row, :length].tolist()
        weights.append([reference.importance_weight(differences, t, importance) for t in range(length)])
        torch.testing.assert_close(found[row, :length].tolist(), weights[-1], rtol=1e-10, atol=1e-10)
    new, entropy = (SLOW[name].clone().requires_grad_() for name in ("new", "entropy"))
    expected = reference.loss(new, entropy, SLOW, config, kl=kl, weights=weights)
    gradients = torch.autograd.grad(expected, (new, entropy))
    loss, *ours, _ = loss_of(config, advantages=GIVEN["token_advantages"], weights=found, kl=kl)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
