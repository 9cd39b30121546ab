"""How ranks find each other: the store that rank 0 serves, and the default process group."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from megarlhf.cluster import cuda, launch
from megarlhf.cluster.device import device, on_cuda
from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError

STORE_SECONDS = 60.0  # from rank 0's port being open to its store's answer


def open_store(rendezvous: Rendezvous, timeout_minutes: float = 10) -> dist.Store:
    """The key-value store through which ranks find each other. Rank 0 serves it, under torchrun its agent. Does not
    wait for other ranks than rank 0."""
    if rendezvous.world_size == 1:
        return dist.HashStore()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent:
        launch.await_rank0(rendezvous, timeout=60 * timeout_minutes)
    store = launch.within(
        STORE_SECONDS,
        lambda: dist.TCPStore(
            rendezvous.master_addr,
            rendezvous.master_port,
            is_master=rendezvous.rank == 0 and not agent,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            wait_for_workers=False,
        ),
    )
    if not isinstance(store, dist.Store):
        raise UserError(
            f"rank {rendezvous.rank} on {rendezvous.node}: what listens at {rendezvous.master_addr}:"
            f"{rendezvous.master_port} is not rank 0's store ({store}); see rank 0's own message, or set MASTER_PORT "
            "to a free port"
        )
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def join(rendezvous: Rendezvous, store: dist.Store, timeout_minutes: float = 10) -> None:
    """Start the default process group: gloo on CPU, NCCL on CUDA with one device a rank. Raises UserError where ranks
    would share a device."""
    if on_cuda():
        torch.cuda.set_device(cuda.device_index(rendezvous, torch.cuda.device_count()))
    os.environ.update(rendezvous.environment())
    dist.init_process_group(
        "nccl" if on_cuda() else "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


def timeout() -> datetime.timedelta:
    """How long a collective of the default process group may take; other groups are to have the same time."""
    return dist.group.WORLD._get_backend(device()).options._timeout
