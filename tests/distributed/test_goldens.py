"""The forward and backward pass give the golden arrays of every family, in every layout."""

import math

import pytest

from tests.distributed.goldens import truth
from tests.distributed.goldens.cases import ARCHITECTURES, CASES, TOLERANCE, Case, load, measure, worst

pytestmark = pytest.mark.long

COMMON = ("llama", "gpt2", "gpt_neox", "gemma", "qwen3", "falcon_40b")
RAGGED = {name: Case(name, "actor", "ragged") for name in ARCHITECTURES}
FEW = [case for case in CASES if case.architecture in ("llama", "gpt2")]  # the other batches and roles


def jobs(cases, micro: int = 4, recompute: str = "none"):
    return [(case, micro, recompute) for case in cases]


def common(*more: str):
    return jobs(RAGGED[name] for name in COMMON + more)


def recomputed(recompute: str):
    cases = [RAGGED["llama"], RAGGED["gpt2"], Case("llama", "actor", "packed"), Case("gpt2", "actor", "plain")]
    return jobs(cases, recompute=recompute)


# blocks side by side, with norms of their own and with one; and other heads
OTHERS = [RAGGED["gpt_neox"], RAGGED["falcon_7b"], RAGGED["gemma"], Case("llama", "reward", "packed"),
          Case("gpt2", "critic", "ragged"), Case("llama", "actor_critic", "ragged")]  # fmt: skip


# micro-batches of one row: some have no token that counts, or no token at all
SINGLE_ROWS = jobs([RAGGED["llama"], Case("gpt2", "actor", "packed"), Case("llama", "reward", "packed")], 1)
TWO = [RAGGED["llama"], RAGGED["gpt2"]]
WORK = {  # ranks -> [(ParallelConfig fields, jobs)]
    1: [({}, jobs(CASES) + SINGLE_ROWS + recomputed("selective") + recomputed("full") + jobs(OTHERS, 3, "full"))],
    2: [
        (
            dict(tensor=2, sequence=True),
            common() + jobs(FEW) + SINGLE_ROWS + recomputed("selective") + recomputed("full"),
        ),
        (dict(tensor=2), jobs(TWO)),
        (dict(pipeline=2), common("falcon_7b") + jobs(FEW) + SINGLE_ROWS + recomputed("full")),
        (
            dict(pipeline=2, virtual_pipeline=2),
            jobs(TWO) + jobs([RAGGED["llama"]], 2, "selective") + jobs([RAGGED["gpt2"]], 3, "full"),
        ),
        (dict(distributed_optimizer=False), common() + SINGLE_ROWS),
        ({}, jobs(FEW)),  # gradients are sharded over the data-parallel ranks; their norm is compared
    ],
    4: [
        (dict(pipeline=4), common("falcon_7b") + jobs(TWO, 2, "full")),
        (dict(tensor=2, pipeline=2), common()),
        (dict(tensor=2, pipeline=2, sequence=True), jobs(TWO) + jobs([RAGGED["llama"]], 2, "full")),
        (dict(tensor=2, sequence=True, distributed_optimizer=False), jobs(TWO)),
    ],
}


@pytest.mark.parametrize("world_size", WORK)
def test_the_arrays_do_not_change(ranks, world_size):
    golden = {case: load(case) for case in CASES}
    everything = [(sizes, *job) for sizes, group in WORK[world_size] for job in group]
    wrong = []
    for rank, answer in enumerate(ranks.run(world_size, measure, WORK[world_size])):
        for (sizes, case, micro, recompute), (data_rank, found) in zip(everything, answer, strict=True):
            size = world_size // math.prod(sizes.get(name, 1) for name in ("tensor", "pipeline"))
            assert ("gradients" in found) == (size == 1 or "distributed_optimizer" in sizes)
            rows = slice(8 // size * data_rank, 8 // size * (data_rank + 1))
            difference, name = worst(case, found, golden[case], rows)
            if not difference <= TOLERANCE:
                wrong.append((rank, sizes, *case, micro, recompute, name, difference))
    assert not wrong, f"{len(wrong)} of {len(everything) * world_size} differ:\n" + "\n".join(map(str, wrong[:20]))


def test_the_arrays_are_transformers():
    """In float64, each example alone."""
    for case in CASES:
        difference, name = worst(case, truth.arrays(case), load(case))
        assert difference <= TOLERANCE, (case, name, difference)
