"""A real Slurm of two nodes on this machine for the session; see `cluster.sh`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import ROOT

SCRIPT = Path(__file__).with_name("cluster.sh")


@dataclass(frozen=True)
class SlurmCluster:
    directory: Path  # the cluster's own: log/ has the daemons' logs
    environment: dict[str, str]

    def run(self, *command, timeout: float, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        """`command` (srun, sbatch, scontrol, ...), by default from the root of the checkout, ended after `timeout`
        seconds.

        The outer environment's SLURM_* are not passed on: tests may themselves run inside a job.
        """
        return subprocess.run(
            [str(part) for part in command], cwd=cwd, env={**self.environment, **environment}, timeout=timeout,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    def script(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`cluster.sh command`: wait, kill, start, ..."""
        return self.run(SCRIPT, *command, timeout=timeout)


@pytest.fixture(scope="module")  # not longer: another process of pytest waits for its end
def slurm_cluster():
    """Two idle nodes of 64 claimed CPUs and 8 claimed GPUs."""
    with running_cluster(2) as cluster:
        yield cluster


@contextlib.contextmanager
def running_cluster(nodes: int, **environment: str) -> Iterator[SlurmCluster]:
    """A cluster of its own, with `cluster.sh`'s variables. Its directory is kept when it does not start.

    One at a time on a machine: the jobs of two have the same numbers, from which the ports of their ranks follow.
    """
    with open(Path(tempfile.gettempdir()) / f"megarlhf-slurm-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _started_cluster(nodes, environment) as cluster:
            yield cluster


@contextlib.contextmanager
def _started_cluster(nodes: int, environment: dict[str, str]) -> Iterator[SlurmCluster]:
    directory = Path(tempfile.mkdtemp(prefix="megarlhf-slurm-"))
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
    environment = {
        **outer, "SLURM_CONF": str(directory / "etc/slurm.conf"), "SLURM_TEST_DIR": str(directory),
        "SLURM_TEST_PORT": str(_free_ports(1 + nodes)), **environment,
    }  # fmt: skip
    # `hold` ends the cluster when its standard input does, so also when this process is killed
    holder = subprocess.Popen(
        [SCRIPT, "hold", str(nodes)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if holder.stdout.readline() != b"ready\n":
        pytest.fail(f"the Slurm cluster did not start; its logs are in {directory}/log")
    yield SlurmCluster(directory, environment)
    holder.stdin.close()
    holder.wait(timeout=60)
    holder.stdout.close()
    shutil.rmtree(directory)


def _free_ports(count: int) -> int:
    """The first of `count` neighbouring ports (slurmctld's, then one a node), below Linux's ephemeral ones (32768)."""
    for first in range(16817 + os.getpid() % 1000 * 10, 32000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise RuntimeError("no free ports")
