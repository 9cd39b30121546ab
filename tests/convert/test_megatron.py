"""megatron-core itself loads what we write and writes what we read, at one and two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megarlhf.convert import convert, torch_dist
from megarlhf.models.spec import VOCABULARY, Architecture
from tests.convert.models import CASES, assert_same_tensors, save, tensors

# Which axis of a weight tensor parallelism cuts; other tensors are whole on every rank.
CUT = {"word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0,
       "linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}  # fmt: skip


def sharded(values: dict[str, torch.Tensor | tuple[int, ...]], gated: bool, padded: int) -> dict:
    """megatron's sharded tensors for per-layer `values` (tensors to save, shapes to load), cut over all ranks."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    stacks: dict[str, list[tuple[int, ...]]] = {}
    for name in values:
        key, place = torch_dist.stored_as(name)
        stacks.setdefault(key, []).append(place)
    out = {}
    for name, value in values.items():
        key, place = torch_dist.stored_as(name)
        axis = next((axis for end, axis in CUT.items() if name.endswith(end)), None)
        loading = not isinstance(value, torch.Tensor)
        tensor = torch.empty(value) if loading else value
        if name in VOCABULARY:
            tensor = torch.cat([tensor, torch.full((padded - len(tensor), tensor.shape[1]), 7.0)])
        sizes = [1 + max(column) for column in zip(*stacks[key], strict=True)]  # layers; layers and experts
        prepended = [(axis, i, n) for axis, (i, n) in enumerate(zip(place, sizes, strict=True))]
        halves = 2 if gated and "linear_fc1" in name and axis == 0 else 1  # gate and up are cut separately
        for half in range(halves):
            offsets, part = list(prepended), tensor
            if axis is not None:
                part = tensor.chunk(size * halves, dim=axis)[half * size + rank]
                offsets.append((axis + len(prepended), half * size + rank, size * halves))
            out[name, half] = ShardedTensor.from_rank_offsets(
                key, part.clone(), *offsets, prepend_axis_num=len(prepended),
                replica_id=rank if axis is None else 0, allow_shape_mismatch=name in VOCABULARY,
            )  # fmt: skip
    return {f"{name}|{half}": tensor for (name, half), tensor in out.items()}


def load(directory: str, gated: bool, padded: int) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    shapes = Architecture.load(Path(directory)).shapes()
    return dist_checkpointing.load(sharded(shapes, gated, padded), directory)


def store(directory: str, weights: dict[str, torch.Tensor], gated: bool, padded: int) -> None:
    from megatron.core import dist_checkpointing

    state = {"model": sharded(weights, gated, padded), "step": 3}
    name = "decoder.final_layernorm.weight"
    moments = sharded({name: torch.zeros_like(weights[name])}, gated, padded)[f"{name}|0"]
    moments.key = f"optimizer.state.exp_avg.{name}"
    dist_checkpointing.save({**state, "optimizer": moments}, directory)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_megatron_loads_what_we_write(case, size, ranks, tmp_path):
    convert.hf2megatron(save(case, tmp_path / "source"), tmp_path / "ours")
    actor = tmp_path / "ours" / "actor"
    gated, vocabulary = case != "gpt2", CASES[case][1]["vocab_size"]
    loaded = ranks.run(size, load, str(actor), gated, 64)
    reader = torch_dist.Reader(actor, vocabulary)
    for name in reader.specs:
        axis = next((axis for end, axis in CUT.items() if name.endswith(end)), None)
        halves = [[answer[f"{name}|{half}"] for answer in loaded] for half in (0, 1) if f"{name}|{half}" in loaded[0]]
        whole = halves[0][0] if axis is None else torch.cat([part for half in halves for part in half], dim=axis)
        if name in VOCABULARY:
            assert whole.shape[0] == 64
            whole = whole[:vocabulary]
        assert torch.equal(whole, reader.read(name)), name


@pytest.mark.parametrize("size", [1, 2])
def test_we_export_what_megatron_writes(size, ranks, tmp_path):
    """Cut over ranks, vocabulary padded, optimizer state in the same files: the exported model is the original one."""
    source = save("llama", tmp_path / "source")
    convert.hf2megatron(source, tmp_path / "ours")
    actor = tmp_path / "ours" / "actor"
    reader = torch_dist.Reader(actor, 61)
    trained = tmp_path / "run" / "checkpoints" / "step_00000003" / "actor"
    trained.mkdir(parents=True)
    ranks.run(size, store, str(trained), {name: reader.read(name) for name in reader.specs}, True, 64)
    assert json.loads((trained / "metadata.json").read_text()) == torch_dist.FORMAT
    for name in ("architecture.yaml", "hf_config.json"):
        shutil.copy(actor / name, trained / name)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000003\n")
    assert any(key.startswith("optimizer") for key in torch_dist.Reader(trained, 61).stored)
    convert.megatron2hf(tmp_path / "run", tmp_path / "back")
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
