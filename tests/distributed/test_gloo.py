"""cluster/gloo.py against torch's collectives."""

import pytest
import torch
import torch.distributed as dist

from megarlhf.cluster import gloo


def check():
    rank, count = dist.get_rank(), dist.get_world_size()
    half = dist.new_group([0, 1])
    groups = [(None, rank, count)] + [(half, rank, 2)] * (rank < 2)
    for group, place, size in groups:
        mine = slice(place * 6, (place + 1) * 6)
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(rank)
            source = torch.randint(-8, 9, (size * 6, 5), generator=generator).to(dtype)  # exact in any order
            total = source.clone()
            dist.all_reduce(total, group=group)
            result = torch.empty(6, 5, dtype=dtype)
            assert gloo.reduce_scatter_tensor(result, source, group=group) is None
            assert torch.equal(result, total[mine])
            inside = source.clone()  # as Megatron's buffers have it
            gloo.reduce_scatter_tensor(inside[mine], inside, group=group, async_op=True).wait()
            assert torch.equal(inside[mine], total[mine])
            whole = torch.empty_like(source)
            gloo.all_gather_into_tensor(whole, result, group=group)
            assert torch.equal(whole, total)
            gloo.all_gather_into_tensor(inside, inside[mine], group=group, async_op=True).wait()
            assert torch.equal(inside, total)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_torchs(ranks, world_size):
    if world_size == 1:
        ranks.run(1, alone)
    else:
        ranks.run(world_size, check)


def alone():
    source = torch.arange(6.0)
    output = torch.empty(6)
    gloo.reduce_scatter_tensor(output, source)
    gloo.all_gather_into_tensor(source, output)
    assert torch.equal(source, torch.arange(6.0)) and torch.equal(output, source)
