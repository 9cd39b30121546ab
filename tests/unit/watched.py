"""A run that does nothing but live under the watchdog: python -m tests.unit.watched RANK WORLD_SIZE DIRECTORY.

It enters a phase every 50 ms until DIRECTORY/finish exists, and ends as it should. `hang_minutes` is DIRECTORY/hang's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megarlhf.cluster import watchdog
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.slurm import JobConfig


def main(rank: int, world_size: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), -1)
    place = Rendezvous("env", rank, world_size, rank, world_size, f"node{rank}", "127.0.0.1", 29500)
    hang = float((directory / "hang").read_text())
    watchdog.start(place, store, JobConfig(hang_minutes=hang, join_minutes=1), directory)
    (directory / f"here{rank}").touch()
    step = 0
    while not (directory / "finish").exists():
        step += 1
        watchdog.phase("step", step)
        time.sleep(0.05)
    watchdog.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
