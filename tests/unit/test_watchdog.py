"""Whom the hang doctor names, and which errors are only echoes of another rank's."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch.distributed as dist

from megarlhf.cluster.diagnosis import Beat, Seen, diagnosis, is_of_peer, stack_of

NOW, SILENCE = 1000.0, 12.0
WAITING = ("megarlhf/engine.py:1 step", "torch/distributed/distributed_c10d.py:2 all_reduce")
WORKING = ("megarlhf/train/online.py:1 train", "megarlhf/experience/scorer.py:9 score")


def ranks(**odd) -> dict[int, Seen]:
    """Four ranks that wait in step 7, of which rank 2 on node2 is `odd`."""
    usual = dict(phase="step", step=7, count=20, stack=WAITING, heard=NOW - 1)
    out = {}
    for rank in range(4):
        values = usual | (odd if rank == 2 else {})
        heard = values.pop("heard")
        out[rank] = Seen(Beat(rank, f"node{1 + rank // 2}", 100 + rank, **values), heard, NOW - 70)
    return out


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (dict(heard=NOW - 65), "silent for 65 s"),  # SIGSTOP, or the machine is cut off
        (dict(phase="save", count=19), "behind"),
        (dict(stack=WORKING), "behind"),
        (dict(stack=("megarlhf/models/gpt.py:3 forward", *WAITING[1:])), "behind"),  # waits elsewhere than the others
    ],
)
def test_the_lagging_rank_is_named(odd, why):
    text, lagging = diagnosis(ranks(**odd), NOW, SILENCE)
    assert lagging == [2]
    first, second, *_ = text.splitlines()
    assert first == f"no progress for 70 s; rank 2 lags: {why}"
    assert second.startswith("  LAGS: rank 2 on node2 (pid 102, phase '")
    assert "rank 0 on node1 (pid 100, phase 'step' of step 7) and ranks 1,3; last seen in:" in text
    for frame in odd.get("stack", WAITING):
        assert frame in text


@pytest.mark.parametrize(
    "waiting", ["torch/distributed/distributed_c10d.py:2 all_reduce", "megarlhf/cpu/shared_memory.py:3 _wait_for"]
)
def test_who_works_while_the_others_wait(waiting):
    """Two against two: their places alone do not tell."""
    seen = ranks(stack=WORKING) | {0: ranks(stack=WORKING)[2]}
    for rank in (1, 3):
        seen[rank].beat = dataclasses.replace(seen[rank].beat, stack=(WAITING[0], waiting))
    seen[0].beat = dataclasses.replace(seen[0].beat, rank=0)
    assert diagnosis(seen, NOW, SILENCE)[1] == [0, 2]


def test_a_stack_shows_the_loop_above_a_deep_model():
    """Whatever depth of other people's modules lies between."""
    scope = {}
    for file, text in {
        "/x/site-packages/torch/module.py": "def model(depth): return model(depth - 1) if depth else forward()",
        "/x/megarlhf/megarlhf/models/layers.py": "def forward(): return frame()",
        "/x/megarlhf/megarlhf/train/online.py": "def train(): return model(40)",
    }.items():
        exec(compile(text, file, "exec"), scope)
    scope["frame"] = lambda: stack_of(sys._getframe())
    stack = scope["train"]()
    assert "megarlhf/train/online.py:1 train" in stack
    assert stack[-2] == "megarlhf/models/layers.py:1 forward"
    assert sum(call == "torch/module.py:1 model" for call in stack) == 10


def test_all_at_the_same_place():
    text, lagging = diagnosis(ranks(), NOW, SILENCE)
    assert lagging == [0, 1, 2, 3]
    assert text.startswith("no progress for 70 s; ranks 0-3 lag: all at the same place")


def test_echoes():
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert is_of_peer(lost) and is_of_peer(dist.DistBackendError("NCCL communicator was aborted"))
    assert not is_of_peer(RuntimeError("shapes do not match")) and not is_of_peer(ValueError("no"))
    try:
        try:
            raise lost
        except RuntimeError:
            raise KeyError("while handling it")
    except KeyError as error:
        assert is_of_peer(error)
