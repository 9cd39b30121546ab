"""From rewards to advantages.

Legend: B rows, R response columns. A row's mask is True from its first response token to the one that ends it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (B, R) rewards and values -> (B, R) advantages and returns.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   returns_t = A_t + V_t

    with V = A = 0 after the last token (Schulman et al. 2015, arXiv:1506.02438, eq. 16; details P6 and G4).

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
