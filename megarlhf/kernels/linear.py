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

from megarlhf.kernels.chunks import Call, give_back, weight_accumulator, weight_grad
from megarlhf.kernels.products import accumulate, gradient_buffer, operand_of, project, sum_dtype, uncap_
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
    softcap: float | None = None,
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

    With `softcap` the logits are softcap * tanh(hidden @ weight^T / softcap) (Gemma 2, arXiv:2408.00118, section 2).

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
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 vocabulary ids, not {labels.dtype}; use labels.long()")
    options = CallOptions.of(
        weight_shard, len(weight_shard), temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad,
        vocab_size=vocab_size, tp_group=tp_group, backend=backend, softcap=softcap,
    )  # fmt: skip
    call = Call(
        options, hidden, weight_shard, rows=rows, sequence_parallel=sequence_parallel,
        fusion=gradient_accumulation_fusion, chunk_rows=chunk_rows,
    )  # fmt: skip
    if labels.numel() != call.selected:
        raise ValueError(f"labels has {labels.numel()} elements for {call.selected} selected rows of {call.total}")
    outputs = _LinearLogprobs.apply(hidden, weight_shard, options.local(labels), call)
    return LogprobOutput(*(None if output is None else output.view(labels.shape) for output in outputs))


@torch.no_grad()
def label_logits(
    hidden: Tensor, weight_shard: Tensor, labels: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """hidden (N, H), the same on all TP ranks, weight_shard (V', H), labels (N,) int64 -> (N,) hidden . weight_y, in
    float32 or wider, not capped. No other logit is computed; no gradients."""
    start = len(weight_shard) * (dist.get_rank(tp_group) if tp_size(tp_group) > 1 else 0)
    here = (labels >= start) & (labels < start + len(weight_shard))
    rows = weight_shard[(labels - start).where(here, 0)]
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight_shard.dtype), torch.float32)
    logits = (hidden.to(wide) * rows).sum(-1).where(here, 0)
    if tp_size(tp_group) > 1:
        dist.all_reduce(logits, group=tp_group)
    return logits


class _LinearLogprobs(torch.autograd.Function):
    """Hidden, weight, (N,) local columns -> logprobs, entropy, the labels' logits, (N,) each."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, call: Call):
        options = call.options
        x, w = operand_of(call.select(hidden)), operand_of(weight)
        stats = x.new_empty(len(x), 4, dtype=sum_dtype(x))
        scratch = call.scratch(x, w)
        for chunk in call.chunks(x):
            logits = project(x[chunk], w, scratch, options.softcap)
            stats[chunk] = options.kernels.logprob_stats(
                logits[:, : options.width],
                labels[chunk],
                temperature=options.temperature,
                with_entropy=options.with_entropy,
            )
        merged = merge(gather(stats, options.tp_group), options)
        ctx.save_for_backward(hidden, weight, labels, stats, merged.weights[options.rank], merged.entropy)
        ctx.call, ctx.last_logits = call, scratch if call.grads else give_back(scratch)
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
        w_grad = weight_accumulator(weight, w, call.fusion) if need_weight else None
        # The last chunk's logits are still there: a batch of one chunk needs no recomputation. A second backward does.
        kept, ctx.last_logits = ctx.last_logits, None
        scratch = call.scratch(x, w) if kept is None else kept
        for chunk in reversed(call.chunks(x)):
            if kept is None:
                logits = project(x[chunk], w, scratch, call.options.softcap)
            else:
                logits, kept = kept[: chunk.stop - chunk.start], None
            d = gradient_buffer(logits, x, call.options.softcap)
            parts = {name: None if value is None else value[chunk] for name, value in scalars.items()}
            write_logprob_grad(call.options, logits, labels[chunk], stats[chunk], d, parts)
            uncap_(d, logits, call.options.softcap)
            if need_hidden:
                torch.mm(d, w, out=x_grad[chunk])
            if need_weight:
                accumulate(w_grad, d.t(), x[chunk])
        give_back(scratch)
        hidden_grad = call.select_backward(x_grad, hidden) if need_hidden else None
        return hidden_grad, weight_grad(weight, w_grad, call.fusion) if need_weight else None, None, None
