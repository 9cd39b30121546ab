"""The loss and the metrics of process reward models, which score each step of a solution, and the score of a response
from those of its steps.

A model's score at a step's end is the logit of the probability that the step is right, p = sigmoid(score). Its text is
read up to and including that token.

Legend: B rows (a solution each), R response columns.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megarlhf.algorithms.interface import Metrics, OfflineAlgorithm
from megarlhf.algorithms.masked import last_valid, masked_sum
from megarlhf.batch import LabelledSteps

Aggregate = Literal["min", "product", "last"]
THRESHOLD = 0.5  # of a probability and of a label: a step below it is wrong


def process_reward_model() -> OfflineAlgorithm:
    """A process reward model's training for the loop."""
    return OfflineAlgorithm(step_loss, derived=found_errors)


def step_loss(outputs: dict[str, Tensor], rows: LabelledSteps) -> tuple[Tensor, Tensor, Metrics]:
    """The sum over labelled steps of the binary cross-entropy of p = sigmoid(score) and the label y in [0, 1]:

        -y log p - (1 - y) log(1 - p)

    Lightman et al. 2023, arXiv:2305.20050, section 2.6; with a soft label, the share of continuations that end right,
    Wang et al. 2023, arXiv:2312.08935 (Math-Shepherd), eq. 2. A cross-entropy over two reward tokens with the logits
    z_good and z_bad is the same with score = z_good - z_bad.

    outputs["scores"] (B, R), differentiable; rows.mask: the ends of labelled steps. Returns (sum, number of labelled
    steps, metrics): the loss and the accuracy, means over steps; solutions/wrong and solutions/right, the shares of
    rows whose first error is known and that are known to have none, and solutions/wrong_found and
    solutions/right_found, the shares that the model judges so exactly. `found_errors` has their ratios.
    """
    scores, mask = outputs["scores"], rows.mask
    losses = F.binary_cross_entropy_with_logits(torch.where(mask, scores, 0), rows.labels, reduction="none")
    total, count = masked_sum(losses, mask), mask.sum()
    flagged, wrong = mask & (scores < 0), mask & (rows.labels < THRESHOLD)  # sigmoid(0) is the threshold
    counted = mask.any(1)
    known, faulty = counted & rows.decided, wrong.any(1)
    found = _first(flagged) == _first(wrong)
    solutions = counted.sum()
    return (
        total,
        count,
        {
            "loss": (total, count),
            "accuracy": ((mask & (flagged == wrong)).sum(), count),
            "solutions/wrong": ((known & faulty).sum(), solutions),
            "solutions/wrong_found": ((known & faulty & found).sum(), solutions),
            "solutions/right": ((known & ~faulty).sum(), solutions),
            "solutions/right_found": ((known & ~faulty & found).sum(), solutions),
        },
    )


def found_errors(values: dict[str, float]) -> dict[str, float]:
    """From the means of `step_loss`: first_error, the share of solutions with a known verdict whose first wrong step is
    found exactly, or in which no step is flagged if all are right; first_error/wrong and first_error/right, of these
    two kinds of solutions alone; first_error/f1, the harmonic mean of both (Zheng et al. 2024, arXiv:2412.06559,
    ProcessBench). What has no solutions is left out."""
    wrong, right = values["solutions/wrong"], values["solutions/right"]
    found_wrong, found_right = values["solutions/wrong_found"], values["solutions/right_found"]
    derived = {}
    if wrong + right:
        derived["first_error"] = (found_wrong + found_right) / (wrong + right)
    if wrong:
        derived["first_error/wrong"] = found_wrong / wrong
    if right:
        derived["first_error/right"] = found_right / right
    if wrong and right:
        a, b = found_wrong / wrong, found_right / right
        derived["first_error/f1"] = 2 * a * b / (a + b) if a + b else 0.0
    return derived


def response_score(chances: Tensor, ends: Tensor, how: Aggregate) -> Tensor:
    """(B,): one number for a response from the probabilities (B, R) at the ends of its steps, where `ends` (B, R) bool
    is True, at least one a row: the least one, their product (Lightman et al. 2023, section 2.6), or the last."""
    if how == "min":
        return torch.where(ends, chances, torch.inf).amin(1)
    if how == "product":
        return torch.where(ends, chances, 1).prod(1)
    return torch.where(last_valid(ends), chances, 0).sum(1)


def _first(marked: Tensor) -> Tensor:
    """(B, R) bool -> (B,) the first True column, R without one."""
    columns = torch.arange(marked.shape[1], device=marked.device)
    return torch.where(marked, columns, marked.shape[1]).amin(1)
