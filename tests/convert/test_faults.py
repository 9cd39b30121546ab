"""What is wrong with a source or a target is said in one line, and nothing is left under the final name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from megarlhf.config import UserError
from megarlhf.convert import convert, registry
from megarlhf.convert.__main__ import main
from megarlhf.convert.storage import completed
from tests.convert.models import CASES, assert_same_tensors, save, tensors


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    for case in ("llama", "llama-3.1-tied", "gpt2", "mistral"):
        save(case, root / case)
    save("llama", root / "sharded", max_shard_size="20KB")
    convert.hf2megatron(root / "llama", root / "ours")
    return root


def refused(capsys, command: str, source: Path, target: Path, *words: str, role: str | None = None) -> None:
    """`command` ends with status 2 and one line that has all of `words`; no target appears."""
    before = set(target.parent.iterdir())
    assert main([command, str(source), str(target), *(["--role", role] if role else [])]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error
    assert set(target.parent.iterdir()) == before


def reweigh(source: Path, change) -> None:
    weights = tensors(source)
    change(weights)
    save_file(weights, source / "model.safetensors")


def reconfigure(file: Path, **changes) -> None:
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def redescribe(model: Path, **changes) -> None:
    file = model / "architecture.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def rehead(file: Path, change) -> None:
    """Change the text of a safetensors header, keeping its length."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length].decode())
    assert len(header) == length
    file.write_bytes(data[:8] + header.encode() + data[8 + length :])


def truncate(file: Path, size: int) -> None:
    os.truncate(file, file.stat().st_size - size)


Q = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"
HF_FAULTS = {
    "missing tensor": ("llama", lambda d: reweigh(d, lambda w: w.pop(Q)), [Q, "[32, 32]", "missing"]),
    "extra tensor": ("llama", lambda d: reweigh(d, lambda w: w.update(score=torch.ones(2))), ["'score' [2]"]),
    "wrong shape": (
        "llama",
        lambda d: reweigh(d, lambda w: w.update({Q: torch.ones(32, 16)})),
        [Q, "[32, 16]", "expected [32, 32]"],
    ),
    "wrong head count": (
        "llama",
        lambda d: reconfigure(d / "config.json", num_key_value_heads=4),
        ["model.layers.0.self_attn.k_proj.weight", "[16, 32]", "expected [32, 32]"],
    ),
    "truncated": ("llama", lambda d: truncate(d / WEIGHTS, 100), [WEIGHTS, "ends within tensor", "bytes of"]),
    "truncated header": ("llama", lambda d: os.truncate(d / WEIGHTS, 200), [WEIGHTS, "not a complete safetensors"]),
    "empty file": ("llama", lambda d: os.truncate(d / WEIGHTS, 0), [WEIGHTS, "not a complete safetensors"]),
    "duplicate key": (
        "llama",
        lambda d: rehead(d / WEIGHTS, lambda text: text.replace("layers.2.mlp.up", "layers.1.mlp.up")),
        ["model.layers.1.mlp.up_proj.weight", "twice"],
    ),
    "size against shape": (
        "llama",
        lambda d: rehead(d / WEIGHTS, lambda text: text.replace("[61,32]", "[60,32]", 1)),
        ["bytes, its shape needs"],
    ),
    "unknown dtype": ("llama", lambda d: rehead(d / WEIGHTS, lambda t: t.replace("F32", "F31", 1)), [WEIGHTS, "F31"]),
    "quantised": (
        "llama",
        lambda d: reweigh(d, lambda w: w.update({Q: w[Q].to(torch.int8)})),
        [Q, "torch.int8", "quantised"],
    ),
    "mixed dtypes": (
        "llama",
        lambda d: reweigh(d, lambda w: w.update({Q: w[Q].bfloat16()})),
        [Q, "different dtypes", "--dtype"],
    ),
    "mixed layers": (
        "gpt2",
        lambda d: reweigh(d, lambda w: w.update({"transformer.h.1.ln_1.bias": torch.ones(32, dtype=torch.bfloat16)})),
        ["linear_qkv.layer_norm_bias", "different dtypes", "--dtype"],
    ),
    "tied but different": (
        "llama-3.1-tied",
        lambda d: reweigh(d, lambda w: w.update({"lm_head.weight": torch.ones(61, 32)})),
        ["lm_head.weight", "tie_word_embeddings"],
    ),
    "missing shard": (
        "sharded",
        lambda d: sorted(d.glob("model-*"))[1].unlink(),
        ["model-00002-of-", "restore the missing shard"],
    ),
    "tensor not in its shard": (
        "sharded",
        lambda d: shutil.copy(sorted(d.glob("model-*"))[0], sorted(d.glob("model-*"))[1]),
        ["also stands in model-00001-of-"],
    ),
    "index out of the directory": (
        "sharded",
        lambda d: reconfigure(d / "model.safetensors.index.json", weight_map={"a": "../a.safetensors"}),
        ["weight_map"],
    ),
    "no torch.save": (
        "llama",
        lambda d: (d / WEIGHTS).rename(d / "pytorch_model.bin"),
        ["pytorch_model.bin", "damaged"],
    ),
    "evil .bin": (
        "llama",
        lambda d: ((d / WEIGHTS).unlink(), torch.save({"a": Evil()}, d / "pytorch_model.bin")),
        ["pytorch_model.bin", "posix.system"],
    ),
    "no weights": ("llama", lambda d: (d / WEIGHTS).unlink(), ["holds neither", WEIGHTS]),
    "no config": ("llama", lambda d: (d / "config.json").unlink(), ["config.json", "No such file"]),
    "broken config": ("llama", lambda d: truncate(d / "config.json", 9), ["config.json", "not valid JSON"]),
    "config key": ("llama", lambda d: reconfigure(d / "config.json", hidden_size="absent"), ["'hidden_size'"]),
    "config type": ("llama", lambda d: reconfigure(d / "config.json", vocab_size="61"), ["vocab_size", "whole number"]),
    "config null": ("gpt2", lambda d: reconfigure(d / "config.json", n_embd=None), ["config.json", "NoneType"]),
    "config value": ("llama", lambda d: reconfigure(d / "config.json", num_key_value_heads=3), ["num_query_groups"]),
    "model_type": (
        "llama",
        lambda d: reconfigure(d / "config.json", model_type="lama"),
        ["'lama'", "known: falcon, gemma, gemma2"],
    ),
    "activation": ("llama", lambda d: reconfigure(d / "config.json", hidden_act="relu"), ["hidden_act", "relu"]),
    "bias": ("llama", lambda d: reconfigure(d / "config.json", mlp_bias=True), ["attention_bias", "mlp_bias"]),
    "rope type": (
        "llama",
        lambda d: reconfigure(d / "config.json", rope_scaling={"type": "proportional"}, rope_parameters="absent"),
        ["rope_scaling", "proportional", "llama3"],
    ),
    "rope field": (
        "llama",
        lambda d: reconfigure(d / "config.json", rope_parameters={"rope_type": "llama3", "factor": 2.0}),
        ["rope_parameters", "low_freq_factor"],
    ),
    "partial rope": (
        "llama",
        lambda d: reconfigure(d / "config.json", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ["partial_rotary_factor", "0.5"],
    ),
    "gpt2 scale": (
        "gpt2",
        lambda d: reconfigure(d / "config.json", scale_attn_by_inverse_layer_idx=True),
        ["scale_attn_by_inverse_layer_idx"],
    ),
    "tokenizer": (
        "llama",
        lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace(": 60", ": 61")),
        ["ids up to 61", "model.embed_tokens.weight", "61 rows"],
    ),
    "gpt2 cross": ("gpt2", lambda d: reconfigure(d / "config.json", add_cross_attention=True), ["add_cross_attention"]),
    "gpt2 activation": (
        "gpt2",
        lambda d: reconfigure(d / "config.json", activation_function="x"),
        ["activation_function", "'x'"],
    ),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_hugging_face_source(fault, originals, tmp_path, capsys):
    case, change, words = HF_FAULTS[fault]
    source = shutil.copytree(originals / case, tmp_path / "source")
    change(source)
    refused(capsys, "hf2megatron", source, tmp_path / "target", *words)


REFUSED = {  # what a family knows and we do not
    "alibi": ("falcon-7b", dict(alibi=True), "alibi: True"),
    "falcon: contradiction": ("falcon-new", dict(parallel_attn=False), "parallel_attn: false contradicts"),
    "falcon: two norms": ("falcon-7b", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn: 2 needs"),
    "falcon: activation": ("falcon-7b", dict(activation="relu"), "activation: 'relu'"),
    "neox: bias": ("gpt_neox", dict(attention_bias=False), "attention_bias: False"),
    "neox: rope": (
        "gpt_neox",
        dict(rope_parameters={"rope_type": "proportional", "factor": 2.0}),
        "rope_type 'proportional'",
    ),
    "gemma: both directions": ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention: True"),
    "gemma: activation": ("gemma", dict(hidden_activation="silu"), "hidden_activation: 'silu'"),
    "qwen3: window of a layer": ("qwen3", dict(layer_types=["sliding_attention"] * 3), "layer_types: sliding"),
    "qwen3_moe: window": (
        "qwen3_moe",
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=0),
        "use_sliding_window: True",
    ),
    "qwen2: chunks": ("qwen2", dict(layer_types=["chunked_attention"] * 3), "layer_types: chunked_attention"),
    "yarn: mscale": (
        "qwen2-yarn",
        dict(rope_parameters={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}),
        "rope_type yarn needs exactly factor and may have",
    ),
    "gemma2: both directions": ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention: True"),
    "gemma3: cap of scores": ("gemma3", dict(attn_logit_softcapping=5.0), "attn_logit_softcapping: 5.0"),
    "gemma3: no window": ("gemma3", dict(sliding_window=None), "sliding_window: null"),
    "gemma3: local rope": (
        "gemma3",
        dict(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        "sliding_attention: only the default kind",
    ),
    "phi3: linear": ("phi3", dict(rope_parameters={"rope_type": "linear", "factor": 2.0}), "linear is no Phi-3's"),
    "phi3: frequencies": (
        "phi4-mini",
        dict(rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        "short_factor: must have",
    ),
    "mlp bias alone": ("granite", dict(mlp_bias=True), "mlp_bias: True while attention_bias is False"),
    "jamba": ("llama", dict(model_type="jamba"), "'jamba' is not supported: layers with a state space"),
    "vision": ("gemma3", dict(model_type="gemma3"), "'gemma3' is not supported: it has a vision tower"),
    "qwen3: bias": ("qwen3", dict(attention_bias=True), "attention_bias: True"),
    "mixtral: too many": ("mixtral", dict(num_experts_per_tok=9), "experts_per_token: 9 with num_experts 3"),
    "qwen3_moe: some layers": ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step: 2"),
    "qwen3_moe: other layers": ("qwen3_moe", dict(mlp_only_layers=[1]), "mlp_only_layers: [1]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_family_cannot_say(fault):
    case, changes, message = REFUSED[fault]
    kind, fields = CASES[case]
    config = kind(**fields).to_dict() | {"model_type": kind.model_type}
    registry.read_config(config, "config.json")
    with pytest.raises(UserError) as caught:
        registry.read_config(config | changes, "config.json")
    assert message in str(caught.value) and "\n" not in str(caught.value) and "config.json" in str(caught.value)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-here",)


def repickle(model: Path, change) -> None:
    metadata = pickle.loads((model / ".metadata").read_bytes())
    change(metadata)
    (model / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_chunk(metadata) -> None:
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop(1)


def lead_outside(metadata) -> None:
    info = metadata.storage_data[next(iter(metadata.storage_data))]
    object.__setattr__(info, "relative_path", "../../ours/actor/__0_0.distcp")


def scribble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[:200] = bytes(200)
    file.write_bytes(data)


DATA = "__0_0.distcp"
OUR_FAULTS = {
    "missing tensor": (lambda d: redescribe(d, num_layers=4), ["decoder.layers.3.", "missing"]),
    "extra tensor": (lambda d: redescribe(d, num_layers=2), ["decoder.layers.2.", "no place"]),
    "wrong shape": (lambda d: redescribe(d, ffn_hidden_size=45), ["linear_fc1.weight", "[88, 32]", "[90, 32]"]),
    "vocabulary": (lambda d: redescribe(d, vocab_size=62), ["word_embeddings.weight", "[61, 32]", "[62, 32]"]),
    "not expressible": (lambda d: redescribe(d, normalization="LayerNorm"), ["normalization", "RMSNorm", "LayerNorm"]),
    "family": (lambda d: redescribe(d, family="lama"), ["'lama'", "known: falcon, gemma, gemma2"]),
    "truncated": (lambda d: truncate(d / DATA, 300), [DATA, "ends within"]),
    "no data file": (lambda d: (d / DATA).unlink(), [DATA, "is missing"]),
    "damaged": (lambda d: scribble(d / DATA), ["embedding.word_embeddings.weight", "damaged"]),
    "no .metadata": (lambda d: (d / ".metadata").unlink(), [".metadata", "cannot be read"]),
    "broken .metadata": (lambda d: truncate(d / ".metadata", 300), [".metadata", "damaged"]),
    "other pickle": (lambda d: (d / ".metadata").write_bytes(pickle.dumps([1])), [".metadata", "list"]),
    "evil pickle": (lambda d: (d / ".metadata").write_bytes(pickle.dumps(Evil())), [".metadata", "posix.system"]),
    "missing chunk": (lambda d: repickle(d, drop_chunk), ["decoder.layers.1.mlp.linear_fc2.weight", "incomplete"]),
    "file outside": (lambda d: repickle(d, lead_outside), [".metadata", "outside the directory"]),
    "rotary": (lambda d: redescribe(d, rotary_percent=0.5), ["rotary_percent", "1.0", "0.5"]),
    "no architecture": (lambda d: (d / "architecture.yaml").unlink(), ["neither a model"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", OUR_FAULTS)
def test_our_source(fault, originals, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, words = OUR_FAULTS[fault]
    source = shutil.copytree(originals / "ours", tmp_path / "ours") / "actor"
    (tmp_path / "ours" / "checksums.json").unlink()  # which would see all of these
    change(source)
    refused(capsys, "megatron2hf", source, tmp_path / "target", *words)


def test_existing_target(originals, tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("precious")
    refused(capsys, "hf2megatron", originals / "llama", tmp_path / "target", "exists already")
    refused(capsys, "megatron2hf", originals / "ours", tmp_path / "target", "exists already")
    refused(capsys, "hf2megatron", originals / "llama", tmp_path / "target" / "mine", "exists already")
    assert (tmp_path / "target" / "mine").read_text() == "precious"


def test_wrong_kind_of_source(originals, tmp_path, capsys):
    refused(capsys, "megatron2hf", originals / "llama", tmp_path / "target", "hf2megatron")
    refused(capsys, "megatron2hf", tmp_path / "nothing", tmp_path / "target", "no such directory")
    refused(capsys, "hf2megatron", originals / "ours", tmp_path / "target", "config.json")


def test_interrupted_run_can_be_repeated(originals, tmp_path):
    with pytest.raises(KeyboardInterrupt), completed(tmp_path / "target") as partial:
        (partial / "half").write_text("a model")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())
    (tmp_path / ".target.partial" / "actor").mkdir(parents=True)  # what kill -9 leaves
    (tmp_path / ".target.partial" / "actor" / ".metadata").write_text("half a model")
    (tmp_path / "target").mkdir()  # empty, made in advance
    convert.hf2megatron(originals / "llama", tmp_path / "target")
    convert.megatron2hf(tmp_path / "target", tmp_path / "back")
    assert_same_tensors(tensors(originals / "llama"), tensors(tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "target"]
