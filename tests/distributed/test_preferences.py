"""`megarlhf dpo` and `kto` over ranks: one loss, one gradient and one z0 in every layout and any micro-batch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarlhf.algorithms.kto import KTOConfig, derangement, kto
from megarlhf.algorithms.preference import PreferenceConfig, preference
from megarlhf.batch import Sequences
from megarlhf.data.loader import Loader
from megarlhf.data.preferences import PreferenceLoader, Preferences
from megarlhf.data.ratings import RatedExamples, RatingLoader
from megarlhf.models.build import build
from megarlhf.optim import OptimizerConfig
from megarlhf.train import reference_cache
from megarlhf.train.offline import prepared
from tests import traffic
from tests.distributed.layouts import LLAMA, layout

LOSSES = {
    "dpo": preference(PreferenceConfig(nll_coef=0.3)),
    "ipo": preference(PreferenceConfig(loss="ipo", logprobs="mean", nll_coef=0.3, nll_normalization="sequence")),
    "orpo": preference(PreferenceConfig(loss="orpo")),
    "kto": kto(KTOConfig(beta=0.5, undesirable_weight=0.7)),
}
CASES = {
    1: [(1, {}), (3, {})],
    2: [
        (1, {}),
        (2, dict(tensor=2, sequence=True)),
        (2, dict(pipeline=2)),
        (1, dict(pipeline=2, virtual_pipeline=2)),
        (8, dict(distributed_optimizer=True)),
    ],
    4: [(1, dict(pipeline=4)), (2, dict(tensor=2, sequence=True, distributed_optimizer=True))],
}
KEYS = ("loss", "accuracy", "margins", "baseline", "grad_norm")
LENGTH, BATCH = 24, 8


def data(kind):
    """16 rows of very different lengths: pairs, or ratings of which 5 are good and 6 have the same prompt."""
    draw = np.random.RandomState(5)
    prompts = [draw.randint(0, 503, 1 + i % 5) for i in range(8)]
    order = (
        np.repeat(np.arange(8), 2)
        if kind is Preferences
        else np.array([0, 0, 1, 0, 2, 0, 0, 3, 4, 0, 5, 1, 1, 6, 2, 7])
    )
    rows = [(prompts[i], draw.randint(0, 503, draw.randint(1, LENGTH - 4))) for i in order]
    marks = [np.r_[np.zeros(len(p), bool), np.ones(len(r), bool)] for p, r in rows]
    flat = dict(
        tokens=np.concatenate([np.r_[p, r] for p, r in rows]).astype(np.int32), mask=np.concatenate(marks),
        offsets=np.cumsum([0, *(len(mark) for mark in marks)]),
    )  # fmt: skip
    if kind is Preferences:
        return Preferences(**flat, num_responses=2, ranks=np.tile([0, 1], 8), margins=np.zeros(16, np.float32))
    return RatedExamples(
        **flat, labels=draw.rand(16) < 0.3, prompts=order, starts=np.array([len(p) for p, _ in rows]), max_length=LENGTH
    )


def loader(name, topology=None):
    make, kind = (RatingLoader, RatedExamples) if name == "kto" else (PreferenceLoader, Preferences)
    ranks = {} if topology is None else dict(dp_rank=topology.data_rank, dp_size=topology.data_size)
    return make(data(kind), global_batch=BATCH, seed=3, **ranks)


def models(topology, micro, reference_seed=7, reference_micro=None):
    optimizer = OptimizerConfig(name="adam", lr=1e-2, eps=1.0, schedule="constant", clip_grad=0.0)
    actor = build("actor", LLAMA, topology, micro_batch_tokens=LENGTH * micro, dtype="fp32", optimizer=optimizer,
                  total_steps=2, seed=8)  # fmt: skip
    frozen = build("reference", LLAMA, topology, micro_batch_tokens=LENGTH * (reference_micro or micro), dtype="fp32",
                   seed=reference_seed)  # fmt: skip
    return {"actor": actor, "reference": frozen}


def learn(cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> {loss: (numbers of two updates and a held-out evaluation, the
    log-probs afterwards)} of each case. Every weight moves by its gradient."""
    results = []
    everything = Loader(data(Preferences), global_batch=16).batch(0)
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            found = {}
            for name, algorithm in LOSSES.items():
                engines, batches = models(topology, micro), loader(name, topology)
                numbers = []
                for step in range(2):
                    rows = prepared(algorithm, engines, batches.batch(step))
                    numbers.append(engines["actor"].step(rows, algorithm.loss))
                for batch in batches.epoch_batches():
                    numbers.append(engines["actor"].evaluate(prepared(algorithm, engines, batch), algorithm.loss))
                after = engines["actor"].forward(everything)["logprobs"]
                found[name] = ([{k: v.value for k, v in n.items() if k in KEYS} for n in numbers], after)
            results.append(found)
    return results


def test_the_loss_and_its_gradient_do_not_depend_on_the_layout(ranks):
    ((truth,),) = ranks.run(1, learn, [(16, {})])
    assert truth["kto"][0][1]["baseline"] > 0.01, "a z0 that is clamped would say nothing"
    for world_size, cases in CASES.items():
        for answer in ranks.run(world_size, learn, cases):
            for case, found in zip(cases, answer, strict=True):
                for name, (numbers, after) in found.items():
                    for got, expected in zip(numbers, truth[name][0], strict=True):
                        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), (world_size, case, name)
                    torch.testing.assert_close(after, truth[name][1], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the start


def start(cases):
    """[(micro-batch, of the reference, layout)] -> the metrics and the rows' log-ratios at step 0, for dpo and kto,
    with a reference that is the policy."""
    results = []
    for micro, reference_micro, sizes in cases:
        with layout(**sizes) as topology:
            engines = models(topology, micro, reference_seed=8, reference_micro=reference_micro)
            for name, algorithm in (("dpo", preference(PreferenceConfig())), ("kto", LOSSES["kto"])):
                rows = prepared(algorithm, engines, loader(name, topology).batch(0))
                own = engines["actor"].forward(rows)["logprobs"].double().sum(1)
                ratios = (own - rows.ref_logprobs).abs().max().item()
                numbers = engines["actor"].evaluate(rows, algorithm.loss)
                results.append((ratios, {key: value.value for key, value in numbers.items()}))
    return results


def test_the_start(ranks):
    """ln 2 and log-ratios of 0 in every row: exactly with the same cut into micro-batches."""
    for world_size, sizes in ((1, {}), (2, dict(tensor=2, sequence=True)), (2, dict(pipeline=2)), (2, {})):
        for answer in ranks.run(world_size, start, [(2, 2, sizes), (2, 8, sizes)]):
            for index, (ratios, numbers) in enumerate(answer):
                largest = 0.0 if index < 2 else 1e-4  # of sums of 24 log-probs of about -6, in float32
                assert ratios <= largest, (world_size, sizes, index)
                if index % 2 == 0:
                    assert numbers["loss"] == pytest.approx(math.log(2), abs=1e-6)
                    assert abs(numbers["margins"]) <= (0 if index < 2 else 1e-6)
                    assert index >= 2 or numbers["accuracy"] == 0.5


# ------------------------------------------------------------------------------------------------ z0


def baselines(sizes):
    """(z0 of the global minibatch, the mean of h over this rank's mismatched pairs)."""
    with layout(**sizes) as topology:
        engines = models(topology, 2)
        batch = loader("kto", topology).batch(0)
        z0 = prepared(LOSSES["kto"], engines, batch).baseline
        policy, reference = (engines[name].forward(batch.mismatched)["logprobs"] for name in ("actor", "reference"))
        return z0, (policy - reference).sum(1).mean().item()


def slow_baseline():
    """The mean over the global minibatch, pair by pair, each of them alone in its batch."""
    batches, total = loader("kto"), []
    rows, examples = batches.rows(0), batches.data
    with layout() as topology:
        engines = models(topology, 1)
        for place, other in enumerate(derangement(examples.prompts[rows])):
            tokens, _, _ = examples.row(rows[place])
            answer, _, _ = examples.row(rows[other])
            assert not np.array_equal(tokens[: examples.starts[rows[place]]], answer[: examples.starts[rows[other]]])
            prompt = tokens[: examples.starts[rows[place]]].tolist()
            response = answer[examples.starts[rows[other]] :].tolist()
            prompt = prompt[max(0, len(prompt) + len(response) - LENGTH) :]
            pair = Sequences(
                torch.tensor([prompt + response]), torch.tensor([[False] * (len(prompt) - 1) + [True] * len(response)])
            )
            logprobs = [
                engines[name].forward(pair)["logprobs"].double().sum().item() for name in ("actor", "reference")
            ]
            total.append(logprobs[0] - logprobs[1])
    return sum(total) / len(total)


def test_one_z0_over_the_global_minibatch(ranks):
    """Equal to a loop over its rows in every layout, and not what ranks would find alone: clamped each and averaged, or
    with a rotation of their own rows."""
    (expected,) = ranks.run(1, slow_baseline)
    assert expected > 0.01
    for world_size, sizes in (
        (1, {}),
        (2, {}),
        (4, {}),
        (2, dict(tensor=2)),
        (2, dict(pipeline=2)),
        (4, dict(tensor=2)),
    ):
        found = ranks.run(world_size, baselines, sizes)
        assert [z0 for z0, _ in found] == pytest.approx([expected] * world_size, rel=1e-5), sizes
    alone = [mean for _, mean in ranks.run(4, baselines, {})]
    clamped_before = sum(max(0.0, mean) for mean in alone) / 4
    assert min(alone) < 0 and clamped_before > expected + 1e-3, alone
    rotated = ranks.run(4, rotation)
    assert abs(sum(rotated) / 4 - expected) > 1e-3, "the rows of one rank alone"


def rotation():
    """The mean of h where each rank puts its own rows' responses behind the next of its own prompts."""
    with layout() as topology:
        engines, batches = models(topology, 2), loader("kto", topology)
        rows = batches.rows(0)
        mine = rows[batches._mine(rows)]
        pairs = [batches._mismatched(row, other) for row, other in zip(mine, np.roll(mine, 1), strict=True)]
        total = 0.0
        for tokens, mask, _ in pairs:
            pair = Sequences(torch.from_numpy(tokens).long()[None], torch.from_numpy(mask)[None, 1:])
            policy, reference = (
                engines[name].forward(pair)["logprobs"].sum().item() for name in ("actor", "reference")
            )
            total += policy - reference
        assert dist.get_world_size() == topology.data_size
        return total / len(pairs)


def one_class(label):
    """Two updates where this data-parallel rank has no response of one class, and where nobody has."""
    with layout() as topology:
        engines, batches = models(topology, 2), loader("kto", topology)
        labels = np.full(16, label)
        labels[batches.rows(0)[:3]] = not label  # the second batch has one class
        batches = RatingLoader(
            RatedExamples(**{**vars(batches.data), "labels": labels}), global_batch=BATCH, seed=3,
            dp_rank=topology.data_rank, dp_size=topology.data_size,
        )  # fmt: skip
        found = []
        for step in range(2):
            batch = batches.batch(step)
            numbers = engines["actor"].step(prepared(LOSSES["kto"], engines, batch), LOSSES["kto"].loss)
            found.append((int(batch.labels.sum()), numbers["loss"].value, numbers["grad_norm"].value))
        return found


def test_a_rank_without_one_class(ranks):
    for label in (True, False):
        ((expected),) = ranks.run(1, one_class, label)
        answers = ranks.run(4, one_class, label)
        numbers = [[good for good, *_ in answer] for answer in answers]
        assert any(first in (0, 2) for first, _ in numbers) and all(second == 2 * label for _, second in numbers)
        for answer in answers:
            for (_, loss, norm), (_, whole_loss, whole_norm) in zip(answer, expected, strict=True):
                assert (loss, norm) == pytest.approx((whole_loss, whole_norm), rel=1e-5)


# ------------------------------------------------------------------------------------------------ communication


def communicate(path, cases):
    """(what tests/traffic.py finds, number of calls) on rank 0, of making a cache and of a step of kto with it, in each
    layout."""
    found = []
    for number, sizes in enumerate(cases):
        with layout(**sizes) as topology, traffic.recorded() as log:
            engines, batches, algorithm = models(topology, 2), loader("kto", topology), LOSSES["kto"]
            parts = (part for step in range(2) for part in algorithm.referenced(batches.batch(step)))
            reference_cache.write_cache(Path(path) / str(number), engines["reference"], {"loss": "kto"}, parts)
            for step in range(2):
                rows = prepared(algorithm, engines, batches.batch(step))
                cached = {**engines, "reference": reference_cache.Cached.read(Path(path) / str(number), topology)}
                again = prepared(algorithm, cached, batches.batch(step))
                assert again.baseline == rows.baseline and torch.equal(again.ref_logprobs, rows.ref_logprobs)
                engines["actor"].step(rows, algorithm.loss)
        logs = traffic.gathered(log)
        found.append((traffic.violations(logs), min(map(len, logs))) if dist.get_rank() == 0 else None)
    return found


def test_the_order_of_calls_suits_nccl(ranks, tmp_path):
    """With the same cut, a cache gives the very numbers of the model."""
    cases = [dict(pipeline=2), dict(tensor=2, sequence=True)]
    for case, (lines, count) in zip(cases, ranks.run(4, communicate, str(tmp_path), cases)[0], strict=True):
        assert not lines and count > 50, (case, count, lines)
