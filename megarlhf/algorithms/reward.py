"""Losses and normalisation of reward models.

Legend: B rows, R response columns, K responses to a prompt in adjacent rows, the best first, G = B / K prompts. A row's
score is read where its mask is True (detail R1); prompts whose rows have none are not counted. A micro-batch holds
whole prompts (`Sequences.together`).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf.algorithms.interface import Metrics, OfflineAlgorithm
from megarlhf.algorithms.masked import last_valid, masked_mean, masked_sum, masked_var
from megarlhf.batch import Comparisons
from megarlhf.config import UserError

LossName = Literal["pairwise", "log_exp", "best_of"]


def reward_model(loss: LossName, *, num_responses: int) -> OfflineAlgorithm:
    """A reward model's training for the loop."""
    if loss == "pairwise":
        return OfflineAlgorithm(pairwise_loss)
    losses = {"log_exp": log_exp_loss, "best_of": best_of_loss}
    return OfflineAlgorithm(partial(losses[loss], num_responses=num_responses))


def final_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """(B, R) scores at every token -> (B,) the one at the last token of the mask, 0 in rows without one (detail R1)."""
    return torch.where(last_valid(mask), scores, 0).sum(1)


def pairwise_loss(outputs: dict[str, Tensor], rows: Comparisons) -> tuple[Tensor, Tensor, Metrics]:
    """sum over pairs of -log sigmoid(chosen - rejected - margin), rows 2i chosen and 2i + 1 rejected.

    Stiennon et al. 2020, arXiv:2009.01325, section 3.4; with a margin Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    outputs["scores"] (B, R), differentiable. Returns (sum, number of pairs, metrics).
    """
    scores, counted = _by_prompt(outputs, rows, num_responses=2)
    difference = scores[:, 0] - scores[:, 1]
    losses = F.softplus(rows.margins[0::2] - difference)
    return _result(losses, counted, scores, difference > 0)


def log_exp_loss(
    outputs: dict[str, Tensor], rows: Comparisons, *, num_responses: int
) -> tuple[Tensor, Tensor, Metrics]:
    """sum over prompts of the mean over a prompt's comparisons, w better than l, of log(1 + exp(score_l - score_w)).

    A prompt's K (K - 1) / 2 comparisons (fewer where ranks are equal) weigh as one and are computed together (Ouyang et
    al. 2022, arXiv:2203.02155, eq. 1). At K = 2 it is the pairwise loss without a margin. outputs["scores"] (B, R),
    differentiable. Returns (sum, number of prompts, metrics); accuracy is the mean of prompts' accuracies.
    """
    scores, counted = _by_prompt(outputs, rows, num_responses=num_responses)
    ranks = rows.ranks.view(-1, num_responses)
    compared = ranks[:, :, None] < ranks[:, None, :]  # (G, K, K): the first is better than the second
    difference = scores[:, :, None] - scores[:, None, :]
    number = compared.sum((1, 2)).clamp(min=1)
    losses = torch.where(compared, F.softplus(-difference), 0).sum((1, 2)) / number
    return _result(losses, counted, scores, (compared & (difference > 0)).sum((1, 2)) / number)


def best_of_loss(
    outputs: dict[str, Tensor], rows: Comparisons, *, num_responses: int
) -> tuple[Tensor, Tensor, Metrics]:
    """sum over prompts of -log softmax(scores)[best], the best being the prompt's first row.

    Ziegler et al. 2019, arXiv:1909.08593, eq. 1, with K = 4 (lm-human-preferences label_types.py, `PickBest`).
    outputs["scores"] (B, R), differentiable. Returns (sum, number of prompts, metrics); accuracy is that of the best
    having the highest score.
    """
    scores, counted = _by_prompt(outputs, rows, num_responses=num_responses)
    losses = torch.logsumexp(scores, 1) - scores[:, 0]
    return _result(losses, counted, scores, scores[:, 0] > scores[:, 1:].amax(1))


def normalisation(
    scores: Tensor, *, target_mean: float = 0.0, target_std: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[float, float]:
    """(gain, bias) with which gain * score + bias has the target mean and (biased) standard deviation over `scores`
    (N,), raw scores of responses sampled from the frozen initial policy, those of all ranks of `group` together:

        gain = sigma_T / sigma_D,   bias = mu_T - gain mu_D

    Detail R3 (Ziegler et al. 2019, section 2.1; lm-human-preferences train_reward.py, `normalize`). Raises UserError if
    the scores do not differ or are not finite.
    """
    wide, everything = scores.double(), torch.ones_like(scores, dtype=torch.bool)
    mean, std = masked_mean(wide, everything, group=group), masked_var(wide, everything, group=group).sqrt()
    if not 1e-12 * (1 + mean.abs()) < std < torch.inf:
        raise UserError(
            f"the reward model's scores cannot be normalised: mean {mean:g}, standard deviation {std:g} over the "
            "sampled responses; check that its head is initialised or trained, and that its training did not diverge"
        )
    gain = target_std / std.item()
    return gain, target_mean - gain * mean.item()


def _by_prompt(outputs: dict[str, Tensor], rows: Comparisons, *, num_responses: int) -> tuple[Tensor, Tensor]:
    """(G, K) scores and (G,) bool, True for the prompts that count."""
    scores = final_scores(outputs["scores"], rows.mask).view(-1, num_responses)
    return scores, rows.mask.any(1).view(-1, num_responses).all(1)


def _result(losses: Tensor, counted: Tensor, scores: Tensor, correct: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """The (G,) losses and other values of each prompt, summed over the prompts that count."""
    total, count = masked_sum(losses, counted), counted.sum()
    return (
        total,
        count,
        {
            "loss": (total, count),
            "accuracy": (masked_sum(correct.float(), counted), count),
            "scores/chosen": (masked_sum(scores[:, 0], counted), count),
            "scores/rejected": (masked_sum(scores[:, 1:].mean(1), counted), count),
        },
    )
