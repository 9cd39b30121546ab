"""The elements of a family's table: rows that work in both directions.

Legend: h hidden size, f feed-forward size, d head size, ng query groups, r heads per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.convert.keys import Keys
from megarlhf.models.spec import Architecture


@dataclass(frozen=True)
class Pair:
    """Two inverse functions. They only rearrange elements, so on the meta device they compute shapes."""

    to_ours: Callable[[Sequence[Tensor]], Tensor]
    to_theirs: Callable[[Tensor], Sequence[Tensor]]


COPY = Pair(lambda tensors: tensors[0], lambda tensor: [tensor])


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat; without a copy where the tensors lie behind each other already (`storage.read_together`). On the meta
    device torch's own would first import the compiler, for seconds."""
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    if first.is_meta:
        return torch.empty(shape, device="meta")
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    together = [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1]
    together &= len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    if dim == 0 and together and all(tensor.is_contiguous() for tensor in tensors):
        return first.as_strided(shape, first.stride())
    return torch.cat(list(tensors), dim)


# Megatron keeps both halves of a gated MLP in one matrix: act(gate) * up with [gate; up] of shape [2f, h].
GATE_UP = Pair(cat, lambda tensor: tensor.chunk(2))


def qkv(architecture: Architecture) -> Pair:
    """q, k, v as three tensors <-> Megatron's rows, group by group: r query heads, their key, their value."""
    groups, d = architecture.num_query_groups, architecture.kv_channels
    sizes = [architecture.num_attention_heads // groups * d, d, d]

    def merge(tensors: Sequence[Tensor]) -> Tensor:
        return cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)

    def split(tensor: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(sizes, dim=1)]

    return Pair(merge, split)


def stacked(pair: Pair) -> Pair:
    """For three tensors of equal size that are one tensor on the other side, [q; k; v]."""
    return Pair(lambda tensors: pair.to_ours(tensors[0].chunk(3)), lambda tensor: [cat(pair.to_theirs(tensor))])


def fused(pair: Pair, sizes: Sequence[int]) -> Pair:
    """For tensors of these sizes that are one tensor on the other side, one below the other."""
    return Pair(
        lambda tensors: pair.to_ours(tensors[0].split(list(sizes))), lambda tensor: [cat(pair.to_theirs(tensor))]
    )


def adjacent_pairs(pair: Pair, architecture: Architecture) -> Pair:
    """For q, k and v whose rotary pairs are adjacent rows of a head on the other side; ours are half of the rows that
    turn apart."""
    d, turning = architecture.kv_channels, architecture.rotary_channels

    def ordered(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
        heads = tensor.unflatten(0, (-1, d))
        turned = heads[:, :turning].unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return cat([turned, heads[:, turning:]], dim=1).flatten(0, 1)

    def to_ours(tensors: Sequence[Tensor]) -> Tensor:
        return pair.to_ours([*(ordered(tensor, (turning // 2, 2)) for tensor in tensors[:2]), tensors[2]])

    def to_theirs(tensor: Tensor) -> list[Tensor]:
        q, k, v = pair.to_theirs(tensor)
        return [ordered(q, (2, turning // 2)), ordered(k, (2, turning // 2)), v]

    return Pair(to_ours, to_theirs)


def transposed(pair: Pair) -> Pair:
    """For weights that are [in, out] on the other side (GPT-2's Conv1D)."""
    return Pair(
        lambda tensors: pair.to_ours([tensor.t() for tensor in tensors]),
        lambda tensor: [part.t() for part in pair.to_theirs(tensor)],
    )


@dataclass(frozen=True)
class Row:
    """Source tensors that make one target tensor. `{i}` in the names is the number of a layer."""

    theirs: tuple[str, ...]
    ours: str
    pair: Pair = COPY


@dataclass(frozen=True)
class Family:
    """A Hugging Face model family, both ways. Its name is the exact `model_type`.

    `from_config` gives Architecture's fields for a config.json that `keys` admits and raises ValueError("key: what;
    remedy") for anything that Architecture cannot express; `to_config` is its inverse. `registry` adds the file's name
    and checks that.
    """

    name: str
    from_config: Callable[[dict[str, Any]], dict[str, Any]]
    to_config: Callable[[Architecture], dict[str, Any]]
    rows: Callable[[Architecture], list[Row]]
    prefix: str  # what files of the bare model (AutoModel, the oldest checkpoints) lack in front of their names
    buffers: tuple[str, ...]  # regular expressions of tensors that are no weights
    keys: Keys
    head: str = "lm_head.weight"  # the output layer
    classifier: str | None = ""  # transformers' class of its reward models; "": by the usual name; None: it has none
