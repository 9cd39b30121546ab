"""The language-model head and its log-probabilities, by chunks of rows: logits exist for one chunk at a time.

The forward keeps a few numbers a row and the last chunk's logits; the backward computes those of the other chunks again
(4 GEMMs instead of 3), turns them into their gradient in place and multiplies that into the gradients of hidden and
weight. Memory: one chunk of logits and the weight's gradient, instead of several [N, V'].

Legend: S sequence, B rows, H hidden size, N selected rows of [S*B, H], V' columns of one rank, TP ranks.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megarlhf.kernels.shard import Head, LogprobOutput, gather, grad_scalars, merge, shaped, tp_size, write_logprob_grad
from megarlhf.kernels.vocab_parallel import policy_ref_kl

# Of one chunk's logits. The weight's gradient is read and written once a chunk, so that small chunks are slow.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}

# Whether a GPU's GEMM of half-precision operands can hand out its float32 accumulators: torch >= 2.8. Before that, a
# product is rounded to the precision of its operands and then converted: see `linear_logprobs` for what that costs.
WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads()


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    labels: Tensor,
    *,
    rows: slice | Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    chunk_rows: int | None = None,
    debug: bool = False,
    backend: str = "auto",
) -> LogprobOutput:
    """`logprobs` of the logits hidden @ weight^T, without the logits.

    hidden: (S, B, H), the same on all TP ranks, or this rank's (S/TP, B, H) under `sequence_parallel`.
    weight_shard: (V', H), this rank's rows [rank V', (rank + 1) V') of the output (or the tied embedding) weight.
    labels: int64 global ids, any shape with as many elements as there are selected rows; the outputs have its shape.
    rows: which rows of the whole (S*B, H) hidden (after the sequence-parallel gather) the labels belong to: all (None),
        a slice or int64 indices. The others cost no head work and get no gradient.
    gradient_accumulation_fusion: Megatron's protocol: add the weight's gradient to `weight_shard.main_grad` and set
        `grad_added_to_main_grad`. Otherwise autograd gets it.
    chunk_rows: rows of logits held at a time; default: 64 MiB of them on a CPU, 256 MiB on a GPU.
    The rest as in `logprobs`.

    Callers need no mappings: the gradient of hidden arrives complete, all-reduced over TP, or reduce-scattered under
    `sequence_parallel`. The weight's gradient is accumulated in float32 over the chunks. Logits are float32 whatever
    the precision of hidden and weight: a GPU's GEMM hands out its accumulators; a CPU, which may have no fast bfloat16,
    computes in float32 throughout. On a GPU with torch < 2.8 every product of half-precision operands is rounded to
    their precision: in bfloat16 a logit is off by up to 1/256 of itself (0.06 at 20), and log-probs with it; in float16
    by 1/2048. The weight's gradient is still summed in float32, of rounded chunks. It takes room for one product more.
    """
    tp = tp_size(tp_group)
    if hidden.dtype != weight_shard.dtype or hidden.shape[-1] != weight_shard.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} and weight_shard {tuple(weight_shard.shape)} "
            f"{weight_shard.dtype} must have the same dtype and the same last dimension"
        )
    if gradient_accumulation_fusion and weight_shard.requires_grad and not hasattr(weight_shard, "main_grad"):
        raise ValueError(
            "gradient_accumulation_fusion adds to weight_shard.main_grad, which this weight has not; "
            "wrap the model in Megatron's DistributedDataParallel or pass gradient_accumulation_fusion=False"
        )
    head = Head.of(weight_shard, len(weight_shard), labels, temperature=temperature, with_entropy=with_entropy,
                   entropy_grad=entropy_grad, ignore_index=ignore_index, vocab_size=vocab_size, tp_group=tp_group,
                   backend=backend, debug=debug)  # fmt: skip
    total = hidden.shape[:-1].numel() * (tp if sequence_parallel else 1)
    selected = len(range(total)[rows]) if isinstance(rows, slice) else total if rows is None else rows.numel()
    if labels.numel() != selected:
        raise ValueError(f"labels has {labels.numel()} elements for {selected} selected rows of {total}")
    if chunk_rows is None:
        chunk_rows = _default_chunk(weight_shard)
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, not {chunk_rows}")
    call = _Call(head, rows, sequence_parallel and tp > 1, gradient_accumulation_fusion, chunk_rows)
    logp, entropy, lse = _LinearLogprobs.apply(hidden, weight_shard, head.local(labels), call)
    return LogprobOutput(
        shaped(logp, labels, ignore_index), shaped(entropy, labels, ignore_index), lse.view(labels.shape)
    )


@torch.no_grad()
def linear_policy_ref_kl(
    hidden: Tensor,
    weight_shard: Tensor,
    ref_hidden: Tensor,
    ref_weight_shard: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The exact KL(policy || ref) of `policy_ref_kl` for the logits hidden @ weight^T of two heads, without the logits:
    a chunk of both exists at a time. hidden and ref_hidden: (N, H) rows, the same on all TP ranks; labels: (N,) global
    ids. Returns (N,) nats, float32; no gradients. The rest as in `linear_logprobs`.
    """
    x, w = _operand(hidden), _operand(weight_shard)
    ref_x, ref_w = _operand(ref_hidden), _operand(ref_weight_shard)
    rows = chunk_rows or _default_chunk(weight_shard)
    room, ref_room = (
        a.new_empty(min(rows, len(a)), len(b), dtype=_accumulator(a)) for a, b in ((x, w), (ref_x, ref_w))
    )
    kl = torch.empty(len(x), dtype=_accumulator(x), device=x.device)
    for start in range(0, len(x), rows):
        chunk = slice(start, start + rows)
        kl[chunk] = policy_ref_kl(
            _project(x[chunk], w, room), _project(ref_x[chunk], ref_w, ref_room), labels[chunk],
            temperature=temperature, vocab_size=vocab_size, tp_group=tp_group, backend=backend,
        ).kl  # fmt: skip
    return kl


@torch.no_grad()
def linear_logits(hidden: Tensor, weight_shard: Tensor) -> Tensor:
    """hidden (N, H) @ weight_shard^T (V', H) -> (N, V') logits as `linear_logprobs` computes them: float32 of half
    precision. No gradients."""
    x, w = _operand(hidden), _operand(weight_shard)
    return _project(x, w, x.new_empty(len(x), len(w), dtype=_accumulator(x)))


class _Call:
    """What a call's forward and backward share."""

    def __init__(self, head: Head, rows: slice | Tensor | None, sequence_parallel: bool, fusion: bool, chunk_rows: int):
        self.head = head
        self.rows = rows
        self.sequence_parallel = sequence_parallel
        self.fusion = fusion
        self.chunk_rows = chunk_rows

    def select(self, hidden: Tensor) -> Tensor:
        """-> (N, H) selected rows of the whole hidden."""
        if self.sequence_parallel:
            local = hidden.contiguous()
            hidden = local.new_empty(len(local) * tp_size(self.head.tp_group), *local.shape[1:])
            dist.all_gather_into_tensor(hidden, local, group=self.head.tp_group)
        hidden = hidden.flatten(0, -2)
        return hidden if self.rows is None else hidden[self.rows]

    def select_backward(self, grad: Tensor, hidden: Tensor) -> Tensor:
        """(N, H) of this rank's columns -> the gradient of `hidden`, summed over TP."""
        group, tp = self.head.tp_group, tp_size(self.head.tp_group)
        if tp > 1 and not self.sequence_parallel:
            dist.all_reduce(grad, group=group)
        if self.rows is not None:
            whole = grad.new_zeros(hidden.shape[:-1].numel() * (tp if self.sequence_parallel else 1), grad.shape[1])
            if isinstance(self.rows, slice):
                whole[self.rows] = grad
            else:
                whole.index_add_(0, self.rows, grad)
            grad = whole
        if self.sequence_parallel:
            grad, whole = grad.new_empty(len(grad) // tp, grad.shape[1]), grad
            dist.reduce_scatter_tensor(grad, whole, group=group)
        return grad.view(hidden.shape).to(hidden.dtype)

    def chunks(self, x: Tensor) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, len(x))) for start in range(0, len(x), self.chunk_rows)]

    def scratch(self, x: Tensor, weight: Tensor) -> Tensor:
        """Room for the logits of a chunk of the rows `x`; `_spare` it afterwards."""
        return _room(x, min(self.chunk_rows, len(x)), len(weight))


class _LinearLogprobs(torch.autograd.Function):
    """Hidden, weight, (N,) local columns -> logprobs, entropy, lse, (N,) each."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, call: _Call):
        head = call.head
        x, w = _operand(call.select(hidden)), _operand(weight)
        stats = x.new_empty(len(x), 4, dtype=_accumulator(x))
        scratch = call.scratch(x, w)
        for chunk in call.chunks(x):
            logits = _project(x[chunk], w, scratch)
            stats[chunk] = head.kernels.logprob_stats(
                logits[:, : head.width], labels[chunk], temperature=head.temperature, with_entropy=head.with_entropy
            )
        merged = merge(gather(stats, head.tp_group), head)
        ctx.save_for_backward(hidden, weight, labels, stats, merged.weights[head.rank], merged.entropy)
        ctx.call, ctx.last_logits = call, scratch if any(ctx.needs_input_grad) else _spare(scratch)
        ctx.set_materialize_grads(False)
        lse = merged.top / head.temperature + merged.log_size
        ctx.mark_non_differentiable(lse)
        if merged.entropy is not None and not head.entropy_grad:
            ctx.mark_non_differentiable(merged.entropy)
        return merged.logprobs, merged.entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None, _):
        hidden, weight, labels, stats, row_weight, entropy = ctx.saved_tensors
        call = ctx.call
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        x, w = _operand(call.select(hidden)), _operand(weight)
        scalars = grad_scalars(call.head, row_weight, entropy, grad, grad_entropy)
        x_grad = torch.empty_like(x) if need_hidden else None
        w_grad = _weight_accumulator(weight, w, call.fusion) if need_weight else None
        # The last chunk's logits are still there: a batch of one chunk needs no recomputation. A second backward does.
        kept, ctx.last_logits = ctx.last_logits, None
        scratch = call.scratch(x, w) if kept is None else kept
        for chunk in reversed(call.chunks(x)):
            logits = _project(x[chunk], w, scratch) if kept is None else kept[: chunk.stop - chunk.start]
            kept = None
            # In half precision the GEMMs want half operands; else the gradient takes the place of the logits.
            d = logits if logits.dtype == x.dtype else torch.empty_like(logits, dtype=x.dtype)
            parts = {name: None if value is None else value[chunk] for name, value in scalars.items()}
            write_logprob_grad(call.head, logits, labels[chunk], stats[chunk], d, parts)
            if need_hidden:
                torch.mm(d, w, out=x_grad[chunk])
            if need_weight:
                _accumulate(w_grad, d.t(), x[chunk])
        _spare(scratch)
        hidden_grad = call.select_backward(x_grad, hidden) if need_hidden else None
        return hidden_grad, _weight_grad(weight, w_grad, call.fusion) if need_weight else None, None, None


_spares: dict[torch.dtype, torch.UntypedStorage] = {}


def _room(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty (rows, columns) in the precision of sums over `x`; on a CPU the last that was spared, if it fits: malloc
    gives so much memory back to the system, and the page faults of asking again take a quarter of the GEMM's time."""
    dtype = _accumulator(x)
    if x.device.type == "cpu" and dtype in _spares:
        storage = _spares.pop(dtype)
        if storage.nbytes() >= rows * columns * dtype.itemsize:
            return torch.empty(0, dtype=dtype).set_(storage, 0, (rows, columns))
    return x.new_empty(rows, columns, dtype=dtype)


def _spare(room: Tensor) -> None:
    if room.device.type == "cpu":
        _spares[room.dtype] = room.untyped_storage()


def _operand(tensor: Tensor) -> Tensor:
    """What the GEMMs read: half precision on a CPU becomes float32."""
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype.itemsize == 2 else tensor


def _accumulator(operand: Tensor) -> torch.dtype:
    return torch.promote_types(operand.dtype, torch.float32)


def _project(x: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
    """x @ weight^T in the first rows of `scratch` and in its dtype, not rounded to bfloat16 if WIDE_PRODUCTS."""
    logits = scratch[: len(x)]
    if logits.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=logits)
    if WIDE_PRODUCTS:
        return torch.mm(x, weight.t(), logits.dtype, out=logits)
    return logits.copy_(torch.mm(x, weight.t()))


def _weight_accumulator(weight: Tensor, operand: Tensor, fusion: bool) -> Tensor:
    if fusion and weight.main_grad.dtype == _accumulator(operand):
        return weight.main_grad
    return torch.zeros_like(operand, dtype=_accumulator(operand))


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the product not rounded to the precision of its operands if WIDE_PRODUCTS."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif not WIDE_PRODUCTS:
        total.add_(torch.mm(a, b))
    elif _adds_wide(a.device, a.dtype):
        torch.addmm(total, a, b, total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b, total.dtype))


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `addmm` adds float32 products of `dtype` to a float32 total there. torch 2.8 and 2.9 refuse a total of
    another dtype than its operands'; versions do not tell for builds from in between, so it is tried. Otherwise the
    sum takes room for one product more."""
    operand = torch.zeros(16, 16, dtype=dtype, device=device)
    total = operand.float()
    try:
        torch.addmm(total, operand, operand, total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def _weight_grad(weight: Tensor, w_grad: Tensor, fusion: bool) -> Tensor:
    if not fusion:
        return w_grad.to(weight.dtype)
    if w_grad is not weight.main_grad:
        weight.main_grad.add_(w_grad)
    weight.grad_added_to_main_grad = True
    # Autograd needs some gradient for Megatron's hooks to run. They read it only under zero_out_wgrad (tied
    # embeddings), where autograd adds the embedding's gradient to it.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _default_chunk(weight: Tensor) -> int:
    """A power of 2, at least 64."""
    fitting = CHUNK_BYTES[weight.device.type] // (4 * max(len(weight), 1))
    return max(64, 1 << max(fitting, 1).bit_length() - 1)
