"""Training under a real Slurm: srun alone starts the ranks, and they compute what one process does."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.runs import CLI, losses
from tests.ranks import ENVIRONMENT

pytestmark = pytest.mark.slurm


def test_srun_gives_the_same_losses(straight, tmp_path, slurm_cluster):
    run, config = straight
    done = slurm_cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--time=5", "--kill-on-bad-exit=1", sys.executable, *CLI, "sft",
        "--config", config, f"run={tmp_path / 'run'}", "parallel.pipeline=2", timeout=300, **ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-5)
