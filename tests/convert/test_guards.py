"""What the converter refuses although it could go on: unknown settings, damage that formats can detect, files of
another size than they say, two conversions at once. And what it leaves behind when it is stopped: nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from megarlhf.convert import convert, torch_dist
from megarlhf.convert.__main__ import main
from megarlhf.convert.storage import Spec, completed
from megarlhf.models.spec import Architecture
from tests.campaigns import convert_faults
from tests.campaigns.convert_faults import Originals, sparse
from tests.convert.models import assert_same_tensors, tensors
from tests.convert.test_faults import reconfigure, refused, reweigh
from tests.ranks import ENVIRONMENT, ROOT


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return Originals(tmp_path_factory.mktemp("originals"))


def copied(originals, kind: str, work: Path) -> Path:
    return Path(shutil.copytree(originals.root / kind, work / kind))


def test_a_target_has_one_writer(originals, tmp_path, capsys):
    with completed(tmp_path / "target") as partial:
        (partial / "weights").write_text("of the first")
        refused(capsys, "hf2megatron", originals.hf, tmp_path / "target", "target", "another conversion")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (tmp_path / ".second.lock").touch()  # of a process that was killed
    convert.hf2megatron(originals.hf, tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "target"]


def arguments(directory: Path, **changes) -> None:
    file = directory / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(changes)
    torch.save(state, file)


OTHER_NETWORKS = {
    "lm": {
        "position_embedding_type": ("none", "relative", "mrope", "learned_absolute "), "window_size": ((4, 0),),
        "no_rope_freq": (4, [1, 0, 0]), "softmax_type": ("off-by-one", "learnable"),
        "apply_residual_connection_post_layernorm": (True,), "rotary_interleaved": (True,), "squared_relu": (True,),
        "multi_latent_attention": (True,), "qk_l2_norm": (True,), "softmax_scale": (0.5,), "quick_geglu": (True,),
        "attention_output_gate": (True,), "activation_func_clamp_value": (7.0,), "mtp_num_layers": (1,),
        "spec": (["a"],), "heterogeneous_layers_config_path": ("a.json",), "an_argument_of_tomorrow": (True, False, 1),
    },
    "nemo": {
        "position_embedding_type": ("none", "alibi"), "window_size": ([4, 0],), "attention_type": ("multiquery",),
        "normalize_attention_scores": (False,), "transformer_block_type": ("post_ln",), "headscale": (True,),
        "mcore_customization_config": ({"attn_logit_softcapping": 50.0},), "a_setting_of_tomorrow": (True, 0, "x"),
    },
    "hf": {
        "is_causal": (False,), "quantization_config": ({"quant_method": "fp8"},), "transformers_weights": ("a",),
        "rope_scaling": ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 16}, {"type": "linear", "factor": 2.0}),
        "rope_theta": (5e5,), "logits_mup_width_multiplier": (2.0,), "a_key_of_tomorrow": (True, None, 0),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_NETWORKS)
def test_settings_that_make_another_network(kind, originals, tmp_path, capsys):
    command = {"lm": "megatron2megatron", "nemo": "nemo2megatron", "hf": "hf2megatron"}[kind]
    change = {
        "lm": arguments,
        "nemo": lambda d, **new: (d / "model_config.yaml").write_text(
            yaml.safe_dump(yaml.safe_load((originals.nemo / "model_config.yaml").read_text()) | new)
        ),
        "hf": lambda d, **new: (
            shutil.copy(originals.hf / "config.json", d),
            reconfigure(d / "config.json", **new),
        ),
    }[kind]
    source = copied(originals, kind, tmp_path)
    for key, values in OTHER_NETWORKS[kind].items():
        for value in values:
            shutil.rmtree(source)
            change(copied(originals, kind, tmp_path), **{key: value})
            refused(capsys, command, source, tmp_path / "target", key)
    assert main([command, str(source), str(tmp_path / "target"), "--ignore", key]) == 0
    known = json.loads((tmp_path / "target" / "certificate.json").read_text())
    assert known["options"]["ignore"] == [key]
    assert main(["verify", str(source), str(tmp_path / "target")]) == 0


@pytest.mark.parametrize("tensor_parallel, rows", [(1, 70), (4, 80), (8, 80), (8, 61)])
def test_padding_of_nemo_goes_at_any_tensor_parallel_size(tensor_parallel, rows, originals, tmp_path):
    """It goes up to a multiple over all ranks in torch_dist weights too: with 10 a rank, 61 tokens have 70 rows at TP 1
    and 80 at TP 4 and 8. No padding is fine."""
    source = copied(originals, "nemo", tmp_path)
    weights = torch.load(source / "model_weights.ckpt")
    (source / "model_weights.ckpt").unlink()
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[name] = torch.cat([weights[name], torch.full((rows - 61, 32), 7.0)])
    (source / "model_weights").mkdir()
    writer = torch_dist.Writer(
        source / "model_weights", {name: Spec(tuple(t.shape), t.dtype) for name, t in weights.items()}
    )
    for name, tensor in weights.items():
        writer.write(name, tensor)
    writer.finish([writer.close()])
    config = yaml.safe_load((source / "model_config.yaml").read_text())
    config |= {"make_vocab_size_divisible_by": 10, "tensor_model_parallel_size": tensor_parallel}
    (source / "model_config.yaml").write_text(yaml.safe_dump(config))
    target = tmp_path / "target"
    convert.COMMANDS["nemo2megatron"](source, target, convert.Options(tokenizer=originals.hf))
    assert Architecture.load(target / "actor").vocab_size == 61
    convert.megatron2hf(target, tmp_path / "back")
    assert_same_tensors(tensors(originals.hf), tensors(tmp_path / "back"))


def rehead(file: Path, change) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = change(header, data[8 + length :])
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def overlap(header: dict, body: bytes) -> bytes:
    """Two tensors of one size in one place."""
    gate, up = (header[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    gate["data_offsets"] = up["data_offsets"]
    return body


def gap(header: dict, body: bytes) -> bytes:
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    begin, end = last["data_offsets"]
    last["data_offsets"] = [begin + 8, end + 8]
    return body[:begin] + bytes(8) + body[begin:]


@pytest.mark.parametrize("change", [overlap, gap, lambda header, body: body + bytes(8)])
def test_safetensors_without_holes(change, originals, tmp_path, capsys):
    source = copied(originals, "hf", tmp_path)
    rehead(source / "model.safetensors", change)
    refused(capsys, "hf2megatron", source, tmp_path / "target", "model.safetensors", "not a complete safetensors file")


def test_one_of_two_models(originals, tmp_path, capsys):
    source = copied(originals, "sharded", tmp_path)
    weights = {name: tensor + 1 for name, tensor in tensors(source).items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    refused(capsys, "hf2megatron", source, tmp_path / "target", "model.safetensors.index.json", "remove one")


@pytest.mark.parametrize("kind", ["lm", "torch_dist"])
def test_crc_of_zip_members(kind, originals, tmp_path, capsys):
    """One bit in the middle of a tensor, where only the CRC can tell."""
    if kind == "lm":
        source = copied(originals, "lm", tmp_path)
        command, file = "megatron2megatron", source / "mp_rank_00" / "model_optim_rng.pt"
    else:  # as other programs than this converter write it: with CRCs, without checksums.json
        source = copied(originals, "ours", tmp_path)
        (source / "checksums.json").unlink()
        command, file = "megatron2hf", source / "actor" / "__0_0.distcp"
        reader, path = torch_dist.Reader(source / "actor", None), source / "actor" / ".metadata"
        weights, metadata = {name: reader.read(name) for name in reader.specs}, pickle.loads(path.read_bytes())
        with open(file, "wb") as out:
            for index, info in metadata.storage_data.items():
                name, begin = index.fqn, out.tell()
                if "layers" in name:  # stacked
                    tensor = weights[name.replace("layers.", f"layers.{index.offset[0]}.", 1)][None]
                else:
                    tensor = weights[name]
                torch.save(tensor.clone(), out)
                info.offset, info.length = begin, out.tell() - begin
        path.write_bytes(pickle.dumps(metadata))
        assert main([command, str(source), str(tmp_path / "sound")]) == 0
        capsys.readouterr()
    part = tensors(originals.hf)["model.layers.1.mlp.down_proj.weight"].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(part) + len(part) // 2] ^= 1
    file.write_bytes(data)
    refused(capsys, command, source, tmp_path / "target", "damaged", "CRC")


def test_metadata_that_speaks_of_more_than_there_is(originals, tmp_path, capsys):
    source = copied(originals, "ours", tmp_path)
    path = source / "actor" / ".metadata"
    for size in ((10**7, 32), (10**12, 0)):
        metadata = pickle.loads((originals.ours / "actor" / ".metadata").read_bytes())
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].size = torch.Size(size)
        path.write_bytes(pickle.dumps(metadata))
        start = time.monotonic()
        refused(capsys, "megatron2hf", source, tmp_path / "target", ".metadata", str(list(size)))
        assert time.monotonic() - start < 30  # it took minutes and gigabytes


def test_numbers_that_do_not_fit(originals, tmp_path, capsys):
    source, name = copied(originals, "hf", tmp_path), "model.layers.1.mlp.up_proj.weight"
    reweigh(source, lambda weights: weights[name].view(-1)[7].fill_(1e6))
    assert main(["hf2megatron", str(source), str(tmp_path / "target"), "--dtype", "fp16"]) == 2
    said = capsys.readouterr().err
    assert "decoder.layers.1.mlp.linear_fc1.weight" in said and "1e+06" in said and said.count("\n") == 1
    assert main(["hf2megatron", str(source), str(tmp_path / "target"), "--dtype", "bf16"]) == 0


def said(capsys, *words) -> str:
    assert main([str(word) for word in words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_options_that_fit_nothing(originals, tmp_path, capsys):
    lm, nemo, target = originals.lm, originals.nemo, tmp_path / "target"
    assert "/nonexistent" in said(capsys, "megatron2megatron", lm, target, "--tokenizer", "/nonexistent")
    assert "/nonexistent" in said(capsys, "nemo2megatron", nemo, target, "--tokenizer", "/nonexistent")
    (tmp_path / "empty").mkdir()
    assert "empty" in said(capsys, "nemo2megatron", nemo, target, "--tokenizer", tmp_path / "empty")
    short = said(capsys, "megatron2megatron", lm, target, "--tokenizer", originals.hf, "--vocab-size", 50)
    assert "50" in short and "61" in short and "--vocab-size" in short
    with pytest.raises(SystemExit) as caught:
        main(["megatron2megatron", str(lm), str(target), "--vocab-size", "-5"])
    assert caught.value.code == 2 and "at least 1, not -5" in capsys.readouterr().err
    shutil.copytree(originals.ours / "actor", tmp_path / "trained" / "reward")
    assert "--role reward" in said(capsys, "megatron2hf", tmp_path / "trained", target)


def test_verify_sees_more_than_tensors(originals, tmp_path, capsys):
    target = copied(originals, "ours", tmp_path)
    assert main(["verify", str(originals.hf), str(target)]) == 0
    capsys.readouterr()
    for name in ("actor/architecture.yaml", "actor/hf_config.json", "tokenizer/tokenizer.json"):
        before = (target / name).read_bytes()
        (target / name).write_bytes(before + b"\n")
        assert f"{name}: was changed" in said(capsys, "verify", originals.hf, target)
        (target / name).write_bytes(before)
    (target / "tokenizer" / "added_tokens.json").write_text("{}")
    assert "added_tokens.json: was added" in said(capsys, "verify", originals.hf, target)
    (target / "tokenizer" / "added_tokens.json").unlink()
    (target / "tokenizer" / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json: is missing" in said(capsys, "verify", originals.hf, target)


def test_quantization_does_not_come_back(originals, tmp_path):
    """Of a checkpoint that was converted when such configurations were taken."""
    source = copied(originals, "ours", tmp_path)
    (source / "checksums.json").unlink()
    reconfigure(source / "actor" / "hf_config.json", quantization_config={"quant_method": "fp8"})
    convert.megatron2hf(source, tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_archives_of_holes(originals, tmp_path, capsys):
    (tmp_path / "a.nemo").write_bytes(sparse(3_000_000_000))
    assert "no plain file" in said(capsys, "nemo2megatron", tmp_path / "a.nemo", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["a.nemo"]


def endless(path: Path) -> Path:
    """An archive of 20 GB that is nearly all hole on the disk, and takes long to unpack."""
    with tarfile.open(path, "w") as archive:
        header = tarfile.TarInfo("model_weights.ckpt")
        header.size = 20 * 10**9
        archive.fileobj.write(header.tobuf())
    os.truncate(path, 512 + header.size + 1024)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped(number, originals, tmp_path):
    source = endless(tmp_path / "a.nemo")
    command = [sys.executable, "-m", "megarlhf", "convert", "nemo2megatron", str(source), str(tmp_path / "target")]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stderr=subprocess.PIPE, text=True)
    try:
        while not list(tmp_path.glob(".nemo-*/**/model_weights.ckpt")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    left = sorted(path.name for path in tmp_path.iterdir() if path != source)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and f"stopped by {number.name}" in error and not left, (error, left)
        return
    assert len(left) == 1 and left[0].startswith(".nemo-")  # and the next conversion there removes it
    os.utime(tmp_path / left[0], (0, 0))
    source.unlink()
    source.write_bytes(convert_faults.packed(originals.nemo))
    assert main(["nemo2megatron", str(source), str(tmp_path / "target")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nemo", "target"]


def test_signals_during_imports(originals):
    """torch is imported for seconds. nohup's children ignore SIGHUP and go on doing so."""
    command = ["nohup", sys.executable, "-m", "megarlhf", "convert", "inspect", str(originals.hf)]
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, **streams)
    try:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, error
    assert error.strip().splitlines()[-1:] == ["error: stopped by SIGTERM; nothing was written"], error
    assert "Traceback" not in error


def test_a_share_of_the_campaign_of_faults(tmp_path):
    """The rest: python -m tests.campaigns.convert_faults."""
    bad = [entry for entry in convert_faults.run(tmp_path, every=12, seed=1) if entry[2].isupper()]
    assert not bad
