"""Losses on the text of a data set."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarlhf.algorithms.interface import Metrics, OfflineAlgorithm, Outputs
from megarlhf.batch import Sequences


def sft() -> OfflineAlgorithm:
    """Supervised fine-tuning for the loop."""
    return OfflineAlgorithm(sft_loss, derived=perplexity)


def perplexity(values: dict[str, float]) -> dict[str, float]:
    """exp of the mean negative log-likelihood a token."""
    return {"perplexity": math.exp(min(values["loss"], 700))}


def sft_loss(outputs: Outputs, rows: Sequences) -> tuple[Tensor, Tensor, Metrics]:
    """Negative log-likelihood of the counted tokens: -sum_{b,j} mask * log p(token).

    outputs["logprobs"] and rows.mask are (B, R). Returns (sum, number of tokens, {"loss": (sum, count)}); the mean's
    exponential is the perplexity.
    """
    count = rows.mask.sum()
    total = -(outputs["logprobs"] * rows.mask).sum()
    return total, count, {"loss": (total, count)}


def ptx_loss(outputs: Outputs, rows: Sequences, *, scale: float) -> tuple[Tensor, Tensor, Metrics]:
    """The pretraining term of PPO-ptx (Ouyang et al. 2022, arXiv:2203.02155, eq. 2): `scale` times the negative
    log-likelihood, with a count of 0, so that it is divided by the policy loss's count in the same update. With scale =
    coefficient * (tokens of the policy loss) / (tokens of this one), both of the global batch, each term is a mean over
    its own tokens."""
    total, count, _ = sft_loss(outputs, rows)
    return scale * total, torch.zeros_like(count), {"ppo/loss/ptx": (total, count)}
