"""Runs code that a model wrote, with tests, in a sandbox of namespaces (docs/rewards.md says what it guarantees).

The kernel does it all: no root, no set-uid program and no daemon are needed. jail.py is the inside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarlhf.cluster.launch import rendezvous
from megarlhf.config import UserError
from megarlhf.experience import jail

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GRACE = 10.0  # seconds beyond the limit until the sandbox itself is killed
START = "import sys; sys.path[:1] = []; sys.path.append(sys.argv[1]); from megarlhf.experience import jail; jail.main()"
PAUSES = (0.1, 0.4, 1.0, 3.0)  # seconds before a sandbox is tried again
_built = False  # whether this process has built one
# What code and tests see.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a response's code together with its tests."""

    seconds: float = 10.0  # wall time
    memory_mb: int = 512  # MiB of address space of each process
    processes: int = 4  # that the code may have beside its own, threads included
    disk_mb: int = 16  # MiB in /tmp, which is in memory

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds: must be positive, not {self.seconds}")
        for name, least in (("memory_mb", 64), ("processes", 0), ("disk_mb", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, not {getattr(self, name)}")


def judge(programs: Sequence[tuple[str, list[str]]], limits: SandboxConfig) -> list[bool]:
    """For each (code, tests): whether all tests pass within the limits. As many run at a time as this rank has CPUs.

    Raises UserError if a sandbox cannot be built.
    """
    try:
        with ThreadPoolExecutor(workers()) as pool:
            return list(pool.map(lambda program: passes(*program, limits), programs))
    except RuntimeError as error:  # can't start new thread
        raise _broken(str(error))


def workers() -> int:
    """The CPUs of this rank: those that it may use, shared with the other ranks of its node that may use them, too."""
    mine = len(os.sched_getaffinity(0))
    on_node, ranks = os.cpu_count() or 1, 1
    if "LOCAL_WORLD_SIZE" in os.environ:
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    else:  # before the processes have joined
        with contextlib.suppress(UserError):  # not started by a launcher
            ranks = rendezvous(os.environ).local_world_size
    return max(1, mine // ranks if mine == on_node else mine)


def passes(code: str, tests: list[str], limits: SandboxConfig) -> bool:
    """Whether all tests pass within the limits. Where sandboxes have been built, one that cannot be built (the machine
    has too many processes, or no memory) is tried again after PAUSES. Raises UserError."""
    global _built
    for pause in (*PAUSES, None):
        status, said = _run(code, tests, limits)
        if status in (jail.PASSED, jail.FAILED) or status < 0:  # killed, for its memory
            _built = True
            return status == jail.PASSED
        if pause is None or not _built:
            break
        time.sleep(pause)
    raise _broken((said.strip().splitlines() or [f"status {status}"])[-1][:300])


def _run(code: str, tests: list[str], limits: SandboxConfig) -> tuple[int, str]:
    """(The exit status, or BROKEN; what stands in standard error)."""
    binds, links, path = _system()
    config = {**asdict(limits), "binds": binds, "links": links, "path": path, "environment": ENVIRONMENT}
    blocks = [json.dumps(config).encode(), code.encode(errors="surrogatepass"), json.dumps(tests).encode()]
    root = str(Path(__file__).parents[2])
    try:
        process = subprocess.Popen(  # with one hash seed: sets have the same order each time
            [sys.executable, "-s", "-S", "-B", "-c", START, root], cwd="/", env={"PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return jail.BROKEN, f"a process cannot be started ({error.strerror})"
    try:
        content = b"".join(struct.pack("<Q", len(block)) + block for block in blocks)
        _, said = process.communicate(content, timeout=limits.seconds + GRACE)
        return process.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return jail.FAILED, ""
    finally:
        if process.returncode is None:  # also where the rank is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode < 0:  # killed, so that it has not waited for the others
            _end(process.pid)


def _end(group: int) -> None:
    """Kill the processes of a sandbox whose first process is gone, and wait until the kernel has removed them: it kills
    the code's own processes when the keeper, one of the group, ends."""
    until = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left, or only another user's
        while time.monotonic() < until:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.01)


def _broken(reason: str) -> UserError:
    return UserError(
        f"verify: code: the sandbox cannot be built on this machine: {reason}; allow user namespaces to users "
        "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0, the container's seccomp "
        "profile), give the job more processes, memory and open files, or score with a url"
    )


# The number of processes is what a kernel or container may fail to limit although everything else works.
PROBE = """
import os, time
def square(x): return x * x
def forks(most):
    for count in range(most):
        try:
            if not os.fork(): time.sleep(60)
        except OSError: return count
    return most
"""


def check(limits: SandboxConfig) -> None:
    """Refuse (UserError) a machine on which the sandbox cannot be built, or does not hold a number of processes."""
    tests = ["assert square(3) == 9", f"assert forks({limits.processes + 8}) <= {limits.processes}"]
    if not passes(PROBE, tests[:1], limits):
        given = ", ".join(f"{name}: {value}" for name, value in asdict(limits).items())
        raise UserError(
            f"verify: code: a correct program fails in the sandbox on this machine with its limits ({given}); raise "
            "them, or score with a url"
        )
    if not passes(PROBE, tests, replace(limits, seconds=60.0)):
        raise UserError(
            "verify: code: this machine does not limit the number of processes of the sandbox; do not run as root in a "
            "container of one user id, or score with a url"
        )


@functools.cache
def _system() -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """(Paths of the host that the sandbox shows read-only, symbolic links of its root, Python's path inside)."""
    import sysconfig

    prefixes = dict.fromkeys([sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix])
    python = [f"{prefix}/{name}" for prefix in prefixes for name in ("bin", "lib", "lib64")]
    standard = [path for path in sys.path if path.startswith(tuple(f"{prefix}/lib" for prefix in prefixes))]
    binds: list[str] = []
    links = []
    for path in (*SYSTEM, *DEVICES, *python):
        if any(path.startswith(f"{bound}/") for bound in binds):
            continue
        if os.path.islink(path) and os.path.dirname(path) == "/":
            links.append((path, os.readlink(path)))
        elif os.path.exists(path) and os.path.realpath(path) not in map(os.path.realpath, binds):
            binds.append(path)
    named = sysconfig.get_paths()
    path = list(dict.fromkeys([*standard, named["purelib"], named["platlib"]]))
    return binds, links, path
