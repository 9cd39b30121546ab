"""Messages between pipeline stages in sampling: hidden states to the next stage, tokens from the last to the first."""

from __future__ import annotations

from collections import defaultdict

import torch.distributed as dist
from torch import Tensor

from megarlhf.cluster.parallel import Topology


class StageMessages:
    """From the stage before this one, and to the one behind it; the last sends to the first. That way has a
    communicator of its own: over NCCL, messages in both directions between two ranks would otherwise wait for each
    other in one queue."""

    def __init__(self, topology: Topology):
        pipeline, stage, stages = topology.pipeline_group, topology.pipeline_rank, topology.parallel.pipeline
        self.before, self.behind = (dist.get_global_rank(pipeline, (stage + way) % stages) for way in (-1, 1))
        self.from_before = topology.ring_group if topology.first_stage else pipeline
        self.to_behind = topology.ring_group if topology.last_stage else pipeline
        # Unfinished sends of each chunk, and of the rows (None). They are waited for one step later: before that the
        # receiver may itself wait for what this rank sends next.
        self.sending: dict[int | None, list[tuple[dist.Work, Tensor]]] = defaultdict(list)

    def receive(self, into: Tensor) -> None:
        dist.irecv(into, self.before, group=self.from_before).wait()

    def send(self, value: Tensor, what: int | None) -> None:
        """Asynchronous; `value` must not change before `wait(what)`."""
        self.sending[what].append((dist.isend(value, self.behind, group=self.to_behind), value))

    def wait(self, what: int | None) -> None:
        """For what was sent of this chunk, or of the rows."""
        for work, _ in self.sending.pop(what, ()):
            work.wait()

    def wait_for_all(self) -> None:
        for what in list(self.sending):
            self.wait(what)
