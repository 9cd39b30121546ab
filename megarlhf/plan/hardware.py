"""Machines as a table: hardware.yaml, and files of the same form with a site's own entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarlhf import config
from megarlhf.config import UserError, nearest
from megarlhf.plan.time import Link, Machine

TABLE = Path(__file__).with_name("hardware.yaml")
# Assumed, not fitted: seconds of a small kernel, and of a hop of a collective within a node and between nodes.
CALL, NEAR, FAR = 2.5e-6, 2e-6, 8e-6


@dataclass(frozen=True)
class Efficiencies:
    """What programs reach of a data sheet's figures, as shares. bench/scale.py fits them."""

    matmul: float | None = None  # of tflops, by large matrix products and by attention
    memory: float | None = None  # of bandwidth, by decoding and by optimizer steps
    link: float | None = None  # of nvlink and of network, by collectives

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}: is a share above 0 and at most 1, not {value}")


@dataclass(frozen=True)
class Entry:
    """A kind of GPU in its nodes, as files give it. Keys that are left out are those of `like`."""

    like: str | None = None  # the name of another entry
    tflops: float | None = None  # TFLOP/s of matrix products in bf16
    memory: float | None = None  # GB of a GPU
    bandwidth: float | None = None  # TB/s of a GPU's memory
    nvlink: float | None = None  # GB/s of a GPU within a node, both directions together
    network: float | None = None  # GB/s of a GPU between nodes, each direction
    pcie: float | None = None  # GB/s of a GPU to and from host memory, each direction
    per_node: int | None = None  # GPUs of a node
    host_memory: float | None = None  # GB of a node

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "like" and value is not None and value <= 0:
                raise ValueError(f"{name}: must be positive, not {value}")


@dataclass(frozen=True)
class Table:
    """A file of machines."""

    gpus: dict[str, Entry] = field(default_factory=dict)
    efficiencies: Efficiencies = field(default_factory=Efficiencies)


def chosen(name: str | None, path: str | None) -> Machine | None:
    """The machine that the flags --gpu and --hardware name; None without them. Raises UserError."""
    if name is None and path is not None:
        raise UserError("--hardware: is a file with kinds of GPU, and none is chosen; name one with --gpu")
    return None if name is None else load(name, path)


def load(name: str, path: str | None = None) -> Machine:
    """The entry `name` of the built-in table and of the file `path`, whose entries come first. UserError if there is
    none, or if a value is missing."""
    tables = [config.load(Table, TABLE)]
    if path is not None:
        tables.append(config.load(Table, path))
    entries: dict[str, Entry] = {}
    shares: dict[str, float] = {}
    for table in tables:
        entries |= table.gpus
        shares |= {key: value for key, value in vars(table.efficiencies).items() if value is not None}
    return machine(name, resolved(name, entries, path or str(TABLE)), Efficiencies(**shares))


def machine(name: str, entry: Entry, shares: Efficiencies) -> Machine:
    """What programs reach of an entry, in bytes, FLOPs and seconds."""
    return Machine(
        name=name,
        device="cuda",
        memory=int(entry.memory * 1e9),
        flops=entry.tflops * 1e12,
        bandwidth=entry.bandwidth * 1e12 * shares.memory,
        call=CALL,
        near=Link(entry.nvlink * 1e9 / 2 * shares.link, NEAR),
        far=Link(entry.network * 1e9 * shares.link, FAR),
        per_node=entry.per_node,
        reach=shares.matmul,
        # The cost model counts the products that causality masks, too. Kernels skip them.
        attention=2 * shares.matmul,
        host=entry.pcie * 1e9,
        host_memory=int(entry.host_memory * 1e9),
    )


def resolved(name: str, entries: Mapping[str, Entry], where: str) -> Entry:
    """An entry with the values of those that it is like."""
    chain: list[str] = []
    values: dict = {}
    following: str | None = name
    while following is not None:
        if following not in entries:
            known = nearest(following, list(entries))
            raise UserError(f"{where}: there is no GPU '{following}'; {known}, or add it to a file (--hardware)")
        if following in chain:
            raise UserError(f"{where}: gpus.{following}.like leads back to itself ({' -> '.join(chain)}); break it")
        chain.append(following)
        given = {key: value for key, value in vars(entries[following]).items() if value is not None}
        values, following = given | values, given.get("like")
    missing = [f.name for f in dataclasses.fields(Entry) if f.name not in values and f.name != "like"]
    if missing:
        raise UserError(f"{where}: gpus.{name} has no {', '.join(missing)}; set them, or `like` an entry that has them")
    return Entry(**values | {"like": None})
