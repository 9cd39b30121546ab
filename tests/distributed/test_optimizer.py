"""What an update does to the weights: AdamW as it is documented, and nothing where the gradients are not finite."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.algorithms.supervised import sft_loss
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from megarlhf.models.build import build
from megarlhf.optim import OptimizerConfig, epsilon, learning_rate
from tests.distributed.layouts import GPT2, LLAMA, examples, full_weights, layout, share

ADAMW = OptimizerConfig(lr=1e-2, schedule="linear", eps=1e-3, weight_decay=0.3, clip_grad=0.0)
UPDATES, SAVED = 4, 2


def slow_adamw(weight, moments, gradient, step):
    """One update in float64; `moments` (m, v) are changed in place. Vectors, which are norms and biases, do not
    decay."""
    (m, v), (b1, b2), rate = moments, ADAMW.betas, learning_rate(ADAMW, step, UPDATES)
    m.mul_(b1).add_((1 - b1) * gradient)
    v.mul_(b2).add_((1 - b2) * gradient**2)
    decayed = weight * (1 - rate * (ADAMW.weight_decay if weight.dim() > 1 else 0))
    return decayed - rate * (m / (1 - b1 ** (step + 1))) / ((v / (1 - b2 ** (step + 1))).sqrt() + ADAMW.eps)


def updates(directory, cases):
    """[(architecture, distributed optimizer)] -> by name: how far each weight is from the slow ones after updates with
    a save and a load by another engine among them."""
    results = []
    for number, (architecture, distributed) in enumerate(cases):
        with layout(distributed_optimizer=distributed) as topology:
            options = dict(micro_batch_tokens=192, dtype="fp32", optimizer=ADAMW, total_steps=UPDATES)
            engine = build("actor", architecture, topology, **options)
            slow = {name: p.detach().double() for name, p in engine.modules[0].named_parameters()}
            moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in slow.items()}
            checkpoints = Checkpoints(Path(directory) / str(number), CheckpointConfig())
            for step in range(UPDATES):
                if step == SAVED:
                    checkpoints.save(step, {"actor": engine}, {}, architecture.save)
                    engine = build("actor", architecture, topology, seed=1, **options)
                    checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=False)
                engine.step(examples(seed=step), sft_loss)
                for name, parameter in engine.modules[0].named_parameters():
                    slow[name] = slow_adamw(slow[name], moments[name], parameter.main_grad.double(), step)
            results.append(
                {name: (p - slow[name]).abs().max().item() for name, p in engine.modules[0].named_parameters()}
            )
    return results


def test_adamw_is_the_documented_one(ranks, tmp_path):
    """(That layouts do the same: test_engine.py, whose optimizer has a weight decay.)"""
    cases = [(GPT2, True), (GPT2, False), (LLAMA, True)]
    (results,) = ranks.run(1, updates, tmp_path, cases)
    for case, differences in zip(cases, results, strict=True):
        assert any("norm" in name for name in differences)
        for name, difference in differences.items():
            assert difference < 2e-6, (case[0].family, case[1], name, difference)


TF = OptimizerConfig(name="tf_adam", lr=1e-2, schedule="linear", eps=1e-4, betas=(0.9, 0.999), patience=3)
TOTAL, BAD = 6, (1, 3, 4)


def skipping(directory, sizes, bad, first=0, last=TOTAL, leave_out=False):
    """Updates [first, last) of a run, from its checkpoint where first > 0. Those in `bad` get a NaN into one gradient,
    of the last rank alone, or are left out. -> (each update's metrics, weights, error)."""
    with layout(**sizes) as topology:
        engine = build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=TF, total_steps=TOTAL)
        checkpoints = Checkpoints(directory, CheckpointConfig())
        if first:
            checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=False)
        if dist.get_rank() == dist.get_world_size() - 1:
            norm = next(p for name, p in engine.modules[-1].named_parameters() if "norm" in name)
            norm.register_hook(lambda gradient: gradient * (math.nan if engine.steps in bad else 1.0))
        numbers, error = [], None
        try:
            for step in range(first, last):
                if leave_out and step in bad:
                    engine.steps += 1
                    continue
                means = engine.step(share(examples(seed=step), topology), sft_loss)
                values = [means[name].value for name in ("loss", "lr", "grad_norm", "skipped")]
                numbers.append([*values, engine.optimizer.param_groups[0]["eps"]])
            checkpoints.save(last, {"actor": engine}, {}, LLAMA.save)
        except UserError as stopped:
            error = str(stopped)
        return numbers, full_weights(engine), error


def runs(directory, layouts):
    """For each layout: a run in which updates are skipped, one without these updates, and one that is resumed amid
    them."""
    results = []
    for number, sizes in enumerate(layouts):
        place = Path(directory) / str(number)
        skipped = skipping(place / "skipped", sizes, BAD)
        without = skipping(place / "without", sizes, BAD, leave_out=True)
        skipping(place / "resumed", sizes, (1, 2), 0, 3)
        results.append((skipped, without, skipping(place / "resumed", sizes, (3, 4), 3)))
    return results


LAYOUTS = {
    2: [dict(overlap_grad_reduce=True, overlap_param_gather=True), dict(distributed_optimizer=False)],
    4: [dict(tensor=2, pipeline=2, sequence=True), dict(pipeline=4)],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_gradients_that_are_not_finite(ranks, tmp_path, world_size):
    """One rank's NaN: such an update is left out on all, and three in a row stop the run on all."""
    for answer in ranks.run(world_size, runs, tmp_path, LAYOUTS[world_size]):  # every rank
        for (numbers, weights, error), (_, without, _), (resumed, _, stopped) in answer:
            assert error is None
            for step, (loss, rate, norm, skipped, eps) in enumerate(numbers):
                assert math.isfinite(loss) and rate == learning_rate(TF, step, TOTAL)  # the schedule goes on
                assert (math.isfinite(norm), skipped) == ((False, 1) if step in BAD else (True, 0))
                assert eps == epsilon(TF, step - sum(update < step for update in BAD))  # Adam's count does not
            # its moments too are those of a run without these updates
            assert all(torch.equal(weights[name], without[name]) for name in weights)
            assert not resumed
            assert stopped.startswith(
                "actor: 3 updates in a row, up to update 4, were skipped, because their gradients"
            )
