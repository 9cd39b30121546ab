"""`log.profile` and `log.memory_snapshot`: where the time and the memory of a run go, as torch records them.

RUN/profile/rank_R.json     a trace for chrome://tracing or ui.perfetto.dev
RUN/profile/rank_R.txt      the operations that took most time
RUN/memory/rank_R.pickle    allocations before memory ran out, for pytorch.org/memory_viz
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf import console
from megarlhf.cluster import backend

ROWS = 40  # operations in the table
EVENTS = 100_000  # the newest allocations of a snapshot


class Profile:
    """Records the steps from the first to the last of `steps` on every rank; None: nothing."""

    def __init__(self, run: str, steps: tuple[int, int] | None):
        self.directory, self.steps, self.profiler = Path(run) / "profile", steps, None

    def begin(self, step: int) -> None:
        """`step` begins. A run that resumes within the steps records those that are left."""
        if self.steps is None or self.profiler is not None or not self.steps[0] <= step <= self.steps[1]:
            return
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if backend.on_cuda() else [])]
        self.profiler = profile(activities=kinds)
        self.profiler.start()

    def end(self, step: int, *, last: bool) -> None:
        """`step` has ended; `last`: no other follows. A file that cannot be written does not end the run."""
        if self.profiler is None or (step < self.steps[1] and not last):
            return
        backend.synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        rank = dist.get_rank()
        name = self.directory / f"rank_{rank}"
        order = "self_cuda_time_total" if backend.on_cuda() else "self_cpu_time_total"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{name}.json")
            Path(f"{name}.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=ROWS) + "\n")
        except (OSError, RuntimeError) as error:
            console.say(f"  rank {rank}: log.profile: {name}.* cannot be written ({error}); the run goes on without it")
            return
        if rank == 0:
            console.say(f"  profiled up to step {step}: {self.directory}")


@contextlib.contextmanager
def memory_snapshot(run: str, wanted: bool) -> Iterator[None]:
    """Meanwhile record allocations, and write them if the GPU's memory runs out."""
    if not wanted:
        yield
        return
    rank = dist.get_rank()
    if not backend.on_cuda():
        if rank == 0:
            console.say("  log.memory_snapshot: has no effect on a CPU, where torch records no allocations")
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=EVENTS)  # torch has no public name for it
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        path = Path(run) / "memory" / f"rank_{rank}.pickle"
        said = f"its allocations: {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as error:  # the cause of the failure is the memory
            said = f"its allocations cannot be written ({error})"
        console.say(f"  rank {rank}: out of memory; {said}")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
