"""The checks at a job's start, in seconds: what would otherwise end or slow a large allocation half an hour later.

`reach` runs before the process group exists, `compare` right after. Whatever they refuse names the host.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import json
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.cluster import backend
from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError

PACKAGES = ("megarlhf", "torch", "megatron-core", "transformer-engine", "apex", "numpy", "transformers", "triton")
CONNECT_SECONDS = 10.0
CLOCK_SECONDS = 5.0  # clocks that differ by more are mentioned
SLOW = 1.5  # a rank that needs this many times the median is mentioned
FREE = 0.85  # of a device's memory, at least


@dataclass(frozen=True)
class Facts:
    """What one rank finds on its machine."""

    rank: int
    node: str
    clock: float  # seconds since the epoch, just after a barrier
    versions: dict[str, str]
    config: str  # hash of the resolved configuration
    memory_free: int  # bytes of the device; 0 on CPU
    memory_total: int
    matmul: float  # seconds, the best of a few
    all_reduce: float


def reach(rendezvous: Rendezvous, store: dist.Store) -> None:
    """Every node opens a connection to every other, on the network on which it reaches rank 0. Collective over `store`.

    torch connects the same ranks a moment later and gives no name when one of them does not answer. Raises UserError on
    rank 0 (its watchdog ends the others) that names the nodes.
    """
    if rendezvous.world_size == 1:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((socket.gethostbyname(rendezvous.master_addr), rendezvous.master_port))
        own = probe.getsockname()[0]
    leader = rendezvous.local_rank == 0
    with socket.create_server((own, 0), backlog=1024) as listener:  # the kernel answers; nobody needs to accept
        place = (rendezvous.node, own, listener.getsockname()[1]) if leader else None
        store.set(f"place/{rendezvous.rank}", json.dumps(place))
        places = [json.loads(store.get(f"place/{rank}")) for rank in range(rendezvous.world_size)] if leader else []

        def attempt(place: tuple[str, str, int]) -> str | None:
            try:
                socket.create_connection(place[1:], timeout=CONNECT_SECONDS).close()
                return None
            except OSError as error:
                return f"{rendezvous.node} cannot reach {place[0]} at {place[1]} ({error.strerror or error})"

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            failures = [text for text in pool.map(attempt, filter(None, places)) if text]
        store.set(f"reached/{rendezvous.rank}", json.dumps(failures))
        if rendezvous.rank == 0:
            found = [text for rank in range(rendezvous.world_size) for text in json.loads(store.get(f"reached/{rank}"))]
            if found:
                more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
                raise UserError(
                    f"{'; '.join(found[:8])}{more}: exclude the node (sbatch --exclude), or open the firewall between "
                    "the compute nodes"
                )
            store.set("reached/all", "yes")
        store.get("reached/all")  # the listeners stay open until everybody has tried


def compare(rendezvous: Rendezvous, config: str) -> None:
    """Same versions and configuration, free devices, like clocks and speeds on all ranks. Collective.

    Raises UserError on all ranks for what cannot work; rank 0 prints what is only slow or odd, and one line of figures.
    """
    started = time.monotonic()
    facts: list[Facts | None] = [None] * rendezvous.world_size
    dist.all_gather_object(facts, _facts(rendezvous, config))
    errors, remarks = judge(facts)
    if errors:
        raise UserError("; ".join(errors))
    if rendezvous.rank == 0:
        seconds = time.monotonic() - started
        figures = (
            f"matmul {1e3 * statistics.median(fact.matmul for fact in facts):.2f} ms, "
            f"all-reduce {1e3 * statistics.median(fact.all_reduce for fact in facts):.2f} ms"
        )
        nodes = len({fact.node for fact in facts})
        print(f"  preflight: {len(facts)} ranks on {nodes} nodes in {seconds:.1f} s; {figures}", file=sys.stderr)
        for remark in remarks:
            print(f"  preflight: {remark}", file=sys.stderr, flush=True)


def judge(facts: list[Facts]) -> tuple[list[str], list[str]]:
    """(what must stop the run, what is worth a remark), each naming ranks and hosts. Pure."""
    errors, remarks = [], []
    for name in (*PACKAGES, "python"):
        errors += _odd(facts, lambda fact, name=name: fact.versions.get(name, "missing"), name, "the same environment")
    errors += _odd(facts, lambda fact: fact.config, "the configuration's hash", "the same files and overrides")
    for fact in facts:
        if fact.memory_free < FREE * fact.memory_total:
            errors.append(
                f"rank {fact.rank} on {fact.node}: only {fact.memory_free / 1e9:.1f} of {fact.memory_total / 1e9:.1f} "
                "GB of its device are free; end what else runs there, or exclude the node"
            )
    total = max(fact.memory_total for fact in facts)
    now = statistics.median_low(fact.clock for fact in facts)
    for fact in facts:
        where = f"rank {fact.rank} on {fact.node}"
        if fact.memory_total < 0.98 * total:
            remarks.append(f"{where}: its device has {fact.memory_total / 1e9:.0f} GB, others {total / 1e9:.0f} GB")
        if abs(fact.clock - now) > CLOCK_SECONDS:
            ahead = fact.clock - now
            side = "ahead" if ahead > 0 else "behind"
            remarks.append(f"{where}: its clock is {abs(ahead):.0f} s {side}; start NTP there")
    for name in ("matmul", "all_reduce"):
        usual = statistics.median_low(getattr(fact, name) for fact in facts)
        for fact in facts:
            if getattr(fact, name) > SLOW * usual:
                times = f"{1e3 * getattr(fact, name):.2f} ms, the median {1e3 * usual:.2f} ms"
                remarks.append(f"rank {fact.rank} on {fact.node} is slow: {name} took {times}")
    return errors, remarks


def _odd(facts: list[Facts], key: Callable[[Facts], str], name: str, remedy: str) -> list[str]:
    """Who differs from the majority in `key`."""
    usual = statistics.mode(key(fact) for fact in facts)
    odd = [fact for fact in facts if key(fact) != usual]
    if not odd:
        return []
    ranks = ", ".join(f"rank {fact.rank} on {fact.node} has {key(fact)}" for fact in odd[:8])
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return [f"{name} differs: {ranks}{more}, the others {usual}; give every node {remedy}"]


def _facts(rendezvous: Rendezvous, config: str) -> Facts:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    free, total = backend.memory()
    device = backend.device()
    _, matmul = _matmul()
    numbers = torch.zeros(2**22 if backend.on_cuda() else 2**16, device=device)
    all_reduce = _best(lambda: dist.all_reduce(numbers))
    dist.barrier()
    return Facts(
        rendezvous.rank, rendezvous.node, time.time(), versions, hashlib.sha256(config.encode()).hexdigest()[:12],
        free, total, matmul, all_reduce,
    )  # fmt: skip


def matmul_rate() -> float:
    """FLOP/s of this rank in large matrix products, bfloat16 on a GPU and float32 on a CPU."""
    flops, seconds = _matmul()
    return flops / seconds


def _matmul() -> tuple[int, float]:
    """FLOPs and seconds of a product that takes about 0.2 ms on a current GPU and a few ms on a CPU."""
    size, dtype = (4096, torch.bfloat16) if backend.on_cuda() else (512, torch.float32)
    square = torch.ones(size, size, dtype=dtype, device=backend.device())
    return 2 * size**3, _best(lambda: torch.mm(square, square))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of five runs, after one to warm up."""
    times = []
    for _ in range(6):
        backend.synchronize()
        started = time.perf_counter()
        work()
        backend.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
