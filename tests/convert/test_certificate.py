"""The certificate: complete, recomputed by `verify`, the same under mpirun, and what it and the logits check see."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from megarlhf.convert import convert, torch_dist
from megarlhf.convert.__main__ import main
from tests.convert.models import save, tensors
from tests.distributed.test_launch_mpi import FLAVOURS, find_mpirun, for_mpi4py, start
from tests.ranks import ENVIRONMENT, ROOT

GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
SQUARE = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    save("llama", root / "source")
    convert.hf2megatron(root / "source", root / "ours")
    convert.megatron2hf(root / "ours", root / "back")
    return root


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_it_names_every_tensor(converted):
    source = tensors(converted / "source")
    reader = torch_dist.Reader(converted / "ours" / "actor", None)
    there, back = (json.loads((converted / name / "certificate.json").read_text()) for name in ("ours", "back"))
    for certified in (there["source"]["tensors"], back["target"]["tensors"]):
        assert {name: entry["sha256"] for name, entry in certified.items()} == {
            name: digest(tensor) for name, tensor in source.items()
        }
        assert certified[GATE] | {"sha256": 0} == {"dtype": "float32", "shape": [44, 32], "sha256": 0}
    assert there["target"]["tensors"] == back["source"]["tensors"]
    assert {name: entry["sha256"] for name, entry in there["target"]["tensors"].items()} == {
        name: digest(reader.read(name)) for name in reader.specs
    }
    assert str(converted) not in json.dumps(there)


def test_verify(converted, capsys):
    assert main(["verify", str(converted / "source"), str(converted / "ours")]) == 0
    assert main(["verify", str(converted / "ours"), str(converted / "back")]) == 0
    assert "30 tensors read and 21 written" in capsys.readouterr().out


def verify_fails(capsys, source, target, *words):
    assert main(["verify", str(source), str(target)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for word in words:
        assert word in error, error


def swap(weights):
    weights[GATE], weights[UP] = weights[UP], weights[GATE]


def transpose(weights):
    weights[SQUARE] = weights[SQUARE].t().contiguous()


@pytest.mark.parametrize("change, name", [(swap, GATE), (transpose, SQUARE)], ids=["gate and up", "transposed"])
def test_verify_names_what_was_changed(change, name, converted, tmp_path, capsys):
    for side in ("source", "back"):
        changed = shutil.copytree(converted / side, tmp_path / side)
        weights = tensors(changed)
        change(weights)
        save_file(weights, changed / "model.safetensors")
    verify_fails(capsys, tmp_path / "source", converted / "ours", name, "source tensor", "sha256")
    verify_fails(capsys, converted / "ours", tmp_path / "back", name, "target tensor", "sha256")


def test_verify_reads_what_is_on_the_disk(converted, tmp_path, capsys):
    target = shutil.copytree(converted / "ours", tmp_path / "ours")
    file = target / "actor" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    part = tensors(converted / "source")[SQUARE].numpy().tobytes()
    data[data.index(part)] ^= 1
    file.write_bytes(data)
    verify_fails(capsys, converted / "source", target, "decoder.layers.0.self_attention.linear_proj.weight")
    assert main(["megatron2hf", str(target), str(tmp_path / "back")]) == 2
    assert f"{file}: is not what was written" in capsys.readouterr().err and not (tmp_path / "back").exists()
    (target / "certificate.json").unlink()
    verify_fails(capsys, converted / "source", target, "has no certificate.json")


def test_a_converter_that_loses_a_tensor_leaves_nothing(converted, tmp_path, monkeypatch):
    share = convert._share
    monkeypatch.setattr(convert, "_share", lambda *arguments: share(*arguments)[:-1])
    with pytest.raises((convert.UserError, AssertionError), match="model.layers.2|decoder.layers.2"):
        convert.hf2megatron(converted / "source", tmp_path / "ours")
    assert not any(tmp_path.iterdir())


def logits(source, target):
    command = [sys.executable, "-m", "megarlhf", "convert", "verify", str(source), str(target), "--logits"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})


def test_logits(converted, tmp_path):
    done = logits(converted / "source", converted / "ours")
    assert done.returncode == 0 and "log-probs of transformers and megarlhf agree" in done.stdout, done.stderr


WRONG_TABLES = """
import sys
from pathlib import Path
import torch
from megarlhf.convert import convert, logits
from megarlhf.convert.families import llama
from megarlhf.convert.mapping import GATE_UP, COPY, Pair
source, out = map(Path, sys.argv[1:])
swapped = Pair(lambda tensors: GATE_UP.to_ours(tensors[::-1]), lambda tensor: GATE_UP.to_theirs(tensor)[::-1])
turned = Pair(lambda tensors: tensors[0].t(), lambda tensor: [tensor.t()])
rows, row = llama.rows, llama.Row
for name, pair in (("linear_fc1.weight", swapped), ("linear_proj.weight", turned)):
    wrong = lambda it: [row(r.theirs, r.ours, pair) if r.ours.endswith(name) else r for r in rows(it)]
    object.__setattr__(llama.FAMILY, "rows", wrong)
    convert.hf2megatron(source, out / name)
    convert.verify(source, out / name)
    try:
        logits.compare(source, out / name)
    except convert.UserError as error:
        print(error)
"""


def test_logits_see_a_wrong_table(converted, tmp_path):
    """The certificate says that the tensors are what the table makes of them; only the logits tell a wrong table."""
    command = [sys.executable, "-c", WRONG_TABLES, str(converted / "source"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log-probs differ from the source's by up to") == 2, done.stdout


def files(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_mpirun_writes_the_same_bytes(flavour, converted, tmp_path, monkeypatch):
    mpirun = find_mpirun(flavour) or pytest.skip(f"no mpirun of {flavour}")
    library = for_mpi4py(flavour, tmp_path)
    code = "import sys, megarlhf.convert.torch_dist as t; t.FILE_BYTES = 20_000; import megarlhf.convert.__main__ as m"
    code += "; sys.exit(m.main())"
    program = (sys.executable, "-c", code)
    serial, parallel = tmp_path / "serial", tmp_path / "parallel"
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 20_000)  # several files, so that every process has some to write
    convert.hf2megatron(converted / "source", serial / "ours")
    convert.megatron2hf(serial / "ours", serial / "back")
    for size, command, source, name in (
        ("3", "hf2megatron", converted / "source", "ours"),
        ("2", "megatron2hf", parallel / "ours", "back"),
    ):
        done = start(mpirun, "-n", size, *program, command, str(source), str(parallel / name), **library)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("tensors") == 1
    assert len(list((serial / "ours" / "actor").glob("*.distcp"))) > 3
    assert files(serial) == files(parallel)

    source = shutil.copytree(converted / "source", tmp_path / "source")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    done = start(mpirun, "-n", "2", *program, "hf2megatron", str(source), str(parallel / "failed"), **library)
    assert done.returncode != 0 and done.stderr.count("error: ") == 1 and "ends within tensor" in done.stderr
    assert sorted(path.name for path in parallel.iterdir()) == ["back", "ours"]
