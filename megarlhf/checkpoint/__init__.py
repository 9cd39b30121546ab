"""Checkpoints: any layout -> any layout, for weights and optimizer, over megatron's dist_checkpointing.

    RUN/checkpoints/step_00000100/      appears under this name only when complete (steps.py)
        actor/                          one model directory a model of the run: architecture.yaml + torch_dist files
        tokenizer/  run.yaml  state.json
        checksums.json                  of all these files (checksums.py)
    RUN/checkpoints/latest              the name of the newest complete step directory

Weights have megatron's key names without a prefix; the optimizer lies beside them under `optimizer.`.
This package knows no model class: it saves objects with `sharded_state` and `load_sharded_state`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf.checkpoint import checksums, steps
from megarlhf.checkpoint.checksums import Checksum
from megarlhf.checkpoint.loading import Saveable, inspect, load, reason
from megarlhf.checkpoint.steps import LATEST, STATE, read_state
from megarlhf.cluster import lease, residency, watchdog
from megarlhf.config import UserError

__all__ = ["LATEST", "STATE", "CheckpointConfig", "Checkpoints", "Saveable", "inspect", "load", "read_state"]


PATIENCE = 10.0  # seconds that the other ranks wait for rank 0 to report why a save failed


@dataclass(frozen=True)
class CheckpointConfig:
    """When and how a run saves checkpoints."""

    every: int = 100  # steps between saves; the last step is always saved
    keep: int = 2  # newest complete checkpoints to keep
    asynchronous: bool = False  # write in the background while training goes on
    # Go on from the checkpoint of this step (`--step N`). What the run did after it is set aside in RUN/after_step_N. A
    # job that Slurm or torchrun restarts goes back once, then on from its own checkpoints.
    step: int | None = None
    # Each checkpoint also as RUN/hf/step_N for transformers, with its tokenizer; removed with its checkpoint.
    export_hf: bool = False
    resume: bool = True  # continue from `latest` when the run directory has one; false refuses a used directory

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.step is not None and self.step < 1:
            raise ValueError(f"step: must be at least 1, not {self.step}; to begin anew give another run directory")
        if self.step is not None and not self.resume:
            raise ValueError("step: goes on with a run, and resume is false; remove one of them")


class Checkpoints:
    """The checkpoints of one run directory. `save` and `load` are collective. `say`: tells the user; `after`: called
    with each step directory once it is published, collective."""

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        *,
        say: Callable[[str], None] = lambda message: None,
        after: Callable[[Path], None] = lambda step_directory: None,
    ):
        self.directory = run / "checkpoints"
        self.config, self.say, self.after = config, say, after
        self.seconds = 0.0  # how long the last save took until it was published
        self._queue = None
        self._pending: Callable[[], None] | None = None

    def latest(self) -> Path | None:
        """The newest complete step directory, if any."""
        return steps.latest(self.directory)

    def sweep(self) -> None:
        """Remove the leftovers of killed saves and removals. For one rank, of a run that owns the directory."""
        steps.sweep(self.directory)

    def save(
        self,
        step: int,
        models: dict[str, Saveable],
        state: dict[str, Any],
        write_files: Callable[[Path], None],
    ) -> None:
        """Write `step_{step}`. `state` is JSON; `write_files(directory)` adds the other files (rank 0 only).

        The step directory gets its name, and `latest` its new content, after everything is on disk; a crash at any
        moment leaves the previous checkpoint valid. With `asynchronous` a later `poll` does this.
        """
        self.finish()
        watchdog.phase("save", step)
        residency.enter("save")
        started = time.monotonic()
        final = steps.path_of(self.directory, step)
        partial = final.with_name(final.name + steps.PARTIAL)
        with self._named_errors(partial):
            if dist.get_rank() == 0:
                self.sweep()
                for name in models:
                    (partial / name).mkdir(parents=True)
            dist.barrier()
            saves = {}
            for name, model in models.items():
                with model.present():
                    request, saves[name] = _save_sharded(model, partial / name, self.config.asynchronous)
                    self._schedule(request)

        def publish() -> None:
            dist.barrier()  # every rank's files are written
            if dist.get_rank() == 0:
                with self._named_errors(partial):
                    write_files(partial)
                    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
                    written = {
                        f"{name}/{file}": checksum for name, found in saves.items() for file, checksum in found.items()
                    }
                    own_hash = checksums.write(partial, written)
                    steps.sync_tree(partial)
                    lease.verify()  # all this took a while
                    steps.publish(partial, final, own_hash)
                    steps.retire(final, self.config.keep)
            dist.barrier()
            if dist.get_rank() == 0:
                size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
                self.say(f"step {step}: saved {final} ({size / 1e9:.3g} GB in {time.monotonic() - started:.1f} s)")
            self.after(final)
            self.seconds = time.monotonic() - started

        if not self.config.asynchronous:
            publish()
            return
        self._pending = publish

    def _schedule(self, request: Any) -> None:
        """Begin the background write of an asynchronous save, with copies of the tensors."""
        if not self.config.asynchronous:
            return
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._queue = self._queue or AsyncCallsQueue(persistent=False)
        self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Publish a background save that has finished. Collective and cheap; call once a step."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for a background save and publish it."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self._pending is None:
            return
        with self._named_errors(self.directory):
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        if self._queue.get_num_unfinalized_calls() == 0:
            publish, self._pending = self._pending, None
            publish()

    @contextlib.contextmanager
    def _named_errors(self, directory: Path) -> Iterator[None]:
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

        try:
            yield
        except (CheckpointException, CheckpointingException, OSError) as error:
            if getattr(error, "failures", None) == {}:  # on all ranks but the first, which has the causes
                time.sleep(PATIENCE)  # and reports them; then the watchdog ends this rank
                raise
            raise UserError(
                f"{directory}: cannot be written ({reason(error)}{self._free()}); make room or mend the file system, "
                f"and start again: the last good checkpoint is {self._latest_known()}"
            )

    def _free(self) -> str:
        try:
            return f"; {shutil.disk_usage(self.directory).free / 1e9:.3f} GB are free there"
        except OSError:
            return ""

    def _latest_known(self) -> Path | str | None:
        try:
            return self.latest()
        except UserError as error:
            return f"unknown ({error})"


def _save_sharded(model: Saveable, directory: Path, asynchronous: bool) -> tuple[Any, dict[str, Checksum]]:
    """(megatron's request for an asynchronous save, else None; the checksums of the files, on rank 0 once the save is
    finalised)."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from megarlhf.checkpoint.strategies import SaveStrategy

    strategy = SaveStrategy()
    parallel = FullyParallelSaveStrategyWrapper(strategy, model.topology.groups.dp_cp, True)
    state = model.sharded_state(loading=False)
    request = dist_checkpointing.save(state, str(directory), parallel, async_sharded_save=asynchronous)
    return request, strategy.checksums
