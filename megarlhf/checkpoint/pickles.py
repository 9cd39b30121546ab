"""Pickles read safely, in training and in conversions: a pickle can run any code that it names, so only names of an
allow-list are resolved.

Our own checkpoints hold tensors and plain values. Those of others hold more: BytesIO (TransformerEngine's extra state),
Namespace (Megatron's arguments), objects of megatron, NeMo, numpy and Lightning. For conversions, objects of those
packages become inert stubs and nothing is imported; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megarlhf.checkpoint import zips
from megarlhf.config import UserError

_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
ALLOWED = {
    "collections": {"OrderedDict", "defaultdict"},
    "argparse": {"Namespace"},
    "_io": {"BytesIO"},
    "builtins": {"set", "frozenset", "bytearray", "slice", "complex", "range", "dict", "list", "int", "float", "bool"},
    "_codecs": {"encode"},  # how bytes are pickled by protocol 2
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "device", "Tensor", *_DTYPES, *(f"{kind}Storage" for kind in (
        "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"))},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch.nn.parameter": {"Parameter"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
# The names that the index of a torch_dist directory may contain.
ALLOWED_IN_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
                                             "BytesIOWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
STUBBED = ("megatron", "nemo", "nemo_aligner", "numpy", "transformer_engine", "apex", "lightning", "pytorch_lightning",
           "omegaconf")  # fmt: skip


class Stub:
    """A placeholder for an object of a package that conversion does not need; ignores its arguments and state."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Stub()

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass


class Unpickler(pickle.Unpickler):
    """torch.load takes it as `pickle_module.Unpickler`."""

    allowed = ALLOWED
    stubbed: tuple[str, ...] = ()

    def find_class(self, module: str, name: str) -> Any:
        if name in self.allowed.get(module, ()):
            return super().find_class(module, name)
        if module.split(".")[0] in self.stubbed:
            return Stub
        raise UserError(f"refused: the file asks for {module}.{name}, which no checkpoint needs")


class _ForeignUnpickler(Unpickler):
    stubbed = STUBBED


class _MetadataUnpickler(Unpickler):
    allowed = ALLOWED_IN_METADATA


class _Module:
    """The `pickle_module` of torch.load."""

    __name__ = "megarlhf.checkpoint.pickles"

    def __init__(self, unpickler: type[Unpickler]):
        self.Unpickler = unpickler

    def load(self, file, **options) -> Any:
        return self.Unpickler(file, **options).load()


_OURS, _FOREIGN = _Module(Unpickler), _Module(_ForeignUnpickler)


def read(path: Path, *, foreign: bool = False) -> Any:
    """What torch.save wrote to `path`. Tensors are mapped, not read (files older than torch 1.6 are read). `foreign`:
    objects of other packages become stubs instead of being refused, and the CRCs of zip members are compared."""
    module = _FOREIGN if foreign else _OURS
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.split("/")[1:2] == ["constants.pkl"] for name in archive.namelist()):
                    raise UserError("holds TorchScript code, not weights")
            if foreign:  # our own files have checksums instead
                with open(path, "rb") as file:
                    zips.verify_members(file)
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module, mmap=True)
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore the file")
    except UserError as error:
        raise UserError(f"{path}: {error}")
    except Exception as error:  # a damaged file raises many types of errors
        raise UserError(f"{path}: damaged ({_reason(error)}); copy it again")


def read_object(content: io.BytesIO) -> Any:
    """The value that torch.save wrote into an object among the tensors of a torch_dist directory."""
    return torch.load(content, map_location="cpu", weights_only=False, pickle_module=_OURS)


def read_metadata(directory: Path) -> Metadata:
    """`.metadata`, the index of a torch_dist directory, which is a bare pickle."""
    path = directory / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {directory} a complete checkpoint?")
    except UserError as error:
        raise UserError(f"{path}: {error}")
    except Exception as error:  # a damaged pickle raises many types of errors
        raise UserError(f"{path}: damaged ({_reason(error)}); copy the checkpoint again")
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path}: holds a {type(metadata).__name__} instead of checkpoint metadata")
    return metadata


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
