"""FLOPs and memory traffic of a step of the online loop, for `megarlhf report` and bench/scaling.py.

FLOPs are of matrix products alone, a multiplication and an addition each one; a backward pass is two forward passes.
Bytes are the least that must come from memory: weights, gradients, optimizer states, keys and values; activations,
which may stay in the device's caches, are not counted. Both are sums over all ranks.

Every prompt and response is counted at its full length: an upper bound where responses end early or prompts are
shorter, because padding is not computed.

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


def online_step(
    settings: OnlineRunConfig, architecture: Architecture, data_size: int, *, slots: int
) -> dict[str, Work]:
    """{phase: Work} under the names of the loop's clock. The gate, which seldom runs, is not counted. slots: of each
    pipeline stage in sampling, as the sampler has chosen them."""
    training, response = settings.training, settings.sampler.response_length
    rows, prompt = training.batch_size, settings.prompts.length
    length = prompt + response
    size = 2 if settings.model.dtype == "bf16" else 4
    body, head = layer_parameters(architecture) * architecture.num_layers, _head(architecture)
    whole, words = trunk(architecture, rows, length, response), 2.0 * rows * response * head
    fit = max(1, settings.micro_batch_tokens // length)  # rows of a micro-batch

    def micro_batches(rows: int) -> int:
        return data_size * -(-rows // data_size // fit)

    separate = settings.critic_kind in ("separate", "adapters")

    per_prompt = rows // settings.sampler.samples_per_prompt  # samples of a prompt share the pass of its first P - 1
    decoded = 2.0 * body * rows * response + _attention(architecture, rows * response, prompt + response / 2)
    rounds = data_size * -(-rows // data_size // slots)  # of full slots
    cache = 2 * architecture.num_layers * architecture.num_query_groups * architecture.kv_channels
    sample = Work(
        trunk(architecture, per_prompt, prompt - 1, 0) + decoded + words,
        size * (rounds * (response + 1) * (body + head) + rows * response * (prompt + response / 2) * cache),
    )

    judges = [
        Architecture.load(find_model(source.checkpoint, "reward"))
        for source in settings.scoring.sources
        if source.checkpoint is not None
    ]
    score = Work(
        sum(trunk(judge, rows, length, response) for judge in judges),
        sum(size * micro_batches(rows) * layer_parameters(judge) * judge.num_layers for judge in judges),
    )
    layers = settings.model.trained_layers or architecture.num_layers
    share = layers / architecture.num_layers  # of the body that trains
    top = whole - (architecture.num_layers - layers) * layer(architecture, rows, length)
    policies = 2 if separate else 1  # policy, critic
    hydra = settings.reference.kind == "hydra"  # its trunk is the policy's
    evaluate = Work(
        policies * whole + (top if hydra else whole) + 2 * words,
        size * micro_batches(rows) * ((policies + (share if hydra else 1)) * body + 2 * head),
    )

    trained, frozen = policies * share * body + head, policies * (1 - share) * body
    # A backward pass is two forward passes, and one where the weights are frozen; adapters are not counted.
    backward = 2 if settings.model.lora is None else 1
    passes = backward + (settings.model.recompute == "full")  # of the layers that train, after the forward pass of all
    gradients, adam = (8, ADAM_BYTES) if settings.model.lora is None else (0, 0)
    updates, counted = training.epochs * training.minibatches, micro_batches(rows // training.minibatches)
    learn = Work(
        training.epochs * (policies * (whole + passes * top) + (1 + backward) * words),
        updates * (trained * (counted * (2 * size + gradients) + adam) + frozen * counted * size),
    )
    return {"sample": sample, "score": score, "evaluate": evaluate, "learn": learn}


def trunk(architecture: Architecture, rows: float, length: int, read: int) -> float:
    """FLOPs of a causal forward pass of the layers over `rows` rows of `length` tokens, of which the heads read `read`.
    The last layer computes attention for all, but projection and MLP for those alone (models/layers.py); if `read` is
    0, as in the prefill of sampling, only queries, keys and values."""
    rest = layer_parameters(architecture) - _qkv(architecture)
    matrices = layer_parameters(architecture) * architecture.num_layers * length - rest * (length - read)
    attention = _attention(architecture, rows * length, length / 2)
    if not read:
        attention *= 1 - 1 / architecture.num_layers
    return 2.0 * rows * matrices + attention


def layer(architecture: Architecture, rows: float, length: int) -> float:
    """FLOPs of a causal forward pass of one layer that computes all tokens."""
    attention = _attention(architecture, rows * length, length / 2) / architecture.num_layers
    return 2.0 * rows * length * layer_parameters(architecture) + attention


def _qkv(architecture: Architecture) -> int:
    heads = architecture.num_attention_heads + 2 * architecture.num_query_groups
    return architecture.hidden_size * architecture.kv_channels * heads


def layer_parameters(architecture: Architecture) -> int:
    """Elements of the matrices of a layer that compute a token: in a mixture of experts, of its experts and router."""
    h, d = architecture.hidden_size, architecture.kv_channels
    attention = _qkv(architecture) + h * d * architecture.num_attention_heads
    shared = architecture.shared_expert_size or 0
    inner = architecture.ffn_hidden_size * (architecture.experts_per_token or 1) + shared
    router = h * (architecture.num_experts or 0)
    return attention + router + h * inner * (3 if architecture.gated_mlp else 2)


def _attention(architecture: Architecture, queries: float, keys: float) -> float:
    """FLOPs of scores and weighted values of all layers, each query with `keys` keys."""
    return 4.0 * queries * keys * architecture.num_layers * architecture.num_attention_heads * architecture.kv_channels


def _head(architecture: Architecture) -> int:
    return architecture.hidden_size * architecture.vocab_size


def save(work: dict[str, Work], matmul: float, predicted: dict[str, float], path: Path) -> None:
    """For `megarlhf report`; `matmul`: FLOP/s of all ranks together in large matrix products; `predicted`: seconds of
    phases of a step."""
    rows: dict[str, Any] = {"matmul": matmul, "phases": {name: asdict(phase) for name, phase in work.items()}}
    rows["predicted"] = predicted
    records.replace(path, json.dumps(rows, indent=1) + "\n")
