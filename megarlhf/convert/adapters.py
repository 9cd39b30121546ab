"""Adapters: peft's directories (adapter_config.json, adapter_model.safetensors) <-> ours, and adapters merged into
their base for megatron2hf.

Ours have an A and a B for each projection (megarlhf/models/lora.py), as peft's: the tensors are copied, the As of one
layer one below the other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.convert import huggingface, registry, torch_dist
from megarlhf.convert.mapping import COPY
from megarlhf.convert.storage import Spec, completed, understood
from megarlhf.kernels import nf4
from megarlhf.models.adapters import Adapters
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.model_config import LINEARS, LoraConfig, projections
from megarlhf.models.spec import Architecture

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BLOCKS = {"linear_qkv": "self_attention", "linear_proj": "self_attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}
# Keys of adapter_config.json that say how adapters act on a model, with the values under which they act as ours.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "fan_in_fan_out": (False, None), "use_dora": (False, None),
    "lora_bias": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": (None, []),
    "layer_replication": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, []),
    "use_qalora": (False, None), "alora_invocation_tokens": (None, []), "use_bdlora": (None, False),
    "arrow_config": (None,), "monteclora_config": (None,),
}  # fmt: skip


def theirs(architecture: Architecture) -> dict[tuple[str, str], str]:
    """{(linear layer, projection): name of the family's module, with `{i}` for the layer}. UserError for a family that
    has no module for each projection."""
    if architecture.num_experts:
        raise UserError(
            f"peft: mixtures of experts ({architecture.family}) have no adapters here; merge them into the model with "
            "peft, and convert that"
        )
    rows = {row.ours: row for row in registry.FAMILIES[architecture.family].rows(architecture)}
    found = {}
    for linear, block in BLOCKS.items():
        row, parts = rows[f"decoder.layers.{{i}}.{block}.{linear}.weight"], projections(architecture, linear)
        if len(row.theirs) != len(parts) or (len(parts) == 1 and row.pair is not COPY):
            raise UserError(
                f"peft: a {architecture.family} model keeps {' and '.join(parts)} in another way than one linear layer "
                "for each; export the merged model with megatron2hf"
            )
        for part, name in zip(parts, row.theirs, strict=True):
            found[linear, part] = name.removesuffix(".weight")
    return found


def megatron2peft(source: Path, target: Path) -> str:
    """A model directory, checkpoint or run with adapters -> a directory for peft's PeftModel.from_pretrained."""
    model = find_model(source)
    found, architecture = Adapters.of(model), Architecture.load(model)
    if found is None:
        raise UserError(f"{model}: holds no adapters but a whole model; export it with megatron2hf")
    _undamaged(model)
    reader, names = torch_dist.Reader(model, None), theirs(architecture)
    tensors: dict[str, Tensor] = {}
    for layer in range(architecture.num_layers):
        for linear in LINEARS:
            for part, a, b in pairs(reader, found.lora, architecture, layer, linear):
                module = PREFIX + names[linear, part].replace("{i}", str(layer))
                tensors |= {f"{module}.lora_A.weight": a.clone(), f"{module}.lora_B.weight": b}
    targets = sorted({name.split(".")[-3] for name in tensors})
    lora = found.lora
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "lora_dropout": lora.dropout,
        "target_modules": targets, "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip
    with completed(target) as partial:
        huggingface.write_json(partial / CONFIG, config)
        writer = huggingface.Writer(partial, {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()})
        writer.create()
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish([writer.close()])
        (partial / huggingface.SINGLE).rename(partial / WEIGHTS)
    return f"{target}: {len(tensors)} tensors, rank {lora.rank}, on {', '.join(targets)}; their base: {found.base}"


def peft2megatron(source: Path, target: Path, base: Path) -> str:
    """A directory of peft's -> a checkpoint directory whose actor/ has these adapters on the model `base`."""
    model = find_model(base)
    architecture, where = Architecture.load(model), str(source / CONFIG)
    if Adapters.of(model) is not None:
        raise UserError(
            f"--base: {model} holds adapters itself; give a whole model, as megatron2hf and hf2megatron make"
        )
    settings = huggingface.read_json(source / CONFIG)
    for key, plain in PLAIN.items():
        if key in settings and settings[key] not in plain:
            raise UserError(f"{where}: {key}: {settings[key]} has no counterpart in megarlhf; only {plain[0]} converts")
    names = {name: place for place, name in theirs(architecture).items()}
    tensors = read(source / WEIGHTS)
    held: dict[tuple[int, str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(re.escape(PREFIX) + r"(.*)\.lora_([AB])(?:\.default)?\.weight", name)
        layer = re.search(r"\.(\d+)\.", match[1]) if match else None
        place = names.get(match[1].replace(layer[0], ".{i}.", 1)) if layer else None
        if place is None or int(layer[1]) >= architecture.num_layers:
            raise UserError(f"{source / WEIGHTS}: tensor '{name}' has no place among the linear layers of {model}")
        held.setdefault((int(layer[1]), *place), {})[match[2]] = tensor
    with understood(where):
        lora = LoraConfig(
            rank=int(settings["r"]), alpha=float(settings["lora_alpha"]), rslora=bool(settings.get("use_rslora")),
            dropout=float(settings.get("lora_dropout", 0.0)),
            targets=tuple(part for names in LINEARS.values() for part in names if any(part == key[2] for key in held)),
        )  # fmt: skip
    out: dict[str, Tensor] = {}
    for layer in range(architecture.num_layers):
        for linear, block in BLOCKS.items():
            rows, parts = projections(architecture, linear), lora.projections(architecture, linear)
            for part in parts:
                if held.get((layer, linear, part), {}).keys() != {"A", "B"}:
                    raise UserError(
                        f"{source / WEIGHTS}: layer {layer} has no adapter on {part}, which other layers have; only "
                        "the same targets in all layers convert"
                    )
            if not parts:
                continue
            own = {part: held[layer, linear, part] for part in parts}
            for part, tensor in own.items():
                shape = (rows[part], lora.rank)
                if tuple(tensor["B"].shape) != shape or tensor["A"].shape[0] != lora.rank:
                    raise UserError(f"{source / WEIGHTS}: B of layer {layer}'s {part} is not {list(shape)}")
            place = f"decoder.layers.{layer}.{block}.{linear}_lora"
            out[f"{place}.a"] = torch.cat([own[part]["A"] for part in parts])
            out |= {f"{place}.b_{part}": own[part]["B"] for part in parts}
    with completed(target) as partial:
        actor = partial / "actor"
        actor.mkdir()
        writer = torch_dist.Writer(actor, {name: Spec(tuple(t.shape), t.dtype) for name, t in out.items()})
        for name, tensor in out.items():
            writer.write(name, tensor)
        writer.finish([writer.close()])
        architecture.save(actor)
        Adapters(str(model.resolve()), lora, checksums.weights_of(model)).save(actor)
        for file in model.glob("hf_*.json"):
            (actor / file.name).write_bytes(file.read_bytes())
        if tokenizer := find_tokenizer(base):
            for file in filter(Path.is_file, tokenizer.rglob("*")):
                place = partial / "tokenizer" / file.relative_to(tokenizer)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())
        checksums.write(partial, {f"actor/{name}": value for name, value in writer.checksums.items()})
    return f"{target}: {len(out)} tensors, rank {lora.rank}, on {', '.join(lora.targets)}; their base: {model}"


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    if not path.is_file():
        raise UserError(f"{path}: is missing; only adapters saved as safetensors convert")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore the file from its source")


def pairs(
    reader: torch_dist.Reader, lora: LoraConfig, architecture: Architecture, layer: int, linear: str
) -> list[tuple[str, Tensor, Tensor]]:
    """(projection, A (r, I), B (rows, r)) of each adapter of one linear layer."""
    parts = lora.projections(architecture, linear)
    if not parts:
        return []
    place = f"decoder.layers.{layer}.{BLOCKS[linear]}.{linear}_lora"
    whole = reader.read(f"{place}.a").split(lora.rank)
    return [(part, a, reader.read(f"{place}.b_{part}")) for part, a in zip(parts, whole, strict=True)]


class Merged:
    """The reader of a model directory with adapters: the weights of its base, the adapters' products added in float32,
    and the heads that were trained beside them."""

    def __init__(self, model: Path, vocab_size: int | None):
        found = Adapters.of(model)
        assert found is not None
        self.directory, self.lora, self.architecture = model, found.lora, Architecture.load(model)
        self.base = open_weights(found.find_base(model), vocab_size)
        self.own = torch_dist.Reader(model, vocab_size)
        self.heads = {name: spec for name, spec in self.own.specs.items() if "_lora." not in name}
        self.specs = {**self.base.specs, **self.heads}
        if model.name in ("reward", "critic"):  # they have a scalar head instead of their base's output layer
            self.specs.pop("output_layer.weight", None)
        self.stored, self.ignored = self.own.stored, self.own.ignored

    def read(self, name: str) -> Tensor:
        if name in self.heads:
            return self.own.read(name)
        weight = self.base.read(name)
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.\w+\.(linear_\w+)\.weight", name)
        if match is None:
            return weight
        layer, linear = int(match[1]), match[2]
        if self.lora.quantization == "nf4":  # what the adapters were trained on
            weight = nf4.dequantize(nf4.quantize(weight), weight.dtype)
        products = {
            part: b.float() @ a.float() for part, a, b in pairs(self.own, self.lora, self.architecture, layer, linear)
        }
        if not products:
            return weight
        rows = projections(self.architecture, linear)
        parts = [products.get(part, weight.new_zeros(size, weight.shape[1]).float()) for part, size in rows.items()]
        if linear == "linear_qkv":
            groups = self.architecture.num_query_groups
            product = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
        else:
            product = torch.cat(parts)
        return (weight.float() + self.lora.scale * product).to(weight.dtype)


def open_weights(model: Path, vocab_size: int | None) -> torch_dist.Reader | Merged:
    """The reader of a model directory, whole or with adapters."""
    if Adapters.of(model) is None:
        return torch_dist.Reader(model, vocab_size)
    _undamaged(Adapters.of(model).find_base(model))
    return Merged(model, vocab_size)


def _undamaged(model: Path) -> None:
    if damage := checksums.damage(model, rank=0, size=1):
        raise UserError(damage)
