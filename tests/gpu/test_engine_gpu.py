"""What an engine does on a GPU alone: gradients have memory during an update and no longer."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_gradients_share_memory_that_is_there_during_an_update_alone():
    import torch.distributed as dist

    from megarlhf.cluster import backend, gradients
    from tests.distributed.test_engine import same, with_and_without_prompts

    backend.install()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (found,) = with_and_without_prompts([("llama", {})])
        same(*found, case="llama on a GPU")
        assert all(storage.nbytes() == 0 for storage in gradients._memory.values())
    finally:
        dist.destroy_process_group()
