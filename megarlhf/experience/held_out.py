"""Responses to held-out prompts, scored: the share that is right when decoded greedily, and pass@k when sampled.

Training does not change by it: the noise is of sequence ids that training never draws, the running moments of the
scorer stay as they are, and no weight, optimizer or generator is touched.

Legend: K held-out prompts, n samples of each, c of them right.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf import config as configuration
from megarlhf.batch import Rollout, Scores
from megarlhf.cluster import backend
from megarlhf.data.prompts import PromptsConfig, PromptSet
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.experience.scorer import Scorer

if TYPE_CHECKING:
    from megarlhf.engine import Engine

ROUNDS = 4  # responses a slot and call of the sampler: more waste less at its end, fewer need less memory
# Of the first prompt. Training counts from 0, so it has other noise; every evaluation has the same, so that their
# differences come from the weights.
FIRST_ID = 2**48
MOST_SAMPLES = 2**14  # with more the ids of samples would not fit in 63 bits


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out prompts. What is left out of the sampler is as in the section sampler."""

    # path: a file of their own.
    prompts: PromptsConfig | None = field(default=None, metadata=configuration.like("prompts"))
    every: int = 10  # steps; also before the first and after the last
    greedy: bool = True  # a greedy response to each prompt
    samples: int = 0  # sampled responses to each prompt, for pass@k; 0: none
    k: tuple[int, ...] | None = None  # default: 1 and `samples`
    temperature: float | None = None  # of the samples; default: as in sampler, also of the next three
    top_k: int | None = None  # of the samples
    top_p: float | None = None  # of the samples
    response_length: int | None = None  # of all responses
    threshold: float = 1.0  # a response is right if its score is at least this
    source: str | None = None  # the scoring source whose own number is that score; default: the total score
    best: str | None = None  # the metric by which the best step is kept as a checkpoint: evaluation/greedy, say
    patience: int | None = None  # stop after so many evaluations in a row without a better one

    def __post_init__(self):
        if self.prompts is None:
            raise ValueError("prompts: is missing; give the held-out prompts' path there")
        for name in ("every", "patience", "response_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        if not 0 <= self.samples <= MOST_SAMPLES:
            raise ValueError(f"samples: must be from 0 to {MOST_SAMPLES}, not {self.samples}")
        if not self.greedy and not self.samples:
            raise ValueError("samples: with greedy: false give the number of samples a prompt; there is no response")
        for name in ("k", "temperature", "top_k", "top_p"):
            if getattr(self, name) is not None and not self.samples:
                raise ValueError(f"{name}: is of sampled responses, but samples is 0; give their number, or remove it")
        if self.k is not None and (not self.k or len({*self.k}) < len(self.k)):
            raise ValueError(f"k: must be one or more different numbers, not {list(self.k)}")
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise ValueError(f"k: must be from 1 to samples, {self.samples}, not {k}")
        self.sampled(SamplerConfig())  # refuses what no sampler can do
        if self.best is not None and self.best not in self.names:
            raise ValueError(f"best: there is no metric '{self.best}'; {configuration.nearest(self.best, self.names)}")
        if self.patience is not None and self.best is None:
            raise ValueError("patience: needs the metric that should become better; set best")

    @property
    def ks(self) -> tuple[int, ...]:
        return self.k if self.k is not None else tuple(sorted({1, self.samples} if self.samples else ()))

    @property
    def names(self) -> list[str]:
        """The metrics of which more is better."""
        greedy = ["evaluation/greedy", "evaluation/score"] if self.greedy else []
        return greedy + [f"evaluation/pass@{k}" for k in self.ks]

    def decoded(self, usual: SamplerConfig) -> SamplerConfig:
        """The sampler of greedy responses; `usual`: that of training."""
        length = self.response_length or usual.response_length
        return replace(usual, greedy=True, samples_per_prompt=1, response_length=length)

    def sampled(self, usual: SamplerConfig) -> SamplerConfig:
        """The sampler of the samples."""
        own = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "response_length")}
        given = {name: value for name, value in own.items() if value is not None}
        return replace(usual, greedy=False, samples_per_prompt=max(1, self.samples), **given)


def pass_at(k: int, right: int, samples: int) -> float:
    """The probability that at least one of k of the samples is right, drawn without putting back: unbiased for k new
    samples. Chen et al. 2021, "Evaluating large language models trained on code", equation 1:

        pass@k = 1 - C(n - c, k) / C(n, k)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def prompts_at_once(num_slots: int, samples: int, most_rows: int) -> int:
    """Prompts of a rank that are sampled and scored in one call, with so many slots and samples of each: at least one,
    and otherwise no more than `most_rows` responses."""
    return max(1, min(ROUNDS * num_slots, most_rows) // samples)


def respond(
    engine: Engine,
    scorer: Scorer,
    prompts: PromptSet,
    draw: SamplerConfig,
    *,
    length: int,
    source: str | None,
    seed: int,
    eos_id: int | None,
    most_rows: int,
    on_batch: Callable[[Rollout, Scores], None],
) -> Tensor:
    """(K, n, 2) float64 on the CPU: score and number of tokens of each response, in the order of the prompts; the same
    on every rank, and up to rounding in every layout. Collective.

    length: columns of prompts. source: see `EvaluationConfig`. most_rows: responses that this rank may score in one
    call, unless one prompt alone has more; memory decides on the slots, which may suggest more. on_batch: called with
    this rank's rows after each call of the sampler. Raises UserError, the same on every rank, as `Scorer.score` does.

    The sampler is built here and dropped at the end: its caches, and on a GPU its graphs, need memory meanwhile alone.
    """
    topology, samples = engine.topology, draw.samples_per_prompt
    # Collectives need as many prompts on every data-parallel rank; copies of the last prompt fill up and do not count.
    share = -(-len(prompts) // topology.data_size)
    mine = np.minimum(np.arange(share) + topology.data_rank * share, len(prompts) - 1)
    policy = Sampler(engine, draw, rows=share * samples, prompt_length=length, seed=seed, eos_id=eos_id)
    most = torch.tensor(most_rows, device=backend.device())
    dist.all_reduce(most, op=dist.ReduceOp.MIN)  # ranks may have different numbers of CPUs
    step = prompts_at_once(policy.num_slots, samples, int(most))
    parts = []
    for start in range(0, share, step):
        rows = mine[start : start + step]
        rollout = policy.sample(prompts.rows(rows, FIRST_ID + rows, length=length, pad_id=policy.pad_id))
        scores = scorer.score(rollout, held_out=prompts.records)
        number = scores.total if source is None else scores.by_source[:, scorer.names.index(source)]
        parts.append(torch.stack([number.double(), rollout.mask.sum(1).double()], 1))
        on_batch(rollout, scores)
    del policy
    gc.collect()  # it and its groups refer to each other
    local = torch.cat(parts)
    ranks = [torch.empty_like(local) for _ in range(topology.data_size)]
    dist.all_gather(ranks, local, group=topology.data_group)
    return torch.cat(ranks).view(-1, samples, 2)[: len(prompts)].cpu()
