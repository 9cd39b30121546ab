"""Hugging Face model directories: config.json, safetensors in one file or in shards with an index, tokenizer files.

This module reads and writes the safetensors format without its library. The library maps whole files (so the memory of
a process grows by their size), accepts a header that has a name twice, and writes only files whose tensors are all in
memory. The format: 8 bytes with the header's length, a JSON header {name: {dtype, shape, data_offsets}}, the bytes of
the tensors.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megarlhf.checkpoint import pickles
from megarlhf.config import UserError
from megarlhf.convert import storage
from megarlhf.convert.storage import SHARD_BYTES, Spec

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
             "*.tiktoken", "chat_template*", "additional_chat_templates/*")  # fmt: skip
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
          "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = _parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {path.parent} a Hugging Face model directory?")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); restore the file from its source")
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; restore the file from its source")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's files in `directory`, relative to it."""
    found = {path for pattern in TOKENIZER for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(directory) for path in found)


@dataclass(frozen=True)
class _Record:
    file: Path
    offset: int


class Reader:
    """The tensors of a model directory, read one at a time."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.specs: dict[str, Spec] = {}
        self._records: dict[str, _Record | Tensor] = {}
        if (directory / INDEX).is_file():
            self._open_index(directory / INDEX, self._open)
            if (directory / SINGLE).is_file() and SINGLE not in {record.file.name for record in self._records.values()}:
                raise UserError(
                    f"{directory}: holds a model in {SINGLE} and another in the shards of {INDEX}; transformers takes "
                    "the former, older programs the latter: remove one"
                )
        elif (directory / SINGLE).is_file():
            self._open(directory / SINGLE)
        elif (directory / f"{BIN}.index.json").is_file():
            self._open_index(directory / f"{BIN}.index.json", self._open_bin)
        elif (directory / BIN).is_file():
            self._open_bin(directory / BIN)
        else:
            raise UserError(f"{directory}: holds neither {SINGLE}, {INDEX} nor {BIN}; give a Hugging Face directory")

    def add_prefix(self, prefix: str) -> None:
        """Put `prefix` in front of all names, for files of the bare model."""
        self.specs = {prefix + name: spec for name, spec in self.specs.items()}
        self._records = {prefix + name: record for name, record in self._records.items()}

    def read(self, name: str) -> Tensor:
        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        record = self._records[name]
        if isinstance(record, Tensor):
            tensor.copy_(record)
            return
        with open(record.file, "rb") as file:
            file.seek(record.offset)
            if file.readinto(_bytes(tensor)) != self.specs[name].nbytes:
                raise UserError(f"{record.file}: ends within tensor '{name}'; fetch the file again")

    def _open_index(self, path: Path, open_shard: Callable[[Path], None]) -> None:
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not all(_plain(name) for name in index.values()):
            raise UserError(f"{path}: 'weight_map' must map tensors to files beside it; restore the file")
        found: dict[str, str] = {}
        for file in sorted(set(index.values())):
            open_shard(path.parent / file)
            found |= {name: file for name in self.specs if name not in found}
        for name, file in index.items():
            if found.get(name) != file:
                raise UserError(f"{path}: tensor '{name}' is not in {file}; restore the missing shard")

    def _open_bin(self, path: Path) -> None:
        """A file of torch.save; its tensors are mapped, not read."""
        content = pickles.read(path, foreign=True)
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise UserError(f"{path}: holds more than tensors by name; save the model again with save_pretrained")
        for name, tensor in content.items():
            if name in self.specs:
                raise UserError(f"{path}: tensor '{name}' also stands in another shard; remove one")
            self.specs[name] = Spec(tuple(tensor.shape), tensor.dtype)
            self._records[name] = tensor

    def _open(self, path: Path) -> None:
        damaged = f"{path}: not a complete safetensors file"
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if 8 + length > size:
                    raise ValueError(f"the header alone would take {length} bytes")
                header = _parse(file.read(length))
            end = 0
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
                self._add(path, name, entry, 8 + length, size)
                if entry["data_offsets"][0] != end:
                    raise ValueError(f"tensor '{name}' begins at {entry['data_offsets'][0]} instead of {end}")
                end = entry["data_offsets"][1]
            if 8 + length + end != size:
                raise ValueError(f"{size - 8 - length - end} bytes belong to no tensor")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); restore the missing shard")
        except UserError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise UserError(f"{damaged} ({error}); fetch it again")

    def _add(self, path: Path, name: str, entry: dict[str, Any], start: int, size: int) -> None:
        begin, end = entry["data_offsets"]
        spec = Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        if name in self.specs:
            raise UserError(f"{path}: tensor '{name}' also stands in {self._records[name].file.name}; remove one")
        if end - begin != spec.nbytes:
            raise UserError(
                f"{path}: tensor '{name}' has {end - begin} bytes, its shape needs {spec.nbytes}; fetch it again"
            )
        if begin < 0 or start + end > size:
            raise UserError(
                f"{path}: ends within tensor '{name}' ({size} bytes of {start + end}); fetch the file again"
            )
        self.specs[name] = spec
        self._records[name] = _Record(path, start + begin)


class Writer:
    """Writes `specs` as safetensors shards of at most `limit` bytes (one tensor may be larger), in any order."""

    def __init__(self, directory: Path, specs: dict[str, Spec], limit: int = SHARD_BYTES):
        self.directory = directory
        self._specs = specs
        self._records: dict[str, _Record] = {}
        self._file: BinaryIO | None = None
        self._written: list[str] = []
        self._headers: dict[Path, bytes] = {}
        shards: list[dict[str, Spec]] = [{}]
        for name, spec in specs.items():
            if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + spec.nbytes > limit:
                shards.append({})
            shards[-1][name] = spec
        for number, shard in enumerate(shards, 1):
            single = len(shards) == 1
            self._lay_out(
                directory / (SINGLE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"), shard
            )

    def create(self) -> None:
        """Write the headers; the tensors follow from any process in any order."""
        for path, header in self._headers.items():
            ends = [record.offset + self._specs[name].nbytes for name, record in self._records.items()
                    if record.file == path]  # fmt: skip
            with open(path, "wb") as file:
                file.write(header)
                storage.reserve(file, max(ends))

    def unit(self, name: str) -> str:
        return name

    def write(self, name: str, tensor: Tensor) -> None:
        record, spec = self._records[name], self._specs[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype) and name not in self._written, name
        if self._file is None or self._file.name != str(record.file):
            self.close()
            self._file = open(record.file, "r+b")  # noqa: SIM115 (kept open for the tensors that follow)
        self._file.seek(record.offset)
        self._file.write(_bytes(tensor.contiguous()))
        storage.flush(self._file, record.offset)
        self._written.append(name)

    def close(self) -> list[str]:
        """Close the open file. Returns a record of this process's files, for `finish`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._written

    def finish(self, written: list[list[str]]) -> None:
        """Complete the directory from the records of all processes."""
        assert sorted(name for part in written for name in part) == sorted(self._specs)
        files = {name: record.file.name for name, record in self._records.items()}
        if set(files.values()) != {SINGLE}:
            total = sum(spec.nbytes for spec in self._specs.values())
            write_json(self.directory / INDEX, {"metadata": {"total_size": total}, "weight_map": files})

    def _lay_out(self, path: Path, shard: dict[str, Spec]) -> None:
        """The header: offsets follow from the specs. Wider dtypes come first, so all tensors are aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
            begin, end = end, end + spec.nbytes
            header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._headers[path] = struct.pack("<Q", len(text)) + text
        for name in shard:
            self._records[name] = _Record(path, 8 + len(text) + header[name]["data_offsets"][0])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def _plain(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^/\\]+", name) is not None and name not in (".", "..")


def _parse(text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' stands twice in it")
        return out

    return json.loads(text, object_pairs_hook=unique)
