"""The exact KL divergence between two models' distributions over a vocabulary split over tensor-parallel ranks.

    KL(policy || ref) = sum_v p_v (ln p_v - ln r_v)
    d KL / d logits_v = p_v (ln p_v - ln r_v - KL) / temperature

A class of probability 0 under the policy adds nothing; one of probability 0 under the reference alone makes it inf.

Legend: S sequence, B rows, H hidden size, N selected rows of [S*B, H], V' columns of one rank, TP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megarlhf.kernels.chunks import Call, give_back, weight_accumulator, weight_grad
from megarlhf.kernels.products import accumulate, gradient_buffer, operand_of, project, sum_dtype, uncap_
from megarlhf.kernels.shard import CallOptions, gather, merge_sizes


def linear_policy_ref_kl(
    hidden: Tensor,
    weight_shard: Tensor,
    ref_hidden: Tensor,
    ref_weight_shard: Tensor,
    *,
    rows: slice | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL(policy || ref) of softmax(hidden @ weight^T / temperature), without keeping logits; differentiable in hidden
    and weight_shard. ref_hidden: (N, H), the reference's states of the selected rows, the same on all TP ranks, without
    gradient, as ref_weight_shard (V', H). With `softcap` the logits of both models are capped. Returns (N,) nats,
    float32. The rest as in `linear_logprobs`.

    The backward computes the logits of both models again: 2 GEMMs forward and 4 backward.
    """
    options = CallOptions.of(
        weight_shard, len(weight_shard), temperature=temperature, vocab_size=vocab_size, tp_group=tp_group,
        backend=backend, softcap=softcap,
    )  # fmt: skip
    call = Call(
        options, hidden, weight_shard, rows=rows, sequence_parallel=sequence_parallel,
        fusion=gradient_accumulation_fusion, chunk_rows=chunk_rows,
    )  # fmt: skip
    if len(ref_hidden) != call.selected:
        raise ValueError(f"ref_hidden has {len(ref_hidden)} rows for {call.selected} selected rows of {call.total}")
    return _LinearKL.apply(hidden, weight_shard, ref_hidden.detach(), ref_weight_shard.detach(), call)


class _LinearKL(torch.autograd.Function):
    """Hidden, weight, and the reference's -> (N,) KL."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, call: Call):
        x, w = operand_of(call.select(hidden)), operand_of(weight)
        ref_x, ref_w = operand_of(ref_hidden), operand_of(ref_weight)
        scratch, ref_scratch = call.scratch(x, w), call.scratch(ref_x, ref_w)
        kl, scalars = x.new_empty(len(x), dtype=sum_dtype(x)), x.new_empty(len(x), 3, dtype=sum_dtype(x))
        for chunk in call.chunks(x):
            logits = project(x[chunk], w, scratch, call.options.softcap)
            ref_logits = project(ref_x[chunk], ref_w, ref_scratch, call.options.softcap)
            kl[chunk], scalars[chunk] = kl_of_logits(logits, ref_logits, call.options)
        give_back(scratch), give_back(ref_scratch)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, scalars)
        ctx.call = call
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight, ref_hidden, ref_weight, scalars = ctx.saved_tensors
        call = ctx.call
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        x, w = operand_of(call.select(hidden)), operand_of(weight)
        ref_x, ref_w = operand_of(ref_hidden), operand_of(ref_weight)
        x_grad = torch.empty_like(x) if need_hidden else None
        w_grad = weight_accumulator(weight, w, call.fusion) if need_weight else None
        scratch, ref_scratch = call.scratch(x, w), call.scratch(ref_x, ref_w)
        for chunk in call.chunks(x):
            logits = project(x[chunk], w, scratch, call.options.softcap)
            ref_logits = project(ref_x[chunk], ref_w, ref_scratch, call.options.softcap)
            d = gradient_buffer(logits, x, call.options.softcap)
            write_kl_grad(call.options, logits, ref_logits, scalars[chunk], grad[chunk], d)
            uncap_(d, logits, call.options.softcap)
            if need_hidden:
                torch.mm(d, w, out=x_grad[chunk])
            if need_weight:
                accumulate(w_grad, d.t(), x[chunk])
        give_back(scratch), give_back(ref_scratch)
        hidden_grad = call.select_backward(x_grad, hidden) if need_hidden else None
        return hidden_grad, weight_grad(weight, w_grad, call.fusion) if need_weight else None, None, None, None


def kl_of_logits(x: Tensor, ref: Tensor, options: CallOptions) -> tuple[Tensor, Tensor]:
    """(N, V') logits of the policy and of the reference -> (N,) KL(policy || ref), and (N, 3) for `write_kl_grad`: this
    rank's maximum and `Merged.weights`, and the mean distance of the logits, in units of the temperature."""
    stats = options.kernels.kl_stats(x[:, : options.width], ref[:, : options.width], temperature=options.temperature)
    top, size, distance, ref_top, ref_size = gather(stats, options.tp_group).unbind(-1)
    highest, _, log_total, weights = merge_sizes(top, size, options.temperature)
    ref_highest, _, ref_log_total, _ = merge_sizes(ref_top, ref_size, options.temperature)
    mean = (weights * distance).sum(0)
    # The difference of the two log-sum-exps, from differences of exact maxima.
    gap = (highest - ref_highest) / options.temperature + (log_total - ref_log_total)
    scalars = torch.stack([stats[:, 0], weights[options.rank], mean], 1)
    return (mean - gap).clamp_(min=0), scalars  # rounding may leave -1e-7


def write_kl_grad(options: CallOptions, x: Tensor, ref: Tensor, scalars: Tensor, grad: Tensor, out: Tensor) -> None:
    """The gradient of (N, V') logits of the policy into `out`, which may be `x` itself, 0 in the padding.

    With the mean D of the distances x_v - ref_v under the policy, ln p_v - ln r_v - KL is (x_v - ref_v - D) /
    temperature. It is subtracted before anything is scaled: where p is almost 1 the two are almost equal.
    """
    width, temperature = options.width, options.temperature
    top, weight, mean = scalars.unbind(1)
    options.kernels.kl_grad(
        x[:, :width], ref[:, :width], top.contiguous(), temperature * mean, out[:, :width], temperature=temperature,
        factor=grad * weight / temperature**2,
    )  # fmt: skip
    out[:, width:] = 0
