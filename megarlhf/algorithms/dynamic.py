"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): groups whose scores are all equal teach
nothing, so others take their place.

Every round samples a whole batch of new prompts. The groups are taken in the order of their prompts, so the batch is
the same in every layout.
"""

from __future__ import annotations

import torch

from megarlhf.algorithms.advantages import varies
from megarlhf.algorithms.interface import Actions
from megarlhf.batch import Rollout, Scores, concatenated
from megarlhf.config import UserError


def collect_varied(act: Actions, rounds: int) -> tuple[Rollout, Scores, dict[str, float]]:
    """This rank's share of a batch of responses with their scores; and {"rounds": how many it took, at most `rounds`;
    "score": the mean over all that were sampled}. If the rounds do not find enough groups with different scores, the
    last one's others fill the batch. Raises UserError, on every rank alike, if they find none. Collective."""
    found: list[tuple[Rollout, Scores]] = []
    sampled = []
    for _ in range(rounds):
        mine = act.sample(act.prompts())
        rollout, scores = (act.gathered(rows) for rows in (mine, act.score(mine)))
        keep = varies(scores.total, rollout.group_ids)
        found.append((rollout.select(keep), scores.select(keep)))
        sampled.append(scores.total.double().mean().item())
        missing = len(keep) - sum(len(part) for part, _ in found)
        if missing <= 0:
            break
    if missing == len(keep):
        size = int((rollout.group_ids == rollout.group_ids[0]).sum())
        raise UserError(
            f"reinforce.dynamic_rounds: in {rounds} rounds of {len(keep) // size} prompts no group of {size} responses "
            f"had different scores (the last batch's mean is {scores.total.mean():.3g}), so there is nothing to learn; "
            "look at the scores, take prompts that the policy sometimes solves, raise sampler.samples_per_prompt or "
            "sampler.temperature"
        )
    if missing > 0:
        rest = (~keep).nonzero()[:missing, 0]
        found.append((rollout.select(rest), scores.select(rest)))
    share = torch.arange(len(mine), device=mine.tokens.device) + act.rank * len(mine)
    rollouts, scored = zip(*found, strict=True)
    return (
        concatenated(rollouts).select(share),
        concatenated(scored).select(share),
        {"rounds": len(sampled), "score": sum(sampled) / len(sampled)},
    )
