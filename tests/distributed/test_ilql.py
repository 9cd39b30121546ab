"""ILQL's model on ranks: the same loss, gradient and slow copies in every layout, and the distribution it decodes."""

import dataclasses
from functools import partial

import pytest
import torch

from megarlhf.algorithms.ilql import ILQLConfig, ilql_loss
from megarlhf.batch import Prompts, Rewarded
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.build import build
from megarlhf.optim import OptimizerConfig
from tests.distributed.layouts import LLAMA, full_weights, layout, share

MODEL = dataclasses.replace(LLAMA, init_std=0.1)
CONFIG = ILQLConfig(awac_beta=0.3)
Q_NAMES = ("first", "second", "slow_first", "slow_second")


def rewarded(rows=8, length=24):
    """Right-padded rows of different lengths, of which the last one's response is a single token."""
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(length)
    sizes = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    starts = torch.randint(1, length // 2, (rows, 1), generator=generator)
    starts[-1] = sizes[-1] - 1
    mask = ((column >= starts) & (column < sizes))[:, 1:]
    rewards = torch.randn(mask.shape, generator=generator)
    return Rewarded(
        tokens=torch.randint(0, 503, (rows, length), generator=generator).where(column < sizes, 0),
        mask=mask, segments=(column < sizes).long(), rewards=rewards * mask,
    )  # fmt: skip


def engine_of(topology, *, role="actor_q", micro=8, optimizer=None):
    return build(role, MODEL, topology, micro_batch_tokens=24 * micro, dtype="fp32", total_steps=2, seed=7,
                 optimizer=optimizer)  # fmt: skip


def learn(cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> metrics of two updates, and the outputs after them."""
    results = []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            # epsilon 1: the weights move by their gradients
            optimizer = OptimizerConfig(name="adam", lr=1e-2, eps=1.0, schedule="constant")
            engine = engine_of(topology, micro=micro, optimizer=optimizer)
            batch, steps = rewarded(), []
            for _ in range(2):
                found = engine.step(share(batch, topology), partial(ilql_loss, config=CONFIG))
                engine.update_slow_copies(0.3)
                steps.append({name: metric.value for name, metric in found.items()})
            results.append((steps, engine.forward(Rewarded(**vars(batch)))))
    return results


CASES = {
    1: [(1, {}), (3, {})],
    2: [(2, {}), (4, dict(tensor=2)), (2, dict(tensor=2, sequence=True)), (3, dict(pipeline=2))],
}


def test_loss_gradient_and_slow_copies_do_not_depend_on_the_cut(ranks):
    (((steps, truth),),) = ranks.run(1, learn, [(8, {})])
    assert {"logprobs", "values", "q1", "q2", "q1_logprobs", "q2_logprobs", "slow_q"} == truth.keys()
    assert not torch.equal(truth["q1"], truth["q2"])
    for world_size, cases in CASES.items():
        for answer in ranks.run(world_size, learn, cases):
            for case, (found, outputs) in zip(cases, answer, strict=True):
                for got, expected in zip(found, steps, strict=True):
                    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), (world_size, case)
                for name, value in truth.items():
                    torch.testing.assert_close(outputs[name], value, rtol=1e-5, atol=1e-5, msg=f"{case}: {name}")


def heads(sizes):
    """(outputs, states, the heads' whole weights) of a model whose slow copies differ from its heads."""
    with layout(**sizes) as topology:
        engine = changed(engine_of(topology))
        return engine.forward(rewarded(), with_states=True), full_weights(engine), slow_copies(engine)


@torch.no_grad()
def changed(engine):
    """With large slow copies, other heads, and values."""
    for module in engine.modules:
        if hasattr(module, "q_heads"):
            module.q_heads.first.mul_(2)
            module.q_heads.second.mul_(-3)
            module.q_heads.update_slow_copies(0.7)
            module.q_heads.first.neg_()
            module.value_head.weight.copy_(torch.linspace(-1, 1, MODEL.hidden_size))
    return engine


def slow_copies(engine):
    return [getattr(engine.modules[-1].q_heads, f"slow_{name}")[:503].double() for name in ("first", "second")]


def exact(states, weights, slow, beta):
    """logits + beta (min Q - V), float64, (..., V)."""
    states = states.double()
    q = torch.minimum(*(states @ weight.T for weight in slow))
    value = states @ weights["value_head.weight"].double().T + weights["value_head.bias"].double()
    return states @ weights["output_layer.weight"].double().T + beta * (q - value)


def test_the_heads(ranks):
    """In float64, of whole logits."""
    ((outputs, weights, slow),) = ranks.run(1, heads, {})
    rows = rewarded()
    states, labels = outputs["states"].double(), rows.tokens[:, 1:, None]
    expected = {"slow_q": torch.minimum(*((states @ weight.T).gather(2, labels)[..., 0] for weight in slow))}
    for name, key in (("q1", "first"), ("q2", "second")):
        values = states @ weights[f"q_heads.{key}"].double().T
        expected |= {
            name: values.gather(2, labels)[..., 0],
            f"{name}_logprobs": values.log_softmax(2).gather(2, labels)[..., 0],
        }
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name].double(), value * rows.mask, rtol=1e-5, atol=1e-5)
        assert value.std() > 0.5
    assert ((outputs["q1"] - outputs["slow_q"]).abs() > 0.1)[rows.mask].float().mean() > 0.5


COUNT, TOP_K, TEMPERATURE, BETA = 4096, 20, 0.8, 1.5


def decode(cases):
    """[(ParallelConfig fields, beta, role)] -> sampled tokens and log-probs, and the states before them."""
    results = []
    tokens = torch.randint(0, 503, (1, 5), generator=torch.Generator().manual_seed(2)).expand(COUNT, -1)
    prompts = Prompts(tokens=tokens, valid=torch.ones(COUNT, 5, dtype=torch.bool),
                      sequence_ids=torch.arange(COUNT), prompt_ids=torch.arange(COUNT))  # fmt: skip
    for sizes, beta, role in cases:
        with layout(**sizes) as topology:
            engine = changed(engine_of(topology, role=role))
            draw = SamplerConfig(response_length=3, top_k=TOP_K, temperature=TEMPERATURE, micro_batch_size=512)
            rollout = Sampler(engine, draw, prompt_length=5, seed=1, q_beta=beta).sample(prompts)
            first = rollout.select(slice(256))
            states = engine.forward(first, with_states=True)["states"]
            found = [first.tokens[:, 5:], first.logprobs, rollout.tokens[:, 5], states]
            whole = (full_weights(engine), slow_copies(engine)) if role == "actor_q" and not sizes else ()
            results.append((*found, *whole))
    return results


def test_decoding_draws_from_the_policy_shifted_by_the_advantage(ranks):
    """Log-probs are those of softmax((logits + beta (Q - V)) / T) in float64; the tokens are its top 20, as often as
    it says."""
    cases = [({}, BETA, "actor_q"), ({}, 0.0, "actor_q"), ({}, 0.0, "actor")]
    ((with_q, without, plain),) = ranks.run(1, decode, cases)
    for got, expected in zip(without[:4], plain[:4], strict=True):
        assert torch.equal(got, expected)  # beta 0 is the plain policy
    tokens, logprobs, chosen, states, weights, slow = with_q
    scores = exact(states, weights, slow, BETA) / TEMPERATURE
    expected = scores.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-5)
    ranked = scores.argsort(-1, descending=True)[..., :TOP_K]
    assert (ranked == tokens[..., None]).any(-1).all()

    allowed = torch.full_like(scores[0, 0], -torch.inf)
    allowed[ranked[0, 0]] = scores[0, 0, ranked[0, 0]]
    truth = allowed.softmax(0)
    assert distance(chosen, truth) < 0.05  # 0.03 is expected of 4096 draws
    assert distance(plain[2], truth) > 0.3
    for sizes in (dict(tensor=2), dict(tensor=2, sequence=True), dict(pipeline=2)):
        for ((*other, _),) in ranks.run(2, decode, [(sizes, BETA, "actor_q")]):
            assert (other[0] == tokens).all(1).float().mean() > 0.99  # rounding may change one
            same = (other[0] == tokens).all(1)
            torch.testing.assert_close(other[1][same], logprobs[same], rtol=0, atol=2e-5)
            assert distance(other[2], truth) < 0.05


def distance(tokens, truth):
    """Total variation between the frequencies of `tokens` and the distribution `truth`."""
    return (tokens.bincount(minlength=len(truth)) / len(tokens) - truth).abs().sum() / 2
