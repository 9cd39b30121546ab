"""Training the top layers alone, and a value head with a hidden layer: the same in any layout, the frozen weights
untouched, the head as a plain network computes it, and its checkpoints in any layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megarlhf import checkpoint
from megarlhf.algorithms.supervised import sft_loss
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.models.build import build
from tests.distributed.layouts import (
    ADAM,
    GPT2,
    LLAMA,
    examples,
    full_weights,
    layout,
    named_parameters,
    set_full_weights,
    share,
)

FAMILIES = {"llama": LLAMA, "gpt2": GPT2}
TOP = 2  # of 4
GENTLE = dataclasses.replace(ADAM, lr=2e-3)  # a network with a ReLU magnifies rounding
MODELS = {  # (role, family): options
    ("actor", "llama"): dict(trained_layers=TOP),
    ("actor", "gpt2"): dict(trained_layers=TOP),  # tied: the output layer is frozen, too
    ("reward", "llama"): dict(trained_layers=TOP),
    ("critic", "gpt2"): dict(trained_layers=TOP, mlp_values=True),
    ("critic", "llama"): dict(mlp_values=True),
    ("actor_critic", "llama"): dict(mlp_values=True),
    ("actor_q", "llama"): dict(trained_layers=1),
}
ALL = [*MODELS]
CASES = {
    1: [(model, {}) for model in ALL],
    2: [
        *((model, dict(tensor=2, sequence=True)) for model in ALL),
        *((model, dict(pipeline=2)) for model in ALL[:4]),
        *((model, {}) for model in ALL[:4]),
        (ALL[4], dict(tensor=2)),
    ],
    4: [(model, dict(tensor=2, pipeline=2, sequence=True)) for model in ALL] + [(ALL[0], dict(pipeline=4))],
}


def loss_of(outputs, rows):
    """Of every output that the model has."""
    total = torch.zeros(())
    if "logprobs" in outputs:
        total = total + sft_loss(outputs, rows)[0]
    for name in sorted({"values", "scores", "q1", "q2"} & outputs.keys()):
        total = total + (outputs[name] - 1).square().mul(rows.mask).sum()
    return total, rows.mask.sum(), {"loss": (total.detach(), rows.mask.sum())}


def start_of(engine, seed):
    """A head that says something: the output layer of a new critic's is zero."""
    found = {name: value for name, value in full_weights(engine).items() if name.startswith("value_head")}
    generator = torch.Generator().manual_seed(seed)
    changed = {name: torch.randn(value.shape, generator=generator) / 8 for name, value in found.items()}
    weights = full_weights(engine) | changed
    set_full_weights(engine, weights)
    if engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def train(cases, directory):
    """[((role, family), ParallelConfig fields)] -> [(weights before, after 3 updates; outputs; norms)]; saves each."""
    results = []
    for (role, family), sizes in cases:
        with layout(**sizes) as topology:
            engine = build(
                role, FAMILIES[family], topology, micro_batch_tokens=48, dtype="fp32", optimizer=GENTLE, total_steps=3,
                seed=7, **MODELS[role, family],
            )  # fmt: skip
            start_of(engine, 3)
            before = full_weights(engine)
            norms = [engine.step(share(examples(seed=step), topology), loss_of)["grad_norm"].value for step in range(3)]
            outputs = engine.forward(share(examples(seed=9), topology))
            names = [(name, parameter.requires_grad) for name, parameter, _ in named_parameters(engine)]
            results.append((before, full_weights(engine), (topology.data_rank, outputs), norms, names))
            path = directory / f"{role} {family} {len(sizes)}{topology.world_size}"
            Checkpoints(path, CheckpointConfig()).save(3, {role: engine}, {}, lambda path: None)
    return results


def recomputed(sizes):
    """{recompute: (weights after 3 updates, norms)}, with dropout, whose random numbers must be the same."""
    found = {}
    for recompute in ("none", "full"):
        with layout(**sizes) as topology:
            engine = build(
                "actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=GENTLE, total_steps=3, seed=7,
                trained_layers=TOP, dropout=0.1, recompute=recompute,
            )  # fmt: skip
            torch.manual_seed(11)
            norms = [engine.step(share(examples(seed=step), topology), loss_of)["grad_norm"].value for step in range(3)]
            found[recompute] = full_weights(engine), norms
    return found


def reload(directory, model):
    """The weights that one rank reads of what TP 2 x PP 2 or TP 2 saved."""
    (role, family) = model
    with layout() as topology:
        engine = build(
            role, FAMILIES[family], topology, micro_batch_tokens=48, dtype="fp32", optimizer=GENTLE, total_steps=3,
            seed=1, **MODELS[model],
        )  # fmt: skip
        checkpoint.load(engine, directory, weights_only=False)
        assert engine.steps == 3
        return full_weights(engine)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def truth(ranks, directory):
    (results,) = ranks.run(1, train, CASES[1], directory)
    return dict(zip(ALL, results, strict=True))


def close(left, right, what) -> None:
    scale = right.abs().max().item()
    assert (left - right).abs().max().item() <= 1e-5 * scale, what


def test_the_top_layers_move_and_nothing_else(truth):
    for model, (before, after, _, _, names) in truth.items():
        top = MODELS[model].get("trained_layers", 4)
        tied = model[1] == "gpt2"
        for name, trains in names:
            wanted = top == 4 or name.startswith(("decoder.final_layernorm", "value_head", "q_heads"))
            wanted |= name.startswith("decoder.layers.") and int(name.split(".")[2]) >= 4 - top
            wanted |= name == "output_layer.weight" and not tied
            assert trains == wanted, (model, name)
            if name in after:
                assert torch.equal(before[name], after[name]) != wanted, (model, name)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_layout_does_not_matter(ranks, truth, directory, world_size):
    for answer in ranks.run(world_size, train, CASES[world_size], directory):
        for (model, sizes), (_, weights, (rank, outputs), norms, _) in zip(CASES[world_size], answer, strict=True):
            _, expected, (_, whole), expected_norms, _ = truth[model]
            assert norms == pytest.approx(expected_norms, rel=1e-5), (model, sizes)
            assert weights.keys() == expected.keys(), (model, sizes)
            for name, value in weights.items():
                close(value, expected[name], (model, sizes, name))
            for name, value in outputs.items():
                rows = len(value)
                close(value, whole[name][rank * rows : (rank + 1) * rows], (model, sizes, name))
    # what tensor parallelism saved, one rank reads
    for model in [("critic", "llama"), ("actor", "gpt2")]:
        saved = directory / f"{model[0]} {model[1]} {3 if world_size == 4 else 2}{world_size}"
        (found,) = ranks.run(1, reload, saved / "checkpoints" / "step_00000003" / model[0], model)
        for name, value in truth[model][1].items():
            close(found[name], value, (model, name))


@pytest.mark.parametrize(
    "sizes",
    [{}, *(pytest.param(sizes, marks=pytest.mark.long) for sizes in (dict(pipeline=2), dict(tensor=2, sequence=True)))],
    ids=str,
)
def test_recomputed_layers_train_as_others(ranks, sizes):
    """The frozen ones below them are computed once, without a backward pass."""
    for found in ranks.run(2 if sizes else 1, recomputed, sizes):
        (usual, norms), (again, same) = found["none"], found["full"]
        assert norms == pytest.approx(same, rel=1e-6) and len(set(norms)) == 3
        for name, value in usual.items():
            close(again[name], value, name)


def values_and_states(sizes):
    """Values of a critic with a hidden layer, the states that its head reads, and the head's weights."""
    with layout(**sizes) as topology:
        options = dict(micro_batch_tokens=4096, dtype="fp32", seed=2, mlp_values=True)
        engine = build("actor_critic", LLAMA, topology, **options)
        assert (engine.forward(examples())["values"] == 0).all()  # at the start (detail P2)
        start_of(engine, 5)
        return engine.forward(examples(), with_states=True), full_weights(engine)


def test_the_hidden_layer_against_float64(ranks):
    for size, sizes in ((1, {}), (2, dict(tensor=2)), (2, dict(tensor=2, sequence=True))):
        for outputs, weights in ranks.run(size, values_and_states, sizes):
            head = {name.removeprefix("value_head."): w.double() for name, w in weights.items() if "value_head" in name}
            assert head["hidden_weight"].shape == (128, 64) and head["weight"].shape == (1, 128)
            units = (outputs["states"].double() @ head["hidden_weight"].T + head["hidden_bias"]).relu()
            expected = (units @ head["weight"].T + head["bias"]).squeeze(-1) * examples().mask
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(outputs["values"].double(), expected, rtol=0, atol=1e-5)
