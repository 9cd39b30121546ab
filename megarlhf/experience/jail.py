"""The inside of the sandbox (sandbox.py starts this file in a process of its own; standard library alone).

    this process       writes the maps of user ids; waits
      the door         in new user, mount, pid, network, ipc and cgroup namespaces; waits
        the keeper     pid 1 of the namespace; builds the file system, gives up all privileges, keeps the time
          tests, code  see apart.py

When the keeper ends, the kernel kills every process of its pid namespace. Standard input has three blocks
(`apart.read_block`): the configuration, the code and the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import sys
from typing import Any, NoReturn

from megarlhf.experience import apart, calls

PASSED, FAILED, BROKEN = 40, 41, 42  # exit statuses; none that an interpreter ends with by itself
NOBODY = 65534  # root becomes this user: the limit of processes does not bind root
ROOT = "/tmp"  # where the new root is mounted, in the door's mount namespace

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
NAMESPACES = 0x00020000 | 0x02000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
OPTIONS = {"ro": MS_RDONLY, "nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": MS_NOATIME,
           "nodiratime": MS_NODIRATIME, "relatime": MS_RELATIME}  # fmt: skip
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
NUMBERS = {"x86_64": (155, 250), "aarch64": (41, 219)}  # of pivot_root and keyctl, for which libc has no functions
KEYCTL_JOIN_SESSION_KEYRING = 1

libc = ctypes.CDLL(None, use_errno=True)


class BrokenError(Exception):
    """The sandbox cannot be built; says why."""


def main() -> NoReturn:
    config, code = json.loads(apart.read_block(0)), apart.read_block(0)
    status = BROKEN
    try:
        status = _outside(config, code)
    except BrokenError as error:
        os.write(2, str(error).encode())
    os._exit(status)


def _outside(config: dict[str, Any], code: bytes) -> int:
    ready, tell = os.pipe()
    go, start = os.pipe()
    child = os.fork()
    if not child:
        try:
            status = _door(config, code, tell, go)
        except BrokenError as error:
            os.write(2, str(error).encode())
            status = BROKEN
        os._exit(status)
    os.close(tell)
    if os.read(ready, 1):
        os.write(start, b"%d" % _map_ids(child))
    os.close(start)
    return _status(child)


def _map_ids(child: int) -> int:
    """Give the user namespace of `child` one user and one group. Returns the user's id."""
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # in a container of one user
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{child}/{name}", f"{NOBODY} {NOBODY} 1")
            return NOBODY
    try:
        _write(f"/proc/{child}/setgroups", "deny")
        _write(f"/proc/{child}/uid_map", f"{os.geteuid()} {os.geteuid()} 1")
        _write(f"/proc/{child}/gid_map", f"{os.getegid()} {os.getegid()} 1")
    except OSError as error:
        raise BrokenError(f"a user namespace gets no user id ({error.strerror})")
    return os.geteuid()


def _door(config: dict[str, Any], code: bytes, tell: int, go: int) -> int:
    user = os.geteuid()
    if platform.machine() not in NUMBERS:
        raise BrokenError(f"machines of the kind {platform.machine()} are not supported")
    _call("user namespaces are not allowed", libc.unshare, NAMESPACES)
    os.write(tell, b"+")
    inner = int(os.read(go, 16) or user)
    # Opened before root becomes nobody, who may not see the directories on the way to them.
    opened = {path: os.open(path, os.O_PATH) for path in config["binds"]}
    if inner != user:
        os.setgroups([])
        os.setresgid(inner, inner, inner)
        os.setresuid(inner, inner, inner)
    _end_with_parent()
    child = os.fork()
    if child:
        return _status(child)
    try:
        _end_with_parent()
        _build(config, opened)
        _give_up_privileges()
        _limit(config)
        return _keep(config, code)
    except OSError as error:
        raise BrokenError(f"{error.filename or 'set-up'}: {error.strerror}")


def _end_with_parent() -> None:
    """If the machine's lack of memory kills one process of the three, it ends them all."""
    _call("prctl", libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _build(config: dict[str, Any], opened: dict[str, int]) -> None:
    """The new root: some of the host's directories, read-only, a few devices, and an empty /tmp."""
    os.umask(0o022)
    with contextlib.suppress(OSError):  # /proc/sys is read-only in some containers
        _write("/proc/sys/user/max_user_namespaces", "0")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{ROOT}/tmp")
    size = f"size={config['disk_mb']}m,nr_inodes=4096,mode=1777"
    _mount("tmpfs", f"{ROOT}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    targets = []
    for path, descriptor in opened.items():
        target = ROOT + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND | MS_REC)
        targets.append(target)
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split(" ")[4:6] for line in file]
    for place, options in mounts:
        place = place.replace(r"\040", " ")
        if any(place == target or place.startswith(target + "/") for target in targets):
            flags = sum(OPTIONS.get(option, 0) for option in options.split(",")) | MS_RDONLY | MS_NOSUID
            flags |= 0 if place.startswith(f"{ROOT}/dev/") else MS_NODEV
            _mount(None, place, None, MS_REMOUNT | MS_BIND | flags)
    for path, aim in config["links"]:
        os.symlink(aim, ROOT + path)
    os.makedirs(f"{ROOT}/dev", exist_ok=True)
    os.symlink("/tmp", f"{ROOT}/dev/shm")
    os.chdir(ROOT)
    _call("pivot_root", libc.syscall, NUMBERS[platform.machine()][0], b".", b".")
    _call("umount", libc.umount2, b".", MNT_DETACH)
    os.chdir("/tmp")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _give_up_privileges() -> None:
    """Also the session's keys, such as a Kerberos ticket; namespaces do not cover them."""
    joined = libc.syscall(NUMBERS[platform.machine()][1], KEYCTL_JOIN_SESSION_KEYRING, None)
    if joined < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):  # else nobody here has any
        raise BrokenError(f"keyctl ({os.strerror(ctypes.get_errno())})")
    _call("prctl", libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _call("capset", libc.capset, header, none)
    _call("seccomp", calls.refuse, libc)
    _call("prctl", libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)  # the code may not trace the tests or the keeper


def _limit(config: dict[str, Any]) -> None:
    mega = 2**20
    for limit, value in (
        (resource.RLIMIT_CPU, int(config["seconds"]) + 1),
        (resource.RLIMIT_AS, config["memory_mb"] * mega),
        (resource.RLIMIT_FSIZE, config["disk_mb"] * mega),
        (resource.RLIMIT_NOFILE, 32),  # pipes and sockets have buffers
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _at_most(limit, value)


def _at_most(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _keep(config: dict[str, Any], code: bytes) -> int:
    """Start tests and code, and wait for the tests, which alone decide."""
    from_code, to_tests = os.pipe()
    from_tests, to_code = os.pipe()
    tests = os.fork()
    if not tests:
        status = FAILED
        with contextlib.suppress(BaseException):
            given = json.loads(apart.read_block(0))
            _alone(config, from_code, to_code)
            apart.run_tests(given, apart.Peer(from_code, to_code, frozenset({"call"})))
            status = PASSED
        os._exit(status)
    if not os.fork():
        with contextlib.suppress(BaseException):
            _alone(config, from_tests, to_tests)
            apart.run_code(code, apart.Peer(from_tests, to_tests, frozenset(apart.OPERATIONS)))
        os._exit(FAILED)
    for descriptor in (from_code, to_tests, from_tests, to_code):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(FAILED))
    signal.setitimer(signal.ITIMER_REAL, config["seconds"])
    while True:  # processes without a parent become the keeper's
        ended, status = os.waitpid(-1, 0)
        if ended == tests:
            return PASSED if os.WIFEXITED(status) and os.WEXITSTATUS(status) == PASSED else FAILED


def _alone(config: dict[str, Any], *keep: int) -> None:
    """Leave this process `keep` alone of all descriptors, few processes, and a plain environment."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for descriptor in range(3, 1024):
        if descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    most = config["processes"] + 4  # the door, the keeper, the tests, the code itself
    # Not before: kernels before 5.14 count all processes of the user, and none could be forked here.
    _at_most(resource.RLIMIT_NPROC, most)
    sys.path[:] = config["path"]
    os.environ.clear()
    os.environ.update(config["environment"])
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # answers are JSON; the time has its own limit


def _status(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else FAILED


def _write(path: str, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call(f"mount of {target}", libc.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def _call(what: str, function: Any, *args: Any) -> None:
    if function(*args) != 0:
        raise BrokenError(f"{what} ({os.strerror(ctypes.get_errno())})")
