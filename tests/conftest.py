"""Fixtures and the reasons for skips. What a machine lacks is skipped with one line that says what is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.ranks import ENVIRONMENT, ROOT, Ranks

for name, value in ENVIRONMENT.items():
    if name != "CUDA_VISIBLE_DEVICES":
        os.environ.setdefault(name, value)

SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items):
    reasons = {
        "gpu": None if _has_gpu() else "no CUDA device",
        "slurm": None if all(_which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch")) else "no Slurm here",
        "mpi": None if _which("mpirun") else "no mpirun here",
        "shared": None if SHARED.is_dir() else f"no {SHARED}",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.fixture(scope="session")
def ranks():
    """Worker processes for the whole session; see `tests/ranks.py`."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def straight(tmp_path_factory) -> tuple[Path, Path]:
    """(run directory, configuration) of one uninterrupted `megarlhf sft` on one process; read only."""
    import sys

    from tests.e2e.runs import CLI, finish, prepare

    directory = tmp_path_factory.mktemp("straight")
    config = prepare(directory)
    done = finish(sys.executable, *CLI, "sft", "--config", str(config))
    assert done.returncode == 0, done.stderr
    return directory / "run", config


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data and fixtures beside the checkout; tests that take this are marked `shared`."""
    return SHARED
