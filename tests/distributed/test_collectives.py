"""Collectives of CPU ranks against torch's, in shared memory and between machines."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megarlhf.cluster.diagnosis import is_of_peer
from megarlhf.cpu import collectives, shared_memory

SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
SEVERAL_TURNS = shared_memory.HALF // 4 + 3  # more than one turn holds, and no multiple of it


def check(one_machine):
    if not one_machine:
        shared_memory._attached = lambda *_: None  # as if the first rank's memory were another machine's
    rank, count = dist.get_rank(), dist.get_world_size()
    half = dist.new_group([0, 1])
    groups = [(None, rank, count)] + [(half, rank, 2)] * (rank < 2)
    for size in (6, SEVERAL_TURNS):
        for group, place, ranks in groups:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                alike(group, place, ranks, dtype, size)
            assert (shared_memory.of_group(group) is not None) == one_machine


def alike(group, place, ranks, dtype, size):
    mine = slice(place * size, (place + 1) * size)
    generator = torch.Generator().manual_seed(place)
    source = torch.randint(-8, 9, (ranks * size, 2), generator=generator).to(dtype)  # exact in any order
    for op in (MAX, MIN, SUM):
        total, ours = source.clone(), source.clone()
        collectives._all_reduce(total, op, group=group)
        assert collectives.all_reduce(ours, op, group=group) is None
        assert torch.equal(ours, total)
    collectives.all_reduce(ours[:0], group=group)
    result = torch.empty(size, 2, dtype=dtype)
    assert collectives.reduce_scatter_tensor(result, source, group=group) is None
    assert torch.equal(result, total[mine])
    inside = source.clone()  # as Megatron's buffers have it
    collectives.reduce_scatter_tensor(inside[mine], inside, group=group, async_op=True).wait()
    assert torch.equal(inside[mine], total[mine])
    whole = torch.empty_like(source)
    collectives.all_gather_into_tensor(whole, result, group=group)
    assert torch.equal(whole, total)
    collectives.all_gather_into_tensor(inside, inside[mine], group=group, async_op=True).wait()
    assert torch.equal(inside, total)


@pytest.mark.parametrize(("world_size", "one_machine"), [(1, False), (2, True), (3, True), (3, False)])
def test_as_torchs(ranks, world_size, one_machine):
    if world_size == 1:
        ranks.run(1, alone)
    else:
        ranks.run(world_size, check, one_machine)
        ranks.close()


def alone():
    source, total, whole = torch.arange(6.0), torch.zeros(6), torch.zeros(6)
    collectives.reduce_scatter_tensor(total, source)
    collectives.all_gather_into_tensor(whole, source)
    assert torch.equal(total, source) and torch.equal(whole, source)


def the_same_sum_everywhere():
    """Also where the order of additions matters."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    collectives.all_reduce(values)
    return values


def test_ranks_agree_bit_for_bit(ranks):
    first, *others = ranks.run(3, the_same_sum_everywhere)
    assert all(torch.equal(first, other) for other in others)


def one_is_killed():
    collectives.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        assert is_of_peer(error)
        raise


def test_a_killed_rank_is_noticed(ranks):
    with pytest.raises(AssertionError, match=r"rank 1 of 2:\nthe rank's process ended with status -9"):
        ranks.run(2, one_is_killed, timeout=60)
