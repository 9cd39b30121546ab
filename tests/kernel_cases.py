"""What every backend, device and tensor-parallel size of the kernels must satisfy, against `reference` in float64.

Used by the unit tests (torch, one process), the distributed tests (torch and interpreted Triton on gloo ranks) and the
GPU tests. Legend: V vocabulary, V' columns of one rank, T temperature.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarlhf import kernels
from megarlhf.kernels import reference
from megarlhf.kernels.shard import tp_size

VOCABULARIES = (7, 257, 32000, 50257, 128256)
TEMPERATURES = (0.1, 0.7, 2.0)

# A log-probability at temperature 0.1 is some hundreds: there one float32 step is more than 1e-5.
LOGPROB = {"atol": 1e-5, "rtol": 1.2e-7}
ENTROPY = {"atol": 5e-6, "rtol": 0}
GRADIENT = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def group(tp: int):
    return dist.group.WORLD if tp > 1 else None


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|; 0 where both are 0."""
    error, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    return error / size if size else float(error > 0)


def near(name: str, a: torch.Tensor, b: torch.Tensor, *, atol: float, rtol: float) -> None:
    a, b = a.detach().double().cpu(), b.detach().cpu()
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol, msg=lambda message: f"{name}: {message}")


class Given:
    """Random logits (2, 4, V), some of them -inf, in shards whose padding holds large numbers; labels of every kind."""

    def __init__(self, vocabulary: int, dtype: torch.dtype, tp_group, device: str = "cpu"):
        tp = tp_size(tp_group)
        self.rank = dist.get_rank(tp_group) if tp > 1 else 0
        generator = torch.Generator().manual_seed(vocabulary)
        # On 4 ranks, of 7 the last two have padding alone, and of 257 one has a single column.
        self.columns = {(7, 4): 4, (257, 4): 128}.get((vocabulary, tp), -(-vocabulary // (8 * tp)) * 8)
        padded = self.columns * tp
        self.vocabulary = vocabulary
        self.whole = (torch.randn(2, 4, padded, generator=generator) * 4).to(dtype)
        self.whole[0, 1, 1 : vocabulary // 2] = -torch.inf  # the label of this row is elsewhere
        self.ref = (self.whole + torch.randn(2, 4, padded, generator=generator) * 0.5).to(dtype)
        self.labels = torch.randint(vocabulary, (2, 4), generator=generator)
        self.labels[0] = torch.tensor([0, vocabulary - 1, -100, vocabulary // 2])
        self.whole[..., vocabulary:] = 30.0
        self.weights = torch.randn(3, 2, 4, generator=generator)
        self.device, self.tp_group = device, tp_group

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        start = self.rank * self.columns
        return whole[..., start : start + self.columns].contiguous().to(self.device)

    def true(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[..., : self.vocabulary].double()

    def check_gradient(self, grad: torch.Tensor, expected: torch.Tensor, temperature: float) -> None:
        """Of logits, against the exact one (..., V): close, 0 where it must be, and with rows that add to 0."""
        assert grad.dtype == self.whole.dtype
        tolerance = GRADIENT[grad.dtype]
        padded = torch.zeros(self.whole.shape, dtype=torch.float64)
        padded[..., : self.vocabulary] = expected
        mine = self.shard(padded)
        assert relative(grad, mine) < tolerance, ("gradient", relative(grad, mine))
        impossible = (self.whole == -torch.inf) | (self.labels == -100)[..., None]
        impossible[..., self.vocabulary :] = True
        assert not grad[self.shard(impossible)].any(), "ignored rows, padding and impossible classes have no gradient"
        sums = grad.double().sum(-1)
        if self.tp_group is not None:
            dist.all_reduce(sums, group=self.tp_group)
        # Where p is almost 1, d = g (1 - p) / T cancels: the error is in proportion to g / T.
        slack = tolerance * (padded.abs().sum(-1) + self.weights.abs().sum(0) / temperature).to(self.device)
        assert (sums.abs() <= slack).all(), ("row sums of d logits", sums, slack)


def check_logprobs(backend: str, vocabulary: int, dtype: torch.dtype, temperature: float, tp_group=None, device="cpu"):
    case = Given(vocabulary, dtype, tp_group, device)
    options = dict(temperature=temperature, vocab_size=vocabulary, tp_group=tp_group, backend=backend)
    labels = case.labels.to(device)
    leaf = case.true(case.whole).requires_grad_()
    expected = reference.logprobs(leaf, case.labels, temperature=temperature)
    for with_entropy in (False, True):
        logits = case.shard(case.whole).requires_grad_() * 1
        original = logits.data_ptr()
        output = kernels.logprobs(logits, labels, with_entropy=with_entropy, **options)
        assert output.logprobs.dtype == torch.float32 and not output.lse.requires_grad
        near("logprobs", output.logprobs, expected.logprobs, **LOGPROB)
        near("lse", output.lse, expected.lse, atol=1e-5, rtol=2e-7)
        loss = (output.logprobs * case.weights[0].to(device)).sum()
        wanted = (expected.logprobs * case.weights[0]).sum()
        if with_entropy:
            near("entropy", output.entropy, expected.entropy, **ENTROPY)
            loss = loss + (output.entropy * case.weights[1].to(device)).sum()
            wanted = wanted + (expected.entropy * case.weights[1]).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        (exact,) = torch.autograd.grad(wanted, leaf, retain_graph=True)
        assert grad.data_ptr() == original, "the gradient must be where the logits were"
        case.check_gradient(grad, exact, temperature)


def check_kl(backend: str, vocabulary: int, dtype: torch.dtype, temperature: float, tp_group=None, device="cpu"):
    case = Given(vocabulary, dtype, tp_group, device)
    options = dict(temperature=temperature, vocab_size=vocabulary, tp_group=tp_group, backend=backend)
    labels = case.labels.to(device)
    leaf = case.true(case.whole).requires_grad_()
    expected = reference.policy_ref_kl(leaf, case.true(case.ref), case.labels, temperature=temperature)
    for with_entropy in (False, True):
        logits, ref = case.shard(case.whole).requires_grad_() * 1, case.shard(case.ref)
        before = ref.clone()
        output = kernels.policy_ref_kl(logits, ref, labels, with_entropy=with_entropy, **options)
        for name in ("logprobs", "ref_logprobs"):
            near(name, getattr(output, name), getattr(expected, name), **LOGPROB)
        near("kl", output.kl, expected.kl, atol=1e-5, rtol=2e-6)
        assert (output.kl >= 0).all()
        loss = (output.logprobs * case.weights[0].to(device) + output.kl * case.weights[2].to(device)).sum()
        wanted = (expected.logprobs * case.weights[0] + expected.kl * case.weights[2]).sum()
        if with_entropy:
            near("entropy", output.entropy, expected.entropy, **ENTROPY)
            loss = loss + (output.entropy * case.weights[1].to(device)).sum()
            wanted = wanted + (expected.entropy * case.weights[1]).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        (exact,) = torch.autograd.grad(wanted, leaf, retain_graph=True)
        case.check_gradient(grad, exact, temperature)
        assert torch.equal(ref, before), "the reference's logits are not ours to overwrite"


SELECTIONS = {
    "all": None,
    "slice": slice(3, 11),
    "stride": slice(1, 12, 4),
    "index": torch.tensor([11, 0, 5, 5, 7]),
    "none": torch.zeros(0, dtype=torch.int64),
}


def check_linear(backend: str, vocabulary: int, dtype: torch.dtype, selection: str, tp_group=None, device="cpu", *,
                 sequence_parallel=False, with_entropy=True, hidden_size=16):  # fmt: skip
    """(S, B) = (4, 3): the 12 rows in chunks of 5."""
    tp, rows = tp_size(tp_group), SELECTIONS[selection]
    rank = dist.get_rank(tp_group) if tp > 1 else 0
    generator = torch.Generator().manual_seed(vocabulary)
    columns = -(-vocabulary // (8 * tp)) * 8
    hidden = torch.randn(4, 3, hidden_size, generator=generator).to(dtype)
    weight = torch.randn(columns * tp, hidden_size, generator=generator).to(dtype)
    selected = 12 if rows is None else len(torch.arange(12)[rows])
    labels = torch.randint(vocabulary, (selected,), generator=generator)
    labels[1:2] = -100
    weights = torch.randn(2, selected, generator=generator)

    h64, w64 = hidden.double().requires_grad_(), weight[:vocabulary].double().requires_grad_()
    expected = reference.linear_logprobs(h64, w64, labels, rows=rows, temperature=0.7)
    wanted = (expected.logprobs * weights[0] + (expected.entropy * weights[1] if with_entropy else 0)).sum()
    wanted.backward()

    part = slice(rank * 4 // tp, (rank + 1) * 4 // tp) if sequence_parallel else slice(None)
    h = hidden[part].to(device).requires_grad_()
    w = weight[rank * columns : (rank + 1) * columns].clone().to(device).requires_grad_()
    output = kernels.linear_logprobs(
        h, w, labels.to(device), rows=rows.to(device) if isinstance(rows, torch.Tensor) else rows, temperature=0.7,
        with_entropy=with_entropy, vocab_size=vocabulary, tp_group=tp_group, sequence_parallel=sequence_parallel,
        chunk_rows=5, backend=backend, debug=True,
    )  # fmt: skip
    loss = output.logprobs * weights[0].to(device)
    if with_entropy:
        loss = loss + output.entropy * weights[1].to(device)
    loss.sum().backward()
    near("logprobs", output.logprobs, expected.logprobs, **LOGPROB)
    if with_entropy:
        near("entropy", output.entropy, expected.entropy, **ENTROPY)
    tolerance = max(GRADIENT[dtype], 1e-5)  # the logits themselves come out of a float32 GEMM
    assert h.grad.dtype == w.grad.dtype == dtype
    here = w64.grad[rank * columns : (rank + 1) * columns]
    errors = relative(h.grad.cpu(), h64.grad[part]), relative(w.grad[: len(here)].cpu(), here)
    assert max(errors) < tolerance, ("gradients of hidden and weight", errors)
    assert not w.grad[len(here) :].any(), "rows of padding have no gradient"
