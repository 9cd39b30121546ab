"""Log-probabilities, entropy and KL from logits that are split over the tensor-parallel ranks.

One pass over the logits forward, one all-gather of a few numbers a row, and a backward that writes the gradient over
the logits: no copy of [N, V'] is ever made. In bf16 that is 2 bytes read forward and 2 read + 2 written backward for
each element, the least there is.

Legend: N rows (the product of the labels' shape), V vocabulary, V' columns of one rank, TP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megarlhf.kernels.shard import (
    Head,
    KLOutput,
    LogprobOutput,
    gather,
    grad_scalars,
    merge,
    shaped,
    write_logprob_grad,
)


def logprobs(
    logits_shard: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    inplace_backward: bool = True,
    debug: bool = False,
    backend: str = "auto",
) -> LogprobOutput:
    """Log-probability of `labels`, entropy and log-sum-exp under softmax(logits / temperature), in nats.

        log p = z_y - lse,   H = -sum_v p_v ln p_v,   z = logits / temperature
        d logits_v = [g (1[v = y] - p_v) - g_H p_v (ln p_v + H)] / temperature

    logits_shard: (..., V') float of any precision, this rank's columns [rank V', (rank + 1) V'); sums are in float32
        (float64 for float64). nan and +inf give nan; a row that is -inf everywhere gives nan.
    labels: (...) int64 global ids; rows with `ignore_index` have log-prob 0, entropy 0 and no gradient.
    entropy_grad: False if the entropy is only a metric, which saves work in the backward.
    vocab_size: V without padding (default V' * TP). Columns beyond it count as -inf: Megatron's padding holds real
        numbers that change with TP.
    inplace_backward: the backward overwrites the logits with their gradient. They are used up then: a second backward
        raises, but a plain read sees the gradient. False allocates the gradient.
    debug: check the labels' values, which synchronises a GPU. Otherwise a label outside [0, V) gives -lse.
    backend: "auto" (triton for CUDA tensors where it is installed), "torch" or "triton".

    ValueError: see the messages; each names the argument and the remedy.
    """
    head = Head.of(logits_shard, logits_shard.shape[-1], labels, temperature=temperature, with_entropy=with_entropy,
                   entropy_grad=entropy_grad, ignore_index=ignore_index, vocab_size=vocab_size, tp_group=tp_group,
                   backend=backend, debug=debug)  # fmt: skip
    x = _flat(logits_shard, "logits_shard", labels)
    _check_inplace(logits_shard, "logits_shard", inplace_backward)
    logp, entropy, lse = _Logprobs.apply(x, head.local(labels), head, inplace_backward)
    return LogprobOutput(
        shaped(logp, labels, ignore_index), shaped(entropy, labels, ignore_index), lse.view(labels.shape)
    )


def policy_ref_kl(
    policy_logits: Tensor,
    ref_logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    inplace_backward: bool = True,
    debug: bool = False,
    backend: str = "auto",
) -> KLOutput:
    """Both log-probabilities, the sampled KL estimators k1, k2, k3 and the exact KL(policy || ref), in one pass.

        KL = sum_v p_v (ln p_v - ln r_v),   d KL / d logits_v = p_v (ln p_v - ln r_v - KL) / temperature

    The arguments are those of `logprobs`; both logits are (..., V') shards. Gradients reach the policy alone, through
    logprobs, k1, k2, k3, kl and entropy; the backward overwrites `policy_logits` and leaves `ref_logits`.
    A class of probability 0 under the policy adds nothing; one of probability 0 under the reference alone makes kl inf.
    The formulas: see `KLOutput`.
    """
    head = Head.of(policy_logits, policy_logits.shape[-1], labels, temperature=temperature, with_entropy=with_entropy,
                   entropy_grad=entropy_grad, ignore_index=ignore_index, vocab_size=vocab_size, tp_group=tp_group,
                   backend=backend, debug=debug)  # fmt: skip
    if ref_logits.shape != policy_logits.shape or ref_logits.dtype != policy_logits.dtype:
        raise ValueError(
            f"ref_logits {tuple(ref_logits.shape)} {ref_logits.dtype} must have the shape and dtype of policy_logits, "
            f"{tuple(policy_logits.shape)} {policy_logits.dtype}"
        )
    x, ref = _flat(policy_logits, "policy_logits", labels), _flat(ref_logits.detach(), "ref_logits", labels)
    _check_inplace(policy_logits, "policy_logits", inplace_backward)
    outputs = _PolicyRefKL.apply(x, ref, head.local(labels), head, inplace_backward)
    logp, entropy, ref_logp, kl = (shaped(value, labels, ignore_index) for value in outputs)
    return KLOutput.of(logp, ref_logp, kl, entropy)


class _Logprobs(torch.autograd.Function):
    """(N, V') logits, (N,) local columns -> logprobs, entropy, lse, (N,) each."""

    @staticmethod
    def forward(ctx, x: Tensor, labels: Tensor, head: Head, inplace: bool):
        stats = head.kernels.logprob_stats(
            x[:, : head.width], labels, temperature=head.temperature, with_entropy=head.with_entropy
        )
        merged = merge(gather(stats, head.tp_group), head)
        ctx.save_for_backward(x, labels, stats, merged.weights[head.rank], merged.entropy)
        ctx.head, ctx.inplace = head, inplace
        ctx.set_materialize_grads(False)
        lse = merged.top / head.temperature + merged.log_size
        ctx.mark_non_differentiable(lse)
        if merged.entropy is not None and not head.entropy_grad:
            ctx.mark_non_differentiable(merged.entropy)
        return merged.logprobs, merged.entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None, _):
        x, labels, stats, weight, entropy = ctx.saved_tensors
        out = _gradient_of(x, ctx.inplace)
        scalars = grad_scalars(ctx.head, weight, entropy, grad, grad_entropy)
        write_logprob_grad(ctx.head, x, labels, stats, out, scalars)
        return _used_up(x, out), None, None, None


class _PolicyRefKL(torch.autograd.Function):
    """(N, V') policy and reference logits, (N,) local columns -> logprobs, entropy, ref_logprobs, kl, (N,) each."""

    @staticmethod
    def forward(ctx, x: Tensor, ref: Tensor, labels: Tensor, head: Head, inplace: bool):
        stats = head.kernels.kl_stats(
            x[:, : head.width],
            ref[:, : head.width],
            labels,
            temperature=head.temperature,
            with_entropy=head.with_entropy,
        )
        everyone = gather(stats, head.tp_group)
        policy, reference = merge(everyone[..., :4], head), merge(everyone[..., 4:], head, with_entropy=False)
        # lse_policy - lse_reference, from differences of exact maxima
        gap = (policy.top - reference.top) / head.temperature + (policy.log_size - reference.log_size)
        # Rounding may leave -1e-7. The gradient is the formula's either way.
        kl = ((policy.weights * everyone[..., 6]).sum(0) - gap).clamp_(min=0)
        ctx.save_for_backward(x, ref, labels, stats, policy.weights[head.rank], policy.entropy, kl, gap)
        ctx.head, ctx.inplace = head, inplace
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reference.logprobs)
        if policy.entropy is not None and not head.entropy_grad:
            ctx.mark_non_differentiable(policy.entropy)
        return policy.logprobs, policy.entropy, reference.logprobs, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None, _, grad_kl: Tensor | None):
        x, ref, labels, stats, weight, entropy, kl, gap = ctx.saved_tensors
        head, width = ctx.head, ctx.head.width
        scalars = grad_scalars(head, weight, entropy, grad, grad_entropy)
        out = _gradient_of(x, ctx.inplace)
        if grad_kl is None:
            write_logprob_grad(head, x, labels, stats, out, scalars)
        else:
            distance = weight * grad_kl / head.temperature
            scalars["constant"] -= distance * (gap + kl)
            head.kernels.kl_grad(x[:, :width], ref[:, :width], labels, stats, out[:, :width], distance=distance,
                                 temperature=head.temperature, **scalars)  # fmt: skip
            out[:, width:] = 0
        return _used_up(x, out), None, None, None, None


def _flat(logits: Tensor, name: str, labels: Tensor) -> Tensor:
    """(..., V') -> (N, V') without a copy: the gradient is written where the caller's logits are."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} must have the leading shape of {name} {tuple(logits.shape)}")
    columns = logits.shape[-1]
    try:
        x = logits.view(-1, columns) if columns else logits
    except RuntimeError:
        x = None
    if x is None or x.stride(1) != 1 or (len(x) > 1 and x.stride(0) < columns):
        raise ValueError(
            f"{name} must have a contiguous last dimension and rows that do not overlap, so that it is [N, V'] without "
            f"a copy; its strides are {logits.stride()}. Pass {name}.contiguous()"
        )
    return x


def _check_inplace(logits: Tensor, name: str, inplace: bool) -> None:
    if inplace and torch.is_grad_enabled() and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            f"{name} is a leaf that requires grad: its .grad would share its memory. Pass inplace_backward=False"
        )


def _gradient_of(x: Tensor, inplace: bool) -> Tensor:
    return x.detach() if inplace else torch.empty_like(x)


def _used_up(x: Tensor, out: Tensor) -> Tensor:
    if out.data_ptr() == x.data_ptr():
        # Autograd cannot see a Triton kernel's writes. With the version raised, whoever saved the logits gets an error.
        torch.autograd.graph.increment_version(x)
    return out
