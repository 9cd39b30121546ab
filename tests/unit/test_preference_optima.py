"""Where the losses of pairs and ratings lead: a prompt with a few responses whose best policy is known.

A table of logits is trained on every pair of responses, weighted by how often people who follow the model of Bradley
and Terry (1952) prefer one to the other, so a gradient is the expected one.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from megarlhf.algorithms.kto import KTOConfig, kto
from megarlhf.algorithms.preference import PreferenceConfig, preference
from megarlhf.batch import Comparisons, Ratings
from tests.unit.test_bandit import distance, optimum

RESPONSES, BETA = 4, 0.5
DRAW = torch.Generator().manual_seed(2)
REFERENCE = torch.randn(RESPONSES, dtype=torch.float64, generator=DRAW).log_softmax(0)
SCORES = torch.randn(RESPONSES, dtype=torch.float64, generator=DRAW)
PAIRS = torch.tensor(list(itertools.permutations(range(RESPONSES), 2)))  # chosen, rejected
CHOSEN, REJECTED = PAIRS.unbind(1)
WINS = torch.sigmoid(SCORES[CHOSEN] - SCORES[REJECTED])  # of Bradley and Terry


def minimised(loss, start=REFERENCE, steps=100):
    """The probabilities at the least of loss(log-probs of the responses)."""
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], lr=1.0, max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-15,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def closure():
        optimizer.zero_grad()
        value = loss(logits.log_softmax(0))
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach().softmax(0)


def learned(weights=WINS, **options):
    """What a loss of pairs makes of the reference. Each pair is there once; the gradient by its log-probs is multiplied
    by how often it is."""
    algorithm = preference(PreferenceConfig(beta=BETA, **options))
    rows = PAIRS.flatten()
    ones = torch.ones(len(rows), 1, dtype=torch.bool)
    given = Comparisons(
        torch.zeros(len(rows), 2, dtype=torch.int64), ones, together=2, ranks=torch.zeros(len(rows)),
        margins=torch.zeros(len(rows)),
    )  # fmt: skip
    given = algorithm.prepare(given, {"reference": lambda _: {"logprobs": REFERENCE[rows][:, None]}}, None)

    def loss(logprobs):
        own = logprobs[rows][:, None]
        value = torch.zeros((), dtype=torch.float64)
        for pair, weight in enumerate(weights):
            part = slice(2 * pair, 2 * pair + 2)
            value = value + weight * algorithm.loss({"logprobs": own[part]}, given.select(part))[2]["loss"][0]
        return value / weights.sum()

    return minimised(loss)


def test_dpo_reaches_the_optimum_of_the_reward():
    """reference exp(score / beta) / Z: the policy that maximises E[score] - beta KL (arXiv:2305.18290, eq. 4)."""
    best = optimum(REFERENCE.exp(), SCORES, BETA)
    assert distance(best, REFERENCE.exp()) > 0.3
    assert distance(learned(), best) < 1e-5


def test_ipo_reaches_its_own():
    """The differences of log-ratios are fitted to the means (2 p(x wins) - 1) / (2 beta) by least squares, all pairs
    alike, so the log-ratio of a response is the mean over the others."""
    wins = torch.full((RESPONSES, RESPONSES), 0.5, dtype=torch.float64)
    wins[CHOSEN, REJECTED] = WINS
    targets = (2 * wins - 1) / (2 * BETA)  # the mean over both orders of a pair
    ratios = targets.mean(1)
    expected = (REFERENCE + ratios).softmax(0)
    found = learned(loss="ipo")
    assert distance(found, expected) < 1e-5 and distance(found, optimum(REFERENCE.exp(), SCORES, BETA)) > 0.05


def test_robust_undoes_flipped_labels_and_cdpo_does_not():
    """20% of all pairs have the wrong order. `robust` reaches what dpo reaches on right ones. dpo fits the wrong ones
    too, and cdpo assumes further wrong ones."""
    flipped = 0.8 * WINS + 0.2 * (1 - WINS)
    best = optimum(REFERENCE.exp(), SCORES, BETA)
    assert distance(learned(flipped, loss="robust", label_smoothing=0.2), best) < 1e-5
    strays = [distance(learned(flipped, **options), best)
              for options in ({}, dict(loss="cdpo", label_smoothing=0.2))]  # fmt: skip
    assert 0.05 < strays[0] < strays[1], strays


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_apo_zero_unpaired_follows_the_share_of_good_ratings(share):
    """Of each response g are good: the slope of sigmoid(b h) is (bad - good), so its log-ratio goes up without end if
    more than half are good. The one response that is mostly good gets all of the probability."""
    good = torch.full((RESPONSES,), share - 0.1, dtype=torch.float64)
    good[3] = 0.9
    found = rated(KTOConfig(loss="apo_zero_unpaired", beta=BETA), good, steps=60)
    assert found[3] > 0.9


def rated(config, good, steps):
    algorithm = kto(config)
    labels = torch.tensor([True, False]).repeat(RESPONSES)
    rows = torch.arange(RESPONSES).repeat_interleave(2)
    weights = torch.stack([good, 1 - good], 1).flatten()
    ones, tokens = torch.ones(len(rows), 1, dtype=torch.bool), torch.zeros(len(rows), 2, dtype=torch.int64)
    given = Ratings(
        tokens, ones, labels=labels, mismatched_tokens=tokens, mismatched_mask=ones, mismatched_segments=ones
    )
    given = algorithm.prepare(given, {"reference": lambda _: {"logprobs": REFERENCE[rows][:, None]}}, None)

    def loss(logprobs):
        value = torch.zeros((), dtype=torch.float64)
        for row, weight in enumerate(weights):
            part = slice(row, row + 1)
            found = algorithm.loss({"logprobs": logprobs[rows[part]][:, None]}, given.select(part))
            value = value + weight * found[2]["loss"][0]
        return value / weights.sum()

    return minimised(loss, steps=steps)
