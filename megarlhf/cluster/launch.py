"""This process's place among the ranks: the environment -> `Rendezvous`, for torchrun, Slurm, MPI and one process.

`rendezvous(env)` is a pure function, so every launcher is tested on a dictionary. The first of these that is present
decides, because the inner launcher leaves the outer one's variables in place:

    1. RANK and WORLD_SIZE: torchrun (also inside srun), or exported by hand.
    2. OMPI_COMM_WORLD_*: Open MPI's mpirun. Inside a Slurm job mpirun starts its daemons with srun, so the SLURM_PROCID
       that the ranks inherit is the daemon's and wrong for them.
    3. PMI_* with MPI_LOCALRANKID: MPICH's mpirun (hydra). srun --mpi=pmi2 sets PMI_* too, but no MPI_LOCALRANKID.
    4. A Slurm step (srun). No MPI is needed; srun's --mpi= makes no difference.
    5. One process.

Programs call `resolve()`. It adds the facts that only the machine has, and fails within seconds where torch would retry
silently for five minutes. This module imports neither torch nor megatron, so a bad launch line is reported at once.

`python -m megarlhf.cluster.launch`, started in place of the training program, tests a launch line.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.config import UserError

# The names of (rank, world size, local rank, local world size) under each launcher.
_EXPLICIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

# slurm.h: ids from here on are not steps of srun (0xfffffffa interactive shell, 0xfffffffb batch script, ...).
_FIRST_SPECIAL_STEP = 0xFFFFFFFA


# One item of a Slurm node list: text and [1-3,07] in any order.
_HOST = r"([^,\[\]]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+"


@dataclass(frozen=True)
class Rendezvous:
    """One rank's place, and the address at which rank 0 listens. `resolve()` leaves no field None."""

    launcher: Literal["torchrun", "env", "mpi", "slurm", "single"]
    rank: int
    world_size: int
    local_rank: int  # among the ranks of this node: the device's index
    local_world_size: int
    node: str | None  # the scheduler's name for the machine, or its host name
    master_addr: str | None
    master_port: int | None

    def environment(self) -> dict[str, str]:
        """The variables torch.distributed's env:// and the libraries under it read."""
        places = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        values = (*places, self.master_addr, self.master_port)
        return dict(zip((*_EXPLICIT, "MASTER_ADDR", "MASTER_PORT"), map(str, values), strict=True))


def rendezvous(env: Mapping[str, str]) -> Rendezvous:
    """The Rendezvous in the environment. Fields not given are None: `node` outside Slurm, the address under an mpirun
    without MASTER_ADDR and MASTER_PORT, the port of a single process.

    Raises UserError naming the variable that is missing, not a number or in contradiction to another.
    """
    addr, port = _master(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        ranks = _ranks(env, _EXPLICIT)
        for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)):
            if value is None:
                raise UserError(
                    f"RANK is set but {name} is not; set both, or unset RANK and start with srun or torchrun"
                )
        if "TORCHELASTIC_RUN_ID" in env:
            return Rendezvous("torchrun", *ranks, env.get("SLURMD_NODENAME"), addr, port)
        _refuse_same_rank_everywhere(env)
        return Rendezvous("env", *ranks, env.get("SLURMD_NODENAME"), addr, port)
    step = _number(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else _FIRST_SPECIAL_STEP
    # SLURMD_NODENAME is not used under mpirun: hydra passes that of its own node to all ranks.
    if "OMPI_COMM_WORLD_RANK" in env:
        return Rendezvous("mpi", *_ranks(env, _OPEN_MPI), None, addr, port)
    if "MPI_LOCALRANKID" in env or ("PMI_RANK" in env and step >= _FIRST_SPECIAL_STEP):
        return Rendezvous("mpi", *_ranks(env, _HYDRA), None, addr, port)
    if step < _FIRST_SPECIAL_STEP:
        on_node = _tasks_on_node(env, _SLURM[3])
        ranks = _ranks({**env, _SLURM[3]: str(on_node)}, _SLURM)
        if addr is None:
            # Rank 0 is on the step's first node; srun's own node (SLURM_LAUNCH_NODE_IPADDR) may be the login node.
            one_node = on_node == ranks[1]
            addr = "127.0.0.1" if one_node else expand_nodes(_text(env, "SLURM_STEP_NODELIST"))[0]
        if port is None:
            # Steps of a job, and neighbouring jobs on a node, differ; all lie below Linux's ephemeral ports (32768).
            port = 20000 + (_number(env, "SLURM_JOB_ID") * 37 + step) % 10000
        return Rendezvous("slurm", *ranks, _text(env, "SLURMD_NODENAME"), addr, port)
    _refuse_alone_in_a_job(env)
    return Rendezvous("single", 0, 1, 0, 1, env.get("SLURMD_NODENAME"), "127.0.0.1", None)


def expand_nodes(nodelist: str) -> list[str]:
    """Slurm's compressed host list, in order: "node[1-3,07],gpu" -> node1 node2 node3 node07 gpu."""
    if not re.fullmatch(f"{_HOST}(,{_HOST})*", nodelist):
        raise UserError(f"'{nodelist}' is not a Slurm node list such as node[1-3,7]; set MASTER_ADDR to rank 0's node")
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", item)  # text and ranges alternate
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def resolve(*, timeout: float = 10) -> Rendezvous:
    """This process's Rendezvous, complete and checked; for programs. Takes seconds and waits for no other rank, except
    under mpirun without MASTER_ADDR and MASTER_PORT (`exchange_over_mpi`).

    `timeout` (seconds) bounds the name lookups. Raises UserError.
    """
    found = rendezvous(os.environ)
    if found.node is None:
        found = dataclasses.replace(found, node=socket.gethostname())
    if found.launcher == "single":
        found = dataclasses.replace(found, master_port=_free_port())
    if found.master_addr is None or found.master_port is None:
        found = exchange_over_mpi(found)
    launch_addr = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if found.launcher == "slurm" and "MASTER_ADDR" not in os.environ and launch_addr:
        # Sites whose node names do not resolve (NodeAddr= in slurm.conf): srun's node, right inside a batch script.
        try:
            _lookup(found, timeout)
        except UserError:
            found = dataclasses.replace(found, master_addr=launch_addr)
    check_address(found, timeout=timeout)
    return found


def exchange_over_mpi(found: Rendezvous) -> Rendezvous:
    """Fill in the address and port that mpirun's environment lacks: rank 0's, broadcast by mpi4py. Collective.

    Between nodes the address is rank 0's host name; the other nodes must be able to resolve it. MPI is finalised
    again, since torch does not need it and a rank that dies later must not hang its peers in MPI_Finalize.
    """
    remedy = "give rank 0's address by hand: MASTER_ADDR=host MASTER_PORT=29500 (Open MPI: mpirun -x MASTER_ADDR ...)"
    # The wheel holds one build for each MPI; left alone it takes the first library it finds, not mpirun's.
    os.environ.setdefault("MPI4PY_MPIABI", "openmpi" if "OMPI_COMM_WORLD_RANK" in os.environ else "mpich")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"MASTER_ADDR or MASTER_PORT is not set and mpi4py, which would agree on them, does not load ({error}); "
            f"pip install mpi4py with mpirun's libmpi on LD_LIBRARY_PATH, or {remedy}"
        )
    comm = MPI.COMM_WORLD
    if comm.Get_size() != found.world_size:
        raise UserError(
            f"mpirun started {found.world_size} ranks but mpi4py's library ({MPI.Get_library_version().split(',')[0]}) "
            f"sees {comm.Get_size()}: it is not mpirun's; set MPI4PY_MPIABI=openmpi or mpich, or {remedy}"
        )
    proposal = None
    if found.rank == 0:
        own = "127.0.0.1" if found.local_world_size == found.world_size else socket.gethostname()
        proposal = (found.master_addr or own, found.master_port or _free_port())
    addr, port = comm.bcast(proposal)
    MPI.Finalize()
    return dataclasses.replace(found, master_addr=addr, master_port=port)


def check_address(found: Rendezvous, *, timeout: float = 10) -> None:
    """Check that MASTER_ADDR resolves within `timeout` seconds and, on rank 0, that it is this node's and the port
    free.

    torch itself retries an address that does not resolve silently for five minutes. Raises UserError.
    """
    addresses = _lookup(found, timeout)
    # torchrun's agent already listens on the port; an address set by hand may be a forwarder's.
    if found.rank != 0 or found.launcher in ("torchrun", "env"):
        return
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            try:
                probe.bind(address)
                return
            except OSError as error:
                code, reason = error.errno, error.strerror
    if code == errno.EADDRNOTAVAIL:
        reason = f"{found.master_addr} is not an address of this node; set MASTER_ADDR to rank 0's node or unset it"
    else:
        reason = f"port {found.master_port} cannot be used ({reason}); set MASTER_PORT to a free one"
    raise UserError(f"{_who(found)}: {reason}")


def await_rank0(found: Rendezvous, *, timeout: float = 300) -> None:
    """Return once rank 0 accepts connections. Call it just before torch's init_process_group, after the slow imports.

    `timeout` (seconds) must cover the differences between the ranks' start-up times. Raises UserError with the error of
    the last attempt, where torch would give no reason.
    """
    if found.rank == 0:
        return
    deadline, pause = time.monotonic() + timeout, 0.1
    while True:
        try:
            socket.create_connection((found.master_addr, found.master_port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise UserError(
                    f"{_who(found)}: rank 0 does not answer at {found.master_addr}:{found.master_port} after "
                    f"{timeout:.0f} s ({error.strerror or error}); see rank 0's own message, or set MASTER_ADDR and "
                    "MASTER_PORT to an address of its node and a port that no firewall closes"
                )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of `work`, or the exception it raised, or a TimeoutError. For calls that have no time-out of their own
    and block signals: getaddrinfo with a name server that is down, torch's store at another program's port."""
    answer: list = []

    def run():
        try:
            answer.append(work())
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else TimeoutError(f"no answer within {seconds:.0f} s")


def _who(found: Rendezvous) -> str:
    return f"rank {found.rank} on {found.node}"


def _lookup(found: Rendezvous, timeout: float) -> list:
    where = found.master_addr, found.master_port
    answer = within(timeout, lambda: socket.getaddrinfo(*where, type=socket.SOCK_STREAM))
    if isinstance(answer, list):
        return answer
    raise UserError(
        f"{_who(found)}: MASTER_ADDR '{found.master_addr}' does not resolve "
        f"({getattr(answer, 'strerror', None) or answer}); "
        "set MASTER_ADDR to a name or IP address of rank 0's node that every node resolves"
    )


def _free_port() -> int:
    """A port that was free a moment ago. Another process may take it before torch does; then torch says so."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name, "").strip():
        state = "empty" if name in env else "missing"
        raise UserError(f"{name} is {state} in the environment; pass it on to every rank (srun --export=ALL does)")
    return env[name].strip()


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not re.fullmatch(r"[0-9]+", text):
        raise UserError(f"{name}={text} is not a whole number of 0 or more; correct it, or leave it to the launcher")
    return int(text)


def _ranks(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[int, int, int, int]:
    for name in names:
        if name not in env:
            there = next(other for other in names if other in env)
            raise UserError(
                f"{there} is set but {name} is not; set both, or unset {there} and start with srun or torchrun"
            )
    rank, size, local_rank, local_size = (_number(env, name) for name in names)
    shown = [f"{name}={env[name]}" for name in names]
    if rank >= size:
        raise UserError(f"{shown[0]} must be less than {shown[1]}; correct whichever is wrong")
    if local_rank >= local_size:
        raise UserError(f"{shown[2]} must be less than {shown[3]}; correct whichever is wrong")
    if local_size > size:
        raise UserError(f"{shown[3]} must not exceed {shown[1]}; correct whichever is wrong")
    return rank, size, local_rank, local_size


def _refuse_same_rank_everywhere(env: Mapping[str, str]) -> None:
    """RANK exported once in a batch script is the same in every task; the ranks would wait for each other forever."""
    for rank, size, *_ in (_OPEN_MPI, _HYDRA, _SLURM):
        if rank in env:
            if env.get(size) == env["WORLD_SIZE"] and env[rank] != env["RANK"]:
                raise UserError(
                    f"RANK={env['RANK']} contradicts {rank}={env[rank]} of {size}={env[size]}: it was set once for all "
                    "ranks; unset RANK and WORLD_SIZE, which are found without"
                )
            return


def _refuse_alone_in_a_job(env: Mapping[str, str]) -> None:
    """One process in an allocation made for several: srun is missing, or the variables of its step did not reach the
    process (a container that takes only a part of the environment)."""
    if "SLURM_JOB_ID" not in env and "SLURM_PROCID" not in env:
        return
    job = f"Slurm job {env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else "The Slurm job around"
    alone = "but this process runs outside a job step, alone"
    srun = "start it with `srun python -m megarlhf ...` (srun -n1 for a single process)"

    def number(name: str) -> int:
        return _number(env, name) if name in env else 1

    nodes = number("SLURM_NNODES")
    # Beside --ntasks, --ntasks-per-node is only the most that a node may have.
    per_node = 1 if "SLURM_NTASKS" in env else number("SLURM_NTASKS_PER_NODE")
    tasks = max(nodes * per_node, number("SLURM_NTASKS"), number("SLURM_STEP_NUM_TASKS"))
    if tasks > 1:
        raise UserError(f"{job} has {tasks} tasks, {alone}; {srun}")
    if "SLURM_PROCID" in env and _number(env, "SLURM_PROCID") > 0:  # a batch script's is 0
        raise UserError(
            f"SLURM_PROCID={env['SLURM_PROCID']} is one task's of a job step, but SLURM_STEP_ID is missing; pass all "
            "SLURM_ variables on to the program"
        )
    # A user selects one device of several in CUDA_VISIBLE_DEVICES, which Slurm sets to all of them.
    gpus = env["CUDA_VISIBLE_DEVICES"].count(",") + 1 if "CUDA_VISIBLE_DEVICES" in env else number("SLURM_GPUS_ON_NODE")
    if gpus > 1 and "SLURM_GPUS_ON_NODE" in env:
        raise UserError(f"{job} has {gpus} GPUs on this node, {alone}; {srun}, with a task for each GPU")


def _master(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    addr = _text(env, "MASTER_ADDR") if "MASTER_ADDR" in env else None
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    if port is not None and not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is no port; use one from 1024 to 65535")
    return addr, port


def tasks_per_node(env: Mapping[str, str], name: str) -> list[int]:
    """Tasks on each node of the step, from the form "2(x3),1": three nodes of 2, one of 1."""
    counts: list[int] = []
    for part in _text(env, name).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(f"{name}={env[name]} is not of Slurm's form 2(x3),1; start the program with srun itself")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks_on_node(env: Mapping[str, str], name: str) -> int:
    """The step's tasks on this node."""
    counts = tasks_per_node(env, name)
    node = _number(env, "SLURM_NODEID")
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID={node} must be less than the {len(counts)} nodes of {name}={env[name]}")
    return counts[node]


def _numbers(ranges: str) -> list[str]:
    out = []
    for piece in ranges.split(","):
        low, _, high = piece.partition("-")
        out += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return out


def main() -> int:
    """The self-test: every rank prints its place, joins a gloo group and checks one all-reduce."""
    try:
        found = resolve()
        import torch
        import torch.distributed as dist

        await_rank0(found)
    except UserError as error:
        print(f"megarlhf: {error}", file=sys.stderr)
        return 2
    os.environ.update(found.environment())
    dist.init_process_group("gloo")
    total = torch.tensor(found.rank + 1)
    dist.all_reduce(total)
    expected = found.world_size * (found.world_size + 1) // 2
    ok = total.item() == expected
    # one write, or the lines of several ranks mix
    result = "ok" if ok else f"gave {total.item()}, not {expected}"
    sys.stdout.write(
        f"{_who(found)}: {found.launcher}, {found.world_size} ranks, local rank {found.local_rank} of "
        f"{found.local_world_size}, rank 0 at {found.master_addr}:{found.master_port}: all_reduce {result}\n"
    )
    sys.stdout.flush()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
