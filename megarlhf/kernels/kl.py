"""The exact KL divergence between two models' distributions over a vocabulary split over tensor-parallel ranks.

    KL(policy || ref) = sum_v p_v (ln p_v - ln r_v)

A class of probability 0 under the policy adds nothing; one of probability 0 under the reference alone makes it inf.

Legend: N rows, H hidden size, V' columns of one rank, TP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megarlhf.kernels.products import default_chunk, operand_of, project, sum_dtype
from megarlhf.kernels.shard import CallOptions, gather, merge_sizes


@torch.no_grad()
def linear_policy_ref_kl(
    hidden: Tensor,
    weight_shard: Tensor,
    ref_hidden: Tensor,
    ref_weight_shard: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL(policy || ref) of softmax(hidden @ weight^T / temperature), without keeping the logits: those of a chunk
    of rows exist at a time. hidden and ref_hidden: (N, H) rows, the same on all TP ranks. Returns (N,) nats, float32;
    no gradients. The rest as in `linear_logprobs`.
    """
    x, w = operand_of(hidden), operand_of(weight_shard)
    ref_x, ref_w = operand_of(ref_hidden), operand_of(ref_weight_shard)
    options = CallOptions.of(
        weight_shard, len(weight_shard), temperature=temperature, vocab_size=vocab_size, tp_group=tp_group,
        backend=backend,
    )  # fmt: skip
    rows = default_chunk(weight_shard)
    logits, ref_logits = (
        a.new_empty(min(rows, len(a)), len(b), dtype=sum_dtype(a)) for a, b in ((x, w), (ref_x, ref_w))
    )
    kl = torch.empty(len(x), dtype=sum_dtype(x), device=x.device)
    for start in range(0, len(x), rows):
        chunk = slice(start, start + rows)
        kl[chunk] = kl_of_logits(project(x[chunk], w, logits), project(ref_x[chunk], ref_w, ref_logits), options)
    return kl


def kl_of_logits(x: Tensor, ref: Tensor, options: CallOptions) -> Tensor:
    """(N, V') logits of the policy and of the reference -> (N,) KL(policy || ref)."""
    stats = options.kernels.kl_stats(x[:, : options.width], ref[:, : options.width], temperature=options.temperature)
    top, size, distance, ref_top, ref_size = gather(stats, options.tp_group).unbind(-1)
    highest, _, log_total, weights = merge_sizes(top, size, options.temperature)
    ref_highest, _, ref_log_total, _ = merge_sizes(ref_top, ref_size, options.temperature)
    # The difference of the two log-sum-exps, from differences of exact maxima.
    gap = (highest - ref_highest) / options.temperature + (log_total - ref_log_total)
    return ((weights * distance).sum(0) - gap).clamp_(min=0)  # rounding may leave -1e-7
