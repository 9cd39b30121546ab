"""One engine, any layout: the same loss, gradient norm and weights after three steps; the same log-probs."""

import dataclasses

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.models.build import build
from tests.distributed.layouts import (
    ADAM,
    FALCON,
    GEMMA,
    GEMMA2,
    GPT2,
    LLAMA,
    NEOX,
    OLMO2,
    examples,
    full_weights,
    layout,
    share,
)

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX, "falcon": FALCON, "gemma": GEMMA,
            "gemma2": GEMMA2, "olmo2": OLMO2}  # fmt: skip


def train(cases):
    """[(family, micro-batch size, left-padded, ParallelConfig fields and recompute)] -> what three steps gave, on this
    rank."""
    results = []
    for family, micro, left_padded, sizes in cases:
        recompute = sizes.get("recompute", "none")
        with layout(**{name: value for name, value in sizes.items() if name != "recompute"}) as topology:
            engine = build(
                "actor", FAMILIES[family], topology, micro_batch_tokens=24 * micro, dtype="fp32", optimizer=ADAM,
                total_steps=3, seed=7, recompute=recompute,
            )  # fmt: skip
            steps = []
            for step in range(3):
                batch = share(examples(left_padded=left_padded, seed=step), topology)
                means = engine.step(batch, sft_loss)
                steps.append((means["loss"].value, means["grad_norm"].value))
            rows = share(examples(seed=9), topology)
            logprobs = engine.forward(rows)["logprobs"]
            few = rows.select(slice(3))  # neither whole micro-batches nor a multiple of the stages
            assert (engine.forward(few)["logprobs"] - logprobs[:3]).abs().max() < 2e-5
            sums = torch.stack([-(logprobs[:3] * few.mask).sum(), few.mask.sum()])
            torch.distributed.all_reduce(sums, group=topology.data_group)
            assert engine.evaluate(few, sft_loss)["loss"].value == pytest.approx((sums[0] / sums[1]).item(), rel=1e-5)
            results.append((steps, full_weights(engine), (topology.data_rank, logprobs)))
    return results


SINGLE = [(family, 8, padded, {}) for family in FAMILIES for padded in (True, False)]
CASES = {
    1: [("llama", 1, True, {}), ("gpt2", 2, True, {}), ("llama", 4, False, dict(distributed_optimizer=False))],
    2: [
        ("llama", 2, True, {}),
        ("gpt2", 4, False, dict(distributed_optimizer=False)),
        ("llama", 2, True, dict(overlap_grad_reduce=True, overlap_param_gather=True)),
        ("llama", 4, True, dict(tensor=2)),
        ("gpt2", 8, True, dict(tensor=2)),
        ("llama", 2, True, dict(tensor=2, sequence=True)),
        ("gpt2", 2, False, dict(tensor=2, sequence=True)),
        ("llama", 2, True, dict(pipeline=2)),
        ("gpt2", 1, True, dict(pipeline=2, distributed_optimizer=False)),
        ("llama", 2, False, dict(pipeline=2, virtual_pipeline=2)),
        ("gpt2", 4, True, dict(pipeline=2, virtual_pipeline=2)),
        ("neox", 2, True, dict(tensor=2, sequence=True, recompute="full")),
        ("falcon", 4, True, dict(tensor=2, sequence=True, recompute="selective")),
        ("gemma", 2, True, dict(tensor=2)),
        ("gemma", 2, True, dict(tensor=2, sequence=True)),
        ("gemma2", 2, True, dict(tensor=2, sequence=True, recompute="full")),
        ("gemma2", 4, True, dict(pipeline=2)),
        ("olmo2", 4, True, dict(tensor=2)),
        ("olmo2", 2, True, dict(tensor=2, sequence=True, recompute="selective")),
    ],
    4: [
        ("llama", 2, True, dict(tensor=2, pipeline=2, sequence=True)),
        ("gpt2", 4, True, dict(tensor=2, pipeline=2)),
        ("llama", 1, False, dict(tensor=2, sequence=True)),
        ("neox", 2, True, dict(tensor=2, pipeline=2)),
        ("gemma", 4, True, dict(tensor=2, pipeline=2, sequence=True)),
        ("gemma2", 2, True, dict(tensor=2, pipeline=2)),
        ("olmo2", 2, True, dict(tensor=4)),
    ],
}


@pytest.fixture(scope="module")
def truth(ranks):
    (results,) = ranks.run(1, train, SINGLE)
    return {(family, padded): result for (family, _, padded, _), result in zip(SINGLE, results, strict=True)}


@pytest.mark.parametrize("world_size", CASES)
def test_training_does_not_depend_on_the_layout(ranks, truth, world_size):
    answers = ranks.run(world_size, train, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        family, _, padded, _ = case
        steps, weights, (_, logprobs) = truth[family, padded]
        for answer in answers:  # every rank
            got_steps, got_weights, (data_rank, got_logprobs) = answer[number]
            torch.testing.assert_close(torch.tensor(got_steps), torch.tensor(steps), rtol=1e-5, atol=0, msg=str(case))
            assert got_weights.keys() == weights.keys(), case
            for name in weights:
                scale = weights[name].abs().max().item()
                difference = (got_weights[name] - weights[name]).abs().max().item()
                assert difference <= 1e-5 * scale, (case, name, difference / scale)
            rows = len(got_logprobs)
            expected = logprobs[data_rank * rows : (data_rank + 1) * rows]
            torch.testing.assert_close(got_logprobs, expected, rtol=0, atol=2e-5, msg=str(case))


def with_and_without_prompts(cases):
    """[(family, ParallelConfig fields and recompute)] -> what an update, with another engine's in between, made of the
    same tokens: once as prompt and response, of whose prompts the last layer leaves out what nobody reads, once without
    a prompt."""
    results = []
    for family, sizes in cases:
        recompute = sizes.get("recompute", "none")
        with layout(**{name: value for name, value in sizes.items() if name != "recompute"}) as topology:
            whole = share(examples(length=26, seed=3), topology)
            whole = dataclasses.replace(whole, mask=whole.mask & (torch.arange(1, 26) >= 12))
            split = dataclasses.replace(whole, mask=whole.mask[:, 11:], prompt_len=12)
            options = dict(micro_batch_tokens=96, dtype="fp32", optimizer=ADAM, total_steps=2, recompute=recompute)
            found = []
            for batch, alone in ((whole, True), (split, False)):
                engine, other = (build(role, FAMILIES[family], topology, **options) for role in ("actor", "critic"))
                steps = []
                for step in range(2):
                    steps.append(engine.step(batch, sft_loss)["grad_norm"].value)
                    if not alone:  # its gradients lie in the same memory
                        rows = share(examples(seed=step), topology)
                        other.step(rows, value_loss)
                logprobs = engine.forward(batch)["logprobs"]
                found.append((steps, logprobs[:, batch.mask.shape[1] - 14 :], full_weights(engine)))
            results.append(found)
    return results


def value_loss(outputs, rows):
    loss = (outputs["values"] - 1).square().mul(rows.mask).sum()
    return loss, rows.mask.sum(), {}


PROMPTS = {
    1: [
        ("llama", {}),
        ("gpt2", {}),
        ("neox", {}),
        ("falcon", {}),
        ("llama", dict(recompute="selective")),
        ("gemma2", {}),
        ("olmo2", {}),
    ],
    2: [
        ("llama", dict(tensor=2, sequence=True)),
        ("falcon", dict(tensor=2, sequence=True)),
        ("gpt2", dict(tensor=2)),
        ("neox", dict(pipeline=2)),
        ("llama", dict(pipeline=2, virtual_pipeline=2)),
        ("llama", dict(tensor=2, sequence=True, recompute="full")),
    ],
}


def same(whole, split, case) -> None:
    assert whole[0] == pytest.approx(split[0], rel=1e-5), case
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=2e-5, msg=str(case))
    for name, weight in whole[2].items():
        scale = weight.abs().max().item()
        assert (split[2][name] - weight).abs().max().item() <= 1e-5 * scale, (case, name)


@pytest.mark.parametrize("world_size", PROMPTS)
def test_what_nobody_reads_changes_nothing(ranks, world_size):
    for answer in ranks.run(world_size, with_and_without_prompts, PROMPTS[world_size]):
        for case, found in zip(PROMPTS[world_size], answer, strict=True):
            same(*found, case)
