"""The checker of communication (tests/traffic.py): it finds what is planted, and nothing in updates, forward passes and
samples of several layouts."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.batch import Prompts
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.build import build
from megarlhf.models.hydra import Hydra
from tests import traffic
from tests.distributed import layouts
from tests.distributed.layouts import ADAM, examples, layout, share

pytestmark = pytest.mark.long

# ------------------------------------------------------------------------------------------------------ planted


def orders(swapped: bool) -> None:
    """Broadcasts in two groups of ranks 0 and 1; rank 1 makes them the other way round. gloo does not mind."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    turned = swapped and dist.get_rank() == 1
    works = [dist.broadcast(torch.ones(3), 0, group=group, async_op=True) for group in groups[:: -1 if turned else 1]]
    for work in works:
        work.wait()


def ring_of_orders(swapped: bool) -> None:
    """Three groups of two ranks. No two ranks share two groups, and yet each rank waits for the next."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[dist.get_rank()]
    for number in mine if swapped else sorted(mine):
        dist.all_reduce(torch.ones(2), group=groups[number])


def shapes(wrong: bool) -> None:
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(4 if wrong and dist.get_rank() == 1 else 5))


def types(wrong: bool) -> None:
    dist.all_gather_into_tensor(torch.ones(4), torch.ones(2, dtype=torch.float64 if wrong else torch.float32))
    output = torch.ones(4, dtype=torch.int64 if wrong and dist.get_rank() == 0 else torch.float32)
    dist.reduce_scatter_tensor(torch.ones(2, dtype=output.dtype), output)


def operations(wrong: bool) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if wrong and dist.get_rank() else dist.ReduceOp.SUM)


def roots(wrong: bool) -> None:
    dist.broadcast(torch.ones(2), src=dist.get_rank() if wrong else 0)


def kinds(wrong: bool) -> None:
    """Objects of different sizes are no mistake: the tensors that they are sent as have one size."""
    dist.barrier()
    if wrong:
        dist.broadcast(torch.ones(2), src=0) if dist.get_rank() else dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast_object_list([{"rank": dist.get_rank()}], src=0)
        dist.all_gather_object([None, None], "x" * dist.get_rank())


def message_shapes(wrong: bool) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, 3), 1)
        dist.isend(torch.ones(4), 1).wait()
    else:
        dist.recv(torch.ones(2, 3), 0)
        dist.irecv(torch.ones(4, dtype=torch.float64) if wrong else torch.ones(4), 0).wait()


def lost_message(wrong: bool) -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1).wait()
    elif not wrong:
        dist.irecv(torch.ones(2), 0).wait()


def any_source(wrong: bool) -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1).wait()
    else:
        dist.recv(torch.ones(2), *([] if wrong else [0]))


def both_ways(wrong: bool) -> None:
    """Rank 0 sends first, rank 1 receives first: all would end, but in one group only by that order."""
    there, back = dist.group.WORLD, dist.new_group([0, 1])
    if dist.get_rank() == 0:
        works = [dist.isend(torch.ones(2), 1), dist.irecv(torch.ones(2), 1, group=there if wrong else back)]
    else:
        works = [dist.irecv(torch.ones(2), 0), dist.isend(torch.ones(2), 0, group=there if wrong else back)]
    for work in works:
        work.wait()


def both_send_first(wrong: bool) -> None:
    """Batches of one message: over NCCL each send waits for the other rank's receive."""
    other = 1 - dist.get_rank()
    sent, received = dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.ones(2), other)
    for batch in ([sent], [received]) if wrong else ([received, sent],):
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def message_and_collective(wrong: bool) -> None:
    """Rank 0 waits for a message before the collective, rank 1 sends it after the collective."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(2), 1, group=group).wait()
        dist.barrier()
    elif wrong:
        dist.barrier()
        dist.isend(torch.ones(2), 0, group=group).wait()
    else:
        work = dist.isend(torch.ones(2), 0, group=group)
        dist.barrier()
        work.wait()


def batch_without_a_rank(wrong: bool) -> None:
    """The first call in a communicator makes it, on all its ranks; rank 2 makes none."""
    group = dist.new_group([0, 1] + [2] * wrong)
    rank = dist.get_rank()
    if rank < 2:
        plan = dist.P2POp((dist.isend, dist.irecv)[rank], torch.ones(2), 1 - rank, group=group)
        for work in dist.batch_isend_irecv([plan]):
            work.wait()


def all_ranks_of(wrong: bool) -> None:
    """A rank of the group that makes no call at all."""
    if dist.get_rank() == 0 or not wrong:
        dist.all_reduce(torch.ones(2))


PLANTED = [  # (plan, number of ranks, whether gloo can run the wrong one, what the checker says)
    (orders, 2, True, "a circle, in which each call waits for the next: rank"),
    (ring_of_orders, 3, False, "a circle, in which each call waits for the next: rank"),
    (shapes, 2, False, "collective 1: ranks [0]: all_reduce float32 [5] SUM at tests/distributed/test_traffic.py:"),
    (types, 2, False, "collective 1: ranks [0]: reduce_scatter_tensor int64 [2] <- [4] SUM at"),
    (operations, 2, False, "ranks [1]: all_reduce float32 [2] MAX at"),
    (roots, 2, False, "ranks [1]: broadcast float32 [2] src 1 at"),
    (kinds, 2, False, "collective 1: ranks [0]: all_reduce float32 [2] SUM at"),
    (message_shapes, 2, False, "number 1: float32 [4] is sent at"),
    (lost_message, 2, False, "from rank 0 to rank 1: 1 are sent and 0 received; the first too many is sent at"),
    (any_source, 2, True, "rank 1 receives from any rank, which NCCL cannot"),
    (both_ways, 2, True, "ranks 0 and 1 send each other single messages"),
    (both_send_first, 2, False, "a circle, in which each call waits for the next: rank"),
    (message_and_collective, 2, False, "a circle, in which each call waits for the next: rank"),
    (batch_without_a_rank, 3, True, "ranks [2] make no call in its communicator"),
    (all_ranks_of, 2, False, "ranks [1]: no call"),
]


def plant(cases):
    """[(what the checker says of the right plan, of the wrong one)] on rank 0."""
    found = []
    for plan, _, runs, _ in cases:
        answers = []
        for wrong in (False, True):
            with traffic.recorded(run=runs or not wrong) as log:
                plan(wrong)
            answers.append(check(log))
        found.append(answers)
    return found


def check(log):
    logs = traffic.gathered(log)
    return (traffic.violations(logs), list(map(len, logs))) if dist.get_rank() == 0 else None


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_planted_is_found(ranks, world_size):
    cases = [case for case in PLANTED if case[1] == world_size]
    for (plan, *_, message), (right, wrong) in zip(cases, ranks.run(world_size, plant, cases)[0], strict=True):
        assert right[0] == [] and any(right[1]), (plan, right)
        (line,) = [line for line in wrong[0] if message in line] or [None]
        assert line and "\n" not in line, (plan, wrong)
        assert "tests/distributed/test_traffic.py:" in line


def test_a_circle_names_calls_and_lines(ranks):
    ((_, ((line,), _)),) = ranks.run(2, plant, [PLANTED[0]])[0]
    for rank in (0, 1):
        assert f"rank {rank}: " in line
    assert line.count(" before ") == 2 and line.count("broadcast in group") == 4 and line.count("test_traffic.py:") == 4


# ------------------------------------------------------------------------------------------------------ real runs

FEW = 12  # tokens, so that one of them ends responses everywhere
LLAMA, GPT2 = (dataclasses.replace(architecture, vocab_size=FEW) for architecture in (layouts.LLAMA, layouts.GPT2))
DEEP = dataclasses.replace(LLAMA, num_layers=8)
LAYOUTS = [
    (LLAMA, dict(tensor=2, pipeline=2, sequence=True)),
    (GPT2, dict(pipeline=4)),
    (GPT2, dict(pipeline=2, virtual_pipeline=2)),  # and DP 2
    (DEEP, dict(pipeline=4, virtual_pipeline=2)),
    (LLAMA, dict(tensor=2, sequence=True, overlap_grad_reduce=True, overlap_param_gather=True)),  # and DP 2
]


def train(engine) -> None:
    engine.step(share(examples(rows=16, vocab=FEW), engine.topology), sft_loss)
    rows = share(examples(rows=16, vocab=FEW, seed=1), engine.topology)
    engine.forward(rows)
    engine.forward(rows.select(slice(3)))


def train_top(engine) -> None:
    """With a hydra reference, whose states travel with the policy's, and a head that is split over the ranks."""
    rows = share(examples(rows=16, vocab=FEW), engine.topology)
    reference = Hydra(engine, 3)
    reference.beside(rows, temperature=1.0, with_kl=True)
    engine.step(rows, both_losses)
    reference.beside(rows, temperature=1.0)


def both_losses(outputs, rows):
    total, count, metrics = sft_loss(outputs, rows)
    return total + (outputs["values"] - 1).square().mul(rows.mask).sum(), count, metrics


def sample(engine) -> None:
    """Responses that end early and leave their slots to others; data-parallel ranks, which have different ones, in
    lockstep."""
    topology = engine.topology
    generator = torch.Generator().manual_seed(3 + topology.data_rank)
    rows = 6 - topology.data_rank
    valid = torch.arange(8) >= 8 - torch.randint(1, 9, (rows, 1), generator=generator)
    prompts = Prompts(
        tokens=torch.randint(0, FEW, (rows, 8), generator=generator), valid=valid, sequence_ids=torch.arange(rows),
        prompt_ids=torch.arange(rows),
    )  # fmt: skip
    config = SamplerConfig(response_length=18, micro_batch_size=2, stop_at_eos=True, samples_per_prompt=3)
    sampler = Sampler(
        engine, config, prompt_length=8, eos_id=0, lockstep=topology.data_group if topology.data_size > 1 else None
    )
    steps = []
    lengths = sampler.sample(prompts, on_tokens=steps.append).mask.sum(1).tolist()
    assert len(set(lengths)) > 4, lengths
    assert topology.data_size > 1 or len(steps) < 18 * 3 * rows / (2 * topology.parallel.pipeline), len(steps)


def runs(cases):
    """[((lines, number of calls a rank) on rank 0, files that this rank's calls come from)], one each case."""
    found = []
    for architecture, sizes in cases:
        with layout(**sizes) as topology, traffic.recorded() as log:
            engine = build("actor", architecture, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM)
            for part in (train, sample, train):
                part(engine)
            top = build(
                "actor_critic", architecture, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM,
                trained_layers=3, mlp_values=True,
            )  # fmt: skip
            train_top(top)
        found.append((check(log), {entry.function[0] for entry in log if isinstance(entry, traffic.Call)}))
    return found


def callers(sizes) -> set[str]:
    """Parts of the files that communicate in such a layout: proof that their calls are recorded."""
    found = {"megarlhf/experience/"}
    if "tensor" in sizes:
        found |= {"megatron/core/tensor_parallel/mappings.py", "megarlhf/kernels/"}
    if "pipeline" in sizes:
        found |= {"megatron/core/pipeline_parallel/p2p_communication.py", "megarlhf/engine.py"}
    if sizes.get("tensor", 1) * sizes.get("pipeline", 1) < 4:
        found |= {"megatron/core/distributed/param_and_grad_buffer.py"}
    return found


def test_nothing_is_found_in_real_runs(ranks):
    for case, *answers in zip(LAYOUTS, *ranks.run(4, runs, LAYOUTS), strict=True):
        (lines, counts), _ = answers[0]
        assert not lines, (case, "\n".join(lines))
        assert min(counts) > 100, (case, counts)
        files = set().union(*(files for _, files in answers))
        silent = [part for part in callers(case[1]) if not any(part in file for file in files)]
        assert not silent, (case, silent, files)
