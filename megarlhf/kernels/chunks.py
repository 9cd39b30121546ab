"""What the functions of the head share: the rows they read, chunks of these, and the gradients of hidden and weight.

Legend: S sequence, B rows, H hidden size, N selected rows of [S*B, H], V' columns of one rank, TP ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels.products import default_chunk, sum_dtype
from megarlhf.kernels.shard import CallOptions, tp_size


class Call:
    """What a call's forward and backward share. ValueError: see the messages."""

    def __init__(
        self,
        options: CallOptions,
        hidden: Tensor,
        weight: Tensor,
        *,
        rows: slice | None,
        sequence_parallel: bool,
        fusion: bool,
        chunk_rows: int | None,
    ):
        if hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"hidden {tuple(hidden.shape)} {hidden.dtype} and weight_shard {tuple(weight.shape)} {weight.dtype} "
                "must have the same dtype and the same last dimension"
            )
        if fusion and weight.requires_grad and not hasattr(weight, "main_grad"):
            raise ValueError(
                "gradient_accumulation_fusion adds to weight_shard.main_grad, which this weight has not; "
                "wrap the model in Megatron's DistributedDataParallel or pass gradient_accumulation_fusion=False"
            )
        if chunk_rows is None:
            chunk_rows = default_chunk(weight)
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
        tp = tp_size(options.tp_group)
        self.options = options
        self.rows = rows
        self.sequence_parallel = sequence_parallel and tp > 1
        self.fusion = fusion
        self.chunk_rows = chunk_rows
        # Whether a backward pass follows: needs_input_grad is also true of a weight that trains under no_grad.
        self.grads = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        self.total = hidden.shape[:-1].numel() * (tp if self.sequence_parallel else 1)  # rows of the whole hidden
        self.selected = self.total if rows is None else len(range(self.total)[rows])  # N

    def select(self, hidden: Tensor) -> Tensor:
        """-> (N, H) selected rows of the whole hidden."""
        if self.sequence_parallel:
            local = hidden.contiguous()
            hidden = local.new_empty(len(local) * tp_size(self.options.tp_group), *local.shape[1:])
            dist.all_gather_into_tensor(hidden, local, group=self.options.tp_group)
        hidden = hidden.flatten(0, -2)
        return hidden if self.rows is None else hidden[self.rows]

    def select_backward(self, grad: Tensor, hidden: Tensor) -> Tensor:
        """(N, H) of this rank's columns -> the gradient of `hidden`, summed over TP."""
        group, tp = self.options.tp_group, tp_size(self.options.tp_group)
        if tp > 1 and not self.sequence_parallel:
            dist.all_reduce(grad, group=group)
        if self.rows is not None:
            whole = grad.new_zeros(self.total, grad.shape[1])
            whole[self.rows] = grad
            grad = whole
        if self.sequence_parallel:
            grad, whole = grad.new_empty(len(grad) // tp, grad.shape[1]), grad
            dist.reduce_scatter_tensor(grad, whole, group=group)
        return grad.view(hidden.shape).to(hidden.dtype)

    def chunks(self, x: Tensor) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, len(x))) for start in range(0, len(x), self.chunk_rows)]

    def scratch(self, x: Tensor, weight: Tensor) -> Tensor:
        """An empty buffer for the logits of a chunk of the rows `x`; `give_back` it afterwards."""
        shape, dtype = (min(self.chunk_rows, len(x)), len(weight)), sum_dtype(x)
        if x.device.type != "cpu":
            return x.new_empty(shape, dtype=dtype)
        from megarlhf.cpu import memory

        return memory.take(*shape, dtype)


def give_back(scratch: Tensor) -> None:
    if scratch.device.type == "cpu":
        from megarlhf.cpu import memory

        memory.give(scratch)


def weight_accumulator(weight: Tensor, operand: Tensor, fusion: bool) -> Tensor:
    if fusion and weight.main_grad.dtype == sum_dtype(operand):
        return weight.main_grad
    return torch.zeros_like(operand, dtype=sum_dtype(operand))


def weight_grad(weight: Tensor, w_grad: Tensor, fusion: bool) -> Tensor:
    if not fusion:
        return w_grad.to(weight.dtype)
    if w_grad is not weight.main_grad:
        weight.main_grad.add_(w_grad)
    weight.grad_added_to_main_grad = True
    # Autograd needs some gradient for Megatron's hooks to run. They read it only under zero_out_wgrad (tied
    # embeddings), where autograd adds the embedding's gradient to it.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
