"""Kernels on real tensor-parallel ranks: torch, and Triton through its interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

from megarlhf import kernels
from tests import kernel_cases as cases
from tests.ranks import Ranks


def torch_given(tp: int) -> None:
    for vocabulary in cases.VOCABULARIES:
        for dtype, temperature in ((torch.float32, 0.1), (torch.float32, 2.0), (torch.bfloat16, 0.7)):
            cases.check_logprobs("torch", vocabulary, dtype, temperature, cases.group(tp))
            cases.check_kl("torch", vocabulary, dtype, temperature, cases.group(tp))


def torch_linear(tp: int) -> None:
    for vocabulary in (7, 257, 32000):
        for selection in cases.SELECTIONS:
            for sequence_parallel in (False, True):
                for check in (cases.check_linear, cases.check_linear_kl):
                    check(
                        "torch", vocabulary, torch.float32, selection, cases.group(tp),
                        sequence_parallel=sequence_parallel,
                    )  # fmt: skip
    cases.check_linear("torch", 257, torch.bfloat16, "stride", cases.group(tp), sequence_parallel=True)
    for check in (cases.check_linear, cases.check_linear_kl):
        check("torch", 257, torch.float32, "stride", cases.group(tp), sequence_parallel=True, softcap=2.0)
    bitwise_equal(tp)


def bitwise_equal(tp: int) -> None:
    """Results that differ between ranks in the last bit make ranks take different decisions."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 2, 16, generator=generator), torch.randn(50304, 16, generator=generator)
    labels = torch.randint(50257, (4, 2), generator=generator)
    mine = torch.stack(kernels.linear_logprobs(
        hidden, weight.chunk(tp)[dist.get_rank()], labels, with_entropy=True, vocab_size=50257, tp_group=cases.group(tp)
    ))  # fmt: skip
    everyone = [torch.empty_like(mine) for _ in range(tp)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(other, mine) for other in everyone)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_given_logits(ranks, tp):
    ranks.run(tp, torch_given, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_linear(ranks, tp):
    ranks.run(tp, torch_linear, tp)


def triton_interpreted(tp: int) -> None:
    from megarlhf.kernels import triton_rows

    # The interpreter takes as long for a small tile as for a large one: whole rows, and a case of several tiles.
    small = (triton_rows.STATS_BLOCK, triton_rows.KL_BLOCK, triton_rows.GRAD_BLOCK)
    for vocabulary, blocks in ((7, small), (257, (64, 64, 64)), *((v, (2**17,) * 3) for v in cases.VOCABULARIES[2:])):
        triton_rows.STATS_BLOCK, triton_rows.KL_BLOCK, triton_rows.GRAD_BLOCK = blocks
        # bf16 differs only in how it is read and written
        kinds = [(torch.float32, 0.1), (torch.bfloat16, 2.0)] if vocabulary < 1000 else [(torch.float32, 0.7)]
        for dtype, temperature in kinds:
            cases.check_logprobs("triton", vocabulary, dtype, temperature, cases.group(tp))
            cases.check_kl("triton", vocabulary, dtype, temperature, cases.group(tp))
    cases.check_linear("triton", 257, torch.float32, "stride", cases.group(tp), sequence_parallel=True)
    cases.check_linear_kl("triton", 257, torch.float32, "slice", cases.group(tp), sequence_parallel=True)
    cases.check_linear("triton", 7, torch.float32, "all", cases.group(tp), with_entropy=False)


@pytest.fixture(scope="module")
def interpreter_ranks():
    """Ranks of their own: Triton reads TRITON_INTERPRET when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = Ranks()
        yield pool
        pool.close()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_triton_interpreted(interpreter_ranks, tp):
    interpreter_ranks.run(tp, triton_interpreted, tp)
