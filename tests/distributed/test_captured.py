"""The sampler as on a GPU, where a decode step is recorded once and repeated: every slot is computed at every step over
all columns, at the same addresses, and nothing of a step depends on what the host knows."""

from __future__ import annotations

import weakref
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megarlhf.cluster import cuda_graphs, operations
from megarlhf.experience.sampler import Sampler, SamplerConfig
from tests.distributed.layouts import layout
from tests.distributed.test_sampler import FAMILIES, ODD, P, R, make_engine, make_prompts
from tests.recorder import Recording, tensors

CASES = {
    "fixed length": {},
    "ends and refilled slots": dict(stop_at_eos=True, samples_per_prompt=2),
    "filters": dict(top_k=20, top_p=0.9),
}


def sampled(engine, recorded: bool, **fields):
    """Two rollouts of one sampler, the recordings, and the bytes of caches and recordings that are left."""
    recordings: list = []

    def captured(step):
        recording = Recording(step)
        recordings.append((weakref.ref(recording), recording.operations))
        return recording

    config = SamplerConfig(response_length=R, micro_batch_size=5, **fields)
    with patched(recorded, captured):
        sampler = Sampler(engine, config, prompt_length=P, seed=1, eos_id=7, with_entropy=True)
        rollouts = [sampler.sample(make_prompts(7, seed=seed)) for seed in (0, 1)]
    left = [x.untyped_storage().nbytes() for cache in sampler.caches for x in (cache.keys, cache.values)]
    return rollouts, recordings, left


class Allocations(TorchDispatchMode):
    """Weak references to the memory of all results within the context that was not there before."""

    def __init__(self):
        super().__init__()
        self.before: set[int] = set()
        self.found: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in tensors((args, kwargs or {})):
            if x.untyped_storage()._cdata not in self.found:
                self.before.add(x.untyped_storage()._cdata)
        results = function(*args, **(kwargs or {}))
        for x in tensors(results):
            storage = x.untyped_storage()
            if storage._cdata not in self.before:
                self.found[storage._cdata] = StorageWeakRef(storage)
        return results


def memory_that_outlives_its_step():
    """(allocations of the steps that would be recorded, those that are still there at the end of their step)"""
    counts = [0, 0]

    def captured(step):
        calls = []

        def call():
            calls.append(None)
            if len(calls) != 3:  # the third call is recorded
                return step()
            with Allocations() as allocations:
                step()
            counts[0] += len(allocations.found)
            counts[1] += sum(not reference.expired() for reference in allocations.found.values())

        return call

    config = SamplerConfig(response_length=R, micro_batch_size=4, stop_at_eos=True, top_k=20)
    found = []
    for sizes in (dict(), dict(tensor=2, sequence=True), dict(pipeline=2, virtual_pipeline=2)):
        counts[:] = [0, 0]
        with layout(**sizes) as topology:
            engine = make_engine(FAMILIES["llama"], topology)
            # the operations of a GPU: a CPU's keep sines for the next layer
            with patched(True, captured), mock.patch.object(operations, "_cpu", lambda: None):
                sampler = Sampler(engine, config, prompt_length=P, seed=1, eos_id=7, with_entropy=True)
                sampler.sample(make_prompts(8))
        found.append(tuple(counts))
    return found


def test_a_recorded_step_leaves_no_memory_behind(ranks):
    """So that steps of all stages and chunks can share one pool (cluster/cuda_graphs.py)."""
    for found in ranks.run(2, memory_that_outlives_its_step):
        for allocated, left in found:
            assert allocated > 50 and left == 0


def test_steps_that_are_recorded_together_share_a_pool():
    numbers = iter(range(1, 9))
    with (
        mock.patch.object(cuda_graphs, "on_cuda", lambda: True),
        mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers))),
    ):
        pools = []
        for _ in range(2):
            with cuda_graphs.together():
                pools += [cuda_graphs.captured(lambda: None).pool for _ in range(3)]
        assert pools == [(0, 1)] * 3 + [(0, 2)] * 3
        assert cuda_graphs.captured(lambda: None).pool is None  # one of its own


def patched(recorded: bool, captured):
    return mock.patch.multiple(
        cuda_graphs, captures=lambda: recorded, captured=captured if recorded else lambda step: step
    )


def recorded_steps():
    found = {}
    with layout() as topology:
        for family in ("llama", "gpt2", "sliding window"):
            engine = make_engine({**FAMILIES, **ODD}[family], topology)
            for case, fields in CASES.items() if family == "llama" else [("fixed length", {})]:
                plain, none, _ = sampled(engine, False, **fields)
                again, recordings, left = sampled(engine, True, **fields)
                same = all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, again, strict=True))
                near = max((a.entropy - b.entropy).abs().max().item() for a, b in zip(plain, again, strict=True))
                found[family, case] = dict(
                    same=same, near=near, none=len(none), recordings=len(recordings),
                    kept=sum(ref() is not None for ref, _ in recordings), left=sum(left),
                )  # fmt: skip
    return found


def test_recorded_steps_give_the_same_tokens_and_keep_no_memory(ranks):
    (found,) = ranks.run(1, recorded_steps)
    assert len(found) == len(CASES) + 2
    for case, seen in found.items():
        assert seen["same"] and seen["near"] < 1e-5, (case, seen)
        # Recorded anew for each rollout: the caches have other addresses. Nothing of either is left.
        assert (seen["none"], seen["recordings"], seen["kept"], seen["left"]) == (0, 2, 0, 0), (case, seen)
