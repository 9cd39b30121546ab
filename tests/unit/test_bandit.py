"""A bandit whose best policy is known: every online algorithm must reach it.

Responses have one token, or two, of a vocabulary of 8, and every response has a score from a table. The policy that
maximises E[score] - beta KL(policy, reference), the KL of whole responses, is reference exp(score / beta) / Z (Ziegler
et al. 2019, arXiv:1909.08593, section 2.2). Other tests say what is computed; this one says where it leads.
"""

from __future__ import annotations

import pytest
import torch

from megarlhf import metrics
from megarlhf.algorithms import ppo
from megarlhf.algorithms.interface import share_trunk
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.ppo import PPOConfig
from megarlhf.batch import Batch, Rollout, Scores, Signals
from tests.scoring import row_ids

VOCAB = 8


def optimum(reference, scores, beta):
    """(...) probabilities and scores of all responses -> the best policy's probabilities."""
    return (reference.log() + scores / beta).flatten().softmax(0).view_as(scores)


def distance(left, right):
    """Total variation."""
    return 0.5 * (left - right).abs().sum().item()


def responses_of(logits, length):
    """(1 + V, V) logits behind each state, the first of which is the prompt -> the probabilities of all responses."""
    table = logits.softmax(1)
    return table[0] if length == 1 else table[0][:, None] * table[1:]


def trained(algorithm, *, length, rows=512, updates=150):
    """The total variation between the optimum and a table of logits and values after so many updates of an algorithm,
    each on a batch sampled from the table."""
    generator = torch.Generator().manual_seed(length)
    options = dict(dtype=torch.float64, generator=generator)
    reference, scores = torch.randn(1 + VOCAB, VOCAB, **options), torch.randn((VOCAB,) * length, **options)
    logits = reference.clone().requires_grad_()
    values = torch.zeros(1 + VOCAB, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.2}, {"params": [values], "lr": 0.2}])
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    mask, state = torch.ones(rows, length, dtype=torch.bool), algorithm.state
    for step in range(updates):
        table = logits.log_softmax(1)
        states, tokens = torch.zeros(rows, 0, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64)
        for t in range(length):
            states = torch.cat([states, 1 + tokens[:, -1:] if t else tokens], 1)
            sampled = torch.multinomial(table[states[:, -1]].exp(), 1, generator=generator)
            tokens = torch.cat([tokens, sampled], 1)
        response = tokens[:, 1:]
        outputs = {"logprobs": table[states, response], "values": values[states]}
        outputs["entropy"] = -(table.exp() * table).sum(1).detach()[states]
        old = {name: output.detach() for name, output in outputs.items()}
        target = reference.log_softmax(1)
        signals = Signals(
            logprobs=old["logprobs"], ref_logprobs=target[states, response], values=old["values"],
            kl=(table.exp() * (table - target)).sum(1).detach()[states],
        )  # fmt: skip
        rollout = Rollout(tokens=tokens, mask=mask, **row_ids(rows), logprobs=old["logprobs"])
        batch = Batch(rollout, Scores(scores[tuple(response.T)], mask, mask[:, 0]), signals)
        experience = algorithm.minibatch(algorithm.make_experience(batch, state, None), None)
        total, count, learned = algorithm.updates(step)["actor"].loss(outputs, experience)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        decay.step()
        found = metrics.of_loss(algorithm.objective(batch, state) | learned)
        state = algorithm.adapt(state, {name: metric.map(float).value for name, metric in found.items()}, rows)
    best = optimum(responses_of(reference, length), scores, state["kl_coef"])
    return distance(responses_of(logits.detach(), length), best)


def ppo_of(estimator, beta, **more):
    """One update a batch: every ratio is 1 and nothing is clipped. Advantages are not whitened: at the optimum they are
    0, and whitening would make what noise is left as large as ever."""
    options = dict(lam=1.0, whiten_advantages=False, clip_range_value=1e9, vf_coef=1.0)
    return share_trunk(ppo.algorithm(PPOConfig(kl=KLConfig(coef=beta, estimator=estimator), **(options | more))))


@pytest.mark.parametrize("beta", [0.2, 1.0])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_policy_reaches_the_optimum(estimator, length, beta):
    found = trained(ppo_of(estimator, beta), length=length)
    assert found < (0.02 if length == 1 else 0.1)


@pytest.mark.parametrize("more", [dict(lam=0.5), dict(whiten_rewards=True)], ids=["lambda", "whitened rewards"])
@pytest.mark.parametrize("length", [1, 2])
def test_the_exact_kl_reaches_it_however_advantages_are_made(length, more):
    """Whitened rewards are divided by a number, and a token's own penalty must be by the same, or score and penalty
    have another balance. (With k1 the rewards of one token become equal at the optimum, and whitening a ruin.)"""
    assert trained(ppo_of("exact", 1.0, **more), length=length) < (0.02 if length == 1 else 0.1)
