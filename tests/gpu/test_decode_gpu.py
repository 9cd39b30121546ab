"""The kernels of a decode step on a GPU: against float64, and recorded."""

from __future__ import annotations

import pytest
import torch

from megarlhf.kernels import decode
from tests import decode_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_against_float64(check, dtype):
    kernels = decode.fused_for(torch.zeros(1, dtype=dtype, device="cuda"))
    if kernels is None:
        pytest.skip("no triton here")
    check(kernels, "cuda", dtype)


@pytest.mark.parametrize("slots", [2, 200])  # with parts of the columns and a second kernel, and without
def test_a_recorded_step_follows_its_columns(slots):
    """Recorded once, repeated while columns are added: each repetition is what float64 says for its columns."""
    kernels, (groups, heads, size, columns) = decode.fused_for(torch.zeros(1, device="cuda")), (2, 4, 128, 700)
    if kernels is None:
        pytest.skip("no triton here")
    new = torch.randn(slots, groups, heads + 2, size, device="cuda").bfloat16()
    keys, values = torch.randn(2, slots, groups, columns, size, device="cuda").bfloat16()
    rows, positions = torch.arange(slots, device="cuda"), torch.arange(slots, device="cuda") % 600

    def step():
        query = kernels.rotate_and_store(
            new[:, :, :heads], new[:, :, heads], new[:, :, heads + 1], keys, values, rows, positions, None
        )
        return kernels.attend(query, keys, values, rows, positions, window=None, scale=size**-0.5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        positions += 20
        graph.replay()
        assert torch.equal(keys[rows, :, positions], new[:, :, heads])
        assert torch.equal(values[rows, :, positions], new[:, :, heads + 1])
        for slot in {0, slots // 2, slots - 1}:
            k, v = (x[slot, :, : positions[slot] + 1].double() for x in (keys, values))
            exact = (size**-0.5 * new[slot, :, :heads].double() @ k.mT).softmax(-1) @ v
            cases.near(found[slot], exact, 2 * cases.ERROR[torch.bfloat16], slot)
