"""FLOPs and memory traffic of a step of the online loop, for `megarlhf report` and bench/scaling.py.

FLOPs are of matrix products alone, a multiplication and an addition each one; a backward pass is two forward passes.
Bytes are the least that must come from memory: weights, gradients, optimizer states, keys and values; activations,
which may stay in the device's caches, are not counted. Both are sums over all ranks.

Legend: B responses a step, P prompt and R response tokens, S = P + R, L layers, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarlhf import records
from megarlhf.models.locate import find_model
from megarlhf.models.spec import Architecture
from megarlhf.train.rl_config import OnlineRunConfig

ADAM_BYTES = 28  # a parameter: fp32 gradient read; moments and fp32 weight read and written


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one phase of one step."""

    flops: float
    bytes: float


def online_step(settings: OnlineRunConfig, architecture: Architecture, data_size: int) -> dict[str, Work]:
    """{phase: Work} under the names of the loop's clock. The gate, which seldom runs, is not counted."""
    training, response = settings.training, settings.sampler.response_length
    rows, prompt = training.batch_size, settings.prompts.length
    length = prompt + response
    size = 2 if settings.model.dtype == "bf16" else 4
    body, head = layer_parameters(architecture) * architecture.num_layers, _head(architecture)
    whole, words = trunk(architecture, rows, length, response), 2.0 * rows * response * head
    micro_batches = rows / training.micro_batch_size
    separate = settings.critic_kind == "separate"

    per_prompt = rows // settings.sampler.samples_per_prompt  # samples of a prompt share its pass
    decoded = 2.0 * body * rows * response + _attention(architecture, rows * response, prompt + response / 2)
    streams = data_size * max(1, -(-rows // data_size // settings.sampler.micro_batch_size))
    cache = 2 * architecture.num_layers * architecture.num_query_groups * architecture.kv_channels
    sample = Work(
        trunk(architecture, per_prompt, prompt, 0) + decoded + words,
        size * (streams * (response + 1) * (body + head) + rows * response * (prompt + response / 2) * cache),
    )

    judges = [
        Architecture.load(find_model(source.checkpoint, "reward"))
        for source in settings.scoring.sources
        if source.checkpoint is not None
    ]
    score = Work(
        sum(trunk(judge, rows, length, response) for judge in judges),
        sum(size * micro_batches * layer_parameters(judge) * judge.num_layers for judge in judges),
    )
    models = 3 if separate else 2  # policy, reference, critic
    evaluate = Work(models * whole + 2 * words, size * micro_batches * (models * body + 2 * head))

    trained = (2 * body + head) if separate else (body + head)
    passes = 4 if settings.model.recompute == "full" else 3
    policies = 2 if separate else 1
    updates = training.epochs * training.minibatches
    learn = Work(
        training.epochs * (policies * passes * whole + 3 * words),
        training.epochs * micro_batches * trained * (2 * size + 8) + updates * trained * ADAM_BYTES,
    )
    return {"sample": sample, "score": score, "evaluate": evaluate, "learn": learn}


def trunk(architecture: Architecture, rows: float, length: int, read: int) -> float:
    """FLOPs of a causal forward pass of the layers over `rows` rows of `length` tokens. The heads read the last `read`
    positions and the one before; of the others the last layer computes queries, keys and values alone
    (models/layers.py)."""
    tokens, unread = rows * length, max(0, length - read - 1)
    rest = layer_parameters(architecture) - _qkv(architecture)
    seen = architecture.num_layers * length**2 / 2 - unread**2 / 2  # keys that the queries of a row see
    return (
        2.0 * (layer_parameters(architecture) * architecture.num_layers * tokens - rest * rows * unread)
        + _attention(architecture, rows, seen) / architecture.num_layers
    )


def _qkv(architecture: Architecture) -> int:
    heads = architecture.num_attention_heads + 2 * architecture.num_query_groups
    return architecture.hidden_size * architecture.kv_channels * heads


def layer_parameters(architecture: Architecture) -> int:
    """Elements of the matrices of a layer."""
    h, d = architecture.hidden_size, architecture.kv_channels
    attention = _qkv(architecture) + h * d * architecture.num_attention_heads
    return attention + h * architecture.ffn_hidden_size * (3 if architecture.gated_mlp else 2)


def _attention(architecture: Architecture, queries: float, keys: float) -> float:
    """FLOPs of scores and weighted values of all layers, each query with `keys` keys."""
    return 4.0 * queries * keys * architecture.num_layers * architecture.num_attention_heads * architecture.kv_channels


def _head(architecture: Architecture) -> int:
    return architecture.hidden_size * architecture.vocab_size


def save(work: dict[str, Work], matmul: float, path: Path) -> None:
    """For `megarlhf report`; `matmul`: FLOP/s of all ranks together in large matrix products."""
    rows: dict[str, Any] = {"matmul": matmul, "phases": {name: asdict(phase) for name, phase in work.items()}}
    records.replace(path, json.dumps(rows, indent=1) + "\n")
