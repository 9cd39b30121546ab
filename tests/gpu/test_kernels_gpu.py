"""The kernels on a GPU: the same checks as everywhere, and the bandwidth they are built for."""

from __future__ import annotations

import pytest
import torch

from megarlhf.kernels import shard
from tests import kernel_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocabulary", cases.VOCABULARIES)
def test_given_logits(backend, dtype, vocabulary):
    for temperature in cases.TEMPERATURES:
        cases.check_logprobs(backend, vocabulary, dtype, temperature, device="cuda")
        cases.check_kl(backend, vocabulary, dtype, temperature, device="cuda")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("selection", cases.SELECTIONS)
def test_linear(backend, dtype, selection):
    for vocabulary in (257, 32000):
        cases.check_linear(backend, vocabulary, dtype, selection, device="cuda")
        cases.check_linear_kl(backend, vocabulary, dtype, selection, device="cuda")


def test_auto_is_triton():
    pytest.importorskip("triton")
    assert shard.row_kernels(torch.zeros(1, device="cuda"), "auto").__name__.endswith("triton_rows")


def options_of(logits, with_entropy=False):
    return shard.CallOptions.of(
        logits, logits.shape[1], temperature=1.0, vocab_size=None, tp_group=None, backend="auto",
        with_entropy=with_entropy, entropy_grad=True,
    )  # fmt: skip


def test_rows_beyond_32_bit_offsets():
    """2^31 elements and more: the last row is as right as the first."""
    rows, columns = 17000, 128256
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    labels = torch.zeros(rows, dtype=torch.int64, device="cuda")
    weights = torch.ones(2, rows, device="cuda")
    logprobs, _ = cases.given_logprobs(logits, labels, weights, options_of(logits))
    uniform = -torch.tensor(float(columns)).log()
    torch.testing.assert_close(logprobs.cpu(), uniform.expand(rows), atol=1e-5, rtol=0)
    assert (logits[:, 0] == 1).all() and (logits[-1, 1:] < 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_bandwidth(with_entropy):
    """At least 85% of a copy's bandwidth, measured here and now: N 8192, V 128256 in bf16, forward and backward."""
    logits = torch.randn(8192, 128256, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(logits)  # out of place: the same bytes (2 read, 2 written an element)
    labels, ones = torch.randint(128256, (8192,), device="cuda"), torch.ones(8192, device="cuda")
    options = options_of(logits, with_entropy)

    def seconds(function) -> float:
        times = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return min(times[2:])

    def forward():
        return options.kernels.logprob_stats(logits, labels, temperature=1.0, with_entropy=with_entropy)

    stats = forward()
    merged = shard.merge(stats[None], options)
    scalars = shard.grad_scalars(options, merged.weights[0], merged.entropy, ones, ones if with_entropy else None)

    def backward():
        shard.write_logprob_grad(options, logits, labels, stats, target, scalars)

    bandwidth = 2 * logits.nbytes / seconds(lambda: target.copy_(logits))
    for function, moved in ((forward, logits.nbytes), (backward, 2 * logits.nbytes)):
        share = moved / seconds(function) / bandwidth
        assert share >= 0.85, (function.__name__, f"{share:.0%} of {bandwidth / 1e9:.0f} GB/s")
