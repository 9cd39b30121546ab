"""torch.save files read safely: a pickle can run any code that it names, so only names of an allow-list are resolved.

Real checkpoints hold more than tensors: BytesIO (TransformerEngine's extra state), Namespace (Megatron's arguments),
objects of megatron, NeMo, numpy and Lightning. Objects of those packages become inert stubs and nothing is imported;
any other name is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

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
STUBBED = ("megatron", "nemo", "nemo_aligner", "numpy", "transformer_engine", "apex", "lightning", "pytorch_lightning",
           "omegaconf")  # fmt: skip


class Stub:
    """Stands for an object of a package that conversion does not need; swallows whatever it is made of."""

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

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module.split(".")[0] in STUBBED:
            return Stub
        raise UserError(f"refused: the file asks for {module}.{name}, which no checkpoint needs")


def load(file, **options) -> Any:
    return Unpickler(file, **options).load()


class _Module:
    """What torch.load wants as its `pickle_module`."""

    __name__ = "tools.convert.pickles"
    Unpickler = Unpickler
    load = staticmethod(load)


def read(path: Path) -> Any:
    """What torch.save wrote to `path`. Tensors are mapped, not read (files older than torch 1.6 are read)."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.split("/")[1:2] == ["constants.pkl"] for name in archive.namelist()):
                    raise UserError("holds TorchScript code, not weights")
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Module, mmap=True)
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Module)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore the file")
    except UserError as error:
        raise UserError(f"{path}: {error}")
    except Exception as error:  # a damaged file raises nearly anything
        raise UserError(f"{path}: damaged ({type(error).__name__}: {str(error).splitlines()[0][:200]}); copy it again")
