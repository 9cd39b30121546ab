"""Mixtures of experts from Megatron-LM: rank files of expert-parallel ranks, and torch_dist."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch

from megarlhf.config import UserError
from megarlhf.convert import convert, torch_dist
from megarlhf.models.spec import Architecture
from tests.convert.models import assert_same_tensors, save, tensors

COMMON = dict(
    num_layers=3, hidden_size=32, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
    max_position_embeddings=64, position_embedding_type="rope", add_bias_linear=False, swiglu=True,
    normalization="RMSNorm", untie_embeddings_and_output_weights=True, vocab_size=61, moe_layer_freq=1,
    moe_router_score_function="softmax", moe_router_load_balancing_type="aux_loss",
)  # fmt: skip
ARGUMENTS = {
    "mixtral": dict(num_experts=3, moe_router_topk=2, ffn_hidden_size=48, kv_channels=16, norm_epsilon=1e-5,
                    rotary_base=1000000),
    "qwen2_moe": dict(num_experts=4, moe_router_topk=2, ffn_hidden_size=99, moe_ffn_hidden_size=24, kv_channels=8,
                      norm_epsilon=1e-6, moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=40,
                      moe_shared_expert_gate=True, add_qkv_bias=True),
    "qwen3_moe": dict(num_experts=4, moe_router_topk=3, ffn_hidden_size=99, moe_ffn_hidden_size=24, kv_channels=16,
                      norm_epsilon=1e-6, qk_layernorm=True),
}  # fmt: skip
SHARES = {"mixtral": 3, "qwen2_moe": 2, "qwen3_moe": 2}  # expert ranks
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight")


def namespace(case: str, **more) -> argparse.Namespace:
    return argparse.Namespace(**{**COMMON, **ARGUMENTS[case], **more})


@pytest.fixture(params=ARGUMENTS)
def case(request, tmp_path) -> str:
    """A converted model in tmp_path/source and tmp_path/ours."""
    convert.hf2megatron(save(request.param, tmp_path / "source"), tmp_path / "ours")
    return request.param


def shard(name: str, tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """What a tensor rank holds."""
    if name.endswith(ROWS[:2]):
        tensor = torch.cat([tensor, torch.zeros(-len(tensor) % size, *tensor.shape[1:])])
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    if name.endswith(ROWS):
        return tensor.chunk(size)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(size, 1)[rank]
    return tensor


def write_rank_files(directory: Path, case: str, actor: Path, tensor: int, pipeline: int) -> list[Path]:
    """As Megatron-LM's --ckpt-format torch: local numbers of layers and experts, dense weights in every expert rank's
    file."""
    reader, shares = torch_dist.Reader(actor, 61), SHARES[case]
    own = ARGUMENTS[case]["num_experts"] // shares
    depth, paths = 3 // pipeline, []
    given = namespace(
        case, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=shares, expert_tensor_parallel_size=tensor,
    )  # fmt: skip
    for rank in range(tensor):
        for stage in range(pipeline):
            for share in range(shares):
                state = {}
                for name in reader.specs:
                    parts = name.split(".")
                    if parts[1] == "layers":
                        if int(parts[2]) // depth != stage:
                            continue
                        parts[2] = str(int(parts[2]) % depth)
                        if ".mlp.experts." in name:
                            number = int(parts[6])
                            if number // own != share:
                                continue
                            local = number % own
                            grouped = case != "mixtral"
                            last = (
                                [parts[7], f"weight{local}"] if grouped else ["local_experts", str(local), *parts[7:]]
                            )
                            parts = [*parts[:5], *last]
                    elif (stage != 0) if parts[0] == "embedding" else (stage != pipeline - 1):
                        continue
                    state[".".join(parts)] = shard(name, reader.read(name), tensor, rank).clone()
                places = [f"{rank:02d}", *([f"{stage:03d}"] if pipeline > 1 else []), f"{share:03d}"]
                folder = directory / "_".join(["mp_rank", *places])
                folder.mkdir(parents=True)
                torch.save({"args": given, "checkpoint_version": 3.0, "model": state}, folder / "model_optim_rng.pt")
                paths.append(folder / "model_optim_rng.pt")
    return paths


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        (2, 3),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((1, 1), (2, 1), (1, 3))),
    ],
)
def test_rank_files_of_expert_ranks(case, tmp_path, tensor, pipeline):
    write_rank_files(tmp_path / "ranks", case, tmp_path / "ours" / "actor", tensor, pipeline)
    convert.COMMANDS["megatron2megatron"](tmp_path / "ranks", tmp_path / "again")
    same_model(case, tmp_path)


def same_model(case: str, tmp_path: Path) -> None:
    ours, again = (Architecture.load(tmp_path / name / "actor") for name in ("ours", "again"))
    assert again == ours and again.family == case
    readers = [torch_dist.Reader(tmp_path / name / "actor", 61) for name in ("ours", "again")]
    assert readers[0].specs.keys() == readers[1].specs.keys()
    assert all(torch.equal(*(reader.read(name) for reader in readers)) for name in readers[0].specs)
    convert.megatron2hf(tmp_path / "again", tmp_path / "back")
    assert_same_tensors(tensors(tmp_path / "source"), tensors(tmp_path / "back"))


def test_torch_dist(case, tmp_path):
    shutil.copytree(tmp_path / "ours" / "actor", tmp_path / "lm")
    torch.save({"args": namespace(case)}, tmp_path / "lm" / "common.pt")
    convert.COMMANDS["megatron2megatron"](tmp_path / "lm", tmp_path / "again")
    same_model(case, tmp_path)


REFUSED = {
    "moe_layer_freq": 2, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True, "moe_latent_size": 8, "expert_tensor_parallel_size": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused(key, tmp_path):
    convert.hf2megatron(save("mixtral", tmp_path / "source"), tmp_path / "ours")
    for path in write_rank_files(tmp_path / "ranks", "mixtral", tmp_path / "ours" / "actor", 2, 1):
        state = torch.load(path, weights_only=False)
        vars(state["args"])[key] = REFUSED[key]
        torch.save(state, path)
    with pytest.raises(UserError, match=key):
        convert.COMMANDS["megatron2megatron"](tmp_path / "ranks", tmp_path / "again")


def test_faults_of_expert_ranks(tmp_path):
    convert.hf2megatron(save("qwen3_moe", tmp_path / "source"), tmp_path / "ours")
    paths = write_rank_files(tmp_path / "ranks", "qwen3_moe", tmp_path / "ours" / "actor", 1, 1)
    state = torch.load(paths[1], weights_only=False)
    good = {**state, "model": dict(state["model"])}
    state["model"]["decoder.final_layernorm.weight"] = state["model"]["decoder.final_layernorm.weight"] + 1
    torch.save(state, paths[1])
    with pytest.raises(UserError, match="'decoder.final_layernorm.weight' differs between the expert ranks"):
        convert.COMMANDS["megatron2megatron"](tmp_path / "ranks", tmp_path / "again")
    del good["model"]["decoder.layers.1.mlp.experts.linear_fc2.weight1"]
    torch.save(good, paths[1])
    with pytest.raises(UserError, match=r"decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"):
        convert.COMMANDS["megatron2megatron"](tmp_path / "ranks", tmp_path / "again")
