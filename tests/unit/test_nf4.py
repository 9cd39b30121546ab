"""NF4: the published code book, slow float64 code, and a linear layer whose gradient is that of the rounded weights."""

import math

import pytest
import torch

from megarlhf.kernels import nf4

# Dettmers et al. 2023, appendix E.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def test_the_code_book_is_the_published_one():
    found = nf4.code_book(torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(PUBLISHED), rtol=0, atol=1e-6)
    assert found[7] == 0 and found[0] == -1 and found[15] == 1


def test_nearest_as_slow_float64():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 192, generator=generator)
    weight[2, 64:128] = 0
    weight[3] *= 1e-20
    found = nf4.quantize(weight)
    assert found.codes.shape == (5, 96) and found.codes.dtype == torch.uint8 and found.scales.shape == (5, 3)
    back = nf4.dequantize(found, torch.float32)
    book = [float(x) for x in nf4.code_book(torch.device("cpu"))]
    for row in range(5):
        for block in range(3):
            values = [float(x) for x in weight[row, 64 * block : 64 * block + 64]]
            scale = max(map(abs, values))
            assert found.scales[row, block].item() == scale
            for column, value in enumerate(values):
                nearest = min(book, key=lambda number: abs(number * scale - value))
                got = back[row, 64 * block + column].item()
                assert math.isclose(got, nearest * scale, rel_tol=1e-6, abs_tol=0), (row, block, column)
    assert not back[2, 64:128].any()
    again = nf4.dequantize(nf4.quantize(back), torch.float32)
    assert torch.equal(again, back)  # what NF4 holds stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_linear_layer(dtype):
    generator = torch.Generator().manual_seed(1)
    matrix = nf4.quantize(torch.randn(8, 64, generator=generator))
    x = torch.randn(3, 64, generator=generator).to(dtype).requires_grad_()
    rounded = nf4.dequantize(matrix, dtype)
    y = nf4.LinearNF4.apply(x, *matrix)
    assert torch.equal(y, x @ rounded.t())
    y.square().sum().backward()
    assert torch.equal(x.grad, (2 * y.detach()) @ rounded)
