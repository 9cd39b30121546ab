"""megarlhf/cpu/operations.py against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from megarlhf.cluster import backend
from megarlhf.cpu import operations as cpu
from megarlhf.cpu import speed


def turned(t, freqs):
    rotary = freqs.shape[-1]
    a, b = t[..., :rotary].chunk(2, -1)
    return torch.cat([t[..., :rotary] * freqs.cos() + torch.cat([-b, a], -1) * freqs.sin(), t[..., rotary:]], -1)


def gated(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


FREQS = torch.rand(6, 1, 1, 8).repeat(1, 1, 1, 2)
CASES = {
    "rms_norm": (lambda x, w: cpu.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
                 (30, 20, 520), (520,)),
    "swiglu": (cpu.swiglu, gated, (30, 20, 1030)),
    "rotate": (lambda t: cpu.rotate(t, FREQS), lambda t: turned(t, FREQS.double()), (6, 3, 4, 16)),
    "rotate a part": (lambda t: cpu.rotate(t, FREQS), lambda t: turned(t, FREQS.double()), (6, 3, 4, 22)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    ours, truth, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert name.startswith("rotate") or inputs[0].nbytes > 2 * cpu.BLOCK_BYTES
    # as Megatron hands them over: not contiguous
    output, expected = ours(inputs[0].transpose(1, 0).contiguous().transpose(1, 0), *inputs[1:]), truth(*exact)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn(output.shape, generator=generator) / output.shape[0]
    output.backward(grad)
    expected.backward(grad.double())
    for x, true in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), true.grad, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_gradients_that_go_to_main_grad(kind):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 4, generator=generator).to(kind).requires_grad_()
    weight.main_grad = torch.ones(9, 4)
    ids, grad = torch.tensor([[1, 8], [1, 0]]), torch.randn(2, 2, 4, generator=generator).to(kind)
    output = cpu.embed(weight, ids)
    assert torch.equal(output, weight[ids])
    output.backward(grad)
    expected = torch.ones(9, 4).index_put((ids,), grad.float(), accumulate=True)
    torch.testing.assert_close(weight.main_grad, expected, rtol=0, atol=1e-6)
    assert weight.grad_added_to_main_grad


def test_bf16_on_a_cpu_is_remarked_on():
    (said,) = backend.remarks(torch.bfloat16, "model.dtype")
    assert said.startswith("model.dtype: bf16 is slow on most CPUs, ")
    assert said.endswith("model.dtype=fp32 is the usual choice")
    assert not backend.remarks(torch.float32, "model.dtype")
    assert 0.05 < speed.bf16_to_fp32() < 100
