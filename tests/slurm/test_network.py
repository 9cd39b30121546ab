"""Nodes that do not reach each other are named at a job's start: real network namespaces, a route taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.e2e.runs import CLI
from tests.ranks import ENVIRONMENT
from tests.slurm.conftest import running_cluster

pytestmark = pytest.mark.slurm


def can_make_namespaces() -> bool:
    made = ["unshare", "--net", "--uts", "--mount", "true"]
    return os.getuid() == 0 and subprocess.run(made, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root")
def test_two_nodes_that_cannot_reach_each_other(straight, tmp_path):
    """Rank 0 reaches both; torch would wait ten minutes for the connection between the other two and give no name."""
    _, config = straight
    with running_cluster(3, SLURM_TEST_MODE="netns", SLURM_TEST_NET="198.18.48") as cluster:
        cut = cluster.script("node", "node2", "ip", "route", "add", "blackhole", "198.18.48.13/32")
        assert cut.returncode == 0, cut.stderr
        started = time.monotonic()
        done = cluster.run(
            "srun", "--nodes=3", "--ntasks-per-node=1", "--time=5", "--kill-on-bad-exit=1", sys.executable, *CLI, "sft",
            "--config", config, f"run={tmp_path / 'run'}", "training.global_batch_size=12", timeout=300, **ENVIRONMENT,
        )  # fmt: skip
        assert time.monotonic() - started < 120
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megarlhf")]
    assert "node2 cannot reach node3 at 198.18.48.13" in line
    assert "node3 cannot reach node2 at 198.18.48.12" in line
    assert "node1" not in line.partition("error: ")[2]
