"""The launch under a real Slurm: srun with no torchrun and no MPI inside."""

from __future__ import annotations

import sys
import time

import pytest

pytestmark = pytest.mark.slurm

SELF_CHECK = (sys.executable, "-m", "megarlhf.cluster.launch")


@pytest.mark.parametrize(("nodes", "tasks_per_node"), [(2, 1), (1, 2)])
def test_srun(slurm_cluster, nodes, tasks_per_node):
    # host names of the nodes do not resolve in this cluster: two nodes test the way by srun's own address as well
    layout = (f"--nodes={nodes}", f"--ntasks-per-node={tasks_per_node}", "--time=5", "--kill-on-bad-exit=1")
    done = slurm_cluster.run("srun", *layout, *SELF_CHECK, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    for rank, line in enumerate(lines):
        node, local_rank = divmod(rank, tasks_per_node)
        assert line.startswith(
            f"rank {rank} on node{node + 1}: slurm, 2 ranks, local rank {local_rank} of {tasks_per_node}"
        )
        assert line.endswith("all_reduce ok")
    assert len(lines) == 2


def test_an_address_that_does_not_resolve(slurm_cluster):
    start = time.monotonic()
    done = slurm_cluster.run(
        "srun", "--nodes=2", "--time=5", *SELF_CHECK, timeout=100, MASTER_ADDR="no-such-host.invalid"
    )
    assert time.monotonic() - start < 30
    assert done.returncode == 2
    for line in ("rank 0 on node1: MASTER_ADDR 'no-such-host.invalid' does not", "rank 1 on node2: MASTER_ADDR"):
        assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_python_in_a_batch_script_without_srun(slurm_cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join(SELF_CHECK)}\n")
    done = slurm_cluster.run(
        "sbatch",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=5",
        f"--output={tmp_path}/log",
        "--parsable",
        script,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    state = slurm_cluster.script("wait", done.stdout.strip())
    assert state.stdout.strip() == "FAILED"
    assert "has 2 tasks, but this process runs outside a job step" in (tmp_path / "log").read_text()
