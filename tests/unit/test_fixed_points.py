"""Where the algorithms without a critic lead, exactly: a bandit as in test_bandit.py, without sampling noise.

A batch has every group of G responses once. Its gradient by a response's log-probs is multiplied by the probability of
the group, so a step is the expected one, and what is learned is the fixed point of the algorithm. Only whitening needs
groups in proportion to their probabilities, because it computes moments over the rows.

The optimum of E[score] - beta KL is reference exp(score / beta) / Z. What an algorithm changes in it is computed here:
a response's mean advantage U given the others of its group, in the place of its score.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarlhf.algorithms import ppo, reinforce
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.ppo import PPOConfig
from megarlhf.algorithms.reinforce import ReinforceConfig
from megarlhf.batch import Batch, Rollout, Scores, Signals
from tests.unit.test_bandit import distance, optimum, responses_of

VOCAB, BETA = 5, 0.8
UPDATES, RATE = 70, 0.5  # the distance shrinks by about 1 - RATE BETA an update
GROUPS = {"reinforce": 1, "remax": 1, "rloo": 2, "dr_grpo": 2}
WEIGHTS = (1.0, -0.5)  # of two sources


def world(length):
    """The reference's logits (1 + V, V) behind each state, and scores by source, (responses, 2)."""
    options = dict(dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return torch.randn(1 + VOCAB, VOCAB, **options), torch.randn(VOCAB**length, 2, **options)


def scores_of(length):
    return world(length)[1] @ torch.tensor(WEIGHTS, dtype=torch.float64)


def reference_of(length):
    return responses_of(world(length)[0], length).flatten()


def learned(algorithm, *, length=1, group=1, copies=0):
    """The probabilities of all responses under what an algorithm makes of the reference. `copies`: so many groups, in
    proportion to their probabilities; 0: every group once."""
    reference, by_source = world(length)
    scores, target = scores_of(length), reference.log_softmax(1)
    tokens = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    states = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), 1 + tokens[:, :-1]], 1)
    groups = torch.tensor(list(itertools.product(range(len(tokens)), repeat=group)))
    logits = reference.clone().requires_grad_()
    for step in range(UPDATES):
        table = logits.log_softmax(1)
        probabilities = table[states, tokens].sum(1).exp().detach()[groups].prod(1)
        repeats = torch.ones_like(groups[:, 0])
        if copies:
            repeats = (probabilities * copies).round().long()
        rows = groups.repeat_interleave(repeats, 0).flatten()
        group_ids = torch.arange(len(rows)) // group
        weights = (probabilities / probabilities.sum() / repeats).repeat_interleave(repeats * group) * len(rows) / group
        response, state = tokens[rows], states[rows]
        mask = torch.ones_like(response, dtype=torch.bool)
        logprobs = table[state, response]
        old = logprobs.detach()
        signals = Signals(
            logprobs=old, ref_logprobs=target[state, response], values=torch.zeros_like(old),
            kl=(table.exp() * (table - target)).sum(1).detach()[state],
        )  # fmt: skip
        ids = dict(sequence_ids=group_ids, prompt_ids=group_ids, group_ids=group_ids)
        rollout = Rollout(tokens=torch.cat([state[:, :1], response], 1), mask=mask, logprobs=old, **ids)
        found = Scores(scores[rows], mask, mask[:, 0], by_source=by_source[rows], weights=WEIGHTS)
        greedy = scores[table.exp()[states, tokens].prod(1).argmax()].expand(len(rows))
        batch = Batch(rollout, found, signals, {"greedy": greedy})
        experience = algorithm.make_experience(batch, algorithm.state, None)
        experience = algorithm.minibatch(experience, None)
        exact = (table.exp() * (table - target)).sum(1)[state]
        for output in (logprobs, exact):
            output.register_hook(lambda gradient, weights=weights: gradient * weights[:, None])
        outputs = {"logprobs": logprobs, "entropy": -(table.exp() * table).sum(1)[state], "kl": exact}
        total, count, _ = algorithm.updates(step)["actor"].loss(outputs, experience)
        (gradient,) = torch.autograd.grad(total / count, logits)
        visits = table.detach().exp()  # of each token: its state is reached with the probability of the token before
        visits = torch.cat([visits[:1], visits[0, :, None] * visits[1:]])
        logits = (logits - RATE * gradient / visits).detach().requires_grad_()  # the natural gradient
    return responses_of(logits.detach(), length).flatten()


def policy_gradient(place, estimator, **options):
    kl = KLConfig(coef=BETA, place=place, estimator=estimator)
    return reinforce.algorithm(ReinforceConfig(kl=kl, **({"normalization": "sequence_sum"} | options)))


def tilted(length, gain):
    """The optimum if the scores are these."""
    return optimum(reference_of(length), gain, BETA)


# ------------------------------------------------------------------------------------------------ KL in the reward


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("estimator", ["k1", "exact"])
@pytest.mark.parametrize("advantage", ["reinforce", "remax", "rloo", "dr_grpo"])
def test_the_kl_in_the_reward_leads_to_the_optimum(advantage, estimator, length):
    """dr_grpo too: the mean with a response's own score makes score and penalty smaller alike."""
    algorithm = policy_gradient("reward", estimator, advantage=advantage)
    found = learned(algorithm, length=length, group=GROUPS[advantage])
    assert distance(found, tilted(length, scores_of(length))) < 1e-5


@pytest.mark.parametrize(
    ("surrogate", "normalization", "ratio"),
    [
        ("none", "token", "token"),
        ("clip", "sequence", "sequence_mean"),
        ("clip", "sequence", "sequence"),
        ("clip", "sequence_sum", "token"),
        ("clip", "constant", "token"),
        ("cispo", "token", "token"),
    ],
)
def test_every_loss_leads_to_it(surrogate, normalization, ratio):
    """One update a batch, so every ratio is 1."""
    options = dict(advantage="rloo", surrogate=surrogate, normalization=normalization, ratio=ratio)
    found = learned(policy_gradient("reward", "k1", **options), length=1, group=2)
    assert distance(found, tilted(1, scores_of(1))) < 1e-5


# ------------------------------------------------------------------------------------------------ KL in the loss


def own_advantages(name, probabilities, scores, group, eps):
    """(responses,) the mean advantage of each, given the others of its group: a sum over all of them."""
    found = []
    for own in scores.tolist():
        mean = 0.0
        for others in itertools.product(range(len(scores)), repeat=group - 1):
            values = [own, *(scores[other].item() for other in others)]
            middle = sum(values) / group
            deviation = math.sqrt(sum((value - middle) ** 2 for value in values) / (group - 1))
            if name == "rloo":
                advantage = own - sum(values[1:]) / (group - 1)
            elif name == "dr_grpo":
                advantage = own - middle
            else:
                advantage = (own - middle) / (deviation + eps) if deviation > 1e-12 else 0.0
            mean += advantage * math.prod(probabilities[other].item() for other in others)
        found.append(mean)
    return torch.tensor(found, dtype=torch.float64)


def stray(policy, gain, beta=BETA):
    """How far a policy is from reference exp(gain(policy) / beta) / Z."""
    return distance(policy, optimum(reference_of(1), gain(policy), beta))


@pytest.mark.parametrize("estimator", ["k2", "exact"])
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo", "grpo"])
def test_groups_with_the_kl_in_the_loss(advantage, group, estimator):
    """rloo leads to the optimum; dr_grpo to that of beta G / (G - 1), since the mean has a response's own score; grpo
    to one whose temperature each group's deviation changes."""
    found = learned(policy_gradient("loss", estimator, advantage=advantage, eps=0.1), group=group)
    assert stray(found, lambda policy: own_advantages(advantage, policy, scores_of(1), group, 0.1)) < 1e-5
    factor = {"rloo": 1.0, "dr_grpo": 1 - 1 / group, "grpo": None}[advantage]
    if factor is not None:
        assert distance(found, tilted(1, factor * scores_of(1))) < 1e-5


def test_gdpo_with_the_kl_in_the_loss():
    found = learned(policy_gradient("loss", "k2", advantage="gdpo", eps=0.1), group=2)
    sources = world(1)[1].unbind(1)

    def gain(policy):
        advantages = [own_advantages("grpo", policy, source, 2, 0.1) for source in sources]
        return WEIGHTS[0] * advantages[0] + WEIGHTS[1] * advantages[1]

    assert stray(found, gain) < 1e-5


@pytest.mark.parametrize("advantage", ["reinforce", "rloo"])
def test_k3_in_the_loss_leads_elsewhere(advantage):
    """The gradient of k3 is that of KL(reference, policy): policy (beta + mean score - score) = beta reference."""
    algorithm = policy_gradient("loss", "k3", advantage=advantage)
    found, scores = learned(algorithm, group=GROUPS[advantage]), scores_of(1)
    expected = BETA * reference_of(1) / (BETA + (found * scores).sum() - scores)
    assert distance(found, expected) < 1e-5
    assert distance(found, tilted(1, scores)) > 0.01


@pytest.mark.parametrize("estimator", ["k2", "exact"])
@pytest.mark.parametrize("normalization", ["token", "sequence_sum"])
def test_the_kl_in_the_loss_of_two_tokens(normalization, estimator):
    """The second token's policy is the optimum. The first one's has no gradient from the second state's KL, so it sees
    the mean score there and not what is left of it when the KL is paid."""
    found = learned(
        policy_gradient("loss", estimator, advantage="rloo", normalization=normalization), length=2, group=2
    )
    reference, scores = world(2)[0].log_softmax(1), scores_of(2).view(VOCAB, VOCAB)
    second = (reference[1:] + scores / BETA).softmax(1)
    first = (reference[0] + (second * scores).sum(1) / BETA).softmax(0)
    assert distance(found, (first[:, None] * second).flatten()) < 1e-5
    assert distance(found, tilted(2, scores_of(2))) > 0.01


@pytest.mark.parametrize("more", [{}, {"lam": 0.5}], ids=["lambda 1", "lambda 0.5"])
def test_ppo_with_the_kl_in_the_loss(more):
    config = PPOConfig(kl=KLConfig(coef=BETA, place="loss", estimator="k2"), whiten_advantages=False, **more)
    assert distance(learned(ppo.algorithm(config)), tilted(1, scores_of(1))) < 1e-5


# ------------------------------------------------------------------------------------------------ whitening


@pytest.mark.parametrize("advantage", ["reinforce", "dr_grpo"])
def test_whitening_with_the_kl_in_the_loss(advantage):
    """The temperature is beta times the deviation of the advantages over the batch. dr_grpo is reinforce++_baseline:
    the variance of its advantages is (G - 1) / G that of the scores, and the gain (G - 1) / G, so sqrt((G - 1) / G) of
    the scores' deviations is left."""
    kl = KLConfig(coef=2.0, place="loss", estimator="k2")  # with a small beta, deviation and temperature both go to 0
    algorithm = reinforce.algorithm(ReinforceConfig(kl=kl, advantage=advantage, whiten_advantages=True))
    found = learned(algorithm, group=GROUPS[advantage], copies=20_000)
    scores, factor = scores_of(1), {"reinforce": 1.0, "dr_grpo": math.sqrt(1 / 2)}[advantage]

    def gain(policy):
        mean = (policy * scores).sum()
        return factor * scores / (policy * (scores - mean) ** 2).sum().sqrt()

    assert stray(found, gain, 2.0) < 1e-3 < 0.03 < stray(found, lambda policy: scores, 2.0)
