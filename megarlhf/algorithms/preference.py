"""Losses that train a policy on pairs of responses, a chosen and a rejected one.

Legend: B rows, 2i the chosen and 2i + 1 the rejected response of pair i, R columns, P = B / 2 pairs. c and r are the
log-ratios log policy(y|x) - log reference(y|x) of a pair's chosen and rejected response, h = c - r, and b is `beta`.
Log-probs are summed over a response's tokens, or averaged (`logprobs`). Pairs whose rows have no counted token (those
that pad an evaluation batch) are not counted. A micro-batch holds whole pairs (`Sequences.together`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf.algorithms.interface import Forwards, Metrics, OfflineAlgorithm, Outputs
from megarlhf.algorithms.masked import masked_sum, row_sums
from megarlhf.batch import Comparisons

LossName = Literal[
    "dpo", "cdpo", "ipo", "hinge", "robust", "simpo", "orpo", "cpo", "apo_zero", "apo_down", "sppo"
]  # fmt: skip
Normalization = Literal["sum", "mean"]


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss. docs/preferences.md has each formula, with its source."""

    loss: LossName = "dpo"
    beta: float | None = None  # b; default: 0.1, of simpo 2
    logprobs: Normalization | None = None  # over a response's tokens; default: sum, of simpo and orpo mean
    label_smoothing: float = 0.0  # of cdpo and robust: the share of pairs whose order is wrong
    gamma: float | None = None  # of simpo: the least difference of rewards; default 1
    nll_coef: float | None = None  # of the chosen response's NLL, which is added; default: 0, of orpo and cpo 1
    # token: the mean over all chosen tokens of the minibatch; sequence: the mean of each response's mean
    nll_normalization: Literal["token", "sequence"] = "token"

    def __post_init__(self):
        if not 0 < self.b < math.inf:
            raise ValueError(f"beta: must be positive, not {self.beta}")
        if not 0 <= self.nll < math.inf:
            raise ValueError(f"nll_coef: must not be negative, not {self.nll_coef}")
        if self.logprobs == "sum" and self.form.logprobs == "mean":
            raise ValueError(f"logprobs: {self.loss} is defined on mean log-probs; remove the key, or change the loss")
        if self.gamma is not None and self.loss != "simpo":
            raise ValueError(f"gamma: is simpo's, and the loss is {self.loss}; remove the key, or change the loss")
        if not 0 <= self.lead < math.inf:
            raise ValueError(f"gamma: must not be negative, not {self.gamma}")
        if self.loss in ("cdpo", "robust"):
            if not 0 < self.label_smoothing < 0.5:
                raise ValueError(
                    f"label_smoothing: of {self.loss} must be between 0 and 0.5, not {self.label_smoothing:g}; without "
                    "wrong labels the loss is dpo"
                )
        elif self.label_smoothing:
            raise ValueError(
                f"label_smoothing: is for cdpo and robust, which differ in it, not for {self.loss}; name one of them"
            )

    @property
    def form(self) -> Form:
        return FORMS[self.loss]

    # The keys above with the loss's own defaults.

    @property
    def b(self) -> float:
        return self.form.beta if self.beta is None else self.beta

    @property
    def normalization(self) -> Normalization:
        return self.form.logprobs if self.logprobs is None else self.logprobs

    @property
    def lead(self) -> float:
        return 1.0 if self.gamma is None else self.gamma

    @property
    def nll(self) -> float:
        return self.form.nll_coef if self.nll_coef is None else self.nll_coef


@dataclass(frozen=True)
class Form:
    """One loss. `of_pairs` takes (c, r, config), (P,) each, and returns (P,); without a reference c and r are the
    log-probs themselves."""

    of_pairs: Callable[[Tensor, Tensor, PreferenceConfig], Tensor]
    reference: bool = True
    beta: float = 0.1
    logprobs: Normalization = "sum"
    nll_coef: float = 0.0
    margins: bool = False  # the data's margin is subtracted from b h


def dpo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """-log sigmoid(b h). Rafailov et al. 2023, arXiv:2305.18290, eq. 7. With a margin it is -log sigmoid(b h - margin),
    Amini et al. 2024, arXiv:2402.10571."""
    return -F.logsigmoid(config.b * (chosen - rejected))


def cdpo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """-(1 - e) log sigmoid(b h) - e log sigmoid(-b h), e = label_smoothing. Mitchell 2023, "A note on DPO with noisy
    preferences and relationship to IPO". Least where sigmoid(b h) = 1 - e."""
    difference, flipped = config.b * (chosen - rejected), config.label_smoothing
    return -(1 - flipped) * F.logsigmoid(difference) - flipped * F.logsigmoid(-difference)


def robust(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """(-(1 - e) log sigmoid(b h) + e log sigmoid(-b h)) / (1 - 2 e): if labels are flipped with probability e, its mean
    is the loss of the true ones. Chowdhury et al. 2024, arXiv:2403.00409."""
    difference, flipped = config.b * (chosen - rejected), config.label_smoothing
    kept = -(1 - flipped) * F.logsigmoid(difference) + flipped * F.logsigmoid(-difference)
    return kept / (1 - 2 * flipped)


def ipo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """(h - 1 / (2 b))^2. Azar et al. 2023, arXiv:2310.12036, eq. 17, whose tau is b."""
    return (chosen - rejected - 1 / (2 * config.b)).square()


def hinge(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """max(0, 1 - b h). Zhao et al. 2023, arXiv:2305.10425, with log-ratios as in Liu et al. 2023,
    arXiv:2309.06657."""
    return F.relu(1 - config.b * (chosen - rejected))


def apo_zero(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """1 - sigmoid(b c) + sigmoid(b r): the chosen response becomes more probable, the rejected one less. D'Oosterlinck
    et al. 2024, arXiv:2408.06266, eq. 7."""
    return torch.sigmoid(-config.b * chosen) + torch.sigmoid(config.b * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """sigmoid(b c) + 1 - sigmoid(b h): both responses become less probable, the rejected one more so. D'Oosterlinck et
    al. 2024, arXiv:2408.06266, eq. 8."""
    return torch.sigmoid(config.b * chosen) + torch.sigmoid(-config.b * (chosen - rejected))


def sppo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2: the chosen response wins with probability 1. Wu et al. 2024,
    arXiv:2405.00675, eq. 4.7, with eta = 1 / b."""
    half = 1 / (2 * config.b)
    return (chosen - half).square() + (rejected + half).square()


def simpo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """-log sigmoid(b (chosen - rejected) - gamma) on mean log-probs. Meng et al. 2024, arXiv:2405.14734, eq. 6."""
    return -F.logsigmoid(config.b * (chosen - rejected) - config.lead)


def orpo(chosen: Tensor, rejected: Tensor, config: PreferenceConfig) -> Tensor:
    """-b log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p), p the exponential of the mean
    log-prob. Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7, whose lambda is b; the NLL is added (`nll_coef`)."""
    odds = [logprob - torch.log(-torch.expm1(logprob.clamp(max=-1e-8))) for logprob in (chosen, rejected)]
    return -config.b * F.logsigmoid(odds[0] - odds[1])


FORMS = {
    "dpo": Form(dpo, margins=True),
    "cdpo": Form(cdpo),
    "robust": Form(robust),
    "ipo": Form(ipo),
    "hinge": Form(hinge),
    "apo_zero": Form(apo_zero),
    "apo_down": Form(apo_down),
    "sppo": Form(sppo),
    "simpo": Form(simpo, reference=False, beta=2.0, logprobs="mean"),
    "orpo": Form(orpo, reference=False, logprobs="mean", nll_coef=1.0),
    # dpo's with a uniform reference, and NLL: Xu et al. 2024, arXiv:2401.08417
    "cpo": Form(dpo, reference=False, nll_coef=1.0),
}


def preference(config: PreferenceConfig) -> OfflineAlgorithm:
    """Training on pairs for the loop. Its models: the trained one, and "reference" unless the loss has none."""
    return OfflineAlgorithm(
        partial(preference_loss, config=config),
        prepare=partial(prepare, config=config),
        referenced=(lambda rows: [rows]) if config.form.reference else None,
    )


def prepare(rows: Comparisons, models: Forwards, group: dist.ProcessGroup, *, config: PreferenceConfig) -> Comparisons:
    """The rows with the reference's log-probs. Collective."""
    if not config.form.reference:
        return rows
    return replace(rows, ref_logprobs=row_sums(models["reference"](rows)["logprobs"], rows.mask))


def preference_loss(outputs: Outputs, rows: Comparisons, *, config: PreferenceConfig) -> tuple[Tensor, Tensor, Metrics]:
    """The sum over pairs of the loss, and of `nll_coef` times the NLL of the chosen response.

    outputs["logprobs"] (B, R), differentiable; rows as `prepare` gives them. Returns (sum, number of pairs, metrics).
    `margins` is b h; `accuracy` is the share of pairs with h > 0, where h = 0 counts half.
    """
    lengths = rows.mask.sum(1).view(-1, 2)
    counted = lengths.all(1)
    sums = row_sums(outputs["logprobs"], rows.mask).view(-1, 2)
    sums = torch.where(counted[:, None], sums, -1.0)  # some losses are not defined at 0
    divisor = lengths.clamp(min=1) if config.normalization == "mean" else 1
    logprobs = sums / divisor
    ratios = logprobs
    if config.form.reference:
        ratios = (sums - rows.ref_logprobs.view(-1, 2)) / divisor
    chosen, rejected = ratios.unbind(1)
    if config.form.margins:
        chosen = chosen - rows.margins[0::2] / config.b
    losses = config.form.of_pairs(chosen, rejected, config)
    count = counted.sum()
    total = masked_sum(losses, counted)

    def mean(values: Tensor) -> tuple[Tensor, Tensor]:
        return masked_sum(values.detach(), counted), count

    difference = ratios[:, 0] - ratios[:, 1]
    metrics = {
        "accuracy": mean((difference > 0).double() + 0.5 * (difference == 0)),
        "margins": mean(config.b * difference),
        f"logprobs_{config.normalization}/chosen": mean(logprobs[:, 0]),
        f"logprobs_{config.normalization}/rejected": mean(logprobs[:, 1]),
    }
    if config.form.reference:
        metrics |= {
            f"logratios_{config.normalization}/chosen": mean(ratios[:, 0]),
            f"logratios_{config.normalization}/rejected": mean(ratios[:, 1]),
        }
    if config.nll:
        per_token = config.nll_normalization == "token"
        nll = -sums[:, 0] * (rows.nll_scale if per_token else 1 / lengths[:, 0].clamp(min=1).double())
        metrics["loss/preference"] = total, count
        metrics[f"loss/nll_{config.nll_normalization}"] = mean(nll)
        total = total + config.nll * masked_sum(nll, counted)
    return total.float(), count, {"loss": (total, count), **metrics}
