"""The sampler on a GPU: the Triton kernels against the torch ones, and the captured decode step against the eager."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_sampling import check_triton, check_triton_thresholds

pytestmark = pytest.mark.gpu


def test_triton_kernels():
    check_triton("cuda")
    check_triton_thresholds("cuda")


def test_recorded_steps_share_memory():
    """Two steps of 256 MiB each, in turn: the pool has room for one, and both give what they give when not recorded."""
    from megarlhf.cluster import cuda_graphs

    x, results = torch.arange(2.0**26, device="cuda"), torch.zeros(2, device="cuda")

    def step(number):
        results[number] = (x + number).mean()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with cuda_graphs.together():
        steps = [cuda_graphs.captured(lambda number=number: step(number)) for number in range(2)]
    for _ in range(5):
        results.zero_()
        for run in reversed(steps):
            run()
        assert results[1] - results[0] == 1
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 1.5 * 2**28
    assert steps[0].pool == steps[1].pool and steps[0].graph.pool() == steps[1].graph.pool()


def test_captured_decoding_is_eager_decoding(monkeypatch):
    """The same tokens whether the decode step is a CUDA graph or not, and twice in a row; fp32 against no cache."""
    import torch.distributed as dist

    from megarlhf.cluster import backend, cuda_graphs
    from megarlhf.experience.sampler import Sampler, SamplerConfig
    from tests.distributed.layouts import layout
    from tests.distributed.test_sampler import FAMILIES, P, R, make_engine, make_prompts
    from tests.uncached import sample_without_cache

    backend.install()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with layout() as topology:
            engine = make_engine(FAMILIES["llama"], topology)
            config = SamplerConfig(response_length=R, micro_batch_size=16)
            captured = Sampler(engine, config, prompt_length=P, seed=1)
            first, second = (captured.sample(make_prompts(32)) for _ in range(2))
            monkeypatch.setattr(cuda_graphs, "captured", lambda step: step)
            eager = Sampler(engine, config, prompt_length=P, seed=1).sample(make_prompts(32))
            assert torch.equal(first.tokens, eager.tokens) and torch.equal(second.tokens, eager.tokens)
            slow = sample_without_cache(engine, make_prompts(32), config, seed=1)
            assert (slow.tokens == eager.tokens).float().mean() > 0.99
    finally:
        dist.destroy_process_group()
