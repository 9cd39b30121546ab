"""Checkpoints: any layout -> any layout, for weights and optimizer, over megatron's dist_checkpointing.

    RUN/checkpoints/step_00000100/      appears under this name only when complete
        actor/                          one model directory a model of the run: architecture.yaml + torch_dist files
        tokenizer/  run.yaml  state.json
    RUN/checkpoints/latest              the name of the newest complete step directory

Weights have megatron's key names without a prefix; the optimizer lies beside them under `optimizer.`.
This module knows no model class: it saves what has `sharded_state` and `load_sharded_state`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megarlhf.cluster import watchdog
from megarlhf.config import UserError

LATEST = "latest"
STATE = "state.json"


@dataclass(frozen=True)
class CheckpointConfig:
    """When and how a run saves itself."""

    every: int = 100  # steps between saves; the last step is always saved
    keep: int = 2  # newest complete checkpoints to keep
    asynchronous: bool = False  # write in the background while training goes on
    resume: bool = True  # continue from `latest` when the run directory has one

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


class Saveable(Protocol):
    def sharded_state(
        self, *, loading: bool, weights_only: bool = False, fresh: tuple[str, ...] = ()
    ) -> dict[str, Any]: ...
    def load_sharded_state(self, state: dict[str, Any], *, weights_only: bool, fresh: tuple[str, ...]) -> None: ...


class Checkpoints:
    """The checkpoints of one run directory. `save` and `load` are collective."""

    def __init__(self, run: Path, config: CheckpointConfig):
        self.directory = run / "checkpoints"
        self.config = config
        self.seconds = 0.0  # how long the last save took until it was published
        self._queue = None
        self._pending: Callable[[], None] | None = None

    def latest(self) -> Path | None:
        """The newest complete step directory, if any."""
        pointer = self.directory / LATEST
        if not pointer.is_file():
            return None
        path = self.directory / pointer.read_text().strip()
        if not (path / STATE).is_file():
            raise UserError(
                f"{pointer}: names {path.name}, which is not a complete checkpoint; write the name of a complete "
                f"step directory into it, or remove it to start anew"
            )
        return path

    def save(
        self,
        step: int,
        models: dict[str, Saveable],
        state: dict[str, Any],
        write_files: Callable[[Path], None],
    ) -> None:
        """Write `step_{step}`. `state` is JSON; `write_files(directory)` adds what else belongs there (rank 0 only).

        The step directory gets its name, and `latest` its new content, after everything is on disk; a crash at any
        moment leaves the previous checkpoint valid. With `asynchronous` that moment comes at a later `poll`.
        """
        self.finish()
        watchdog.phase("save", step)
        started = time.monotonic()
        final = self.directory / f"step_{step:08d}"
        partial = final.with_name(final.name + ".partial")
        if dist.get_rank() == 0:
            for debris in self.directory.glob("step_*.partial"):  # of saves that failed; the disk may be full of them
                shutil.rmtree(debris)
            for name in models:
                (partial / name).mkdir(parents=True)
        dist.barrier()
        with self._named_errors(partial):
            requests = [
                _save_sharded(model.sharded_state(loading=False), partial / name, self.config.asynchronous)
                for name, model in models.items()
            ]

        def publish() -> None:
            dist.barrier()  # every rank's files are written
            if dist.get_rank() == 0:
                with self._named_errors(partial):
                    write_files(partial)
                    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
                    if final.exists():
                        shutil.rmtree(final)  # the same step, saved by the run this one resumes
                    _sync_tree(partial)
                    os.replace(partial, final)
                    pointer = self.directory / LATEST
                    temporary = pointer.with_name(LATEST + ".partial")
                    temporary.write_text(final.name + "\n")
                    os.replace(temporary, pointer)
                    _sync(self.directory)
                self._retire(final)
            dist.barrier()
            self.seconds = time.monotonic() - started

        if not self.config.asynchronous:
            publish()
            return
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._queue = self._queue or AsyncCallsQueue(persistent=False)
        for request in requests:
            self._queue.schedule_async_request(request)
        self._pending = publish

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
                raise
            free = shutil.disk_usage(self.directory).free / 1e9
            raise UserError(
                f"{directory}: cannot be written ({_reason(error)}; {free:.3f} GB are free there); make room or mend "
                f"the file system, and start again: the last good checkpoint is {self.latest()}"
            )

    def _retire(self, newest: Path) -> None:
        """Keep the newest `keep` complete checkpoints. Those beyond `newest` are of a run that somebody went back from
        and count for nothing: each goes when this run comes to its step, or past it."""
        complete = sorted(path for path in self.directory.glob("step_*") if (path / STATE).is_file())
        mine = [path for path in complete if path.suffix != ".partial" and path <= newest]
        for path in mine[: -self.config.keep]:
            shutil.rmtree(path, ignore_errors=True)


def read_state(step_directory: Path) -> dict[str, Any]:
    """What `save` got as `state`, with `step`."""
    path = step_directory / STATE
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"{path}: missing or damaged; resume from another step directory")


def inspect(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in a model directory, name -> global shape, from its metadata alone: no process group, seconds.

    Raises UserError when the metadata cannot be read, or a file is missing or shorter than it says.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(directory).read_metadata()
    except (OSError, EOFError, pickle.PickleError, AttributeError) as error:
        raise UserError(f"{directory}: its .metadata cannot be read ({_reason(error)}); use another checkpoint")
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} of {end} bytes"
            raise UserError(f"{path}: {what}: the checkpoint is damaged; use another one")
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(model: Saveable, directory: Path, *, weights_only: bool, fresh: tuple[str, ...] = ()) -> None:
    """Read a model directory into `model`, whatever layout wrote it. Collective. `weights_only` starts training from
    it, otherwise training goes on where it stopped. Weights whose names begin with one of `fresh` are not read: a new
    head on a trained trunk.

    Raises UserError when the files do not hold what the model needs.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

    if dist.get_rank() == 0:
        inspect(directory)  # a file cut short, by its name
    state = model.sharded_state(loading=True, weights_only=weights_only, fresh=fresh)
    try:
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(directory)),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        loaded = dist_checkpointing.load(state, str(directory), strategy)
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, pickle.PickleError) as error:
        raise UserError(f"{directory}: cannot be loaded ({_reason(error)}); use another checkpoint")
    model.load_sharded_state(loaded, weights_only=weights_only, fresh=fresh)


def _reason(error: BaseException) -> str:
    """The failure itself, of the first rank that had one, without torch's collected tracebacks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = min(failures.items())
        return f"rank {rank}: {_reason(error)}"
    if isinstance(error, EOFError):
        return "a file ends too early"
    return f"{type(error).__name__}: {str(error)[:300]}"


def _save_sharded(state: dict[str, Any], directory: Path, asynchronous: bool):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        True,
    )
    return dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=asynchronous)


def _sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
