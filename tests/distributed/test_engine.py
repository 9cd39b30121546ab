"""One engine, any layout: the same loss, gradient norm and weights after three steps; the same log-probs."""

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, FALCON, GEMMA, GPT2, LLAMA, NEOX, examples, full_weights, layout, share

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX, "falcon": FALCON, "gemma": GEMMA}


def train(cases):
    """[(family, micro-batch size, left-padded, ParallelConfig fields and recompute)] -> what three steps gave, on this
    rank."""
    results = []
    for family, micro, left_padded, sizes in cases:
        recompute = sizes.get("recompute", "none")
        with layout(**{name: value for name, value in sizes.items() if name != "recompute"}) as topology:
            engine = build(
                "actor", FAMILIES[family], topology, micro_batch_size=micro, dtype="fp32", optimizer=ADAM,
                total_steps=3, seed=7, recompute=recompute,
            )  # fmt: skip
            steps = []
            for step in range(3):
                batch = share(examples(left_padded=left_padded, seed=step), topology)
                means = engine.step(batch, sft_loss)
                steps.append((means["loss"].value, means["grad_norm"].value))
            logprobs = engine.forward(share(examples(seed=9), topology))["logprobs"]
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
    ],
    4: [
        ("llama", 2, True, dict(tensor=2, pipeline=2, sequence=True)),
        ("gpt2", 4, True, dict(tensor=2, pipeline=2)),
        ("llama", 1, False, dict(tensor=2, sequence=True)),
        ("neox", 2, True, dict(tensor=2, pipeline=2)),
        ("gemma", 4, True, dict(tensor=2, pipeline=2, sequence=True)),
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
