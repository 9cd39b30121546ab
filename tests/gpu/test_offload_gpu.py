"""Host memory on a GPU: pinned copies, the device's memory is free meanwhile, and the numbers stay the same."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_what_is_in_host_memory_takes_none_of_the_device():
    import torch.distributed as dist

    from megarlhf.algorithms.supervised import sft_loss
    from megarlhf.cluster import backend
    from megarlhf.models.build import build
    from tests.distributed.layouts import ADAM, LLAMA, examples, layout
    from tests.distributed.test_offload import train

    backend.install()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Forward passes alone: attention kernels add gradients in no fixed order.
        with layout() as topology:
            engine = build("actor", LLAMA, topology, micro_batch_tokens=512, dtype="bf16", optimizer=ADAM)
            before, rows = engine.forward(examples())["logprobs"], examples()
            full, held = torch.cuda.memory_allocated(), sum(engine.resident().values())
            for kind in ("weights", "optimizer"):
                engine.keep_on_host(kind)
            assert full - torch.cuda.memory_allocated() >= 0.9 * held
            assert all(kept.host.is_pinned() for part in engine.offloaded.values() for kept in part.kept)
            assert torch.equal(engine.forward(rows)["logprobs"], before)
            engine.step(rows, sft_loss)
            assert sum(engine.resident().values()) == 0
            assert [name for part in engine.offloaded.values() for name in part.changed()] == []
        ((_, count, fault),) = train([("actor", LLAMA, {"dtype": "bf16"})])
        assert count > 20 and "actor's weights" in fault
    finally:
        dist.destroy_process_group()
