"""Read model directories: the names and shapes of their tensors (`inspect`), and the tensors (`load`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarlhf import console
from megarlhf.checkpoint import checksums, pickles
from megarlhf.cluster import watchdog
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError

Select = Callable[[str], bool]  # weights by name


class Saveable(Protocol):
    """The interface of models that this package saves and loads; `engine.Engine` has it."""

    topology: Topology

    def sharded_state(
        self, *, loading: bool, weights_only: bool = False, only: Select | None = None
    ) -> dict[str, Any]: ...
    # what is kept in host memory is on the device meanwhile; `written`: and changes
    def present(self, *, written: bool = False) -> AbstractContextManager[None]: ...
    def load_sharded_state(self, state: dict[str, Any], *, weights_only: bool, only: Select | None) -> None: ...


def inspect(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in a model directory, name -> global shape, from its small files alone: no process group, seconds.

    Raises UserError when these cannot be read, or a file is missing or shorter than they say.
    """
    metadata = pickles.read_metadata(directory)
    pickles.read(directory / "common.pt")
    try:
        json.loads((directory / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{directory / 'metadata.json'}: damaged ({error}); {checksums.DAMAGED}")
    try:
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        tensors = {
            name: tuple(entry.size)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except (AttributeError, TypeError) as error:
        raise UserError(f"{directory / '.metadata'}: damaged ({error}); {checksums.DAMAGED}")
    for name, end in sorted(ends.items()):
        path = directory / name
        if path.parent != directory:
            raise UserError(f"{directory / '.metadata'}: points outside the directory, to {name}; {checksums.DAMAGED}")
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} of {end} bytes"
            raise UserError(f"{path}: {what}: {checksums.DAMAGED}")
    return tensors


def load(
    model: Saveable, directory: Path, *, weights_only: bool, fresh: tuple[str, ...] = (), only: Select | None = None
) -> None:
    """Read a model directory into `model`, written in any layout. Collective. `weights_only`: without the optimizer
    and the count of updates. Only the weights that `only` admits are read (default: those that the model's checkpoints
    hold), and none whose names begin with one of `fresh`: a new head on a trained trunk.

    Raises UserError, on all ranks alike, for a damaged file, and when the files do not hold what the model needs.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

    from megarlhf.checkpoint import strategies

    watchdog.phase("check files")
    verify_files(directory)
    watchdog.phase("load")
    if fresh:
        admitted = only

        def only(name: str) -> bool:
            return not name.startswith(fresh) and (admitted is None or admitted(name))

    with model.present(written=True):
        state = model.sharded_state(loading=True, weights_only=weights_only, only=only)
        try:
            strategy = FullyParallelLoadStrategyWrapper(strategies.LoadStrategy(), model.topology.groups.dp_cp)
            loaded = dist_checkpointing.load(state, str(directory), strategy, strategies.LoadCommonStrategy())
        except UserError:
            raise
        # a wrong value in the files can raise many types of errors
        except (CheckpointException, CheckpointingException, Exception) as error:
            raise UserError(f"{directory}: cannot be loaded ({reason(error)}); use another checkpoint")
        model.load_sharded_state(loaded, weights_only=weights_only, only=only)


def verify_files(directory: Path) -> None:
    """Compare the files of a model directory, and the small ones of the checkpoint around it, with their checksums.
    Each rank reads its share. Collective. Raises UserError, on all ranks alike."""
    raise_together(checksums.damage(directory, rank=dist.get_rank(), size=dist.get_world_size()))
    failure = None
    if dist.get_rank() == 0:
        try:
            inspect(directory)
            if checksums.find(directory) is None:
                console.say(f"  {checksums.missing(directory)}")
        except UserError as error:
            failure = str(error)
    raise_together(failure)


def raise_together(failure: str | None) -> None:
    """Raise a UserError on all ranks if any has a `failure`; its text is that of the first such rank. Collective."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failure)
    if any(everyone):
        raise UserError(next(filter(None, everyone)))


def reason(error: BaseException) -> str:
    """The failure itself, of the first rank that had one, without torch's collected tracebacks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = min(failures.items())
        return f"rank {rank}: {reason(error)}"
    if isinstance(error, EOFError):
        return "a file ends too early"
    return f"{type(error).__name__}: {str(error)[:300]}"
