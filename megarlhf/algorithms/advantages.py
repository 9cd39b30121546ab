"""From rewards to advantages.

Legend: B rows, R response columns. A row's mask is True from its first response token to the one that ends it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (B, R) rewards and values -> (B, R) advantages and returns.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   returns_t = A_t + V_t

    with V = A = 0 after the last token (Schulman et al. 2015, arXiv:1506.02438, eq. 16; details P6 and G4). `lam`: a
    number, or (B,), one a row.

    `mask` is True on tokens up to and including the last. Columns after it contribute nothing and get advantages and
    returns of 0, so padding after EOS does not change an episode. Nothing is bootstrapped: a response cut at R is an
    episode that ends there.
    """
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    advantages = torch.empty_like(rewards)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def lengthwise_lambda(mask: Tensor, *, alpha: float) -> Tensor:
    """(B,) lambda = 1 - 1 / (alpha l) for a response of l tokens, at least 0 (VAPO, Yue et al. 2025, arXiv:2504.05118,
    section 3.2): the sum of GAE's weights is then proportional to the length."""
    return (1 - 1 / (alpha * mask.sum(1).clamp(min=1))).clamp(min=0)


def group_advantages(
    scores: Tensor, group_ids: Tensor, *, leave_one_out: bool = False, deviation: bool = False, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(B,) scores of the responses -> their advantages within their group of G samples of one prompt, and (B,) the
    weights of a response's own score in its advantage, by which a term that belongs to its tokens is to be multiplied.

        mean of the group:  A_i = s_i - mean_j s_j           (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2)
        leave_one_out:      A_i = s_i - mean_{j != i} s_j    (RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 5):
                                                             G / (G - 1) of the one above
        deviation:          divided by (sd + eps), sd with G - 1 in the denominator
                                                             (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2)

    A mean that includes a response's own score leaves it the weight (G - 1) / G. A group whose scores are equal has
    advantages 0, and with `deviation` weights 0. Groups have at least two rows, anywhere in the batch.
    """
    wide = scores.double()
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    zeros = wide.new_zeros(len(sizes))
    mean = (zeros.index_add(0, index, wide) / sizes)[index]
    size = sizes[index]
    factor = torch.ones_like(wide)
    if leave_one_out:
        factor = factor * size / (size - 1)
    if deviation:
        squares = zeros.index_add(0, index, (wide - mean) ** 2)[index]
        factor = factor / ((squares / (size - 1)).sqrt() + eps)
    # The mean of equal numbers may differ from them by rounding, which a deviation of rounding would blow up.
    different = varies(scores, group_ids)
    found, weight = torch.where(different, factor * (wide - mean), 0), factor * (size - 1) / size
    if deviation:
        weight = torch.where(different, weight, 0)
    return found.to(scores.dtype), weight.to(scores.dtype)


def varies(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) bool: whether the group of a row has different scores. Sums of the same numbers in another order differ by
    rounding, which does not count; what is not finite does."""
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    empty = scores.new_zeros(len(sizes))

    def of_group(values: Tensor, how: str) -> Tensor:
        return empty.scatter_reduce(0, index, values, how, include_self=False)[index]

    gap = of_group(scores, "amax") - of_group(scores, "amin")
    return ~(gap <= 1e-6 * of_group(scores.abs(), "amax"))
