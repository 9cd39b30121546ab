"""certificate.json beside a conversion's output: the tensors that were read and written, with their hashes.

It has no times and no paths, so the same conversion gives the same certificate on one process and on many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import UserError
from megarlhf.convert import huggingface
from megarlhf.convert.storage import Spec

FILE = "certificate.json"
VERSION = 1
WEIGHTS = (".distcp", ".safetensors")
NOT_CERTIFIED = (FILE, ".metadata", "checksums.json")

Hashes = dict[str, str]  # tensor name -> SHA-256 of its bytes in row-major order


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())).hexdigest()


def union(parts: Iterable[Hashes], names: Iterable[str], verb: str) -> Hashes:
    """Merge the hashes of all processes in the order of `names`; every name must occur exactly once."""
    out: Hashes = {}
    for part in parts:
        for name, value in part.items():
            if name in out:
                raise UserError(f"tensor '{name}' was {verb} twice; this is an error of the converter")
            out[name] = value
    wanted = list(names)
    for name in [*(set(wanted) - out.keys()), *(out.keys() - set(wanted))]:
        raise UserError(f"tensor '{name}' was not {verb} exactly once; this is an error of the converter")
    return {name: out[name] for name in wanted}


def entries(specs: dict[str, Spec], hashes: Hashes) -> dict[str, Any]:
    return {
        name: {"dtype": str(specs[name].dtype)[6:], "shape": list(specs[name].shape), "sha256": value}
        for name, value in hashes.items()
    }


def files(directory: Path) -> Hashes:
    """SHA-256 of every file in `directory` without tensors: configuration, tokenizer, architecture."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in NOT_CERTIFIED
    }


def compare_files(directory: Path, certified: Hashes) -> None:
    """Raise UserError for the first file that differs from its certificate, or that was added to the tokenizer."""
    found = files(directory)
    for name in [*certified, *found]:
        if found.get(name) != certified.get(name) and (name in certified or name.startswith("tokenizer")):
            what = "is missing" if name not in found else "was changed" if name in certified else "was added"
            raise UserError(f"{directory / name}: {what} after the conversion; convert again")


def load(directory: Path) -> dict[str, Any]:
    path = directory / FILE
    if not path.is_file():
        raise UserError(f"{directory}: has no {FILE}; give the target of a conversion")
    certificate = huggingface.read_json(path)
    if certificate.get("version") != VERSION or not _whole(certificate):
        raise UserError(f"{path}: not a certificate of this converter; convert again")
    return certificate


def _whole(certificate: dict[str, Any]) -> bool:
    sides = [certificate.get("source"), certificate.get("target")]
    if not all(isinstance(side, dict) and isinstance(side.get("tensors"), dict) for side in sides):
        return False
    entries = [entry for side in sides for entry in side["tensors"].values()]
    options, files = certificate.get("options", {}), certificate.get("files", {})
    return (
        all(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "sha256"} for entry in entries)
        and isinstance(certificate.get("command"), str)
        and isinstance(certificate.get("model"), str)
        and isinstance(files, dict)
        and isinstance(options, dict)
        and all(isinstance(options.get(key), (str, type(None))) for key in ("dtype", "role"))
        and isinstance(options.get("vocab_size"), (int, type(None)))
        and isinstance(options.get("ignore", []), list)
    )


def compare(what: str, where: str, certified: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise UserError for the first tensor in which `found` differs from `certified`."""
    for name in [*certified, *(found.keys() - certified.keys())]:
        if name not in found:
            raise UserError(f"{where}: {what} tensor '{name}' is in the certificate but not in the files")
        if name not in certified:
            raise UserError(f"{where}: {what} tensor '{name}' is not in the certificate")
        for key, value in certified[name].items():
            if found[name][key] != value:
                raise UserError(
                    f"{where}: {what} tensor '{name}' has {key} {found[name][key]}, certified was {value}; "
                    "the files were changed after the conversion, convert again"
                )
