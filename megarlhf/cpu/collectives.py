"""Megatron's collectives on CPU ranks: through shared memory where all ranks of a group are on one machine; between
machines by messages that avoid gloo's overhead (it implements a reduce-scatter as an all-reduce with copies, and copies
twice what it gathers). `megatron.py` puts them in the place of torch.distributed's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.cpu import shared_memory

READERS = 4  # ranks of an all-reduce in shared memory; each reads all of every other's, and for more gloo moves less

_all_reduce, _all_to_all_single = dist.all_reduce, dist.all_to_all_single


class _Done:
    """A torch Work that has finished: these collectives do not run in the background."""

    def wait(self, *_) -> bool:
        return True


def all_gather_into_tensor(output: Tensor, source: Tensor, group=None, async_op: bool = False) -> _Done | None:
    """torch.distributed's: output, (n * m, ...), becomes the sources of all n ranks in order, (m, ...) each. `source`
    may be this rank's part of `output`. Each rank sends its part to the others."""
    ranks = dist.get_process_group_ranks(group)
    parts = output.view(-1).chunk(len(ranks))
    own = parts[dist.get_rank(group)]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.reshape(-1))
    shared = shared_memory.of_group(group)
    if shared is not None:
        shared.all_gather(parts)
    else:
        for to, origin in _rounds(len(ranks), dist.get_rank(group)):
            sent = dist.isend(own, ranks[to], group=group)
            dist.irecv(parts[origin], ranks[origin], group=group).wait()
            sent.wait()
    return _Done() if async_op else None


def reduce_scatter_tensor(
    output: Tensor, source: Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False
) -> _Done | None:
    """torch.distributed's, for sums: output, (m, ...), becomes the sum over the n ranks of this rank's part of their
    sources, (n * m, ...). It may be that part of `source`. Each rank sends every other rank that rank's part."""
    assert op == dist.ReduceOp.SUM, op
    ranks = dist.get_process_group_ranks(group)
    count, rank = len(ranks), dist.get_rank(group)
    parts, total = source.reshape(-1).chunk(count), output.view(-1)
    if total.data_ptr() != parts[rank].data_ptr():
        total.copy_(parts[rank])
    shared = shared_memory.of_group(group)
    if shared is not None:
        shared.reduce_scatter(total, parts)
    elif count > 1:
        received = torch.empty_like(total)
        for to, origin in _rounds(count, rank):
            sent = dist.isend(parts[to], ranks[to], group=group)
            dist.irecv(received, ranks[origin], group=group).wait()
            sent.wait()
            total.add_(received)
    return _Done() if async_op else None


def all_reduce(tensor: Tensor, op=dist.ReduceOp.SUM, group=None, async_op: bool = False):
    """torch.distributed's. In shared memory every rank reads the whole tensor of every other rank."""
    shared = shared_memory.of_group(group)
    if shared is None or shared.count > READERS or op not in shared_memory.REDUCTIONS:
        return _all_reduce(tensor, op, group, async_op)
    shared.all_reduce(tensor.data.view(-1), shared_memory.REDUCTIONS[op])
    return _Done() if async_op else None


def all_to_all_single(
    output: Tensor, source: Tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op: bool = False
):
    """torch.distributed's. Megatron's dispatcher of experts leaves the sizes of the parts in tensors on a CPU."""
    sizes = (
        None if given is None else [int(size) for size in given] for given in (output_split_sizes, input_split_sizes)
    )
    return _all_to_all_single(output, source, *sizes, group=group, async_op=async_op)


def _rounds(count: int, rank: int) -> Iterator[tuple[int, int]]:
    """(rank to send to, rank to receive from) in each of `count` - 1 rounds; every pair of ranks meets once."""
    for distance in range(1, count):
        yield (rank + distance) % count, (rank - distance) % count
