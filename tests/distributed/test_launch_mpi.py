"""The launch under real launchers on this machine: Open MPI's and MPICH's mpirun, and torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.ranks import ROOT

FLAVOURS = {"openmpi": "Open MPI", "mpich": "HYDRA"}
SELF_CHECK = (sys.executable, "-m", "megarlhf.cluster.launch")


@lru_cache
def find_mpirun(flavour: str) -> str | None:
    """The mpirun of that MPI, by Debian's name or the plain one."""
    for name in (f"mpirun.{flavour}", "mpirun"):
        path = shutil.which(name)
        if path and FLAVOURS[flavour] in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
            return path
    return None


def for_mpi4py(flavour: str, directory: Path) -> dict[str, str]:
    """Variables under which mpi4py's wheel finds that MPI: it wants libmpi.so.12 of MPICH, which Debian names
    libmpich.so.12. The link to it is made in `directory`."""
    for library in Path("/usr/lib").glob("*/libmpich.so.12") if flavour == "mpich" else ():
        (directory / "libmpi.so.12").symlink_to(library)
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("LD_LIBRARY_PATH")]))}


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER_", "OMPI", "PMI"))
    }
    # Open MPI wants to be told that root may, and that two ranks may share a core
    allow = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    env = {**outer, **allow, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def assert_two_ranks(done: subprocess.CompletedProcess[str], launcher: str) -> None:
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} on ") and line.endswith("all_reduce ok")
        assert f"{launcher}, 2 ranks, local rank {rank} of 2" in line


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_mpirun_with_an_address(flavour, free_port):
    """Rank and size from mpirun's environment; no MPI library is loaded."""
    mpirun = find_mpirun(flavour) or pytest.skip(f"no mpirun of {flavour}")
    done = start(mpirun, "-n", "2", *SELF_CHECK, MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    assert_two_ranks(done, "mpi")


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_mpirun_alone(flavour, tmp_path):
    """mpi4py agrees on the address."""
    pytest.importorskip("mpi4py")
    mpirun = find_mpirun(flavour) or pytest.skip(f"no mpirun of {flavour}")
    assert_two_ranks(start(mpirun, "-n", "2", *SELF_CHECK, **for_mpi4py(flavour, tmp_path)), "mpi")


@pytest.mark.mpi
def test_mpirun_with_another_mpi_s_library():
    """mpi4py bound to Open MPI under MPICH's mpirun: an error, not ranks that each run alone."""
    pytest.importorskip("mpi4py")
    mpirun = find_mpirun("mpich") or pytest.skip("no mpirun of mpich")
    done = start(mpirun, "-n", "2", *SELF_CHECK, MPI4PY_MPIABI="openmpi")
    assert done.returncode != 0
    assert "all_reduce" not in done.stdout
    assert "MASTER_ADDR=host MASTER_PORT" in done.stderr


def test_torchrun():
    done = start(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", SELF_CHECK[2]
    )
    assert_two_ranks(done, "torchrun")


@pytest.fixture
def free_port() -> int:
    from megarlhf.cluster.launch import _free_port

    return _free_port()
