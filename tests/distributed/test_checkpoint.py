"""Save under one layout, go on under another; never lose the last good checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from megarlhf import checkpoint
from megarlhf.algorithms.supervised import sft_loss
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, GPT2, LLAMA, examples, full_weights, layout, share

MODELS = {"llama": LLAMA, "gpt2": GPT2}


def run(directory, family, sizes, first, last, dtype="fp32", asynchronous=False, dropout=0.0):
    """Steps [first, last) of one run: from the checkpoint when first > 0, saving at the end. Returns losses,
    weights."""
    with layout(**sizes) as topology:
        engine = build(
            "actor", MODELS[family], topology, micro_batch_tokens=48, dtype=dtype, optimizer=ADAM, total_steps=10,
            seed=3, dropout=dropout,
        )  # fmt: skip
        checkpoints = Checkpoints(Path(directory), CheckpointConfig(asynchronous=asynchronous, keep=2))
        if first:
            checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=False)
            assert engine.steps == first
        losses = []
        for step in range(first, last):
            losses.append(engine.step(share(examples(seed=step), topology), sft_loss)["loss"].value)
            checkpoints.poll()
        checkpoints.save(last, {"actor": engine}, {"note": family}, MODELS[family].save)
        checkpoints.finish()
        weights = full_weights(engine)
        reread = build("actor", MODELS[family], topology, micro_batch_tokens=48, dtype=dtype)
        checkpoint.load(reread, checkpoints.latest() / "actor", weights_only=True)
        again = full_weights(reread)
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        return losses, weights


TWO = dict(tensor=2)
ACROSS = [  # written by, read by
    ("llama", TWO, dict(pipeline=2)),
    ("gpt2", dict(pipeline=2), TWO),  # tied embeddings, padded vocabulary
    ("llama", dict(pipeline=2, virtual_pipeline=2), dict()),  # distributed optimizer over two data-parallel ranks
    ("gpt2", dict(distributed_optimizer=False), dict(tensor=2, sequence=True, distributed_optimizer=False)),
]


@pytest.mark.parametrize(("family", "writer", "reader"), ACROSS)
def test_going_on_under_another_layout(ranks, tmp_path, family, writer, reader):
    straight = ranks.run(2, run, tmp_path / "straight", family, writer, 0, 8)[0]
    ranks.run(2, run, tmp_path / "run", family, writer, 0, 3)
    for losses, weights in ranks.run(2, run, tmp_path / "run", family, reader, 3, 8):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(straight[0][3:]), rtol=1e-5, atol=0)
        for name, value in weights.items():
            scale = straight[1][name].abs().max()
            assert (value - straight[1][name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize(
    ("family", "sizes", "more"),
    [
        ("llama", dict(tensor=2, sequence=True), dict(dtype="bf16")),
        ("llama", dict(), dict(dtype="bf16", asynchronous=True)),
        ("gpt2", dict(pipeline=2), dict(dtype="bf16", dropout=0.1)),
    ],
    ids=["tp2-bf16", "dp2-bf16-async", "gpt2-pp2-bf16-dropout"],
)
def test_same_layout_is_bit_identical(ranks, tmp_path, family, sizes, more):
    options = [more.get("dtype", "fp32"), more.get("asynchronous", False), more.get("dropout", 0.0)]
    straight = ranks.run(2, run, tmp_path / "straight", family, sizes, 0, 6, *options)[0]
    first = ranks.run(2, run, tmp_path / "run", family, sizes, 0, 3, *options)[0]
    second = ranks.run(2, run, tmp_path / "run", family, sizes, 3, 6, *options)[0]
    assert first[0] + second[0] == straight[0]
    assert all(torch.equal(second[1][name], straight[1][name]) for name in straight[1])


def save(directory, steps, keep=2):
    with layout() as topology:
        engine = build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM)
        checkpoints = Checkpoints(Path(directory), CheckpointConfig(keep=keep))
        for step in steps:
            checkpoints.save(step, {"actor": engine}, {}, LLAMA.save)
        return str(checkpoints.latest())


def load_from(directory):
    with layout() as topology:
        engine = build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32")
        try:
            checkpoint.load(engine, Path(directory), weights_only=True)
        except UserError as error:
            return str(error)
        return None


def optimizer_bytes(family, sizes):
    """(bytes of optimizer state that this rank would write, and would read; all its weights' elements, data-parallel
    ranks)"""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    with layout(**sizes) as topology:
        engine = build("actor", MODELS[family], topology, micro_batch_tokens=48, dtype="bf16", optimizer=ADAM)
        found = []
        for loading in (False, True):
            state = engine.sharded_state(loading=loading)["optimizer"]["param_state"]
            tensors = [x.data for x in nested_values(state) if isinstance(x, ShardedBase)]
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)  # no part of something larger
            found.append(sum(x.nbytes for x in tensors))
        elements = sum(p.numel() for module in engine.modules for p in module.parameters())
        return found, elements, topology.data_size


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {}), ("gpt2", dict(overlap_grad_reduce=True)), ("llama", dict(tensor=2))]
)
def test_a_save_and_a_load_have_each_parameters_state_once(ranks, family, sizes):
    """Data-parallel ranks share it about equally: none needs memory for all."""
    found = ranks.run(2, optimizer_bytes, family, sizes)
    for written_or_read in zip(*(numbers for numbers, *_ in found), strict=True):
        for number, (_, elements, data_size) in zip(written_or_read, found, strict=True):
            assert number < (0.7 if data_size == 2 else 1.01) * 12 * elements
        assert sum(written_or_read) == sum(12 * elements / data_size for _, elements, data_size in found)


LAYOUTS = {
    "llama": [dict(tensor=2), dict(pipeline=2), dict(), dict(pipeline=2, virtual_pipeline=2), dict(tensor=2)],
    "gpt2": [dict(overlap_grad_reduce=True), dict(pipeline=2), dict(tensor=2, sequence=True), dict()],
}


def handed_on(directory, family, layouts):
    """Train under the first layout and save; load and save under each further one. The names and number of tensors
    whose bits are not those of the first save, and the kinds of tensors that were compared."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    first, wrong, kinds = None, [], set()
    for number, sizes in enumerate(layouts):
        with layout(**sizes) as topology:
            engine = build(
                "actor", MODELS[family], topology, micro_batch_tokens=48, dtype="bf16", optimizer=ADAM, seed=number
            )
            checkpoints = Checkpoints(Path(directory), CheckpointConfig(keep=2))
            if number:
                checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=False)
            else:
                for seed in range(2):
                    engine.step(share(examples(seed=seed), topology), sft_loss)
            checkpoints.save(number + 1, {"actor": engine}, {}, MODELS[family].save)
            everything = load_plain_tensors(str(checkpoints.latest() / "actor"))
            tensors = {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}
        first = first or tensors
        for name, before in first.items():  # tensor parallelism decides on the padding of the vocabulary
            rows = slice(503 if len(before) > 500 else None)
            if not torch.equal(tensors[name][rows], before[rows]):
                wrong.append((number, name))
            kinds.add(name.split(".")[2] if name.startswith("optimizer.state") else "weight")
        wrong += [(number, name) for name in tensors.keys() ^ first.keys()]
    return wrong, kinds, len(first)


@pytest.mark.parametrize("family", LAYOUTS)
def test_weights_and_optimizer_keep_their_bits_in_every_layout(ranks, tmp_path, family):
    for wrong, kinds, count in ranks.run(2, handed_on, tmp_path, family, LAYOUTS[family]):
        assert not wrong
        assert kinds == {"weight", "param", "exp_avg", "exp_avg_sq"} and count > 30


def test_retention_and_damage(ranks, tmp_path):
    (latest,) = ranks.run(1, save, tmp_path, (1, 2, 3))
    steps = tmp_path / "checkpoints"
    assert sorted(path.name for path in steps.iterdir()) == ["latest", "step_00000002", "step_00000003"]
    assert Path(latest).name == "step_00000003"
    assert json.loads((steps / "step_00000003" / "state.json").read_text())["step"] == 3

    # A save that died half way: `latest` still names the last complete one, and the debris does not count.
    (steps / "step_00000004.partial" / "actor").mkdir(parents=True)
    assert Checkpoints(tmp_path, CheckpointConfig()).latest().name == "step_00000003"

    # A file cut short is said so in one line; the step before still loads.
    data = max((steps / "step_00000003" / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    (message,) = ranks.run(1, load_from, steps / "step_00000003" / "actor")
    assert message and "\n" not in message and "step_00000003" in message and "damaged; use another one" in message
    assert ranks.run(1, load_from, steps / "step_00000002" / "actor") == [None]

    (steps / "latest").write_text("step_00000009\n")
    with pytest.raises(UserError, match="not a complete checkpoint"):
        Checkpoints(tmp_path, CheckpointConfig()).latest()


def test_a_run_that_went_back_keeps_what_it_saves(ranks, tmp_path):
    """To a checkpoint before the newest ones, by hand: those it left behind count for nothing."""
    ranks.run(1, save, tmp_path, (4, 6))
    assert Path(ranks.run(1, save, tmp_path, (3,), 1)[0]).name == "step_00000003"
    ranks.run(1, save, tmp_path, (5, 7), 1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000007"]
