"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): the frozen linear layers below adapters, held in NF4.

A layer is dequantised when it is computed, in the forward pass and again in the backward pass; no two at a time. The
embedding, the output layer, norms and biases stay as they are. Blocks are those of the whole matrix in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megarlhf.kernels import nf4
from megarlhf.models.gpt import GPT
from megarlhf.models.lora import BLOCKS


class _Frozen(nn.Module):
    """A linear layer in NF4; `quantize` changes the class of megatron's or TE's layer to one of the two below, so that
    its hooks and its place stay. TE's names differ: what is used here is set by `quantize`."""

    def product(self, x: Tensor) -> Tensor:
        return nf4.LinearNF4.apply(x, self.codes, self.scales)

    def added(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Megatron's pair: what to go on with, and a bias that another operation adds."""
        bias = self.bias if self.has_bias else None
        if bias is None or self.returns_bias:
            return y, bias
        return y + bias, None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}  # checkpoints hold adapters alone

    def get_extra_state(self) -> None:
        """Nothing; a hook of the former class's `load_state_dict` needs the pair."""

    def set_extra_state(self, state: None) -> None:
        pass


class Column(_Frozen):
    def forward(self, x: Tensor, *_) -> tuple[Tensor, Tensor | None]:
        """As megatron's ColumnParallelLinear: [T, 1, I] or its sequence shard -> [T, 1, O / TP]."""
        if self.parallel:
            cross = tensor_parallel.copy_to_tensor_model_parallel_region
            if self.over_sequence:
                cross = tensor_parallel.gather_from_sequence_parallel_region
            x = cross(x, group=self.group)
        return self.added(self.product(x))


class Row(_Frozen):
    def forward(self, x: Tensor, *_) -> tuple[Tensor, Tensor | None]:
        """As megatron's RowParallelLinear: [T, 1, I / TP] -> [T, 1, O] or its sequence shard."""
        y = self.product(x)
        if self.parallel:
            cross = tensor_parallel.reduce_from_tensor_model_parallel_region
            if self.over_sequence:
                cross = tensor_parallel.reduce_scatter_to_sequence_parallel_region
            y = cross(y, group=self.group)
        return self.added(y)


@torch.no_grad()
def quantize(modules: Iterable[GPT]) -> None:
    """Put the linear layers of all transformer layers into NF4 and free their weights."""
    for chunk in modules:
        for layer in chunk.decoder.layers:
            for name, block in BLOCKS.items():
                linear = getattr(getattr(layer, block), name)
                matrix = nf4.quantize(linear.weight)
                _hold(chunk, name, linear, matrix.codes, matrix.scales)


def share(chunk: GPT, other: GPT) -> None:
    """Replace the weights of the linear layers of a chunk by those that another has in NF4: the same tensors."""
    for layer, its in zip(chunk.decoder.layers, other.decoder.layers, strict=True):
        for name, block in BLOCKS.items():
            held = getattr(getattr(its, block), name)
            _hold(chunk, name, getattr(getattr(layer, block), name), held.codes, held.scales)


def _hold(chunk: GPT, name: str, linear: nn.Module, codes: Tensor, scales: Tensor) -> None:
    del linear.weight
    linear.__class__ = Column if name in ("linear_qkv", "linear_fc1") else Row
    linear.has_bias = linear.bias is not None and linear.bias.numel() > 0  # TE's is empty
    linear.returns_bias = name != "linear_qkv"  # which adds it itself; others leave it to what follows
    linear.group, linear.parallel = chunk.topology.tensor_group, chunk.topology.parallel.tensor > 1
    linear.over_sequence = chunk.config.sequence_parallel
    linear.register_buffer("codes", codes)
    linear.register_buffer("scales", scales)


@torch.no_grad()
def round_weights(modules: Iterable[GPT]) -> None:
    """Round the weights of the linear layers to what NF4 holds of them."""
    for chunk in modules:
        for layer in chunk.decoder.layers:
            for name, block in BLOCKS.items():
                weight = getattr(getattr(layer, block), name).weight
                weight.copy_(nf4.dequantize(nf4.quantize(weight), weight.dtype))
