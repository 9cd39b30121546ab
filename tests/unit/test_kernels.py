"""The kernels in one process: against the reference, in their contracts, and under planted errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from megarlhf import kernels
from megarlhf.cpu import memory
from megarlhf.kernels import products, shard, torch_rows
from megarlhf.kernels.kl import kl_of_logits
from megarlhf.kernels.shard import CallOptions
from tests import kernel_cases as cases
from tests import reference
from tests.ranks import ENVIRONMENT, ROOT


def run_python(*arguments: str, **environment: str) -> str:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("vocabulary", cases.VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_given_logits(vocabulary, dtype):
    for temperature in cases.TEMPERATURES:
        cases.check_logprobs("torch", vocabulary, dtype, temperature)
        cases.check_kl("torch", vocabulary, dtype, temperature)


@pytest.mark.parametrize("selection", cases.SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_linear(selection, dtype):
    for vocabulary in (7, 257, 32000):
        cases.check_linear("torch", vocabulary, dtype, selection)
        cases.check_linear_kl("torch", vocabulary, dtype, selection)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_capped_logits(dtype):
    for selection in cases.SELECTIONS:
        cases.check_linear("torch", 257, dtype, selection, softcap=2.0)
        cases.check_linear_kl("torch", 257, dtype, selection, softcap=2.0)


def test_many_blocks(monkeypatch):
    """Small blocks: the rows are cut where a large vocabulary would cut them."""
    monkeypatch.setitem(torch_rows.BLOCK_BYTES, "cpu", 4 * 257 * 3)
    cases.check_logprobs("torch", 257, torch.float32, 0.7)
    cases.check_kl("torch", 257, torch.float32, 0.7)


# Each is one line of the kernels gone wrong; what the checks above compare must notice it.
PLANTED = {
    "temperature ignored": (torch_rows, "_exponents", lambda f: lambda x, top, z, temperature: f(x, top, z, 1.0)),
    "maximum ignored": (torch_rows, "_top", lambda f: lambda x, top: top.fill_(0)),
    "label forgotten in the gradient": (torch_rows, "_add_at_label", lambda f: lambda out, labels, onehot: None),
    "label's logit of the next class": (
        torch_rows, "_label_logit", lambda f: lambda x, labels, out: f(x.roll(1, -1), labels, out)
    ),
    "entropy's gradient with the wrong sign": (
        torch_rows, "_line", lambda f: lambda z, constant, slope: f(z, constant, -slope)
    ),
    "padding counted": (shard, "min", lambda f: lambda real, columns: columns),
}  # fmt: skip


@pytest.mark.parametrize("error", PLANTED)
def test_planted_error_is_noticed(monkeypatch, error):
    module, name, plant = PLANTED[error]
    planted = plant(getattr(module, name, None))
    monkeypatch.setattr(module, name, planted, raising=False)
    with pytest.raises(AssertionError):
        for temperature in cases.TEMPERATURES:
            cases.check_logprobs("torch", 257, torch.float32, temperature)


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([3, 0, 8, 4, 5])
    hidden = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def linear(h, w, cap):
        return kernels.linear_logprobs(
            h, w, labels, rows=slice(1, 6), chunk_rows=2, temperature=0.7, with_entropy=True, vocab_size=9, softcap=cap
        )

    def divergence(h, w, cap):
        return kernels.linear_policy_ref_kl(
            h, w, states, rows_of_ref, rows=slice(1, 6), chunk_rows=2, temperature=0.7, vocab_size=9, softcap=cap
        )

    states, rows_of_ref = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (5, 11))
    for cap in (None, 1.5):
        assert torch.autograd.gradcheck(linear, (hidden, weight, cap))
        assert torch.autograd.gradcheck(divergence, (hidden, weight, cap))


def test_entropy_as_a_metric():
    hidden, weight = torch.randn(3, 1, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    output = kernels.linear_logprobs(hidden, weight, torch.arange(3), with_entropy=True, entropy_grad=False)
    assert not output.entropy.requires_grad and output.logprobs.requires_grad
    assert kernels.linear_logprobs(hidden, weight, torch.arange(3)).entropy is None


def given(logits, label):
    """The log-prob of `label` in one row of logits."""
    call = CallOptions.of(logits, logits.shape[1], temperature=1.0, vocab_size=None, tp_group=None, backend="torch")
    return cases.given_logprobs(logits.clone(), torch.tensor([label]), torch.ones(2, 1), call)[0]


def kl(logits, ref):
    call = CallOptions.of(logits, logits.shape[1], temperature=1.0, vocab_size=None, tp_group=None, backend="torch")
    return kl_of_logits(logits, ref, call)[0]


def test_undefined_rows():
    """Not hidden: nan and +inf give nan, and so does a row without any possible class."""
    for bad in (torch.nan, torch.inf):
        assert given(torch.zeros(1, 5).index_fill_(1, torch.tensor(2), bad), 0).isnan().all()
    assert given(torch.full((1, 5), -torch.inf), 0).isnan().all()
    possible = torch.zeros(1, 5).index_fill_(1, torch.tensor(2), -torch.inf)
    assert given(possible, 2).item() == -torch.inf
    assert kl(torch.zeros(1, 5), possible).item() == torch.inf
    assert kl(possible, torch.zeros(1, 5)).item() == pytest.approx(0.2231435)


def test_kl_of_a_distribution_with_itself():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 4
    assert not kl(logits, logits.clone()).any()
    assert (kl(logits, logits + 1e-4 * torch.randn(64, 1000)) >= 0).all()


def test_linear_backward_twice():
    """The first backward uses up the logits that the forward left; the second computes them again."""
    hidden, weight = torch.randn(5, 2, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = kernels.linear_logprobs(hidden, weight, torch.arange(9).repeat(2)[:10], chunk_rows=3).logprobs.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        assert torch.equal(a, b)


def test_the_memory_of_logits_is_used_again(monkeypatch):
    """Also by a pass without gradients of a weight that trains; only what a backward pass reads is kept."""
    monkeypatch.setattr(memory, "_spare", {})
    hidden, weight = torch.randn(4, 8), nn.Parameter(torch.randn(16, 8))

    def spare() -> list[int]:
        return [storage.data_ptr() for storage in memory._spare.values()]

    with torch.no_grad():
        kernels.linear_logprobs(hidden, weight, torch.arange(4))
        (first,) = spare()
        kernels.linear_logprobs(hidden, weight, torch.arange(4))
        assert spare() == [first]
    loss = kernels.linear_logprobs(hidden, weight, torch.arange(4)).logprobs.sum()
    assert spare() == []
    loss.backward()
    assert spare() == [first]


def test_tied_weight():
    """One parameter as embedding and as head: autograd adds both gradients."""
    embedding = nn.Embedding(37, 8)
    tokens, labels = torch.randint(37, (5, 2)), torch.randint(37, (5, 2))
    hidden = embedding(tokens)
    kernels.linear_logprobs(hidden, embedding.weight, labels).logprobs.sum().backward()
    mine, embedding.weight.grad = embedding.weight.grad, None
    reference.linear_logprobs(embedding(tokens), embedding.weight, labels).logprobs.sum().backward()
    torch.testing.assert_close(mine, embedding.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=["main fp32", "main bf16"])
def test_gradient_accumulation_fusion(dtype, main_dtype):
    weight = nn.Parameter(torch.randn(37, 8).to(dtype))
    hidden, labels = torch.randn(6, 1, 8).to(dtype), torch.randint(37, (6, 1))
    options = dict(chunk_rows=4)
    kernels.linear_logprobs(hidden, weight, labels, **options).logprobs.sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones(37, 8, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    kernels.linear_logprobs(
        hidden, weight, labels, gradient_accumulation_fusion=True, **options
    ).logprobs.sum().backward()
    assert weight.grad_added_to_main_grad and weight.grad is not None
    torch.testing.assert_close(weight.main_grad.float(), 1 + expected.float(), atol=0.03, rtol=0.02)
    weight.zero_out_wgrad, weight.grad = True, None  # tied: the embedding's gradient will be added to what we return
    kernels.linear_logprobs(
        hidden, weight, labels, gradient_accumulation_fusion=True, **options
    ).logprobs.sum().backward()
    assert not weight.grad.any()


def test_weight_gradient_accumulates_in_float32():
    """512 chunks of one row in bf16, each a fraction of a bf16 step of the sum: kept, not lost one by one."""
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(512, 1, 4, dtype=torch.bfloat16)
    labels = torch.zeros(512, 1, dtype=torch.int64)
    kernels.linear_logprobs(hidden, weight, labels, chunk_rows=1).logprobs.sum().backward()
    torch.testing.assert_close(weight.grad[0], torch.full((4,), 448.0, dtype=torch.bfloat16))
    torch.testing.assert_close(weight.grad[1], torch.full((4,), -64.0, dtype=torch.bfloat16))


def test_products_of_an_older_torch(monkeypatch):
    """Before torch 2.8 half-precision products are rounded, then converted; a CPU takes that path only when told to."""
    major, minor = torch.__version__.split(".")[:2]
    recent = (int(major), int(minor)) >= (2, 8)
    assert recent == products.WIDE_PRODUCTS
    monkeypatch.setattr(products, "WIDE_PRODUCTS", False)
    monkeypatch.setattr(kernels.linear, "operand_of", lambda tensor: tensor)  # halves stay halves, as on a GPU
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (12, 257))
    labels = torch.randint(257, (12,), generator=generator)
    output = kernels.linear_logprobs(hidden, weight, labels, chunk_rows=5)
    assert output.logprobs.dtype == torch.float32
    mine = torch.autograd.grad(output.logprobs.sum(), (hidden, weight))
    h64, w64 = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    expected = reference.linear_logprobs(h64, w64, labels)
    cases.near("logprobs", output.logprobs, expected.logprobs, atol=0.1, rtol=0)
    for grad, exact in zip(mine, torch.autograd.grad(expected.logprobs.sum(), (h64, w64)), strict=True):
        assert cases.relative(grad, exact) < cases.GRADIENT[torch.bfloat16]


def test_products_of_a_torch_that_refuses_wide_sums():
    """torch 2.8 and 2.9 hand out float32 products of halves, but do not add them: the sum is exact all the same. A CPU
    refuses both; with a wide `mm` of its own it is such a torch."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).half() for shape in ((7, 12), (12, 5)))
    total = torch.randn(7, 5, generator=generator)
    expected = total + a.float() @ b.float()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
        products.accumulate(total, a, b)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_those_of_the_log_probs(dtype):
    """Of halves in float32: rounded to bfloat16 a logit of 20 would be off by up to 0.06."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (4 * torch.randn(n, 16, generator=generator).to(dtype) for n in (12, 257))
    logits = kernels.linear_logits(hidden, weight)
    assert logits.dtype == torch.float32 and logits.abs().max() > 100
    cases.near("logits", logits, hidden.double() @ weight.double().t(), atol=1e-4, rtol=0)
    labels = torch.randint(257, (12,), generator=generator)
    expected = kernels.linear_logprobs(hidden[:, None], weight, labels).logprobs
    cases.near("logprobs", reference.logprobs(logits, labels).logprobs, expected.double(), atol=1e-4, rtol=0)


def test_linear_needs_little_memory():
    """Forward and backward of 4096 rows of 32000 logits (500 MiB): one chunk and the weight's gradient."""
    program = """
import resource, torch
from megarlhf.kernels import linear_logprobs
hidden = torch.randn(4096, 1, 16, requires_grad=True)
weight = torch.randn(32000, 16, requires_grad=True)
labels = torch.randint(32000, (4096, 1))
def run(rows):
    linear_logprobs(hidden, weight, labels[rows], rows=rows, with_entropy=True).logprobs.sum().backward()
run(slice(0, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(slice(None))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python("-c", program)) < 100 * 1024  # KiB


BAD = {
    "same dtype": dict(hidden=torch.zeros(3, 2, 4, dtype=torch.bfloat16)),
    "same last dimension": dict(hidden=torch.zeros(3, 2, 5)),
    "labels has 6 elements for 2 selected rows of 6": dict(rows=slice(0, 2)),
    "chunk_rows": dict(chunk_rows=0),
    "gradient_accumulation_fusion": dict(gradient_accumulation_fusion=True),
    "temperature": dict(temperature=-1.0),
    "temperature ": dict(temperature=0.0),
    "temperature  ": dict(temperature=float("nan")),
    "labels must be int64": dict(labels=torch.zeros(3, 2, dtype=torch.int32)),
    "must be floating point": dict(
        hidden=torch.zeros(3, 2, 4, dtype=torch.int64), weight_shard=torch.ones(8, 4).long()
    ),
    "vocab_size 100 does not fit": dict(vocab_size=100),
    "vocab_size 0 does not fit": dict(vocab_size=0),
    "backend": dict(backend="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    options = dict(
        hidden=torch.zeros(3, 2, 4),
        weight_shard=torch.zeros(8, 4, requires_grad=True),
        labels=torch.zeros(3, 2, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match=message.strip()):
        kernels.linear_logprobs(**options | BAD[message])


def test_triton_backend_refuses_what_it_cannot_do():
    for dtype in (torch.float32, torch.float64):  # on a CPU, without the interpreter
        with pytest.raises(ValueError, match="backend"):
            shard.row_kernels(torch.zeros(2, 8, dtype=dtype), "triton")


def test_kernels_import_nothing_above_them():
    loaded = run_python("-c", "import sys, megarlhf.kernels; print(*sorted(sys.modules))").split()
    assert not [name for name in loaded if name.startswith("megatron")]
    above = [name for name in loaded if name.startswith("megarlhf.") and not name.startswith("megarlhf.kernels")]
    assert not above


def test_sm90_gate(tmp_path):
    """Every kernel, compiled for Hopper without a GPU: at most 128 registers, nothing spilled; the forward's loop
    about the 12 instructions an element, 24 a pair, for which an H200 has issue slots at its bandwidth in bf16."""
    pytest.importorskip("triton")
    measured = json.loads(run_python("-m", "tests.sm90_gate", TRITON_CACHE_DIR=str(tmp_path)))
    assert len(measured) == 11
    for name, cost in measured.items():
        assert cost["registers"] <= 128 and not (cost["stack"] or cost["local"] or cost["spills"]), (name, cost)
    assert measured["logprob_stats_kernel bf16"]["per_element"] <= 9
    assert measured["logprob_stats_kernel bf16 entropy"]["per_element"] <= 13
    assert measured["kl_stats_kernel bf16"]["per_element"] <= 25
