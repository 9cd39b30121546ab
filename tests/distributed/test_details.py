"""Documented details of PPO in models, loops and schedules (docs/ppo-details.md says where the others are)."""

import dataclasses
import math

import pytest
import torch

from megarlhf.algorithms.masked import last_valid
from megarlhf.algorithms.reward import final_scores
from megarlhf.batch import Experience, Rollout
from megarlhf.experience import rollout as rollouts
from megarlhf.models.build import build
from megarlhf.optim import OptimizerConfig, epsilon, learning_rate
from megarlhf.train.reward import NormalizationConfig, normalise
from tests.distributed.layouts import GPT2, LLAMA, examples, layout, share
from tests.scoring import row_ids
from tests.uncached import response_logits

PROMPT = 10


def rollout(**more):
    """Left-padded prompts of 10 columns and 14 response tokens, the last of which end early."""
    rows = examples(seed=4)
    mask = torch.ones(8, 14, dtype=torch.bool)
    mask[5:, 9:] = False
    segments = rows.segments.clone()
    segments[:, PROMPT:] = mask
    segments[:, PROMPT - 1] = 1
    return Rollout(tokens=rows.tokens, mask=mask, segments=segments, prompt_len=PROMPT,
                   **row_ids(8), logprobs=torch.zeros(8, 14), **more)  # fmt: skip


def heads(family, sizes):
    """What each head says of the rollout, and the start of its weights."""
    with layout(**sizes) as topology:
        engines = {
            role: build(role, family, topology, micro_batch_tokens=48, dtype="fp32", seed=1)
            for role in ("actor", "critic", "reward", "actor_critic")
        }
        mine = share(rollout(), topology)
        scalars = {}
        for role, engine in engines.items():
            for module in engine.modules:
                if hasattr(module, "value_head"):
                    scalars[role] = (module.value_head.weight.std().item(), module.value_head.bias.item())
                    generator = torch.Generator().manual_seed(2)  # a zero head says nothing
                    module.value_head.weight.data.copy_(torch.randn(1, family.hidden_size, generator=generator))
        results = {role: engine.forward(mine) for role, engine in engines.items()}
        cold = engines["actor"].forward(mine, temperature=0.5, with_entropy=True)
        # two engines of one role and other weights, so that their KL is not 0
        other = build("actor", family, topology, micro_batch_tokens=48, dtype="fp32", seed=2)
        signals = rollouts.evaluate(mine, actor=engines["actor"], reference=other, critic=engines["critic"],
                                    temperature=0.5, signals=frozenset({"kl", "values"}))  # fmt: skip
        results["exact"] = {"kl": signals.kl}
        logits = [
            response_logits(engine, mine)
            if topology.parallel.tensor == 1 else None for engine in (engines["actor"], other)
        ]  # fmt: skip
        target = NormalizationConfig(prompts=None, mean=0.5, std=2.0)
        normalise(engines["reward"], mine, target)
        gain, bias = normalise(engines["reward"], mine, target)
        scores = final_scores(engines["reward"].forward(mine)["scores"], last_valid(mine.mask))
        return scalars, results, cold, logits, (gain, bias), scores


@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_heads(ranks, family):
    ((scalars, one, cold, (logits, other_logits), again, scores),) = ranks.run(1, heads, family, {})
    mask = rollout().mask
    # R2: normal(0, 1 / sqrt(d + 1)), bias 0; P2: zero
    assert scalars["reward"][0] == pytest.approx(1 / math.sqrt(65), rel=0.3) and scalars["reward"][1] == 0
    assert scalars["critic"] == scalars["actor_critic"] == (0, 0)
    # G1: one number a token, (B, R); a score at a token is the value before the next one
    values, raw = one["critic"]["values"], one["reward"]["scores"]
    assert values.shape == raw.shape == (8, 14)
    torch.testing.assert_close(values[:, 1:][mask[:, 1:]], raw[:, :-1][mask[:, 1:]], rtol=1e-5, atol=1e-5)
    # a head on the actor's trunk sees what a critic with the same trunk sees
    torch.testing.assert_close(one["actor_critic"]["values"][mask], values[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one["actor_critic"]["logprobs"], one["actor"]["logprobs"], rtol=0, atol=1e-6)
    # P1: log-probs of logits / temperature, as entropies
    tokens = rollout().tokens[:, PROMPT:, None]
    for temperature, outputs in ((1.0, one["actor"]), (0.5, cold)):
        expected = (logits[..., :503].double() / temperature).log_softmax(-1)
        torch.testing.assert_close(
            outputs["logprobs"].double()[mask], expected.gather(2, tokens).squeeze(2)[mask], rtol=0, atol=1e-5
        )
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(cold["entropy"].double()[mask], entropy[mask], rtol=0, atol=1e-5)
    # P8: the exact KL at the temperature, over the real vocabulary
    other = (other_logits[..., :503].double() / 0.5).log_softmax(-1)
    kl = (expected.exp() * (expected - other)).sum(-1)
    assert kl[mask].min() > 1e-3
    torch.testing.assert_close(one["exact"]["kl"].double(), kl.where(mask, 0), rtol=1e-4, atol=1e-5)
    # R3: mean and deviation as asked for; a second time changes nothing
    assert scores.mean().item() == pytest.approx(0.5, abs=1e-5)
    assert scores.double().std(unbiased=False).item() == pytest.approx(2.0, rel=1e-5)
    assert again == (pytest.approx(1.0, abs=1e-4), pytest.approx(0.0, abs=1e-4))
    for sizes in (dict(tensor=2, sequence=True), dict(pipeline=2), {}):
        answers = ranks.run(2, heads, family, sizes)
        for role, outputs in one.items():
            for name, expected in outputs.items():
                got = [answer[1][role][name] for answer in answers]
                got = torch.cat(got) if not sizes else got[0]
                torch.testing.assert_close(got[mask], expected[mask], rtol=1e-4, atol=1e-5, msg=f"{sizes} {role}")


def parts(sizes, count, epochs):
    """The sequence ids (told apart by the first log-prob) of this rank's minibatches."""
    with layout(**sizes) as topology:
        mine = share(rollout(), topology)
        ids = mine.sequence_ids[:, None].expand(-1, 14).float().contiguous()
        experience = Experience(
            tokens=mine.tokens, mask=mine.mask, segments=mine.segments, prompt_len=PROMPT, logprobs=ids,
            advantages=torch.zeros_like(ids),
        )  # fmt: skip
        split = rollouts.minibatches(experience, epochs=epochs, count=count, seed=3, step=5, topology=topology)
        return [minibatch.logprobs[:, 0].int().tolist() for minibatch in split]


def test_minibatches_are_reshuffled_and_the_same_under_every_layout(ranks):
    """P7: every row once an epoch, another order in each, the same minibatches on one rank and on two."""
    (one,) = ranks.run(1, parts, {}, 2, 3)
    assert len(one) == 6
    epochs = [one[i] + one[i + 1] for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and list(range(8)) not in epochs
    two = ranks.run(2, parts, {}, 2, 3)
    assert [len(part) for rank in two for part in rank] == [2] * 12
    assert [sorted(left + right) for left, right in zip(*two, strict=True)] == [sorted(part) for part in one]


def test_schedules():
    """G5: linear to 0; P12: epsilon outside the bias correction."""
    linear = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(linear, step, 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = dataclasses.replace(linear, schedule="cosine", warmup_steps=0, min_lr=0.2)
    assert learning_rate(cosine, 3, 6) == pytest.approx(0.6) and learning_rate(cosine, 6, 6) == pytest.approx(0.2)
    tf = OptimizerConfig(name="tf_adam", betas=(0.9, 0.999), eps=1e-5)
    assert epsilon(tf, 0) == pytest.approx(1e-5 / math.sqrt(1e-3))
    assert epsilon(dataclasses.replace(tf, name="adam"), 0) == 1e-5
