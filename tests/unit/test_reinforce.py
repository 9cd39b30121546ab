"""REINFORCE against a slow loop, and on a bandit whose best policy is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarlhf import metrics
from megarlhf.algorithms import reinforce
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.policy_loss import ImportanceConfig
from megarlhf.algorithms.reinforce import ReinforceConfig
from megarlhf.algorithms.shaping import ShapingConfig
from megarlhf.batch import Batch
from tests.unit.test_algorithms import LENGTH, MASKS, ROWS, STOPPED, close, rollout_of
from tests.unit.test_bandit import trained

STATE = {"kl_coef": 0.15, "baseline": 0.7, "baseline_weight": 0.1}


@MASKS
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_advantages(mask, estimator):
    batch = Batch(*rollout_of(mask))
    config = ReinforceConfig(kl=KLConfig(estimator=estimator), gamma=0.9)
    found = reinforce.make_experience(batch, STATE, None, config=config)
    expected = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    k1 = batch.signals.logprobs - batch.signals.ref_logprobs
    for b, length in enumerate(mask.sum(1).tolist()):
        for t in range(length):
            for u in range(t, length):  # a token's own penalty is always k1's
                kl = k1[b, u] if estimator == "k1" or u == t else batch.signals.kl[b, u]
                expected[b, t] += 0.9 ** (u - t) * -0.15 * kl
            expected[b, t] += 0.9 ** (length - 1 - t) * batch.scores.scores[b] - 0.7
    close(found.advantages, expected)


@MASKS
def test_metrics_of_length_importance_and_groups(mask):
    """By hand: means over responses, over tokens with importance, and the share of responses in varied groups."""
    rollout, scores, signals = rollout_of(mask)
    accepted = torch.arange(ROWS) != 2  # has the penalty, which length does not change
    scores = replace(scores, accepted=accepted, scores=torch.where(torch.arange(ROWS) < 4, 0.5, scores.scores))
    rollout = replace(rollout, group_ids=torch.arange(ROWS) // 2, logprobs=0.9 * signals.logprobs)
    shaping = ShapingConfig(overlong_buffer=2, overlong_penalty=0.6, length_penalty=0.01)
    config = ReinforceConfig(advantage="rloo", shaping=shaping, importance=ImportanceConfig(), kl=KLConfig(coef=0.0))
    extra = {name: torch.full((ROWS,), value).double() for name, value in (("rounds", 3.0), ("score", 0.25))}
    found = metrics.of_loss(reinforce.objective(Batch(rollout, scores, signals, extra), STATE, config=config))
    found = {name: metric.map(float).value for name, metric in found.items()}
    taken, ratios = [], []
    for b, length in enumerate(mask.sum(1).tolist()):
        over = max(0, length - (LENGTH - 2))
        taken.append((0.01 * length + 0.6 * over / 2) if accepted[b] else 0.0)
        ratios += [math.exp(0.1 * signals.logprobs[b, t].item()) for t in range(length)]
    close(found["objective/length_penalty"], sum(taken) / ROWS, 1e-6)
    close(found["objective/importance"], sum(ratios) / len(ratios))
    assert found["groups/varied"] == 0.5  # the first two groups have equal scores
    assert (found["groups/rounds"], found["groups/score"]) == (3.0, 0.25)
    close(found["objective/scores"], scores.scores.mean())  # before the penalties of length


def test_the_gradient_is_reinforces_and_stays_within_the_mask():
    config = ReinforceConfig()
    experience = reinforce.make_experience(Batch(*rollout_of(STOPPED)), STATE, None, config=config)
    logprobs = experience.logprobs.clone().requires_grad_()
    loss = reinforce.algorithm(config).updates(0)["actor"].loss
    total, count, _ = loss({"logprobs": logprobs, "entropy": torch.zeros(ROWS, LENGTH)}, experience)
    total.backward()
    close(logprobs.grad, -experience.advantages)
    assert count == STOPPED.sum() and not logprobs.grad[~STOPPED].any()


def test_the_baseline_is_a_weighted_mean_of_the_batches_that_were_learned_from():
    config, state, seen = ReinforceConfig(baseline_decay=0.8), STATE | {"baseline_weight": 0.0}, []
    for score, learned in ((3.0, True), (-1e9, False), (-1.0, True), (math.nan, False), (2.0, True)):
        values = {"objective/kl": 1.0, "objective/scores_total": score}
        values |= {"reinforce/loss/policy": 0.1} if learned else {}
        state = reinforce.adapt(state, values, 8, config=config)
        seen += [score] if learned else []
        weights = [0.8**age for age in reversed(range(len(seen)))]
        close(state["baseline"], sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights))


def test_a_run_is_resumed_with_another_configuration():
    """A fixed KL coefficient and an absent baseline are the configuration's; what adapts is the run's."""
    for config, kept in (
        (ReinforceConfig(kl=KLConfig(controller="adaptive")), STATE),
        (ReinforceConfig(kl=KLConfig(coef=0.5)), STATE | {"kl_coef": 0.5}),
        (
            ReinforceConfig(kl=KLConfig(coef=0.5), baseline="none"),
            {"kl_coef": 0.5, "baseline": 0, "baseline_weight": 0},
        ),
    ):
        assert reinforce.algorithm(config).restore(STATE) == kept


@pytest.mark.parametrize("more", [{}, {"baseline": "none"}], ids=["moving", "none"])
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_policy_reaches_the_optimum(estimator, more):
    config = ReinforceConfig(kl=KLConfig(coef=1.0, estimator=estimator), **more)
    assert trained(reinforce.algorithm(config), length=1) < 0.03
    assert trained(reinforce.algorithm(config), length=2) < 0.1
