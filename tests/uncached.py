"""Logits, and sampling without a cache: a full forward pass of the trainer's model for every token. Slow, and so simple
that the sampler is tested against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megarlhf import kernels
from megarlhf.batch import Prompts, Rollout, Sequences
from megarlhf.cluster import backend
from megarlhf.engine import Engine
from megarlhf.experience.sampler import SamplerConfig, rollout_of, sample_ids
from megarlhf.kernels import sampling
from megarlhf.kernels.sampling import Sampled


def response_logits(engine: Engine, rows: Sequences) -> Tensor:
    """(B, R, V'): this tensor-parallel rank's columns of the logits of the response tokens, on every stage."""
    states = engine.forward(rows, with_states=True)["states"]
    outputs = {}
    if engine.topology.last_stage:
        model = engine.modules[-1]
        architecture = model.architecture
        logits = (
            kernels.linear_logits(states.flatten(0, 1), model.head_weight(), softcap=architecture.logit_softcap)
            / architecture.logit_divisor
        )
        outputs["logits"] = logits.unflatten(0, states.shape[:2])
    return engine._from_last_stage(outputs)["logits"]


@torch.no_grad()
def sample_without_cache(
    engine: Engine,
    prompts: Prompts,
    config: SamplerConfig,
    *,
    seed: int = 0,
    eos_id: int | None = None,
    with_entropy: bool = False,
) -> Rollout:
    """What `Sampler.sample` returns."""
    architecture, topology = engine.modules[0].architecture, engine.topology
    prompts = prompts.to(backend.device())
    length, response_length = prompts.tokens.shape[1], config.response_length
    sequence_ids = sample_ids(prompts, config.samples_per_prompt)
    tokens = prompts.tokens.repeat_interleave(config.samples_per_prompt, 0)
    tokens = F.pad(tokens, (0, response_length), value=architecture.vocab_size)
    segments = F.pad(prompts.valid.long().repeat_interleave(config.samples_per_prompt, 0), (0, response_length))
    drawn = []
    for step in range(response_length):
        tokens[:, length + step] = 0  # some token, which its own prediction does not read
        segments[:, length + step] = 1
        column = torch.arange(response_length, device=tokens.device) == step
        rows = Sequences(tokens=tokens, mask=column.repeat(len(tokens), 1), segments=segments, prompt_len=length)
        sampled = sampling.sample(
            response_logits(engine, rows)[:, step],
            config,
            seed=seed,
            sequence_ids=sequence_ids,
            steps=torch.full_like(sequence_ids, step),
            vocab_size=architecture.vocab_size,
            with_entropy=with_entropy,
            tp_group=topology.tensor_group,
        )
        tokens[:, length + step] = sampled.tokens
        drawn.append(sampled)
    results = {
        name: torch.stack(values, 1)
        for name, *values in zip(Sampled._fields, *drawn, strict=True)
        if values[0] is not None
    }
    return rollout_of(prompts, sequence_ids, results, config, eos_id, architecture.vocab_size)
