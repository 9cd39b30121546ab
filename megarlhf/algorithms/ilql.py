"""ILQL: implicit language Q-learning (Snell et al. 2022, arXiv:2206.11871), on responses with given rewards.

A state is a text, an action the next token. Beside the policy, the model has a value V of a state, two Q values of a
state's tokens, and slow copies of the Q heads. V is an expectile of the data's Q values, so that no action outside the
data is ever valued.

Legend: B rows, R response columns, V' the value after a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megarlhf.algorithms.interface import Learner, Metrics, OfflineAlgorithm, Outputs
from megarlhf.algorithms.masked import masked_sum
from megarlhf.batch import Rewarded


@dataclass(frozen=True)
class ILQLConfig:
    """The loss: Q loss + V loss + cql_coef * CQL loss + awac_coef * policy loss. The defaults are trlX's (ILQLConfig),
    those of the slow copies IQL's (Kostrikov et al. 2021, arXiv:2110.06169)."""

    tau: float = 0.7  # expectile of V: 0.5 is the mean over the data's tokens, towards 1 their maximum
    gamma: float = 0.99  # discount a token
    cql_coef: float = 0.1  # of the cross-entropy of softmax(Q), which keeps the Q values of other tokens down
    awac_coef: float = 1.0  # of the policy's cross-entropy
    awac_beta: float = 0.0  # a token's weight in it is exp(awac_beta (Q - V)); 0: all are equal
    target_alpha: float = 0.005  # slow copy = (1 - target_alpha) * slow copy + target_alpha * Q head ...
    target_period: int = 1  # ... every so many updates

    def __post_init__(self):
        if not 0 < self.tau < 1:
            raise ValueError(f"tau: must be between 0 and 1, not {self.tau}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: must be in [0, 1], not {self.gamma}")
        for name in ("cql_coef", "awac_coef", "awac_beta"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")
        if not 0 < self.target_alpha <= 1:
            raise ValueError(f"target_alpha: must be above 0 and at most 1, not {self.target_alpha}")
        if self.target_period < 1:
            raise ValueError(f"target_period: must be at least 1, not {self.target_period}")


def ilql(config: ILQLConfig) -> OfflineAlgorithm:
    """ILQL for the loop, on `batch.Rewarded` rows."""

    def follow(model: Learner) -> None:
        if model.steps % config.target_period == 0:
            model.update_slow_copies(config.target_alpha)

    return OfflineAlgorithm(partial(ilql_loss, config=config), after_update=follow)


def ilql_loss(outputs: Outputs, rows: Rewarded, *, config: ILQLConfig) -> tuple[Tensor, Tensor, Metrics]:
    """The sum over the counted tokens of

        sum_i (Q_i - (r + gamma V'))^2                  Q loss; V' = 0 after a row's last token, no gradient
        |tau - 1[Q' < V]| (Q' - V)^2                    V loss; Q' the smaller of the slow copies' values, no gradient
        - cql_coef sum_i log softmax(Q_i)               CQL loss, at the token
        - awac_coef exp(awac_beta (Q' - V)) log p       policy loss; no gradient of the weight

    arXiv:2206.11871, section 4, with trlX's two Q heads and policy loss. outputs: logprobs, values, q1, q2,
    q1_logprobs, q2_logprobs (differentiable) and slow_q, (B, R) each; rows.rewards (B, R). Returns (sum, number of
    tokens, metrics).
    """
    mask, count, values = rows.mask, rows.mask.sum(), outputs["values"]
    following = F.pad(torch.where(mask, values, 0).detach()[:, 1:], (0, 1))
    target = rows.rewards + config.gamma * following
    slow = outputs["slow_q"].detach()
    gap = slow - values
    expectile = torch.where(gap >= 0, config.tau, 1 - config.tau) * gap**2
    weight = (config.awac_beta * gap.detach()).exp()
    losses = {
        "q": (outputs["q1"] - target) ** 2 + (outputs["q2"] - target) ** 2,
        "v": expectile,
        "cql": -config.cql_coef * (outputs["q1_logprobs"] + outputs["q2_logprobs"]),
        "awac": -config.awac_coef * weight * outputs["logprobs"],
    }
    sums = {name: masked_sum(loss, mask) for name, loss in losses.items()}
    total = sums["q"] + sums["v"] + sums["cql"] + sums["awac"]
    watched = {"value": values, "q": slow, "advantage": gap, "logprob": outputs["logprobs"]}
    metrics: Metrics = {"loss": (total, count)}
    metrics |= {f"loss/{name}": (part, count) for name, part in sums.items()}
    metrics |= {f"mean/{name}": (masked_sum(value.detach(), mask), count) for name, value in watched.items()}
    return total, count, metrics
