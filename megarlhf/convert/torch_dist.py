"""megatron-core's "torch_dist" checkpoints, without megatron and without process groups.

They are torch.distributed.checkpoint (DCP) directories: `.metadata` is a pickled index, `__*.distcp` hold every chunk
as a torch.save blob. Megatron stacks the layers of a model: `decoder.layers.3.mlp.linear_fc2.weight` is slice 3 of the
key `decoder.layers.mlp.linear_fc2.weight`; and behind the layers the experts: expert 5's `linear_fc1` of layer 3 is
slice (3, 5). Reader and Writer speak of single layers and experts, the directories of stacked keys.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo  # private, but what `.metadata` of every DCP holds
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from megarlhf.checkpoint import pickles, zips
from megarlhf.checkpoint.checksums import Checksum, HashedFile, without_crc
from megarlhf.config import UserError
from megarlhf.convert.storage import Spec, flush, reserve
from megarlhf.models.spec import VOCABULARY

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
          "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
FILE_BYTES = 1_000_000_000  # the unit that a process writes when several convert together
# What training keeps in the same files beside the weights.
STATE = re.compile(r"optimizer|chained_|rng_state|rerun_state|.*_extra_state")
EMBEDDING = "embedding.word_embeddings.weight"
LAYER = re.compile(r"(decoder\.layers)\.(\d+)(\..+)")
EXPERT = re.compile(r"(.*\.mlp\.experts\.experts)\.(\d+)(\..+)")
EXPERTS = ".mlp.experts.experts."
MAX_LAYERS = 1_000_000  # times experts; far more than any model has


def stored_as(name: str) -> tuple[str, tuple[int, ...]]:
    """(key, place in its stack) of a single tensor's name; the place is (layer,), (layer, expert), or () outside the
    layers."""
    place: list[int] = []
    for pattern in (LAYER, EXPERT):
        match = pattern.fullmatch(name)
        if match:
            name = match[1] + match[3]
            place.append(int(match[2]))
    return name, tuple(place)


class Reader:
    """The weights of a torch_dist directory, by per-layer name, read one at a time."""

    def __init__(self, directory: Path, vocab_size: int | None):
        self.directory = directory
        self._metadata = pickles.read_metadata(directory)
        self._check_files()
        self.stored = {key: Spec(tuple(entry.size), entry.properties.dtype)
                       for key, entry in self._metadata.state_dict_metadata.items()
                       if isinstance(entry, TensorStorageMetadata)}  # fmt: skip
        self.specs: dict[str, Spec] = {}
        self.ignored: list[str] = []
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}  # name -> key, slice
        # NeMo 1 puts "model." in front of its keys, NeMo 2 "module."
        prefix = next((key.removesuffix(EMBEDDING) for key in self.stored
                       if key.endswith(EMBEDDING) and not STATE.match(key)), "")  # fmt: skip
        for key, spec in self.stored.items():
            if STATE.match(key) or key.endswith("rotary_pos_emb.inv_freq"):
                self.ignored.append(key)
                continue
            name = re.sub(r"^rm_head\.", "value_head.", key.removeprefix(prefix))  # NeMo-Aligner's reward models
            if name.startswith("decoder.layers.") and not LAYER.fullmatch(name):
                rest = name.removeprefix("decoder.layers")
                depth = 2 if EXPERTS in rest else 1
                if len(spec.shape) < depth or math.prod(spec.shape[:depth]) > MAX_LAYERS:
                    raise UserError(f"{directory}: '.metadata' says that '{key}' is {list(spec.shape)}, which no model "
                                    "has; copy the checkpoint again")  # fmt: skip
                for place in itertools.product(*map(range, spec.shape[:depth])):
                    single = f"decoder.layers.{place[0]}{rest}"
                    if depth == 2:
                        single = single.replace(EXPERTS, f"{EXPERTS}{place[1]}.")
                    self.specs[single] = Spec(spec.shape[depth:], spec.dtype)
                    self._places[single] = (key, place)
                continue
            if name in VOCABULARY and vocab_size is not None and spec.shape[0] > vocab_size:
                spec = Spec((vocab_size, *spec.shape[1:]), spec.dtype)
            self.specs[name] = spec
            self._places[name] = (key, ())

    def read(self, name: str) -> Tensor:
        spec = self.specs[name]
        key, place = self._places[name]
        wanted = _chunk(place, spec)
        items = create_read_items_for_chunk_list(key, self._metadata.state_dict_metadata[key], [wanted])
        if sum(item.lengths.numel() for item in items) != spec.numel:
            raise UserError(f"{self.directory}: parts of tensor '{name}' are missing; the checkpoint is incomplete")
        tensor = None
        try:
            for item in items:
                part = self._load(item)
                if part.shape == wanted.sizes:  # the whole, as this converter writes it: no copy
                    tensor = part
                    break
                tensor = torch.empty(wanted.sizes, dtype=spec.dtype) if tensor is None else tensor
                _part(tensor, item.dest_offsets, item.lengths).copy_(part)
        except UserError:
            raise
        except Exception as error:  # a damaged file raises nearly anything
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"{self.directory}: tensor '{name}' is damaged ({said}); copy it again")
        return tensor.view(spec.shape)

    def _load(self, item: ReadItem) -> Tensor:
        info = self._metadata.storage_data[item.storage_index]
        with open(self.directory / info.relative_path, "rb") as file:
            zips.verify_members(file, info.offset, info.length)
            blob = _create_file_view(file, info.offset, info.length)
            return _part(torch.load(blob, map_location="cpu", weights_only=True), item.storage_offsets, item.lengths)

    def _check_files(self) -> None:
        """Check that everything in `.metadata` exists; otherwise a damaged file could cause lists of any length."""
        sizes: dict[str, int] = {}
        for index, info in self._metadata.storage_data.items():
            file = self.directory / info.relative_path
            if file.parent != self.directory:
                raise UserError(f"{self.directory}: '.metadata' points outside the directory, to {info.relative_path}")
            if file.name not in sizes:
                sizes[file.name] = file.stat().st_size if file.is_file() else 0
            if info.offset + info.length > sizes[file.name]:
                raise UserError(
                    f"{file}: {'ends within' if file.is_file() else 'is missing; it holds'} '{index.fqn}'; "
                    "copy the checkpoint again"
                )
        held = sum(sizes.values())
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and entry.size.numel() * entry.properties.dtype.itemsize > held:
                raise UserError(
                    f"{self.directory}: '.metadata' says that '{key}' is {list(entry.size)}, but all files together "
                    f"have {held} bytes; copy the checkpoint again"
                )


class Writer:
    """Writes `specs` as a torch_dist directory with files of about FILE_BYTES. Which tensor stands in which file
    follows from the specs; within a file the order of the calls counts, so one process writes all of it, in order."""

    def __init__(self, directory: Path, specs: dict[str, Spec]):
        self.directory = directory
        self._specs = specs
        self.checksums: dict[str, Checksum] = {}  # by file, of this process; after `finish` of all
        self._file: BinaryIO | None = None
        self._hashed: HashedFile | None = None
        self._units: dict[str, int] = {}
        self._written: dict[str, tuple[int, int]] = {}  # offset and length in the file
        self._entries: dict[str, TensorStorageMetadata] = {}
        stacks: dict[str, tuple[int, ...]] = {}  # how many of each key there are
        for name in specs:
            key, place = stored_as(name)
            stacks[key] = tuple(max(i + 1, n) for i, n in zip(place, stacks.get(key, place), strict=True))
        unit, size = 0, 0
        for name, spec in specs.items():
            if size >= FILE_BYTES:
                unit, size = unit + 1, 0
            self._units[name] = unit
            size += spec.nbytes
            key, _ = stored_as(name)
            shape = torch.Size((*stacks[key], *spec.shape))
            entry = TensorStorageMetadata(TensorProperties(dtype=spec.dtype), shape, [])
            if self._entries.setdefault(key, entry).properties.dtype != spec.dtype:
                raise UserError(f"the layers of '{key}' have different dtypes in the source; choose one with --dtype")

    def unit(self, name: str) -> int:
        return self._units[name]

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self._specs[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype) and name not in self._written, name
        tensor = tensor.reshape(_chunk(stored_as(name)[1], spec).sizes).contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save writes the whole storage of a view
        path = self.directory / f"__0_{self._units[name]}.distcp"
        if self._file is None or self._file.name != str(path):
            self.close()
            self._file = open(path, "wb")  # noqa: SIM115 (kept open for the tensors that follow)
            unit = self._units[name]
            reserve(self._file, sum(self._specs[other].nbytes for other in self._specs if self._units[other] == unit))
            self._hashed = HashedFile(self._file)
        start = self._hashed.tell()
        with without_crc():
            torch.save(tensor, self._hashed)
        flush(self._file, start)
        self._written[name] = (start, self._hashed.tell() - start)

    def close(self) -> tuple[dict[str, tuple[int, int]], dict[str, Checksum]]:
        """Close the open file. Returns a record of this process's files, for `finish`."""
        if self._file is not None:
            self._file.truncate()
            self._file.close()
            self.checksums[Path(self._file.name).name] = self._hashed.checksum()
            self._file = None
        return self._written, self.checksums

    def finish(self, written: list[tuple[dict[str, tuple[int, int]], dict[str, Checksum]]]) -> None:
        """Complete the directory from the records of all processes."""
        places = {name: place for part, _ in written for name, place in part.items()}
        self.checksums = {name: checksum for _, part in written for name, checksum in part.items()}
        assert places.keys() == self._specs.keys(), self._specs.keys() - places.keys()
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, spec in self._specs.items():
            key, place = stored_as(name)
            chunk = _chunk(place, spec)
            self._entries[key].chunks.append(chunk)
            storage[MetadataIndex(key, chunk.offsets)] = _StorageInfo(f"__0_{self._units[name]}.distcp", *places[name])
        torch.save({}, self.directory / "common.pt")
        (self.directory / "metadata.json").write_text(json.dumps(FORMAT))
        (self.directory / ".metadata").write_bytes(pickle.dumps(Metadata(self._entries, storage_data=storage)))


def _chunk(place: tuple[int, ...], spec: Spec) -> ChunkStorageMetadata:
    """The position of the tensor at `place` in the whole stack."""
    offsets, sizes = (*place, *(0 for _ in spec.shape)), (*(1 for _ in place), *spec.shape)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _part(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
