"""The kernels of a decode step: torch's, and Triton's in the interpreter and compiled."""

from __future__ import annotations

import json

import pytest
import torch

from megarlhf.cpu import operations as cpu
from megarlhf.kernels import decode
from tests.unit.test_kernels import run_python


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_queries_and_keys_turn_as_in_training(dtype):
    """The bits of the rotation that a trainer on a CPU computes, here through the cache."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(5, 2, 6, 24, generator=generator).to(dtype)
    angles = 100 * torch.rand(5, 1, 1, 8, generator=generator)
    expected = cpu.rotate(product.float(), torch.cat([angles, angles], -1)).to(dtype)
    keys, values = torch.zeros(2, 7, 2, 9, 24, dtype=dtype)
    rows, positions = torch.tensor([6, 0, 1, 1, 4]), torch.tensor([8, 0, 1, 2, 5])
    turns = torch.cat([angles.cos(), angles.sin()], -1)[:, 0, 0]
    found = decode.rotate_and_store(
        product[:, :, :4], product[:, :, 4], product[:, :, 5], keys, values, rows, positions, turns
    )
    assert torch.equal(found, expected[:, :, :4])
    assert torch.equal(keys[rows, :, positions], expected[:, :, 4])
    assert torch.equal(values[rows, :, positions], product[:, :, 5])
    assert (keys != 0).sum() == (values != 0).sum() == 5 * 2 * 24  # nothing else


def test_parts_fill_a_gpu():
    pytest.importorskip("triton")
    code = """
from megarlhf.kernels.triton_decode import splits_for
print([splits_for(programs, columns, 64, 132) for programs, columns in
       ((8, 4096), (8, 500), (8, 64), (8, 1), (100, 4096), (132, 4096), (264, 4096), (100000, 4096))])
"""
    # A power of 2, each part of a block at least, and one where there are two programs a multiprocessor.
    assert json.loads(run_python("-c", code)) == [32, 8, 1, 1, 4, 2, 1, 1]


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    run_python(
        "-c",
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from tests import decode_cases, interpreter; interpreter.mend(); decode_cases.check_all('cpu')",
    )


def test_triton_on_sm90(tmp_path):
    """Compiled for Hopper without a GPU: nothing spilled, and as few registers and bytes of shared memory as let an SM
    hold two programs of attention, one with heads of 256, and 1024 threads of the others, 512 of the longest norms."""
    pytest.importorskip("triton")
    measured = json.loads(run_python("-m", "tests.sm90_gate", "decode", TRITON_CACHE_DIR=str(tmp_path)))
    assert len(measured) == 23
    # docs/gpu.md has the registers of each.
    registers = {"rotate": 64, "attend": 128, "join": 64, "RMS norm of 4096": 64, "layer norm of 4096": 64,
                 "RMS norm of 16384": 128, "layer norm of 16384": 128, "silu": 64, "gelu": 64}  # fmt: skip
    for name, cost in measured.items():
        most = next(value for kind, value in registers.items() if name.startswith(kind))
        assert cost["registers"] <= most and not (cost["stack"] or cost["local"] or cost["spills"]), (name, cost)
        assert cost["shared"] <= 227 * 1024 // (1 if "x 256" in name else 2), (name, cost)
