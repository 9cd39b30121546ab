"""The specification of megarlhf/kernels: the plain formulas on whole, unsharded logits, differentiable by autograd.

Slow and memory hungry on purpose; run it in float64. The kernels must agree with it for every backend, dtype and
tensor-parallel size.

Legend: V vocabulary, H hidden size; `...` the shape of the labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.kernels import LogprobOutput


def logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> LogprobOutput:
    """Log-probability of `labels` (...) and entropy (nats) under softmax(logits / temperature), logits (..., V), and
    the labels' logits.

    A class with logit -inf has probability 0 and adds nothing to the entropy.
    """
    log_p = (logits / temperature).log_softmax(-1)
    own, chosen = (x.gather(-1, labels[..., None])[..., 0] for x in (log_p, logits))
    return LogprobOutput(own, -_expectation(log_p, log_p), chosen)


def policy_ref_kl(policy_logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(policy || ref) = sum_v p_v (ln p_v - ln r_v) of logits (..., V)."""
    log_p = (policy_logits / temperature).log_softmax(-1)
    log_r = (ref_logits / temperature).log_softmax(-1)
    return _expectation(log_p, log_p - log_r)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, rows=None, temperature: float = 1.0,
    softcap: float | None = None,
) -> LogprobOutput:  # fmt: skip
    """`logprobs` of the logits hidden @ weight^T, capped, hidden (S, B, H), weight (V, H), at the chosen `rows` of
    (S*B, H)."""
    hidden = hidden.flatten(0, -2)
    hidden = hidden if rows is None else hidden[rows]
    logits = capped((hidden @ weight.t()).unflatten(0, labels.shape), softcap)
    return logprobs(logits, labels, temperature=temperature)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _expectation(log_p: Tensor, values: Tensor) -> Tensor:
    """sum_v p_v values_v with 0 * inf = 0, in the value and in the gradient."""
    possible = log_p > -torch.inf
    return (log_p.exp() * torch.where(possible, values, 0)).masked_fill(~possible, 0).sum(-1)
