"""What every backend, device and tensor-parallel size of the kernels must satisfy, against `reference` in float64.

Used by the unit tests (torch, one process), the distributed tests (torch and interpreted Triton on gloo ranks) and the
GPU tests. Legend: V vocabulary, V' columns of one rank, T temperature.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarlhf import kernels
from megarlhf.kernels.kl import kl_of_logits, write_kl_grad
from megarlhf.kernels.shard import CallOptions, gather, grad_scalars, merge, tp_size, write_logprob_grad
from tests import reference

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
        self.labels[0] = torch.tensor([0, vocabulary - 1, vocabulary // 3, vocabulary // 2])
        self.whole[..., vocabulary:] = 30.0
        self.weights = torch.randn(3, 2, 4, generator=generator)
        self.device, self.tp_group = device, tp_group

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        start = self.rank * self.columns
        return whole[..., start : start + self.columns].contiguous().to(self.device)

    def true(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[..., : self.vocabulary].double()

    def check_gradient(
        self, grad: torch.Tensor, expected: torch.Tensor, temperature: float, terms: torch.Tensor | None = None
    ) -> None:
        """Of logits, against the exact one (..., V): close, 0 where it must be, and with rows that add to 0. `terms`:
        the sizes of the terms whose difference it is, if they are much larger than it."""
        assert grad.dtype == self.whole.dtype
        tolerance = GRADIENT[grad.dtype]
        padded = torch.zeros(self.whole.shape, dtype=torch.float64)
        padded[..., : self.vocabulary] = expected
        mine = self.shard(padded)
        size = (mine if terms is None else terms).norm().item()
        error = (grad.double() - mine).norm().item()
        assert error <= tolerance * size, ("gradient", error, size)
        impossible = self.whole == -torch.inf
        impossible[..., self.vocabulary :] = True
        assert not grad[self.shard(impossible)].any(), "padding and impossible classes have no gradient"
        sums = grad.double().sum(-1)
        if self.tp_group is not None:
            dist.all_reduce(sums, group=self.tp_group)
        # Where p is almost 1, d = g (1 - p) / T cancels: the error is in proportion to g / T.
        slack = tolerance * (padded.abs().sum(-1) + self.weights.abs().sum(0) / temperature).to(self.device)
        assert (sums.abs() <= slack).all(), ("row sums of d logits", sums, slack)


def given_logprobs(x, labels, weights, options: CallOptions):
    """Log-probs and entropies of the given logits x (N, V'), and the gradient of their sums weighted by `weights`
    (2, N), which takes the place of x: what `linear_logprobs` does with a chunk."""
    local = options.local(labels)
    stats = options.kernels.logprob_stats(
        x[:, : options.width], local, temperature=options.temperature, with_entropy=options.with_entropy
    )
    merged = merge(gather(stats, options.tp_group), options)
    grad_entropy = weights[1] if options.entropy_grad else None
    scalars = grad_scalars(options, merged.weights[options.rank], merged.entropy, weights[0], grad_entropy)
    write_logprob_grad(options, x, local, stats, x, scalars)
    return merged.logprobs, merged.entropy


def check_logprobs(backend: str, vocabulary: int, dtype: torch.dtype, temperature: float, tp_group=None, device="cpu"):
    case = Given(vocabulary, dtype, tp_group, device)
    leaf = case.true(case.whole).requires_grad_()
    expected = reference.logprobs(leaf, case.labels, temperature=temperature)
    for with_entropy in (False, True):
        x = case.shard(case.whole).flatten(0, 1).clone()  # the gradient takes its place
        options = CallOptions.of(
            x, case.columns, temperature=temperature, vocab_size=vocabulary, tp_group=tp_group, backend=backend,
            with_entropy=with_entropy, entropy_grad=True,
        )  # fmt: skip
        weights = case.weights.flatten(1).to(device)
        logprobs, entropy = given_logprobs(x, case.labels.to(device), weights, options)
        assert logprobs.dtype == torch.float32
        near("logprobs", logprobs.view(2, 4), expected.logprobs, **LOGPROB)
        wanted = (expected.logprobs * case.weights[0]).sum()
        if with_entropy:
            near("entropy", entropy.view(2, 4), expected.entropy, **ENTROPY)
            wanted = wanted + (expected.entropy * case.weights[1]).sum()
        (exact,) = torch.autograd.grad(wanted, leaf, retain_graph=True)
        case.check_gradient(x.view(2, 4, -1), exact, temperature)


def check_kl(backend: str, vocabulary: int, dtype: torch.dtype, temperature: float, tp_group=None, device="cpu"):
    case = Given(vocabulary, dtype, tp_group, device)
    leaf = case.true(case.whole).requires_grad_()
    expected = reference.policy_ref_kl(leaf, case.true(case.ref), temperature=temperature)
    x, ref = case.shard(case.whole).flatten(0, 1).clone(), case.shard(case.ref).flatten(0, 1)
    options = CallOptions.of(
        x, case.columns, temperature=temperature, vocab_size=vocabulary, tp_group=tp_group, backend=backend
    )
    kl, scalars = kl_of_logits(x, ref, options)
    near("kl", kl.view(2, 4), expected, atol=1e-5, rtol=2e-6)
    assert (kl >= 0).all()
    weights = case.weights[0]
    (exact,) = torch.autograd.grad((expected * weights).sum(), leaf)
    write_kl_grad(options, x, ref, scalars, weights.flatten().to(device), x)  # the gradient takes the place of x
    distances = (case.true(case.whole) - case.true(case.ref)).nan_to_num(0, 0, 0).abs()
    p = (case.true(case.whole) / temperature).softmax(-1)
    terms = weights[..., None] * p * (distances + (p * distances).sum(-1, keepdim=True)) / temperature**2
    case.check_gradient(x.view(2, 4, -1), exact, temperature, terms)


SELECTIONS = {
    "all": None,
    "slice": slice(3, 11),
    "stride": slice(1, 12, 4),
    "none": slice(0),  # an empty micro-batch
}


class Head:
    """Hidden states (4, 3, H) and a weight (V, H) in half or single precision: their true values as float64 leaves, and
    this rank's leaves. The 12 rows are computed in chunks of 5."""

    def __init__(self, vocabulary: int, dtype: torch.dtype, tp_group, device: str, sequence_parallel: bool, size: int):
        tp = tp_size(tp_group)
        rank = dist.get_rank(tp_group) if tp > 1 else 0
        self.generator = torch.Generator().manual_seed(vocabulary)
        columns = -(-vocabulary // (8 * tp)) * 8
        self.vocabulary, self.dtype, self.device = vocabulary, dtype, device
        self.part = slice(rank * 4 // tp, (rank + 1) * 4 // tp) if sequence_parallel else slice(None)
        self.mine = slice(rank * columns, (rank + 1) * columns)
        hidden, weight = self.random(4, 3, size).to(dtype), self.random(columns * tp, size).to(dtype)
        self.true_hidden = hidden.double().requires_grad_()
        self.true_weight = weight[:vocabulary].double().requires_grad_()
        self.hidden, self.weight = (
            value.clone().to(device).requires_grad_() for value in (hidden[self.part], weight[self.mine])
        )
        self.options = dict(temperature=0.7, vocab_size=vocabulary, tp_group=tp_group, chunk_rows=5,
                            sequence_parallel=sequence_parallel)  # fmt: skip

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def check_gradients(self, tolerance: float, of_whole: bool = False) -> None:
        """After both backward passes."""
        assert self.hidden.grad.dtype == self.weight.grad.dtype == self.dtype
        here = self.true_weight.grad[self.mine]
        own = self.weight.grad.cpu()
        errors = relative(self.hidden.grad.cpu(), self.true_hidden.grad[self.part]), relative(own[: len(here)], here)
        if of_whole:  # a rank's rows may have a gradient that is small beside the terms that cancel in it
            part = self.true_hidden.grad[self.part].norm() / self.true_hidden.grad.norm().clamp(min=1e-30)
            errors = errors[0] * part.item(), errors[1]
        assert max(errors) < tolerance, ("gradients of hidden and weight", errors)
        assert not own[len(here) :].any(), "rows of padding have no gradient"


def check_linear(backend: str, vocabulary: int, dtype: torch.dtype, selection: str, tp_group=None, device="cpu", *,
                 sequence_parallel=False, with_entropy=True, hidden_size=16, softcap=None):  # fmt: skip
    head, rows = Head(vocabulary, dtype, tp_group, device, sequence_parallel, hidden_size), SELECTIONS[selection]
    selected = 12 if rows is None else len(torch.arange(12)[rows])
    labels = torch.randint(vocabulary, (selected,), generator=head.generator)
    weights = head.random(3, selected)
    expected = reference.linear_logprobs(head.true_hidden, head.true_weight, labels, rows=rows, temperature=0.7,
                                         softcap=softcap)  # fmt: skip
    wanted = expected.logprobs * weights[0] + expected.logits * weights[2]
    (wanted + (expected.entropy * weights[1] if with_entropy else 0)).sum().backward()
    output = kernels.linear_logprobs(
        head.hidden, head.weight, labels.to(device), rows=rows, with_entropy=with_entropy, backend=backend,
        softcap=softcap, **head.options,
    )  # fmt: skip
    loss = output.logprobs * weights[0].to(device) + output.logits * weights[2].to(device)
    if with_entropy:
        loss = loss + output.entropy * weights[1].to(device)
    loss.sum().backward()
    near("logprobs", output.logprobs, expected.logprobs, **LOGPROB)
    near("logits", output.logits, expected.logits, **LOGPROB)
    if not sequence_parallel and softcap is None:
        states = head.hidden.detach().flatten(0, 1)[slice(None) if rows is None else rows]
        alone = kernels.label_logits(states, head.weight.detach(), labels.to(device), tp_group=tp_group)
        near("label_logits", alone, expected.logits, **LOGPROB)
    if with_entropy:
        near("entropy", output.entropy, expected.entropy, **ENTROPY)
    head.check_gradients(max(GRADIENT[dtype], 1e-5))  # the logits themselves come out of a float32 GEMM


def check_linear_kl(backend: str, vocabulary: int, dtype: torch.dtype, selection: str, tp_group=None, device="cpu", *,
                    sequence_parallel=False, softcap=None):  # fmt: skip
    head, rows = Head(vocabulary, dtype, tp_group, device, sequence_parallel, 16), SELECTIONS[selection]
    everything = slice(None) if rows is None else rows
    ref_hidden = (head.true_hidden.detach().flatten(0, 1) + 0.3 * head.random(12, 16))[everything].to(dtype)
    ref_weight = (head.true_weight.detach() + 0.3 * head.random(*head.true_weight.shape)).to(dtype)
    weights = head.random(len(ref_hidden))
    logits, ref_logits = (
        reference.capped(hidden @ weight.t(), softcap) for hidden, weight in (
            (head.true_hidden.flatten(0, 1)[everything], head.true_weight), (ref_hidden.double(), ref_weight.double())
        )
    )  # fmt: skip
    expected = reference.policy_ref_kl(logits, ref_logits, temperature=0.7)
    (expected * weights).sum().backward()
    own = torch.full_like(head.weight.detach(), 30.0)  # padding holds real numbers
    own[: len(ref_weight[head.mine])] = ref_weight[head.mine].to(device)
    kl = kernels.linear_policy_ref_kl(
        head.hidden,
        head.weight,
        ref_hidden.to(device),
        own,
        rows=rows,
        backend=backend,
        softcap=softcap,
        **head.options,
    )
    (kl * weights.to(device)).sum().backward()
    near("kl", kl, expected, atol=1e-5, rtol=1e-5)
    head.check_gradients(max(GRADIENT[dtype], 1e-5), of_whole=True)
