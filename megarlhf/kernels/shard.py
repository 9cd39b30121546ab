"""What the kernels share: the checks of their arguments, and the merge of row statistics over TP.

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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megarlhf.kernels import torch_rows
from megarlhf.kernels.torch_rows import NO_MAXIMUM

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CallOptions:
    """Checked options of one call, and which columns of the vocabulary this rank has."""

    temperature: float
    with_entropy: bool
    entropy_grad: bool
    width: int  # real columns of this rank, the first of its V'
    start: int  # vocabulary id of its first column
    rank: int
    tp_group: ProcessGroup | None
    kernels: ModuleType  # torch_rows or triton_rows
    softcap: float | None  # logits become softcap * tanh(logits / softcap) before anything else

    @classmethod
    def of(
        cls, shard: Tensor, columns: int, *, temperature: float, vocab_size: int | None, tp_group: ProcessGroup | None,
        backend: str, with_entropy: bool = False, entropy_grad: bool = False, softcap: float | None = None,
    ) -> CallOptions:  # fmt: skip
        """For a `shard` (logits or weight) with `columns` columns on this rank."""
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be finite and > 0, not {temperature}; greedy is the sampler's business")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
            raise ValueError(f"softcap must be finite and > 0, not {softcap}; None leaves logits as they are")
        if shard.dtype not in FLOATS:
            raise ValueError(f"logits and weight_shard must be floating point, not {shard.dtype}")
        tp = tp_size(tp_group)
        vocab_size = columns * tp if vocab_size is None else vocab_size
        if not 0 < vocab_size <= columns * tp:
            raise ValueError(
                f"vocab_size {vocab_size} does not fit {tp} shards of {columns} columns; pass the unpadded "
                "vocabulary size, and the group over which the vocabulary is split as tp_group"
            )
        rank = dist.get_rank(tp_group) if tp > 1 else 0
        start = rank * columns
        width = min(max(vocab_size - start, 0), columns)
        kernels = row_kernels(shard, backend)
        entropy_grad = with_entropy and entropy_grad
        return cls(temperature, with_entropy, entropy_grad, width, start, rank, tp_group, kernels, softcap)

    def local(self, labels: Tensor) -> Tensor:
        """Vocabulary ids -> (N,) columns of this rank, -1 where the label is on another rank."""
        column = labels.flatten() - self.start
        return column.masked_fill_((column < 0) | (column >= self.width), -1)


@dataclass(frozen=True)
class Merged:
    """A row's statistics over all ranks; (N,) each, but for the weights."""

    logprobs: Tensor
    entropy: Tensor | None
    logits: Tensor  # of the labels
    weights: Tensor  # (TP, N): on rank r, p_v = weights[r] exp((x_v - top_r) / temperature), top_r the rank's maximum


def merge(everyone: Tensor, options: CallOptions) -> Merged:
    """(TP, N, 4) statistics of the ranks -> the rows' results.

    The columns are top = max_v x_v, size = sum_v e^z_v, moment = sum_v e^z_v z_v, with z = (x - top) / temperature, and
    the label's x (0 where it is not here). Maxima and the label's logit stay in the logits' own scale, where they are
    exact: at temperature 0.1 the log-sum-exp is so large that its rounding alone would show in the log-probability.
    """
    top, size, moment, label = everyone.unbind(-1)
    highest, shift, log_total, weights = merge_sizes(top, size, options.temperature)
    entropy = None
    if options.with_entropy:
        entropy = log_total - (weights * (moment + size * shift)).sum(0)
    logits = label.sum(0)
    return Merged((logits - highest) / options.temperature - log_total, entropy, logits, weights)


def merge_sizes(top: Tensor, size: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(TP, N) maxima of the ranks, and sums of e^z relative to them -> the rows' maximum (N,), the ranks' distance from
    it (TP, N), in units of the temperature, the logarithm of the rows' sum (N,), and `Merged.weights` (TP, N)."""
    highest = top.amax(0)
    shift = (top - highest) / temperature
    scale = shift.exp()
    total = (scale * size).sum(0)
    return highest, shift, total.log(), scale / total


def grad_scalars(
    options: CallOptions, weight: Tensor, entropy: Tensor | None, grad: Tensor | None, grad_entropy: Tensor | None,
    grad_logits: Tensor | None = None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The row scalars (N,) of a backward, by the names of the row kernels' arguments.

    With p_v = weight e^z_v and ln p_v = z_v + ln weight,
        d logits_v = [g (1[v = y] - p_v) - g_H p_v (ln p_v + H)] / temperature + g_x 1[v = y]
                   = e^z_v (constant + slope z_v) + 1[v = y] onehot.
    """
    scaled = torch.zeros_like(weight) if grad is None else grad / options.temperature
    onehot = scaled if grad_logits is None else scaled + grad_logits
    if grad_entropy is None:
        return {"constant": -weight * scaled, "slope": None, "onehot": onehot}
    slope = -weight * grad_entropy / options.temperature
    log_weight = weight.log().clamp(min=NO_MAXIMUM)  # a shard without any weight: 0 * -inf
    return {"constant": slope * (entropy + log_weight) - weight * scaled, "slope": slope, "onehot": onehot}


def write_logprob_grad(
    options: CallOptions, x: Tensor, labels: Tensor, stats: Tensor, out: Tensor, scalars: dict[str, Tensor | None]
) -> None:
    """The gradient of (N, V') logits into `out`, 0 in the padding."""
    width, temperature = options.width, options.temperature
    options.kernels.logprob_grad(x[:, :width], labels, stats, out[:, :width], temperature=temperature, **scalars)
    out[:, width:] = 0


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
    if backend == "torch":
        return torch_rows
    from megarlhf.kernels import triton_rows

    return triton_rows
