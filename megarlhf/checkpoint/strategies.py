"""megatron-core's strategies that save and load torch_dist directories, with parts of our own.

Writing: every file is hashed while it is written. A synchronous save writes with threads, an asynchronous one in one
forked process, which is killed when its rank ends; each save has its own queue of results. (Megatron's writer forks
for every file, leaves these processes behind when a rank is killed, and has one queue for the results of all saves, so
that two models saved together can get each other's.)

Reading: only names that `pickles` allows are unpickled. (Megatron and torch unpickle any name in `.metadata` and in the
objects among the tensors.)
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import io
import os
import pickle
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from megarlhf.checkpoint import checksums, pickles
from megarlhf.checkpoint.checksums import Checksum, HashedFile

_FORMAT = {}  # torch 2.7 writes other formats too
if "serialization_format" in inspect.signature(dcp._write_item).parameters:
    _FORMAT["serialization_format"] = dcp.SerializationFormat.TORCH_SAVE


@contextlib.contextmanager
def _replaced(module: ModuleType, **ours: Any) -> Iterator[None]:
    """Within the context, our objects replace attributes of `module`."""
    theirs = {name: getattr(module, name) for name in ours}
    for name, value in ours.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in theirs.items():
            setattr(module, name, value)


# --------------------------------------------------------------------------------------------------- writing


class SaveStrategy(torch_dist.TorchDistSaveShardedStrategy):
    """For one save of one model. `checksums`: on rank 0, once the save is finalised, of each file by name."""

    def __init__(self):
        super().__init__("torch_dist", 1)
        self.checksums: dict[str, Checksum] = {}

    def async_save(self, sharded_state_dict, checkpoint_dir):
        with (
            _replaced(torch_dist, FileSystemWriterAsync=partial(_Writer, checksums=self.checksums)),
            _replaced(filesystem_async, _get_write_results_queue=_Results),
        ):
            return super().async_save(sharded_state_dict, checkpoint_dir)


class _Results:
    """The results of one save, from the process that writes; they are read after it has ended. A file in memory, so
    that writing any amount does not wait for a reader."""

    def __init__(self):
        self.rank_pid = os.getpid()
        self._file = open(os.memfd_create("results of a save"), "w+b")  # noqa: SIM115, it lives as long as the save

    def put(self, results: Any) -> None:
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty  # the writer was killed
        finally:
            self._file.close()


@dataclass(frozen=True)
class _LastResult(WriteResult):
    """The last result of a file, which carries the checksum of the file to rank 0."""

    checksum: Checksum


class _Writer(filesystem_async.FileSystemWriterAsync):
    def __init__(self, *args, checksums: dict[str, Checksum], **options):
        super().__init__(*args, **options)
        self.checksums = checksums

    @staticmethod
    def write_preloaded_data_multiproc(transforms, use_msc, rank, write_buckets, results: _Results) -> None:
        """Write the files of this rank; the name is megatron's, which calls it in the rank or in a forked process."""
        if os.getpid() != results.rank_pid:
            _end_with(results.rank_pid)
            gc.disable()  # it could free tensors of the rank's GPU
        try:
            with checksums.without_crc(), ThreadPoolExecutor(len(write_buckets)) as pool:
                written = list(pool.map(partial(_write_file, transforms), write_buckets))
        except Exception as error:
            results.put(error)
        else:
            results.put(dict(enumerate(written)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for result in (result for part in results for result in part if isinstance(result, _LastResult)):
            self.checksums[result.storage_data.relative_path] = result.checksum


def _write_file(transforms: list, bucket: filesystem_async.WriteBucket) -> list[WriteResult]:
    path, name, (objects, tensors) = bucket
    with open(path, "wb") as file:
        hashed = HashedFile(file)
        results = [
            dcp._write_item(*transforms, hashed, data, item, name, **_FORMAT) for item, data in (*objects, *tensors)
        ]
        file.flush()
        os.fsync(file.fileno())
    return [*results[:-1], _LastResult(**vars(results[-1]), checksum=hashed.checksum())]


def _end_with(rank_pid: int) -> None:
    """Have this process, which the rank's main thread forked, killed when the rank ends. Ignore the signals that ask a
    whole job for a save: the rank handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != rank_pid:  # the rank ended before that call
        os._exit(1)


# --------------------------------------------------------------------------------------------------- reading


class LoadStrategy(torch_dist.TorchDistLoadShardedStrategy):
    def load(self, sharded_state_dict, checkpoint_dir):
        with _replaced(
            torch_dist,
            _get_filesystem_reader=lambda directory, cache_metadata=False: _Reader(directory),
            MCoreLoadPlanner=_Planner,
        ):
            return super().load(sharded_state_dict, checkpoint_dir)


class LoadCommonStrategy(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir):
        return pickles.read(Path(checkpoint_dir) / COMMON_STATE_FNAME)


class _Reader(FileSystemReader):
    _metadata: Metadata | None = None

    def read_metadata(self, *_, **__) -> Metadata:
        self._metadata = self._metadata or pickles.read_metadata(Path(self.path))
        return self._metadata


class _Planner(torch_dist.MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name, value = read_item.dest_index.fqn, pickles.read_object(value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], value)
        else:
            self.state_dict[name] = value
