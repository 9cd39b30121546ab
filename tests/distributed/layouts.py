"""Tiny models, batches and full weights for tests that compare layouts. Runs inside worker ranks (see
tests/ranks.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarlhf.batch import Sequences
from megarlhf.cluster import parallel
from megarlhf.cluster.parallel import ParallelConfig, Topology
from megarlhf.models.rope_scaling import RopeScaling
from megarlhf.models.spec import VOCABULARY, Architecture
from megarlhf.optim import OptimizerConfig

SIZES = dict(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, vocab_size=503)
LLAMA = Architecture("llama", **SIZES, num_query_groups=4, max_position_embeddings=64)
GPT2 = Architecture(
    "gpt2",
    **SIZES,
    num_query_groups=8,
    max_position_embeddings=64,
    normalization="LayerNorm",
    activation="gelu_tanh",
    gated_mlp=False,
    linear_bias=True,
    position_embedding="learned",
    tie_embeddings=True,
)
NEOX = Architecture(  # attention and MLP side by side, each behind a norm of its own
    "gpt_neox",
    **SIZES,
    num_query_groups=8,
    max_position_embeddings=64,
    normalization="LayerNorm",
    activation="gelu",
    gated_mlp=False,
    linear_bias=True,
    rotary_percent=0.25,
    parallel_residual=True,
)
FALCON = dataclasses.replace(  # ... behind one norm
    NEOX, family="falcon", num_query_groups=4, linear_bias=False, rotary_percent=1.0, shared_norm=True,
    tie_embeddings=True,
)  # fmt: skip
GEMMA = dataclasses.replace(  # with Qwen 3's norm on queries and keys
    LLAMA, family="gemma", head_dim=16, activation="gelu_tanh", tie_embeddings=True, zero_centered_norm=True,
    scale_embedding=True, qk_norm=True,
)  # fmt: skip
GEMMA2 = dataclasses.replace(  # with Gemma 3's two kinds of rotary frequencies, and multipliers of Granite's
    GEMMA, family="gemma2", norms="both", qk_norm=False, sliding_window=5, full_attention_layers=(1, 3),
    local_rotary_base=100.0, attention_scale=0.4, attention_softcap=2.0, logit_softcap=3.0, logit_divisor=0.7,
    embedding_multiplier=0.5, residual_multiplier=0.6,
)  # fmt: skip
OLMO2 = dataclasses.replace(
    LLAMA, family="olmo2", norms="after", qk_norm_joint=True, qkv_bias=True, proj_bias=True,
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16),
)  # fmt: skip
# A large epsilon: with the usual one Adam turns rounding noise in near-zero gradients into visible differences.
ADAM = OptimizerConfig(lr=1e-2, schedule="linear", eps=1e-3, weight_decay=0.1)


@contextlib.contextmanager
def layout(**sizes):
    """Megatron's groups for one layout over the ranks of this test; torn down at the end."""
    topology = parallel.start(ParallelConfig(**sizes))
    try:
        yield topology
    finally:
        parallel.stop()


def examples(rows: int = 8, length: int = 24, left_padded: bool = True, seed: int = 0, vocab: int = 503) -> Sequences:
    """A global batch of prompts and responses of different lengths: left-padded prompts, or right-padded rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    sizes = torch.randint(length // 3, length + 1, (rows,), generator=generator)
    column = torch.arange(length)
    real = column >= (length - sizes)[:, None] if left_padded else column < sizes[:, None]
    counted = real & torch.cat([torch.zeros(rows, 1, dtype=torch.bool), real[:, :-1]], 1)
    return Sequences(
        tokens=torch.where(real, tokens, 0),
        mask=counted[:, 1:] & (torch.rand(rows, length - 1, generator=generator) < 0.7),
        segments=real.long(),
    )


def share(batch: Sequences, topology: Topology) -> Sequences:
    """This data-parallel rank's rows."""
    rows = len(batch) // topology.data_size
    return batch.select(slice(topology.data_rank * rows, (topology.data_rank + 1) * rows))


def named_parameters(engine) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
    """(global name, parameter, chunk) of this rank: the names count layers over all stages."""
    for module in engine.modules:
        for name, parameter in module.named_parameters():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(module.decoder.layers[int(parts[2])].layer_number - 1)
            yield ".".join(parts), parameter, module


def full_weights(engine, read=lambda parameter: parameter.detach()) -> dict[str, torch.Tensor]:
    """{global name: full tensor}, vocabulary padding cut off, on every rank: the weights, or what `read` makes of a
    parameter, such as its gradient."""
    topology, size = engine.topology, engine.topology.parallel.tensor
    found = {}
    for name, parameter, module in named_parameters(engine):
        value = read(parameter).float().contiguous()
        if getattr(parameter, "tensor_model_parallel", False) and size > 1:
            shards = [torch.empty_like(value) for _ in range(size)]
            dist.all_gather(shards, value, group=topology.tensor_group)
            if name.endswith("linear_fc1.weight") and module.architecture.gated_mlp:
                halves = [shard.chunk(2) for shard in shards]
                value = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            else:
                value = torch.cat(shards, parameter.partition_dim)
        if name in VOCABULARY:
            value = value[: module.architecture.vocab_size]
        found[name] = value.clone()
    stages = [None] * topology.parallel.pipeline
    dist.all_gather_object(stages, found, group=topology.pipeline_group)
    merged = {name: value for stage in stages for name, value in stage.items()}
    if engine.modules[0].architecture.tie_embeddings:
        merged.pop("output_layer.weight", None)  # the last stage's copy
    return merged


@torch.no_grad()
def set_full_weights(engine, weights: dict[str, torch.Tensor], key=lambda name: name) -> None:
    """The inverse of `full_weights`, for an fp32 engine: every rank cuts its shards from `weights`. `key`: a global
    name -> its name in `weights`."""
    size, rank = engine.topology.parallel.tensor, engine.topology.tensor_rank
    for name, parameter, module in named_parameters(engine):
        tied = name == "output_layer.weight" and module.architecture.tie_embeddings
        value = weights["embedding.word_embeddings.weight" if tied else key(name)]
        if name in VOCABULARY:
            padded = module.architecture.padded_vocab_size(size)
            value = torch.nn.functional.pad(value, (0, 0, 0, padded - len(value)))
        if getattr(parameter, "tensor_model_parallel", False) and size > 1:
            gated = name.endswith("linear_fc1.weight") and module.architecture.gated_mlp
            halves = value.chunk(2) if gated else (value,)
            value = torch.cat([half.chunk(size, parameter.partition_dim)[rank] for half in halves])
        parameter.copy_(value)
