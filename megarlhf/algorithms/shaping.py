"""Changes of the score that depend on a response's length alone.

Legend: B rows, R response columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarlhf.batch import Scores


@dataclass(frozen=True)
class ShapingConfig:
    """Penalties of length, in units of the score."""

    # In the last so many tokens before sampler.response_length the penalty grows from 0 to overlong_penalty (DAPO, Yu
    # et al. 2025, arXiv:2503.14476, eq. 13)
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    length_penalty: float = 0.0  # for each token

    def __post_init__(self):
        for name in ("overlong_buffer", "overlong_penalty", "length_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")


def shaped(scores: Scores, mask: Tensor, config: ShapingConfig) -> Scores:
    """The scores of responses less their penalties. `mask`: (B, R) bool, the responses' tokens."""
    penalty = config.length_penalty * mask.sum(1).to(scores.scores.dtype)
    if config.overlong_buffer:
        over = mask.sum(1) - (mask.shape[1] - config.overlong_buffer)
        penalty = penalty + config.overlong_penalty * over.clamp(min=0) / config.overlong_buffer
    return replace(scores, scores=torch.where(scores.accepted, scores.scores - penalty, scores.scores))
