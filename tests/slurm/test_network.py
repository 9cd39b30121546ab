"""Nodes that do not reach each other are named, at a job's start and later: real network namespaces, a route taken
away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import CLI
from tests.ranks import ENVIRONMENT, ROOT
from tests.slurm.conftest import SlurmCluster, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def can_make_namespaces() -> bool:
    made = ["unshare", "--net", "--uts", "--mount", "true"]
    return os.getuid() == 0 and subprocess.run(made, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Three nodes with a network of their own."""
    if not can_make_namespaces():
        pytest.skip("network namespaces need root")
    with running_cluster(3, SLURM_TEST_MODE="netns", SLURM_TEST_NET="198.18.48") as cluster:
        yield cluster


def srun(config: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "srun", "--nodes=3", "--ntasks-per-node=1", "--time=5", "--kill-on-bad-exit=1", sys.executable, *CLI, "sft",
        "--config", str(config), "training.global_batch_size=12", *overrides,
    )  # fmt: skip


def cut(cluster: SlurmCluster, verb: str) -> None:
    """`verb`: add or del. Between node2 and node3; rank 0, on node1, goes on reaching both."""
    done = cluster.script("node", "node2", "ip", "route", verb, "blackhole", "198.18.48.13/32")
    assert done.returncode == 0, done.stderr


def assert_the_pair_is_named(text: str) -> None:
    assert "node2 cannot reach node3 at 198.18.48.13" in text
    assert "node3 cannot reach node2 at 198.18.48.12" in text
    assert "node1" not in text


def test_two_nodes_that_cannot_reach_each_other(cluster, straight, tmp_path):
    """Rank 0 reaches both; torch would wait ten minutes for the connection between the other two and give no name."""
    cut(cluster, "add")
    started = time.monotonic()
    done = cluster.run(*srun(straight[1], f"run={tmp_path / 'run'}"), timeout=300, **ENVIRONMENT)
    assert time.monotonic() - started < 120
    cut(cluster, "del")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megarlhf")]
    assert_the_pair_is_named(line.partition("error: ")[2])
    assert not list(tmp_path.glob("run/.watchdog-*"))


def test_two_nodes_that_are_cut_off_from_each_other_later(cluster, straight, tmp_path):
    """TCP itself would notice after a quarter of an hour, and say nothing about who."""
    overrides = ("training.steps=100000", "training.evaluate_every=100000", "job.hang_minutes=0.4")
    command = srun(straight[1], f"run={tmp_path / 'run'}", *overrides)
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env={**cluster.environment, **ENVIRONMENT}, stdin=subprocess.DEVNULL,
                               stdout=log, stderr=log)  # fmt: skip
        try:
            deadline = time.monotonic() + 240
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert time.monotonic() < deadline and job.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            cut(cluster, "add")
            status = job.wait(timeout=120)
        finally:
            job.kill()
    text = (tmp_path / "log").read_text()
    assert status != 0 and "Traceback" not in text
    found = re.search(r"^megarlhf: no progress for \d+ s; .*\n  (node.*)$", text, re.MULTILINE)
    assert found, text
    assert_the_pair_is_named(found[1])
