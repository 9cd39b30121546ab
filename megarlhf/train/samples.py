"""Sampled responses written down: samples.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import torch

from megarlhf.algorithms.kl import kl_estimate
from megarlhf.batch import Batch
from megarlhf.log import Log
from megarlhf.train.actions import Models
from megarlhf.train.settings import LogConfig


def record_samples(batch: Batch, models: Models, config: LogConfig, step: int, log: Log) -> None:
    """The first responses of the batch with their scores."""
    if not log.enabled:
        return
    from megarlhf.experience.scorer import texts

    rollout, signals = batch.rollout, batch.signals
    kl = torch.where(rollout.mask, kl_estimate(signals.logprobs, signals.ref_logprobs), 0).sum(1)
    queries, responses = texts(rollout.select(slice(config.samples)), models.tokenizer)
    rows = [
        {"query": query, "response": response, "score": score, "kl": nats}
        for query, response, score, nats in zip(
            queries, responses, batch.scores.scores.tolist(), kl.tolist(), strict=False
        )
    ]
    log.table("samples", rows, step)
