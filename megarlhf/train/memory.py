"""A lower bound on a rank's memory, to refuse sizes that are wrong by orders of magnitude before anything is allocated.
A configuration that passes may still not fit.

Legend: N rows that a rank holds at once, S tokens a row, T tokens of a micro-batch.
"""

from __future__ import annotations

import os
from typing import Literal

from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.models.spec import Architecture

LARGEST_DEVICE = 288 * 2**30  # bytes
TOKEN_BYTES = 17  # of a token in a batch: id and segment in int64, a mask


def largest() -> int:
    """Bytes of the largest device that is known: a GPU, or a CPU rank that has this machine to itself."""
    return max(LARGEST_DEVICE, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def check_sizes(
    architecture: Architecture,
    parallel: ParallelConfig,
    *,
    dtype: Literal["bf16", "fp32"],
    rows: int,
    micro_batch_tokens: int,
    length: int,
    sampled: int = 0,
) -> None:
    """Refuse (UserError) sizes that no rank has memory for. rows: N; length: S; micro_batch_tokens: T, unless
    the rows have fewer or one row has more; sampled: rows whose keys and values are cached in sampling."""
    tokens = min(max(micro_batch_tokens, length), rows * length)
    size = 2 if dtype == "bf16" else 4
    # Of a mixture of experts the largest share that ranks can have: it is a lower bound.
    share = parallel.pipeline * max(parallel.tensor, parallel.expert)
    channels = architecture.num_layers * architecture.num_query_groups * architecture.kv_channels
    needs = {
        f"{architecture.num_parameters:,} parameters": architecture.num_parameters * size // share,
        f"a batch of {rows:,} rows of {length:,} tokens": rows * length * TOKEN_BYTES,
        f"a micro-batch of {tokens:,} tokens": tokens * architecture.hidden_size * size // parallel.tensor,
        # a stage has its share of the layers, for as many groups of slots as there are stages
        f"the keys and values of {sampled:,} sampled rows of {length:,} tokens": (
            2 * sampled * length * channels * size // parallel.tensor
        ),
    }
    most = largest()
    if sum(needs.values()) > most:
        name = max(needs, key=lambda name: needs[name])
        raise UserError(
            f"each rank would need {sum(needs.values()) / 1e9:,.0f} GB of memory, {needs[name] / 1e9:,.0f} of them for "
            f"{name}, and no device has more than {most / 1e9:,.0f} GB; lower that size, or share it among more ranks"
        )
