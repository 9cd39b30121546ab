"""Records of sampled responses and of the scores of a whole batch: samples.jsonl, scores.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarlhf.algorithms.kl import kl_estimate
from megarlhf.batch import Batch, Rollout, Scores
from megarlhf.cluster.parallel import Topology
from megarlhf.experience.scorer import Scorer
from megarlhf.experience.sources import Record
from megarlhf.experience.texts import texts
from megarlhf.log import Log

LONGEST = 2000  # characters of a value of a record


def record_samples(batch: Batch, scorer: Scorer, prompt_key: str, count: int, step: int, log: Log) -> None:
    """The first `count` responses of this rank's rows, on the rank that logs."""
    if log.enabled:
        log.table("samples", sample_rows(batch, scorer, prompt_key, count), step)


def record_scores(scores: Scores, names: Sequence[str], topology: Topology, step: int, log: Log) -> None:
    """The scores of the global batch, for their distribution: in total and, of several sources, what each said.
    Collective over data-parallel ranks."""
    from megarlhf.experience.rollout import gather

    whole = gather(scores, topology)
    columns = {"score": whole.total.tolist()}
    if len(names) > 1:
        said = whole.by_source.T.tolist()
        columns |= {f"scores/{name}": values for name, values in zip(names, said, strict=True)}
    for name, values in columns.items():
        log.distribution(f"samples/{name}", values, step)


def sample_rows(batch: Batch, scorer: Scorer, prompt_key: str, count: int) -> list[dict[str, Any]]:
    """`rows_of` the first responses, with their KL to the reference (k1, nats)."""
    rollout, scores, signals = (rows.select(slice(count)) for rows in (batch.rollout, batch.scores, batch.signals))
    kl = torch.where(rollout.mask, kl_estimate(signals.logprobs, signals.ref_logprobs), 0).sum(1)
    return rows_of(rollout, scores, scorer, scorer.records, prompt_key, kl=kl.tolist())


def rows_of(
    rollout: Rollout,
    scores: Scores,
    scorer: Scorer,
    records: Callable[[list[int]], list[Record]],
    prompt_key: str,
    **more: list[Any],
) -> list[dict[str, Any]]:
    """A row for each response: query and response, its score (sum over tokens), `more`, each source's score before
    clip, normalisation and weight, and the prompt's record without the prompt, with long values cut."""
    columns = zip(
        *texts(rollout, scorer.tokenizer), scores.total.tolist(), scores.by_source.tolist(),
        records(rollout.prompt_ids.tolist()), *more.values(), strict=True,
    )  # fmt: skip
    return [
        {
            "query": query,
            "response": response,
            "score": score,
            **dict(zip(more, values, strict=True)),
            # JSON has no NaN
            "scores": {
                name: number if math.isfinite(number) else None for name, number in zip(scorer.names, said, strict=True)
            },
            "record": {key: cut(value) for key, value in record.items() if key != prompt_key},
        }
        for query, response, score, said, record, *values in columns
    ]


def cut(value: Any) -> Any:
    """A JSON value; the beginning of its text, with "…" behind it, where it is longer than LONGEST."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= LONGEST else text[:LONGEST] + "…"
