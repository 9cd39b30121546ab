"""The system calls that the sandbox refuses (jail.py): those for memory that belongs to no process and to no file
system with a limit, and those for further user namespaces. Standard library alone.

A filter of seccomp (Linux, Documentation/userspace-api/seccomp_filter.rst): a program of classic BPF that reads the
number of the call, the machine's kind and the arguments.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
# linux/bpf_common.h: load a word at k; compare it with k; return k
LOAD, IF_EQUAL, IF_AT_LEAST, IF_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; of a 64-bit argument the low half
KILL, ERROR, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
CLONE_NEWUSER, X32 = 0x10000000, 0x40000000
# shmget, msgget, semget, memfd_create, memfd_secret, unshare
REFUSED = {"x86_64": (29, 68, 64, 319, 447, 272), "aarch64": (194, 186, 190, 279, 447, 97)}
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def refuse(libc: ctypes.CDLL) -> int:
    """Put this process and its children under the filter. Returns 0, or -1 with errno set; needs no_new_privs."""
    machine = platform.machine()
    program = [
        (LOAD, 0, 0, MACHINE),
        (IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),  # 32-bit calls have other numbers
        (LOAD, 0, 0, NUMBER),
        (IF_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ]
    for number in REFUSED[machine]:
        program += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | errno.EPERM)]
    program += [
        (IF_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ERROR | errno.ENOSYS),  # its flags are in memory; libc then takes clone
        (IF_EQUAL, 0, 3, CLONE[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_BITS, 0, 1, CLONE_NEWUSER),
        (RETURN, 0, 0, ERROR | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(content))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0)
