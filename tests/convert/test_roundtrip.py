"""Hugging Face -> ours -> Hugging Face: the same bits, a directory that transformers loads, the same logits."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarlhf.convert import certificate, convert, huggingface, registry, torch_dist
from megarlhf.convert.__main__ import main
from megarlhf.convert.storage import Spec
from megarlhf.convert.workers import Workers
from megarlhf.models.spec import Architecture
from tests.convert.models import CASES, assert_same_tensors, save, tensors
from tests.ranks import ROOT

TOKENS = torch.arange(24).view(2, 12)


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, dtype, tmp_path):
    source = save(case, tmp_path / "source", dtype)
    convert.hf2megatron(source, tmp_path / "ours")
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
    assert torch.equal(logits(source), logits(tmp_path / "back"))
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    assert after["torch_dtype"] == before["dtype"]  # the old name of the key, which all versions read
    for key in before.keys() - {"dtype", "n_inner"}:
        assert after[key] == before[key], key
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    # transformers takes Qwen 2's own class for whatever tokenizer lies beside its config.json
    expected = [] if case.startswith("qwen2") and case != "qwen2_moe" else [5]
    for directory in (source, tmp_path / "back", tmp_path / "ours" / "tokenizer"):
        assert AutoTokenizer.from_pretrained(directory)("w5")["input_ids"] == expected


@pytest.mark.parametrize("case", CASES)
def test_without_the_sources_own_config(case, tmp_path):
    source = save(case, tmp_path / "source")
    convert.hf2megatron(source, tmp_path / "ours")
    for file in ("actor/hf_config.json", "checksums.json"):  # which would miss it
        (tmp_path / "ours" / file).unlink()
    convert.megatron2hf(tmp_path / "ours" / "actor", tmp_path / "back")
    assert torch.equal(logits(source), logits(tmp_path / "back"))


def test_dtype_option_rounds_once(tmp_path):
    source = save("llama", tmp_path / "source")
    convert.hf2megatron(source, tmp_path / "ours", convert.Options("bf16"))
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back", convert.Options("fp32"))
    convert.megatron2hf(tmp_path / "ours", tmp_path / "half")
    for directory, dtype in (("back", torch.float32), ("half", torch.bfloat16)):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / directory).dtype == dtype
    expected = {name: tensor.bfloat16().float() for name, tensor in tensors(source).items()}
    assert_same_tensors(expected, tensors(tmp_path / "back"))


def test_sharded_source(tmp_path):
    source = save("llama", tmp_path / "source", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    convert.hf2megatron(source, tmp_path / "ours")
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))


def test_sharded_target_loads_in_transformers(tmp_path):
    source = save("llama", tmp_path / "source")
    reader = huggingface.Reader(source)
    (tmp_path / "back").mkdir()
    writer = huggingface.Writer(tmp_path / "back", reader.specs, limit=20_000)
    writer.create()
    for name in reversed(list(reader.specs)):  # any order will do
        writer.write(name, reader.read(name))
    writer.finish([writer.close()])
    assert len(list((tmp_path / "back").glob("model-0000?-of-0000?.safetensors"))) > 2
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == reader.specs.keys()
    (tmp_path / "back" / "config.json").write_bytes((source / "config.json").read_bytes())
    assert torch.equal(logits(source), logits(tmp_path / "back"))


def test_mixed_dtypes_stay_aligned(tmp_path):
    values = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2, 2), "c": torch.ones(1, dtype=torch.float64)}
    specs = {name: Spec(tuple(value.shape), value.dtype) for name, value in values.items()}
    writer = huggingface.Writer(tmp_path, specs)
    writer.create()
    for name, value in values.items():
        writer.write(name, value)
    writer.finish([writer.close()])
    assert_same_tensors(values, load_file(tmp_path / "model.safetensors"))  # the library's own reader
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % value.itemsize == 0 for name, value in values.items())


def test_old_files(tmp_path):
    """GPT-2 on the hub: names without prefix, masks as buffers; others store the tied output layer."""
    source = save("gpt2", tmp_path / "source")
    weights = tensors(source)
    old = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old, source / "model.safetensors")
    convert.hf2megatron(source, tmp_path / "ours")
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(weights, tensors(tmp_path / "back"))

    save_file({**weights, "lm_head.weight": weights["transformer.wte.weight"].clone()}, source / "model.safetensors")
    convert.hf2megatron(source, tmp_path / "again")


def test_order_of_rows(tmp_path):
    """Megatron's order, spelt out: by group, its query heads, its key, its value; gate before up."""
    convert.hf2megatron(save("llama", tmp_path / "llama"), tmp_path / "ours")
    ours, theirs = torch_dist.Reader(tmp_path / "ours" / "actor", 61), tensors(tmp_path / "llama")
    q, k, v = (theirs[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    rows = [q[0:8], q[8:16], k[0:8], v[0:8], q[16:24], q[24:32], k[8:16], v[8:16]]  # 4 heads of size 8 in 2 groups
    assert torch.equal(ours.read("decoder.layers.1.self_attention.linear_qkv.weight"), torch.cat(rows))
    gate, up = (theirs[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(ours.read("decoder.layers.1.mlp.linear_fc1.weight"), torch.cat([gate, up]))

    convert.hf2megatron(save("gpt2", tmp_path / "gpt2"), tmp_path / "our-gpt2")
    ours, theirs = torch_dist.Reader(tmp_path / "our-gpt2" / "actor", 61), tensors(tmp_path / "gpt2")
    q, k, v = theirs["transformer.h.1.attn.c_attn.weight"].t().split(32)
    rows = [part[8 * head : 8 * head + 8] for head in range(4) for part in (q, k, v)]
    assert torch.equal(ours.read("decoder.layers.1.self_attention.linear_qkv.weight"), torch.cat(rows))


def test_old_and_new_configs_mean_the_same():
    base = dict(model_type="llama", hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
                vocab_size=61)  # fmt: skip
    scaling = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    four = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "float32"}
    five = {**base, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "dtype": "float32"}
    architecture = registry.read_config(four, "four")
    assert architecture == registry.read_config(five, "five")
    assert architecture.rotary_base == 5e5 and architecture.rope_scaling.factor == 4.0
    written = registry.write_config(architecture, "ours")
    for lost in ("rope_parameters", "rope_scaling"):  # a version that reads only the other
        kept = {key: value for key, value in written.items() if key != lost}
        assert registry.read_config(kept, "ours") == architecture
    assert registry.read_config(base, "llama 1") == registry.read_config({**base, "rope_scaling": None}, "llama 2")


@pytest.mark.parametrize("case", CASES)
def test_shapes_agree_with_parameter_count(case):
    kind, fields = CASES[case]
    architecture = registry.read_config(kind(**fields).to_dict() | {"model_type": kind.model_type}, case)
    for shapes in (registry.their_shapes(architecture), registry.our_shapes(architecture)):
        assert sum(Spec(shape, torch.int8).numel for shape in shapes.values()) == architecture.num_parameters


def test_two_largest_tensors_in_memory(tmp_path, monkeypatch):
    """When a step reads, earlier ones whose hashes are not done yet leave room for it."""
    source = save("llama", tmp_path / "source")
    architecture = registry.read_config(huggingface.read_json(source / "config.json"), "source")
    steps = registry.steps_to_ours(architecture)
    sizes = {step.inputs[0]: step.inputs for step in steps}
    alive: list[weakref.ref] = []
    held = []

    class Watching(huggingface.Reader):
        def read_into(self, name, tensor):
            if name in sizes:
                kept = [tensor.nbytes for tensor in (ref() for ref in alive) if tensor is not None]
                held.append(sum(kept) + sum(self.specs[other].nbytes for other in sizes[name]))
            alive.append(weakref.ref(tensor))
            super().read_into(name, tensor)

    def slow(tensor):
        time.sleep(0.02)
        return sha256(tensor)

    sha256 = certificate.sha256
    monkeypatch.setattr(certificate, "sha256", slow)
    reader = Watching(source)
    specs = convert.plan(reader.specs, registry.their_shapes(architecture), steps, None, "source")
    convert.transfer(reader, torch_dist.Writer(tmp_path, specs), specs, steps, "test", Workers())
    room = sum(sorted(spec.nbytes for spec in [*reader.specs.values(), *specs.values()])[-2:])
    assert max(held) <= room and len(held) == len(steps)
    assert sum(sum(reader.specs[name].nbytes for name in step.inputs) for step in steps) > 4 * room


def test_command_line_needs_no_megatron_and_no_process_group(tmp_path):
    source = save("llama", tmp_path / "source")
    program = f"""
import sys
from megarlhf.convert.__main__ import main
assert "torch" not in sys.modules  # --help is quick
assert main(["hf2megatron", {str(source)!r}, {str(tmp_path / "ours")!r}, "--dtype", "bf16"]) == 0
assert main(["megatron2hf", {str(tmp_path / "ours")!r}, {str(tmp_path / "back")!r}]) == 0
assert not [name for name in sys.modules if name.startswith("megatron")]
assert not __import__("torch").distributed.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("tensors") == 2


def test_inspect(tmp_path, capsys):
    source = save("gpt2", tmp_path / "source")
    convert.hf2megatron(source, tmp_path / "ours")
    assert main(["inspect", str(source)]) == 0
    theirs = capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "ours")]) == 0
    ours = capsys.readouterr().out
    assert "type 'gpt2'" in theirs and "tokenizer.json" in theirs and "num_layers: 3" in theirs
    assert "transformer.h.2.attn.c_attn.weight" in theirs and "[32, 96]" in theirs
    assert "decoder.layers.self_attention.linear_qkv.weight" in ours and "[3, 96, 32]" in ours
    total = Architecture.load(tmp_path / "ours" / "actor").num_parameters
    for text in (theirs, ours):
        assert f"{total:,} numbers, {4 * total:,} bytes" in text


@pytest.mark.shared
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_mha", "tiny_gpt2"])
def test_files_of_transformers_4(name, shared, tmp_path):
    source = shared / "fixtures" / "hf" / name
    convert.hf2megatron(source, tmp_path / "ours")
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "expected.npz"):
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    expected = np.load(source / "expected.npz")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        got = model(torch.from_numpy(expected["input_ids"])).logits
    torch.testing.assert_close(got, torch.from_numpy(expected["logits"]), atol=1e-4, rtol=0)


@pytest.mark.shared
def test_weights_that_megatron_lm_wrote(shared, tmp_path):
    """Megatron-LM's own file of the same model, at TP2 x PP2 with a padded vocabulary, has what our tables make."""
    convert.hf2megatron(shared / "fixtures" / "hf" / "tiny_llama", tmp_path / "ours")
    ours = torch_dist.Reader(tmp_path / "ours" / "actor", 500)
    theirs = torch_dist.Reader(shared / "fixtures" / "megatron" / "tiny_llama_torchdist_tp2pp2" / "iter_0000010", 500)
    assert ours.specs == theirs.specs
    assert ours.specs.keys() == Architecture.load(tmp_path / "ours" / "actor").shapes().keys()
    for name in ours.specs:
        assert torch.equal(ours.read(name), theirs.read(name)), name
