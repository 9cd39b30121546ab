"""A model that trains a part of its weights: in any layout the trained ones move as in a model that trains all, the
others stay and have neither gradients nor optimizer state; and a resumed run equals a straight one."""

import dataclasses

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.checkpoint import CheckpointConfig, Checkpoints, load
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, GPT2, LLAMA, examples, full_weights, layout, share

FAMILIES = {"llama": LLAMA, "gpt2": GPT2}
UNCLIPPED = dataclasses.replace(ADAM, clip_grad=0.0)  # clipping depends on the gradients of all that train
PARTS = {
    "all": None,
    "top": lambda name: name.startswith(("decoder.layers.3.", "decoder.final")),  # the first stage trains nothing
    "bottom": lambda name: name.startswith("decoder.layers.0."),  # the last stage trains nothing
    "words": lambda name: name == "embedding.word_embeddings.weight",  # tied: on the first and on the last stage
}


def train(cases, directory=None):
    """[(family, part, ParallelConfig fields, recompute and dtype)] -> [weights before, after an update, after three].
    With `directory` a second engine, which loads what was saved after two updates, must make the same third one."""
    results = []
    for number, (family, part, sizes) in enumerate(cases):
        options = dict(micro_batch_tokens=48, optimizer=UNCLIPPED, total_steps=4, seed=7, trains=PARTS[part])
        options |= {name: sizes.get(name, default) for name, default in (("recompute", "none"), ("dtype", "fp32"))}
        with layout(**{name: value for name, value in sizes.items() if name not in options}) as topology:
            engine = build("actor", FAMILIES[family], topology, **options)
            weights = [full_weights(engine)]
            for step in range(3):
                if step == 2 and directory is not None:
                    saved = Checkpoints(directory / str(number), CheckpointConfig())
                    saved.save(2, {"actor": engine}, {}, lambda path: None)
                engine.step(share(examples(seed=step), topology), sft_loss)
                engine.sync_params()
                weights.append(full_weights(engine))
            check_state(engine)
            if directory is not None:
                again = build("actor", FAMILIES[family], topology, **options)
                load(again, saved.latest() / "actor", weights_only=False)
                again.step(share(examples(seed=2), topology), sft_loss)
                again.sync_params()
                for name, value in full_weights(again).items():
                    assert torch.equal(value, weights[3][name]), (family, part, sizes, name)
            results.append([weights[0], weights[1], weights[3]])
    return results


def check_state(engine):
    """Parameters that do not train have no gradients, and the optimizer holds no state of them."""
    parameters = [p for module in engine.modules for p in module.parameters()]
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in parameters if not p.requires_grad)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    inner = [part.optimizer for part in engine.optimizer.chained_optimizers]
    held = sum(p.numel() for part in inner for group in part.param_groups for p in group["params"])
    moments = [x for part in inner for state in part.state.values() for n, x in state.items() if n.startswith("exp")]
    assert held <= trained and sum(x.numel() for x in moments) <= 2 * trained


CASES = {
    1: [("llama", "bottom", dict(recompute="full")), ("gpt2", "words", {})],
    2: [
        ("llama", "top", dict(pipeline=2)),
        ("llama", "bottom", dict(pipeline=2, distributed_optimizer=False)),
        ("llama", "bottom", dict(pipeline=2, distributed_optimizer=False, dtype="bf16")),
        ("llama", "top", dict(pipeline=2, virtual_pipeline=2, recompute="full")),
        ("llama", "bottom", dict(tensor=2, sequence=True)),
        ("llama", "top", dict(overlap_grad_reduce=True, overlap_param_gather=True)),
        ("gpt2", "words", dict(pipeline=2)),
        ("gpt2", "top", dict(tensor=2, sequence=True, recompute="full")),
    ],
}


def close(left, right):
    return (left - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.fixture(scope="module")
def single(ranks):
    """{(family, part): its weights on one rank}"""
    cases = sorted({case[:2] for world in CASES.values() for case in world} | {(family, "all") for family in FAMILIES})
    (results,) = ranks.run(1, train, [(*case, {}) for case in cases])
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("world_size", CASES)
def test_only_a_part_trains(ranks, single, tmp_path, world_size):
    answers = ranks.run(world_size, train, CASES[world_size], tmp_path)
    for number, case in enumerate(CASES[world_size]):
        family, part, sizes = case
        for answer in answers:  # every rank
            before, after, last = answer[number]
            for name, value in before.items():
                if not PARTS[part](name):
                    assert torch.equal(last[name], value), (case, name)
                elif sizes.get("dtype") != "bf16":
                    assert not torch.equal(after[name], value), (case, name)
                    assert close(after[name], single[family, "all"][1][name]), (case, name)
                    assert close(last[name], single[family, part][2][name]), (case, name)
