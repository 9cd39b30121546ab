"""What the kernels share: their outputs, the checks of their arguments, and the merge of row statistics over TP.

A row of logits is split over the tensor-parallel ranks: rank r holds the columns [r V', (r + 1) V'). Each rank reduces
its part of a row to four numbers, one all-gather brings them together, and every rank then adds them in rank order, so
that all ranks hold the same bits (a ring all-reduce does not promise that, and needs three of them).

Legend: N rows, V vocabulary, V' columns of one rank (V' * TP >= V; what exceeds V is padding).
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The maximum of no columns, and of columns that are all -inf: finite, so that no difference of maxima is nan, and a
# power of 2, so that scaling it is exact.
NO_MAXIMUM = -(2.0**100)


class LogprobOutput(NamedTuple):
    """Everything in the shape of the labels and in nats; float32 (float64 for float64 logits)."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor  # log sum_v exp(logit_v / temperature); has no gradient


class KLOutput(NamedTuple):
    """Policy against reference, in the shape of the labels and in nats.

    With d = logprobs - ref_logprobs at the sampled label (Schulman, "Approximating KL divergence", 2020):
    k1 = d                 unbiased, may be negative
    k2 = d^2 / 2           biased, low variance
    k3 = exp(-d) - 1 + d   unbiased, never negative
    kl = sum_v p_v (ln p_v - ln r_v)   exact: no sampling variance, never negative
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    kl: Tensor
    entropy: Tensor | None

    @classmethod
    def of(cls, logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor, entropy: Tensor | None) -> KLOutput:
        k1 = logprobs - ref_logprobs
        k3 = torch.expm1(-k1) + k1  # expm1: exp(-d) - 1 + d cancels to noise for the small d of a fresh policy
        return cls(logprobs, ref_logprobs, k1, k1.square() / 2, k3, kl, entropy)


@dataclass(frozen=True)
class Head:
    """How to read this rank's logits: the options of a call after they were checked."""

    temperature: float
    with_entropy: bool
    entropy_grad: bool
    width: int  # real columns of this rank, the first of its V'
    start: int  # vocabulary id of its first column
    rank: int
    tp_group: ProcessGroup | None
    kernels: ModuleType  # torch_rows or triton_rows

    @classmethod
    def of(cls, shard: Tensor, columns: int, labels: Tensor, *, temperature, with_entropy, entropy_grad, ignore_index,
           vocab_size, tp_group, backend, debug) -> Head:  # fmt: skip
        """The head of a `shard` (logits or weight) with `columns` columns on this rank."""
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be finite and > 0, not {temperature}; greedy is the sampler's business")
        if shard.dtype not in FLOATS:
            raise ValueError(f"logits and weight_shard must be floating point, not {shard.dtype}")
        if labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 vocabulary ids, not {labels.dtype}; use labels.long()")
        tp = tp_size(tp_group)
        vocab_size = columns * tp if vocab_size is None else vocab_size
        if not 0 < vocab_size <= columns * tp:
            raise ValueError(
                f"vocab_size {vocab_size} does not fit {tp} shards of {columns} columns; pass the unpadded "
                "vocabulary size, and the group over which the vocabulary is split as tp_group"
            )
        # Reading values costs a device synchronisation, hence only on request.
        if debug and not bool(((labels == ignore_index) | ((labels >= 0) & (labels < vocab_size))).all()):
            raise ValueError(f"labels must be in [0, {vocab_size}) or ignore_index ({ignore_index})")
        rank = dist.get_rank(tp_group) if tp > 1 else 0
        start = rank * columns
        width = min(max(vocab_size - start, 0), columns)
        kernels = row_kernels(shard, backend)
        return cls(temperature, with_entropy, with_entropy and entropy_grad, width, start, rank, tp_group, kernels)

    def local(self, labels: Tensor) -> Tensor:
        """Vocabulary ids -> (N,) columns of this rank, -1 where the label (or an ignored row) is not here."""
        column = labels.flatten() - self.start
        return column.masked_fill_((column < 0) | (column >= self.width), -1)


@dataclass(frozen=True)
class Merged:
    """A row's statistics over all ranks; (N,) each, but for the weights."""

    logprobs: Tensor
    entropy: Tensor | None
    top: Tensor  # max_v x_v
    log_size: Tensor  # log sum_v exp((x_v - top) / temperature)
    weights: Tensor  # (TP, N): on rank r, p_v = weights[r] exp((x_v - top_r) / temperature), top_r the rank's maximum


def merge(everyone: Tensor, head: Head, *, with_entropy: bool | None = None) -> Merged:
    """(TP, N, 4) statistics of the ranks -> the rows' results.

    The columns are top = max_v x_v, size = sum_v e^z_v, moment = sum_v e^z_v z_v, with z = (x - top) / temperature, and
    the label's x (0 where it is not here). Maxima and the label's logit stay in the logits' own scale, where they are
    exact: at temperature 0.1 lse is so large that its rounding alone would show in the log-probability.
    """
    top, size, moment, label = everyone.unbind(-1)
    highest = top.amax(0)
    shift = (top - highest) / head.temperature
    scale = shift.exp()
    total = (scale * size).sum(0)
    log_total, weights = total.log(), scale / total
    entropy = None
    if head.with_entropy if with_entropy is None else with_entropy:
        entropy = log_total - (weights * (moment + size * shift)).sum(0)
    logprobs = (label.sum(0) - highest) / head.temperature - log_total
    return Merged(logprobs, entropy, highest, log_total, weights)


def grad_scalars(head: Head, weight: Tensor, entropy: Tensor | None, grad: Tensor | None, grad_entropy: Tensor | None):
    """The row scalars (N,) of a backward, by the names of the row kernels' arguments.

    With p_v = weight e^z_v and ln p_v = z_v + ln weight,
        d logits_v = [g (1[v = y] - p_v) - g_H p_v (ln p_v + H)] / temperature
                   = e^z_v (constant + slope z_v) + 1[v = y] onehot.
    """
    onehot = torch.zeros_like(weight) if grad is None else grad / head.temperature
    if grad_entropy is None:
        return {"constant": -weight * onehot, "slope": None, "onehot": onehot}
    slope = -weight * grad_entropy / head.temperature
    log_weight = weight.log().clamp(min=NO_MAXIMUM)  # a shard without any weight: 0 * -inf
    return {"constant": slope * (entropy + log_weight) - weight * onehot, "slope": slope, "onehot": onehot}


def write_logprob_grad(head: Head, x: Tensor, labels: Tensor, stats: Tensor, out: Tensor, scalars: dict) -> None:
    """The gradient of (N, V') logits into `out`, 0 in the padding."""
    width = head.width
    head.kernels.logprob_grad(x[:, :width], labels, stats, out[:, :width], temperature=head.temperature, **scalars)
    out[:, width:] = 0


def shaped(value: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor | None:
    """(N,) -> the labels' shape, 0 (and without a gradient) in ignored rows."""
    return None if value is None else value.view(labels.shape).masked_fill(labels == ignore_index, 0)


def gather(stats: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """(N, ...) of this rank -> (TP, N, ...) of all; the only collective of a forward pass."""
    tp = tp_size(tp_group)
    if tp == 1:
        return stats[None]
    everyone = stats.new_empty(tp * len(stats), *stats.shape[1:])
    dist.all_gather_into_tensor(everyone, stats, group=tp_group)
    return everyone.view(tp, *stats.shape)


def tp_size(tp_group: ProcessGroup | None) -> int:
    return 1 if tp_group is None else dist.get_world_size(tp_group)


def row_kernels(tensor: Tensor, backend: str) -> ModuleType:
    """The module with the row kernels for `tensor`: torch_rows or triton_rows; both have the same functions."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend must be "auto", "torch" or "triton", not {backend!r}')
    if backend == "auto":
        fused = tensor.is_cuda and tensor.dtype != torch.float64 and importlib.util.find_spec("triton") is not None
        backend = "triton" if fused else "torch"
    elif backend == "triton" and (
        tensor.dtype == torch.float64 or not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
    ):
        raise ValueError(
            f'backend="triton" takes CUDA tensors (or any, with TRITON_INTERPRET=1) up to float32, not {tensor.dtype} '
            f'on {tensor.device}; use "auto" or "torch"'
        )
    return importlib.import_module(f"megarlhf.kernels.{backend}_rows")
