"""The specification of this package: the plain formulas on whole, unsharded logits, differentiable by autograd.

Slow and memory hungry on purpose; run it in float64. The fused functions must agree with it, which the tests check for
every backend, dtype and tensor-parallel size.

Legend: V vocabulary, H hidden size; `...` the shape of the labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.kernels.shard import KLOutput, LogprobOutput


def logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0, ignore_index: int = -100) -> LogprobOutput:
    """Log-probability of `labels` (...) and entropy (nats) under softmax(logits / temperature), logits (..., V).

    Ignored positions are 0 in both. A class with logit -inf has probability 0 and adds nothing to the entropy.
    """
    z = logits / temperature
    lse = z.logsumexp(-1)
    log_p = z - lse[..., None]
    ignored = labels == ignore_index
    chosen = log_p.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]
    entropy = -_expectation(log_p, log_p)
    return LogprobOutput(chosen.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0), lse.detach())


def policy_ref_kl(
    policy_logits: Tensor, ref_logits: Tensor, labels: Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> KLOutput:
    """KL(policy || ref) = sum_v p_v (ln p_v - ln r_v), and its estimators from the labels alone (`KLOutput`)."""
    policy = logprobs(policy_logits, labels, temperature=temperature, ignore_index=ignore_index)
    ref = logprobs(ref_logits.detach(), labels, temperature=temperature, ignore_index=ignore_index)
    log_p = (policy_logits / temperature).log_softmax(-1)
    log_r = (ref_logits.detach() / temperature).log_softmax(-1)
    kl = _expectation(log_p, log_p - log_r).masked_fill(labels == ignore_index, 0)
    return KLOutput.of(policy.logprobs, ref.logprobs, kl, policy.entropy)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, rows=None, temperature: float = 1.0, ignore_index: int = -100
) -> LogprobOutput:
    """`logprobs` of the logits hidden @ weight^T, hidden (S, B, H), weight (V, H), at the chosen `rows` of (S*B, H)."""
    hidden = hidden.flatten(0, -2)
    hidden = hidden if rows is None else hidden[rows]
    logits = (hidden @ weight.t()).unflatten(0, labels.shape)
    return logprobs(logits, labels, temperature=temperature, ignore_index=ignore_index)


def _expectation(log_p: Tensor, values: Tensor) -> Tensor:
    """sum_v p_v values_v with 0 * inf = 0, in the value and in the gradient."""
    possible = log_p > -torch.inf
    return (log_p.exp() * torch.where(possible, values, 0)).masked_fill(~possible, 0).sum(-1)
