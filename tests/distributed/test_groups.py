"""The process groups of a layout: all have the time that the default one was given."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.distributed.layouts import layout

LAYOUTS = [
    dict(tensor=2, pipeline=2),
    dict(pipeline=4),
    dict(pipeline=2, virtual_pipeline=2),
    dict(tensor=4, sequence=True),
]
TIME = datetime.timedelta(minutes=77)


def groups(store):
    """With a default group of that time: for each layout the groups of this rank as (description, backend, time-out),
    and the ranks of its ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size), timeout=TIME
    )
    found = []
    for sizes in LAYOUTS:
        before = set(distributed_c10d._world.pg_map)
        with layout(**sizes) as topology:
            mine = [group for group in distributed_c10d._world.pg_map if group not in before]
            backends = [group._get_backend(torch.device("cpu")) for group in mine]
            named = [
                (group.group_desc, backend.name(), backend.options._timeout)
                for group, backend in zip(mine, backends, strict=True)
            ]
            known = (topology.tensor_group, topology.pipeline_group, topology.data_group)
            assert all(group in mine for group in known)
            ring = topology.ring_group
            assert ring is None or ring in mine
            found.append((named, ring and dist.get_process_group_ranks(ring)))
    return found


def test_all_groups_have_the_time_of_the_default_one(ranks, tmp_path):
    answers = ranks.run(4, groups, str(tmp_path / "store"))
    for answer in answers:
        for named, _ in answer:
            assert len(named) > 10
            assert {time for *_, time in named} == {TIME}, named
            assert not [name for name, *_ in named if "GLOO" in name]  # they would use the wrong network on GPUs
    rings = [[ring for _, ring in answer] for answer in answers]
    assert [ring[0] for ring in rings] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ring[1] for ring in rings] == [[0, 3], None, None, [0, 3]]
    assert [ring[2] for ring in rings] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [ring[3] for ring in rings] == [None] * 4
