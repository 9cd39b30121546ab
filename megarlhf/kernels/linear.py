"""The language-model head and its log-probabilities, by chunks of rows: logits exist for one chunk at a time.

The forward keeps a few numbers a row and the last chunk's logits; the backward computes those of the other chunks again
(4 GEMMs instead of 3), turns them into their gradient in place and multiplies that into the gradients of hidden and
weight. Memory: one chunk of logits and the weight's gradient, instead of several [N, V'].

Legend: S sequence, B rows, H hidden size, N selected rows of [S*B, H], V' columns of one rank, TP ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megarlhf.kernels.products import accumulate, default_chunk, operand_of, project, sum_dtype
from megarlhf.kernels.shard import CallOptions, gather, grad_scalars, merge, tp_size, write_logprob_grad


class LogprobOutput(NamedTuple):
    """In the shape of the labels and in nats; float32 (float64 for float64 logits)."""

    logprobs: Tensor
    entropy: Tensor | None
    logits: Tensor  # of the labels, not divided by the temperature


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    labels: Tensor,
    *,
    rows: slice | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> LogprobOutput:
    """Log-probability of `labels` and entropy under softmax(hidden @ weight^T / temperature), and the labels' logits,
    without keeping the other logits. All are differentiable.

        log p = z_y - log sum_v e^z_v,   H = -sum_v p_v ln p_v,   z = logits / temperature
        d logits_v = [g (1[v = y] - p_v) - g_H p_v (ln p_v + H)] / temperature

    hidden: (S, B, H), the same on all TP ranks, or this rank's (S/TP, B, H) under `sequence_parallel`.
    weight_shard: (V', H), this rank's rows [rank V', (rank + 1) V') of the output (or the tied embedding) weight.
    labels: int64 global ids, any shape with as many elements as there are selected rows; the outputs have its shape.
    rows: which rows of the whole (S*B, H) hidden (after the sequence-parallel gather) the labels belong to; None: all.
        The others cost no head work and get no gradient.
    entropy_grad: False if the entropy is only a metric, which saves work in the backward.
    vocab_size: V without padding (default V' * TP). Columns beyond it count as -inf: Megatron's padding holds real
        numbers that change with TP.
    gradient_accumulation_fusion: Megatron's protocol: add the weight's gradient to `weight_shard.main_grad` and set
        `grad_added_to_main_grad`. Otherwise autograd gets it.
    chunk_rows: rows of logits held at a time; default: 64 MiB of them on a CPU, 256 MiB on a GPU.
    backend: "auto" (triton for CUDA tensors where it is installed), "torch" or "triton".

    Callers need no mappings: the gradient of hidden arrives complete, all-reduced over TP, or reduce-scattered under
    `sequence_parallel`. Logits are float32, and the weight's gradient is summed in float32 over the chunks, whatever
    the precision of hidden and weight (`products`). Logits of nan and +inf give nan; so does a row of -inf alone.

    ValueError: see the messages; each names the argument and the remedy.
    """
    tp = tp_size(tp_group)
    if hidden.dtype != weight_shard.dtype or hidden.shape[-1] != weight_shard.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} and weight_shard {tuple(weight_shard.shape)} "
            f"{weight_shard.dtype} must have the same dtype and the same last dimension"
        )
    if gradient_accumulation_fusion and weight_shard.requires_grad and not hasattr(weight_shard, "main_grad"):
        raise ValueError(
            "gradient_accumulation_fusion adds to weight_shard.main_grad, which this weight has not; "
            "wrap the model in Megatron's DistributedDataParallel or pass gradient_accumulation_fusion=False"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 vocabulary ids, not {labels.dtype}; use labels.long()")
    options = CallOptions.of(
        weight_shard, len(weight_shard), temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad,
        vocab_size=vocab_size, tp_group=tp_group, backend=backend,
    )  # fmt: skip
    total = hidden.shape[:-1].numel() * (tp if sequence_parallel else 1)
    selected = total if rows is None else len(range(total)[rows])
    if labels.numel() != selected:
        raise ValueError(f"labels has {labels.numel()} elements for {selected} selected rows of {total}")
    if chunk_rows is None:
        chunk_rows = default_chunk(weight_shard)
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
    call = _Call(options, rows, sequence_parallel and tp > 1, gradient_accumulation_fusion, chunk_rows)
    outputs = _LinearLogprobs.apply(hidden, weight_shard, options.local(labels), call)
    return LogprobOutput(*(None if output is None else output.view(labels.shape) for output in outputs))


@torch.no_grad()
def label_logits(
    hidden: Tensor, weight_shard: Tensor, labels: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """hidden (N, H), the same on all TP ranks, weight_shard (V', H), labels (N,) int64 -> (N,) hidden . weight_y, in
    float32 or wider. No other logit is computed; no gradients."""
    start = len(weight_shard) * (dist.get_rank(tp_group) if tp_size(tp_group) > 1 else 0)
    here = (labels >= start) & (labels < start + len(weight_shard))
    rows = weight_shard[(labels - start).where(here, 0)]
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight_shard.dtype), torch.float32)
    logits = (hidden.to(wide) * rows).sum(-1).where(here, 0)
    if tp_size(tp_group) > 1:
        dist.all_reduce(logits, group=tp_group)
    return logits


class _Call:
    """What a call's forward and backward share."""

    def __init__(
        self, options: CallOptions, rows: slice | None, sequence_parallel: bool, fusion: bool, chunk_rows: int
    ):
        self.options = options
        self.rows = rows
        self.sequence_parallel = sequence_parallel
        self.fusion = fusion
        self.chunk_rows = chunk_rows

    def select(self, hidden: Tensor) -> Tensor:
        """-> (N, H) selected rows of the whole hidden."""
        if self.sequence_parallel:
            local = hidden.contiguous()
            hidden = local.new_empty(len(local) * tp_size(self.options.tp_group), *local.shape[1:])
            dist.all_gather_into_tensor(hidden, local, group=self.options.tp_group)
        hidden = hidden.flatten(0, -2)
        return hidden if self.rows is None else hidden[self.rows]

    def select_backward(self, grad: Tensor, hidden: Tensor) -> Tensor:
        """(N, H) of this rank's columns -> the gradient of `hidden`, summed over TP."""
        group, tp = self.options.tp_group, tp_size(self.options.tp_group)
        if tp > 1 and not self.sequence_parallel:
            dist.all_reduce(grad, group=group)
        if self.rows is not None:
            whole = grad.new_zeros(hidden.shape[:-1].numel() * (tp if self.sequence_parallel else 1), grad.shape[1])
            whole[self.rows] = grad
            grad = whole
        if self.sequence_parallel:
            grad, whole = grad.new_empty(len(grad) // tp, grad.shape[1]), grad
            dist.reduce_scatter_tensor(grad, whole, group=group)
        return grad.view(hidden.shape).to(hidden.dtype)

    def chunks(self, x: Tensor) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, len(x))) for start in range(0, len(x), self.chunk_rows)]

    def scratch(self, x: Tensor, weight: Tensor) -> Tensor:
        """An empty buffer for the logits of a chunk of the rows `x`; `_give_back` it afterwards."""
        shape, dtype = (min(self.chunk_rows, len(x)), len(weight)), sum_dtype(x)
        if x.device.type != "cpu":
            return x.new_empty(shape, dtype=dtype)
        from megarlhf.cpu import memory

        return memory.take(*shape, dtype)


def _give_back(scratch: Tensor) -> None:
    if scratch.device.type == "cpu":
        from megarlhf.cpu import memory

        memory.give(scratch)


class _LinearLogprobs(torch.autograd.Function):
    """Hidden, weight, (N,) local columns -> logprobs, entropy, the labels' logits, (N,) each."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, call: _Call):
        options = call.options
        x, w = operand_of(call.select(hidden)), operand_of(weight)
        stats = x.new_empty(len(x), 4, dtype=sum_dtype(x))
        scratch = call.scratch(x, w)
        for chunk in call.chunks(x):
            logits = project(x[chunk], w, scratch)
            stats[chunk] = options.kernels.logprob_stats(
                logits[:, : options.width],
                labels[chunk],
                temperature=options.temperature,
                with_entropy=options.with_entropy,
            )
        merged = merge(gather(stats, options.tp_group), options)
        ctx.save_for_backward(hidden, weight, labels, stats, merged.weights[options.rank], merged.entropy)
        ctx.call, ctx.last_logits = call, scratch if any(ctx.needs_input_grad) else _give_back(scratch)
        ctx.set_materialize_grads(False)
        if merged.entropy is not None and not options.entropy_grad:
            ctx.mark_non_differentiable(merged.entropy)
        return merged.logprobs, merged.entropy, merged.logits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None, grad_logits: Tensor | None):
        hidden, weight, labels, stats, row_weight, entropy = ctx.saved_tensors
        call = ctx.call
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        x, w = operand_of(call.select(hidden)), operand_of(weight)
        scalars = grad_scalars(call.options, row_weight, entropy, grad, grad_entropy, grad_logits)
        x_grad = torch.empty_like(x) if need_hidden else None
        w_grad = _weight_accumulator(weight, w, call.fusion) if need_weight else None
        # The last chunk's logits are still there: a batch of one chunk needs no recomputation. A second backward does.
        kept, ctx.last_logits = ctx.last_logits, None
        scratch = call.scratch(x, w) if kept is None else kept
        for chunk in reversed(call.chunks(x)):
            logits = project(x[chunk], w, scratch) if kept is None else kept[: chunk.stop - chunk.start]
            kept = None
            # In half precision the GEMMs want half operands; else the gradient takes the place of the logits.
            d = logits if logits.dtype == x.dtype else torch.empty_like(logits, dtype=x.dtype)
            parts = {name: None if value is None else value[chunk] for name, value in scalars.items()}
            write_logprob_grad(call.options, logits, labels[chunk], stats[chunk], d, parts)
            if need_hidden:
                torch.mm(d, w, out=x_grad[chunk])
            if need_weight:
                accumulate(w_grad, d.t(), x[chunk])
        _give_back(scratch)
        hidden_grad = call.select_backward(x_grad, hidden) if need_hidden else None
        return hidden_grad, _weight_grad(weight, w_grad, call.fusion) if need_weight else None, None, None


def _weight_accumulator(weight: Tensor, operand: Tensor, fusion: bool) -> Tensor:
    if fusion and weight.main_grad.dtype == sum_dtype(operand):
        return weight.main_grad
    return torch.zeros_like(operand, dtype=sum_dtype(operand))


def _weight_grad(weight: Tensor, w_grad: Tensor, fusion: bool) -> Tensor:
    if not fusion:
        return w_grad.to(weight.dtype)
    if w_grad is not weight.main_grad:
        weight.main_grad.add_(w_grad)
    weight.grad_added_to_main_grad = True
    # Autograd needs some gradient for Megatron's hooks to run. They read it only under zero_out_wgrad (tied
    # embeddings), where autograd adds the embedding's gradient to it.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
