"""The sampler on a GPU: the Triton kernels against the torch ones, and the captured decode step against the eager."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_sampling import check_triton

pytestmark = pytest.mark.gpu


def test_triton_kernels():
    check_triton("cuda")


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
