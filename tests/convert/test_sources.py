"""NeMo 1, NeMo 2 and Megatron-LM: files of other people's code, and our own imitations of what those files lack."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
from collections import OrderedDict

import pytest
import torch
import yaml

from megarlhf.convert import convert
from megarlhf.convert.archives import unpack
from megarlhf.convert.convert import Options
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.spec import Architecture
from tests.convert.models import assert_same_tensors, tensors
from tests.convert.test_faults import Evil, refused

NEMO1, NEMO2, LM = "nemo2megatron", "nemo2megatron", "megatron2megatron"
# fixture, command, the Hugging Face model with the same weights
FIXTURES = {
    "nemo1/tiny_llama_mha_legacy_tp1.nemo": (NEMO1, "tiny_llama_mha"),
    "nemo1/tiny_llama_mha_legacy_tp2pp2.nemo": (NEMO1, "tiny_llama_mha"),
    "nemo1/tiny_gpt2_legacy_tp1.nemo": (NEMO1, "tiny_gpt2"),
    "nemo1/tiny_llama_mcore_torchdist.nemo": (NEMO1, "tiny_llama"),
    "nemo2/tiny_llama": (NEMO2, "tiny_llama"),
    "megatron/tiny_llama_torch_tp1pp1": (LM, "tiny_llama"),
    "megatron/tiny_llama_torchdist_tp2pp2": (LM, "tiny_llama"),
}


@pytest.mark.shared
@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_weights_of_the_hugging_face_model(fixture, shared, tmp_path):
    """Bit for bit, there and (its family is recognised) back; the tokenizer reads the same ids."""
    command, name = FIXTURES[fixture]
    twin = shared / "fixtures" / "hf" / name
    given = Options(tokenizer=twin) if command == LM else Options()
    convert.COMMANDS[command](shared / "fixtures" / fixture, tmp_path / "ours", given)
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors(twin), tensors(tmp_path / "back"))
    expected, got = load_tokenizer(twin), load_tokenizer(tmp_path / "ours" / "tokenizer")
    for text in ("The quick brown fox", "12 + 7 = 19"):
        assert got.encode(text) == expected.encode(text)
    assert got.eos_id == expected.eos_id
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == expected.eos_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours"]  # no unpacked archive is left


@pytest.fixture(scope="module")
def archives(tmp_path_factory, shared):
    """{fixture: unpacked}"""
    root = tmp_path_factory.mktemp("archives")
    for fixture in ("tiny_llama_mha_legacy_tp1", "tiny_llama_mha_legacy_tp2pp2", "tiny_gpt2_legacy_tp1"):
        (root / fixture).mkdir()
        unpack(shared / "fixtures" / "nemo1" / f"{fixture}.nemo", root / fixture)
    return root


@pytest.fixture
def legacy(archives, tmp_path):
    return shutil.copytree(archives / "tiny_llama_mha_legacy_tp1", tmp_path / "legacy")


def repack(source, archive, mode: str):
    with tarfile.open(archive, mode) as out:
        for path in sorted(source.rglob("*")):
            out.add(path, f"./{path.relative_to(source)}", recursive=False)
    return archive


def same_model(left, right):
    convert.megatron2hf(left, left.parent / "left")
    convert.megatron2hf(right, right.parent / "right")
    assert_same_tensors(tensors(left.parent / "left"), tensors(right.parent / "right"))


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["directory", "gzip"])
def test_packings(kind, legacy, tmp_path):
    source = legacy if kind == "directory" else repack(legacy, tmp_path / "a.nemo", "w:gz")
    convert.COMMANDS[NEMO1](legacy, tmp_path / "plain" / "ours")
    convert.COMMANDS[NEMO1](source, tmp_path / "other" / "ours")
    same_model(tmp_path / "plain" / "ours", tmp_path / "other" / "ours")


def rewrite(path, change):
    weights = torch.load(path, weights_only=False)
    torch.save(OrderedDict(change(weights)), path)


@pytest.mark.shared
@pytest.mark.parametrize("prefix", ["model.module.", "module.", "model._orig_mod."])
def test_prefixes(prefix, legacy, tmp_path):
    """What megatron_amp_O2, torch.compile and hand-written converters put before the names."""
    convert.COMMANDS[NEMO1](legacy, tmp_path / "plain" / "ours")
    rewrite(
        legacy / "model_weights.ckpt",
        lambda weights: ((prefix + name.removeprefix("model."), value) for name, value in weights.items()),
    )
    convert.COMMANDS[NEMO1](legacy, tmp_path / "other" / "ours")
    same_model(tmp_path / "plain" / "ours", tmp_path / "other" / "ours")


@pytest.mark.shared
def test_gate_and_up_in_two_tensors(legacy, tmp_path):
    """`swiglu` without `fast-`."""
    convert.COMMANDS[NEMO1](legacy, tmp_path / "plain" / "ours")

    def split(weights):
        for name, value in weights.items():
            if "dense_h_to_4h.weight" in name:
                yield name, value.chunk(2)[0].clone()
                yield name.replace("4h.", "4h_2."), value.chunk(2)[1].clone()
            else:
                yield name, value

    rewrite(legacy / "model_weights.ckpt", split)
    configure(legacy, activation="swiglu")
    convert.COMMANDS[NEMO1](legacy, tmp_path / "other" / "ours")
    same_model(tmp_path / "plain" / "ours", tmp_path / "other" / "ours")


def configure(directory, **changes):
    path = directory / "model_config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


@pytest.mark.shared
def test_tied_model_over_two_stages(archives, tmp_path):
    """The last stage has a copy of the embedding, its layers count from 0, the vocabulary is padded with garbage."""
    source = shutil.copytree(archives / "tiny_gpt2_legacy_tp1", tmp_path / "source")
    convert.COMMANDS[NEMO1](source, tmp_path / "plain" / "ours")
    weights = torch.load(source / "model_weights.ckpt", weights_only=False)
    (source / "model_weights.ckpt").unlink()
    stages = ({}, {})
    for name, value in weights.items():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
        stage = int(layer >= 3 if layer is not None else "final" in name)  # an uneven cut
        stages[stage][name.replace("layers.3.", "layers.0.") if stage else name] = value
    stages[1]["model.word_embeddings.weight"] = weights["model.language_model.embedding.word_embeddings.weight"].clone()
    for stage, state in enumerate(stages):
        directory = source / f"tp_rank_00_pp_rank_{stage:03d}"
        directory.mkdir()
        torch.save(OrderedDict(state), directory / "model_weights.ckpt")
    convert.COMMANDS[NEMO1](source, tmp_path / "other" / "ours")
    same_model(tmp_path / "plain" / "ours", tmp_path / "other" / "ours")
    assert Architecture.load(tmp_path / "other" / "ours" / "actor").vocab_size == 503

    stages[1]["model.word_embeddings.weight"][7] += 1
    torch.save(OrderedDict(stages[1]), source / "tp_rank_00_pp_rank_001" / "model_weights.ckpt")
    with pytest.raises(convert.UserError, match=r"output_layer.weight' differs from 'embedding"):
        convert.COMMANDS[NEMO1](source, tmp_path / "third")


@pytest.mark.shared
def test_megatron_lm_before_core(legacy, shared, tmp_path):
    """Nested dictionaries, the older norm names, objects of Megatron-LM's own classes among the arguments."""
    import megatron.core.transformer.enums as enums

    convert.COMMANDS[NEMO1](legacy, tmp_path / "plain" / "ours")
    weights = torch.load(legacy / "model_weights.ckpt", weights_only=False)
    nested: dict = {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}
    for name, value in weights.items():
        name = name.removeprefix("model.language_model.")
        if name.startswith("encoder."):
            name = name.removeprefix("encoder.").replace("post_attention_layernorm", "post_attention_norm")
            nested["encoder"][name.replace("final_layernorm", "final_norm")] = value
        elif name.startswith("output_layer."):
            nested["output_layer"]["weight"] = value if value is not None else nested["output_layer"]["weight"]
        elif name.startswith("embedding"):
            nested["embedding"]["word_embeddings"]["weight"] = value
    arguments = torch.load(
        shared / "fixtures/megatron/tiny_llama_torch_tp1pp1/iter_0000010/mp_rank_00/model_optim_rng.pt",
        weights_only=False,
    )["args"]
    arguments.num_query_groups, arguments.attention_backend = 8, enums.AttnBackend.auto
    path = tmp_path / "lm" / "release" / "mp_rank_00"
    path.mkdir(parents=True)
    (tmp_path / "lm" / "latest_checkpointed_iteration.txt").write_text("release\n")
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "model": {"language_model": nested},
        "blob": io.BytesIO(b"1"),
    }
    torch.save(state, path / "model_optim_rng.pt")
    convert.COMMANDS[LM](tmp_path / "lm", tmp_path / "other" / "ours")
    same_model(tmp_path / "plain" / "ours", tmp_path / "other" / "ours")

    torch.save(state | {"checkpoint_version": 1.0}, path / "model_optim_rng.pt")
    with pytest.raises(convert.UserError, match="checkpoint_version 1.0"):
        convert.COMMANDS[LM](tmp_path / "lm", tmp_path / "third")


@pytest.mark.shared
def test_nemo2_without_the_readable_file(shared, tmp_path):
    source = shutil.copytree(shared / "fixtures" / "nemo2" / "tiny_llama", tmp_path / "source")
    convert.COMMANDS[NEMO2](source, tmp_path / "with")
    (source / "context" / "model.yaml").unlink()
    convert.COMMANDS[NEMO2](source, tmp_path / "without")
    assert Architecture.load(tmp_path / "with" / "actor") == Architecture.load(tmp_path / "without" / "actor")


def spoil(tensor: str, change):
    def apply(directory):
        rewrite(
            directory / "model_weights.ckpt",
            lambda weights: (
                {name: change(value) if name == tensor else value for name, value in weights.items()}
                if change
                else {name: value for name, value in weights.items() if name != tensor}
            ),
        )

    return apply


QKV = "model.language_model.encoder.layers.2.self_attention.query_key_value.weight"
FAULTS = {
    "missing tensor": (spoil(QKV, None), ["decoder.layers.2.self_attention.linear_qkv.weight", "missing"]),
    "wrong head count": (
        lambda d: configure(d, num_query_groups=4),
        ["decoder.layers.0.self_attention.linear_qkv.weight", "[192, 64]", "expected [128, 64]"],
    ),
    "extra tensor": (
        lambda d: rewrite(d / "model_weights.ckpt", lambda w: {**w, "model.adapter.weight": torch.ones(2)}),
        ["'adapter.weight' [2]", "no place"],
    ),
    "no gate": (lambda d: configure(d, activation="gelu"), ["linear_fc1.weight", "[352, 64]", "expected [176, 64]"]),
    "evil pickle": (lambda d: torch.save({"a": Evil()}, d / "model_weights.ckpt"), ["posix.system", "refused"]),
    "truncated": (lambda d: (d / "model_weights.ckpt").write_bytes(b"PK" * 99), ["model_weights.ckpt", "damaged"]),
    "tokenizer": (
        lambda d: (
            configure(d, tokenizer={"vocab_file": "nemo:vocab.json"})
            or (d / "vocab.json").write_text(json.dumps({f"w{i}": i for i in range(501)}))
        ),
        ["501 entries", "embedding.word_embeddings.weight", "500 rows"],
    ),
    "no weights": (lambda d: (d / "model_weights.ckpt").unlink(), ["holds no weights"]),
    "no config": (lambda d: (d / "model_config.yaml").unlink(), ["model_config.yaml"]),
    "config key": (lambda d: configure(d, hidden_size="x"), ["hidden_size"]),
    "alibi": (lambda d: configure(d, position_embedding_type="alibi"), ["position_embedding_type", "alibi"]),
    "norm": (lambda d: configure(d, normalization="layernorm1p"), ["normalization", "layernorm1p"]),
    "old order": (lambda d: configure(d, megatron_legacy=True), ["megatron_legacy"]),
    "experts": (lambda d: configure(d, num_moe_experts=8), ["num_moe_experts"]),
    "linear scaling": (lambda d: configure(d, seq_len_interpolation_factor=2), ["seq_len_interpolation_factor"]),
}


@pytest.mark.shared
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, legacy, tmp_path, capsys):
    change, words = FAULTS[fault]
    change(legacy)
    refused(capsys, NEMO1, legacy, tmp_path / "target", *words)


@pytest.mark.shared
def test_faults_of_rank_files(archives, tmp_path, capsys):
    source = shutil.copytree(archives / "tiny_llama_mha_legacy_tp2pp2", tmp_path / "source")
    norm = source / "tp_rank_01_pp_rank_001" / "model_weights.ckpt"
    rewrite(norm, lambda w: {name: value + 1 if "final_layernorm" in name else value for name, value in w.items()})
    refused(capsys, NEMO1, source, tmp_path / "target", "decoder.final_layernorm.weight", "differs between")
    norm.unlink()
    refused(capsys, NEMO1, source, tmp_path / "target", "tensor rank 1, pipeline rank 1", "missing")


def test_archives_that_lead_outside(tmp_path, capsys):
    for name, kind in (("../evil", tarfile.REGTYPE), ("/tmp/evil-was-here", tarfile.REGTYPE), ("a", tarfile.SYMTYPE)):
        with tarfile.open(tmp_path / "evil.nemo", "w") as archive:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../../evil"
            archive.addfile(member)
        refused(capsys, NEMO1, tmp_path / "evil.nemo", tmp_path / "target", f"'{name}'", "refused")
    (tmp_path / "evil.nemo").write_bytes(b"no archive")
    refused(capsys, NEMO1, tmp_path / "evil.nemo", tmp_path / "target", "evil.nemo")


def test_stubs_do_nothing(tmp_path):
    """A name of a stubbed package is neither imported nor called."""
    from megarlhf.checkpoint import pickles

    class Reduced:
        def __reduce__(self):
            return argparse.Namespace, ()

    torch.serialization.set_crc32_options(False)  # the bytes will be changed
    torch.save({"a": Reduced(), "b": torch.ones(3)}, tmp_path / "a.pt")
    torch.serialization.set_crc32_options(True)
    data = (tmp_path / "a.pt").read_bytes()
    assert data.count(b"cargparse\nNamespace") == 1
    (tmp_path / "a.pt").write_bytes(data.replace(b"cargparse\nNamespace", b"cnemo.abc\nNamespacf"))
    torch.testing.assert_close(pickles.read(tmp_path / "a.pt", foreign=True)["b"], torch.ones(3))
    assert isinstance(pickles.read(tmp_path / "a.pt", foreign=True)["a"], pickles.Stub)
