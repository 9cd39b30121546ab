"""The checks at a job's start, in seconds: they find what would otherwise end or slow a large allocation much later.

`reach` runs before the process group exists, `compare` right after. Every message names the host.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megarlhf import console
from megarlhf.cluster import backend, probe
from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError

PACKAGES = ("megarlhf", "torch", "megatron-core", "transformer-engine", "apex", "numpy", "transformers", "triton")
CLOCK_SECONDS = 5.0  # clocks that differ by more are mentioned
SLOW = 1.5  # a rank that needs this many times the median is mentioned,
ROUNDS = 3  # if it does so every time
SPEEDS = {"matmul": "matmul", "all_reduce": "all-reduce"}  # fields of `Speed`, and their names
FREE = 0.85  # of a device's memory, at least


@dataclass(frozen=True)
class Facts:
    """What one rank finds out about its machine."""

    rank: int
    node: str
    clock: float  # seconds since the epoch, just after a barrier
    versions: dict[str, str]
    config: str  # hash of the resolved configuration
    memory_free: int  # bytes of the device; 0 on CPU
    memory_total: int


@dataclass(frozen=True)
class Speed:
    """Seconds of one rank, the best of a few."""

    matmul: float
    all_reduce: float


def reach(rendezvous: Rendezvous, store: dist.Store) -> None:
    """Every node opens a connection to every other, on the network on which it reaches rank 0. Collective over `store`.

    torch connects the same ranks a moment later and gives no name when one of them does not answer. Raises UserError
    that names the nodes, on rank 0; its watchdog ends the other ranks.
    """
    if rendezvous.world_size == 1:
        return
    leader = rendezvous.local_rank == 0
    with probe.listener(probe.own_address(rendezvous, store)) as listener:
        place = (rendezvous.node, *listener.getsockname()[:2]) if leader else None
        store.set(f"place/{rendezvous.rank}", json.dumps(place))
        places = [json.loads(store.get(f"place/{rank}")) for rank in range(rendezvous.world_size)] if leader else []
        store.set(f"reached/{rendezvous.rank}", json.dumps(probe.unreached(rendezvous.node, [*filter(None, places)])))
        if rendezvous.rank == 0:
            found = [text for rank in range(rendezvous.world_size) for text in json.loads(store.get(f"reached/{rank}"))]
            if found:
                raise UserError(
                    f"{probe.several(found)}: exclude the node (sbatch --exclude), or open the firewall between "
                    "the compute nodes"
                )
            store.set("reached/all", "yes")
        store.get("reached/all")  # the listeners stay open until all nodes have tried


def compare(rendezvous: Rendezvous, config: str) -> None:
    """Check that all ranks have the same versions and configuration, free devices, similar clocks and speeds.
    Collective. `config`: the resolved configuration as YAML.

    Raises UserError on all ranks for errors. Rank 0 prints warnings, and one line of figures.
    """
    started = time.monotonic()
    facts = _gather(_facts(rendezvous, config))
    errors, remarks = judge(facts)
    if len({fact.config for fact in facts}) > 1:
        errors.append(differences(facts, _gather(config)))
    if errors:
        raise UserError("; ".join(errors))
    rounds = [_gather(_speed())]
    while len(rounds) < ROUNDS and slow(facts, rounds):  # all ranks see the same rounds and decide alike
        rounds.append(_gather(_speed()))
    remarks += slow(facts, rounds)
    if rendezvous.rank == 0:
        seconds = time.monotonic() - started
        figures = ", ".join(f"{name} {1e3 * _usual(rounds[-1], key):.2f} ms" for key, name in SPEEDS.items())
        nodes = len({fact.node for fact in facts})
        console.say(f"  preflight: {len(facts)} ranks on {nodes} nodes in {seconds:.1f} s; {figures}")
        for remark in remarks:
            console.say(f"  preflight: {remark}")


def judge(facts: list[Facts]) -> tuple[list[str], list[str]]:
    """(errors, warnings), each naming ranks and hosts. Pure."""
    errors, remarks = [], []
    for name in (*PACKAGES, "python"):
        errors += _odd(facts, lambda fact, name=name: fact.versions.get(name, "missing"), name, "the same environment")
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
    return errors, remarks


def slow(facts: list[Facts], rounds: list[list[Speed]]) -> list[str]:
    """Remarks on the ranks that were slow in every one of `rounds`, each [rank]: one measurement of a busy machine says
    little. The figures are those of the last round. Pure."""
    remarks = []
    for key, name in SPEEDS.items():
        for rank, fact in enumerate(facts):
            if all(getattr(speeds[rank], key) > SLOW * _usual(speeds, key) for speeds in rounds):
                times = f"{1e3 * getattr(rounds[-1][rank], key):.2f} ms, the median {1e3 * _usual(rounds[-1], key):.2f}"
                remarks.append(f"rank {fact.rank} on {fact.node} is slow: {name} took {times} ms")
    return remarks


def differences(facts: list[Facts], configs: list[str]) -> str:
    """The keys in which configurations (YAML, one a rank) differ from that of most ranks, with both values. Pure."""
    usual = statistics.mode(fact.config for fact in facts)
    trees = [_flat(yaml.safe_load(config)) for config in configs]
    common = next(tree for fact, tree in zip(facts, trees, strict=True) if fact.config == usual)
    told: dict[str, list[Facts]] = {}
    for fact, tree in zip(facts, trees, strict=True):
        keys = [key for key in {**common, **tree} if tree.get(key) != common.get(key)]
        if fact.config != usual:
            text = ", ".join(f"{key}={tree.get(key)} instead of {common.get(key)}" for key in keys[:8])
            more = f" and {len(keys) - 8} more keys" if len(keys) > 8 else ""
            told.setdefault(text + more, []).append(fact)
    parts = []
    for text, odd in list(told.items())[:4]:
        ranks = ", ".join(f"rank {fact.rank} on {fact.node}" for fact in odd[:4])
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        parts.append(f"{ranks}{more} with {text}")
    return f"the configuration differs: {'; '.join(parts)}; give every node the same files and overrides"


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    parts = [_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def _usual(speeds: list[Speed], key: str) -> float:
    return statistics.median_low(getattr(speed, key) for speed in speeds)


def _gather(mine: Any) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _odd(facts: list[Facts], key: Callable[[Facts], str], name: str, remedy: str) -> list[str]:
    """The ranks that differ from the majority in `key`."""
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
    digest = hashlib.sha256(config.encode()).hexdigest()
    dist.barrier()
    return Facts(rendezvous.rank, rendezvous.node, time.time(), versions, digest, free, total)


def _speed() -> Speed:
    numbers = torch.zeros(2**22 if backend.on_cuda() else 2**16, device=backend.device())
    dist.barrier()
    _, matmul = _matmul()
    return Speed(matmul, _best(lambda: dist.all_reduce(numbers)))


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
    """Seconds of the fastest of five runs, after one warm-up."""
    times = []
    for _ in range(6):
        backend.synchronize()
        started = time.perf_counter()
        work()
        backend.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
