"""Which nodes can open connections to which: the addresses, the listeners and the attempts. The caller carries them
between the ranks: over torch's store at the start (job_checks.py), over the watchdog's channel later (hub.py)."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError

CONNECT_SECONDS = 10.0

Place = tuple[str, str, int]  # node, address, port


def own_address(rendezvous: Rendezvous, store: Any) -> str:
    """This node's address on the network on which it reaches rank 0; on rank 0, the one at which it is reached.

    Rank 0 waits for a rank of another node if its own name resolves to 127.0.1.1, as Debian's installer sets it.
    Raises TimeoutError when none comes before the store's time-out.
    """
    own = _source(rendezvous.master_addr, rendezvous.master_port)
    if rendezvous.local_world_size == rendezvous.world_size:
        return own
    if rendezvous.rank != 0 and rendezvous.local_rank == 0:
        store.set("megarlhf/another node", own)
    elif rendezvous.rank == 0 and ipaddress.ip_address(own).is_loopback:
        try:
            other = store.get("megarlhf/another node").decode()
        except RuntimeError:  # torch's DistStoreError
            raise TimeoutError("no rank of another node came; look for their own messages, or at these nodes")
        own = _source(other, rendezvous.master_port)
    return own


def listener(address: str) -> socket.socket:
    """A listening socket. The kernel accepts connections to it; no code has to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def unreached(node: str, places: Sequence[Place], timeout: float = CONNECT_SECONDS) -> list[str]:
    """Try to connect to every place at the same time. Returns one text for each that `node` cannot reach within
    `timeout` seconds."""

    def attempt(place: Place) -> str | None:
        try:
            socket.create_connection((place[1], place[2]), timeout=timeout).close()
            return None
        except OSError as error:
            return f"{node} cannot reach {place[0]} at {place[1]} ({error.strerror or error})"

    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(places), 512))) as pool:
        return [text for text in pool.map(attempt, places) if text]


def several(failures: list[str]) -> str:
    """At most eight of them, for a message."""
    more = f"; and {len(failures) - 8} more" if len(failures) > 8 else ""
    return "; ".join(failures[:8]) + more


def _source(address: str, port: int) -> str:
    """The address of this machine from which packets to `address` go. Connecting a datagram socket sends none."""
    reason = "no address"
    for family, kind, protocol, _, target in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
                return probe.getsockname()[0]
            except OSError as error:
                reason = error.strerror
    raise UserError(
        f"{address}: there is no way to this address ({reason}); set MASTER_ADDR to one that all nodes reach"
    )
