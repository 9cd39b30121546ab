"""The contents of a checkpoint as text, for Hugging Face directories and for checkpoints of megarlhf."""

from __future__ import annotations

from pathlib import Path

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.convert import huggingface, registry, torch_dist
from megarlhf.convert.storage import Spec
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import FILE, Architecture


def inspect(source: Path, role: str = "actor") -> str:
    if (source / huggingface.CONFIG).is_file() and not (source / FILE).is_file():
        return _huggingface(source)
    model = find_model(source, role)
    architecture = Architecture.load(model)
    stored = torch_dist.Reader(model, architecture.vocab_size).stored
    state = {key: spec for key, spec in stored.items() if torch_dist.STATE.match(key)}
    lines = [f"{model}: a model of megarlhf (megatron torch_dist)", f"tokenizer: {find_tokenizer(source) or 'none'}"]
    lines += _architecture(architecture) + _table({key: spec for key, spec in stored.items() if key not in state})
    if state:
        lines.append(f"beside the weights: {_total(state)} of training state")
    return "\n".join(lines)


def _huggingface(source: Path) -> str:
    path = source / huggingface.CONFIG
    config = huggingface.read_json(path)
    lines = [f"{source}: a Hugging Face model of type '{config.get('model_type')}'"]
    lines.append(f"tokenizer: {', '.join(map(str, huggingface.tokenizer_files(source))) or 'none'}")
    try:
        lines += _architecture(registry.read_config(config, str(path)))
    except UserError as error:  # the tensors are worth a look all the same
        lines.append(f"cannot be converted: {error}")
    return "\n".join(lines + _table(huggingface.Reader(source).specs))


def _architecture(architecture: Architecture) -> list[str]:
    return [f"  {key}: {value}" for key, value in configuration.to_dict(architecture).items()]


def _table(specs: dict[str, Spec]) -> list[str]:
    cells = [("tensor", "dtype", "shape", "bytes")]
    cells += [(key, str(spec.dtype)[6:], str(list(spec.shape)), f"{spec.nbytes:,}") for key, spec in specs.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in cells]
    return [*lines, f"total: {_total(specs)}"]


def _total(specs: dict[str, Spec]) -> str:
    numel, nbytes = sum(spec.numel for spec in specs.values()), sum(spec.nbytes for spec in specs.values())
    return f"{len(specs)} tensors, {numel:,} numbers, {nbytes:,} bytes"
