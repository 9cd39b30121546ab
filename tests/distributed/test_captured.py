"""The sampler as on a GPU, where a decode step is recorded once and repeated: every slot is computed at every step over
all columns, at the same addresses, and nothing of a step depends on what the host knows."""

from __future__ import annotations

import weakref
from unittest import mock

import torch

from megarlhf.cluster import cuda_graphs
from megarlhf.experience.sampler import Sampler, SamplerConfig
from tests.distributed.layouts import layout
from tests.distributed.test_sampler import FAMILIES, ODD, P, R, make_engine, make_prompts
from tests.recorder import Recording

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
