"""The table of families, and functions of it: architectures, shapes on both sides, steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.convert.families import (
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    starcoder2,
)
from megarlhf.convert.mapping import Family, Row
from megarlhf.convert.storage import understood
from megarlhf.models.spec import Architecture, Shape

# A scalar head's tensors beside its weight, with what they are where the source has none (megarlhf/models/heads.py).
CONSTANTS = {"value_head.bias": 0.0, "value_head.reward_gain": 1.0, "value_head.reward_bias": 0.0}
SCORE = "score.weight"
LARGEST = 1 << 31  # of the numbers in an architecture; beyond it, sizes of tensors overflow
FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, olmo2, granite, glm4, starcoder2, gpt2, gpt_neox,
        falcon, mixtral, qwen2_moe, qwen3_moe,
    )
}  # fmt: skip
# Families that people bring and that megarlhf lacks: what they would need.
MISSING = {
    "gemma3": "it has a vision tower; convert a checkpoint of its text model alone (model_type gemma3_text)",
    "jamba": "layers with a state space instead of attention need a kernel of their own in training, and a state "
    "instead of keys and values in the sampler",
    "mamba": "layers with a state space instead of attention need a kernel of their own in training, and a state "
    "instead of keys and values in the sampler",
    "bloom": "ALiBi needs a bias on the scores in every attention kernel",
    "mpt": "ALiBi needs a bias on the scores in every attention kernel",
    "deepseek_v3": "latent attention needs its own projections, cache and kernels",
    "cohere2": "layers without positions, and parallel residuals with windows, are not described",
    "llama4": "layers without positions, chunked attention and a vision tower are not described",
}
MISSING |= dict.fromkeys(("mamba2", "falcon_mamba"), MISSING["mamba"])
MISSING |= dict.fromkeys(("bamba", "zamba2", "nemotron_h", "falcon_h1", "qwen3_next"), MISSING["jamba"])
MISSING["deepseek_v2"] = MISSING["deepseek_v3"]


@dataclasses.dataclass(frozen=True)
class Step:
    """Read `inputs`, convert, write `outputs`: the unit in which checkpoints stream."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def family(name: str, where: str) -> Family:
    if name in MISSING:
        raise UserError(f"{where}: model family '{name}' is not supported: {MISSING[name]}")
    if name not in FAMILIES:
        raise UserError(f"{where}: model family '{name}' is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def read_config(config: dict[str, Any], where: str, ignore: Collection[str] = ()) -> Architecture:
    """The architecture that a Hugging Face config.json describes; UserError for what we could not run exactly. `ignore`
    names keys that the family does not know and that the user vouches for."""
    kind = family(str(config.get("model_type")), where)
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{where}: quantization_config: quantised weights cannot be converted; convert the original model (if the "
            "weights were expanded again, remove the key)"
        )
    with understood(where):
        kind.keys.check({key: value for key, value in config.items() if key != "quantization_config"}, ignore)
        return describe(kind.name, kind.from_config(config), where)


def describe(family: str, fields: dict[str, Any], where: str) -> Architecture:
    """The architecture with these fields; UserError if they do not describe a model."""
    with understood(where):
        for key, value in fields.items():
            if isinstance(value, int) and value > LARGEST:
                raise ValueError(f"{key}: {value} is more than any model has; restore the file")
        return configuration.from_dict(Architecture, {"family": family, **fields}, where)


def write_config(architecture: Architecture, where: str) -> dict[str, Any]:
    """The part of a Hugging Face config.json that `architecture` determines; UserError if the family cannot say it."""
    kind = family(architecture.family, where)
    config = {"model_type": kind.name, **kind.to_config(architecture)}
    said = _normal(read_config(config, where))
    for key, value in _normal(architecture).items():
        if said[key] != value:
            raise UserError(
                f"{where}: a Hugging Face '{kind.name}' model has {key} {said[key]} and cannot have {value}"
            )
    return config


def _normal(architecture: Architecture) -> dict[str, Any]:
    """Fields with the defaults filled in that depend on other fields."""
    fields = dict(head_dim=architecture.kv_channels, qkv_bias=architecture.qkv_bias or architecture.linear_bias)
    return configuration.to_dict(dataclasses.replace(architecture, **fields))


def expand(architecture: Architecture) -> list[Row]:
    """The family's table with `{i}` written out: first the rows outside the layers, then layer by layer."""
    table = FAMILIES[architecture.family].rows(architecture)
    rows = [row for row in table if "{i}" not in row.ours]
    for i in range(architecture.num_layers):
        for row in table:
            if "{i}" in row.ours:
                theirs = tuple(name.replace("{i}", str(i)) for name in row.theirs)
                rows.append(Row(theirs, row.ours.replace("{i}", str(i)), row.pair))
    assert sorted(row.ours for row in rows) == sorted(architecture.shapes())
    return rows


def our_shapes(architecture: Architecture, scalar: bool = False) -> dict[str, Shape]:
    """The shape of every weight of ours; with `scalar` of the model that has a scalar head instead of the output
    layer."""
    ours = architecture.shapes()
    if scalar:
        ours.pop("output_layer.weight", None)
        ours |= {"value_head.weight": (1, architecture.hidden_size), **{name: (1,) for name in CONSTANTS}}
    return ours


def their_shapes(architecture: Architecture, scalar: bool = False) -> dict[str, Shape]:
    """The shape of every weight of theirs; they follow from ours through the table."""
    ours = architecture.shapes()
    theirs: dict[str, Shape] = {}
    for row in _rows(architecture, scalar):
        parts = row.pair.to_theirs(torch.empty(ours[row.ours], device="meta"))
        for name, part in zip(row.theirs, parts, strict=True):
            assert name not in theirs, name
            theirs[name] = tuple(part.shape)
    return theirs | ({SCORE: (1, architecture.hidden_size)} if scalar else {})


def steps_to_ours(architecture: Architecture, scalar: bool = False, offset: float = 0.0) -> list[Step]:
    steps = [
        Step(row.theirs, (row.ours,), lambda tensors, pair=row.pair: [pair.to_ours(tensors)])
        for row in _rows(architecture, scalar)
    ]
    if scalar:
        steps.append(Step((SCORE,), ("value_head.weight",), lambda tensors: tensors))
        steps += [constant(name, offset if name == "value_head.bias" else CONSTANTS[name]) for name in CONSTANTS]
    return steps


def steps_to_theirs(architecture: Architecture, scalar: bool = False) -> list[Step]:
    steps = [
        Step((row.ours,), row.theirs, lambda tensors, pair=row.pair: pair.to_theirs(tensors[0]))
        for row in _rows(architecture, scalar)
    ]
    if scalar:

        def fold(tensors: Sequence[Tensor]) -> list[Tensor]:
            weight, _, gain, _ = tensors
            if weight.is_meta or gain.item() == 1:  # only the shape is needed; or the bits do not change
                return [weight]
            return [weight.float() * gain.float()]

        steps.append(Step(("value_head.weight", *CONSTANTS), (SCORE,), fold))
    return steps


def constant(name: str, value: float) -> Step:
    return Step((), (name,), lambda _: [torch.full((1,), value)])


def _rows(architecture: Architecture, scalar: bool) -> list[Row]:
    return [row for row in expand(architecture) if not (scalar and row.ours == "output_layer.weight")]


def choose_family(architecture: Architecture) -> Architecture:
    """The architecture with a family whose table can express it, because Megatron's files name none. A model without a
    family can be trained but not exported."""
    for name in FAMILIES:
        candidate = dataclasses.replace(architecture, family=name)
        try:
            write_config(candidate, "")
        except (UserError, AttributeError, KeyError):
            continue
        return candidate
    return architecture
