"""The source of megatron2hf: a model of megarlhf, with the configuration that transformers needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarlhf.config import UserError
from megarlhf.convert import adapters, huggingface, registry, spm, torch_dist
from megarlhf.convert.sources import KEPT_CONFIG, KEPT_GENERATION, OFFSET, Source
from megarlhf.data.tokenizer import HF_MARKS, load_tokenizer
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture

OTHER_HEAD = {False: "value_head.", True: "output_layer."}  # by whether a scalar head is exported
Q_HEADS = "q_heads."  # of ILQL; no model of transformers has such heads


def open_model(source: Path, role: str | None) -> tuple[Source, dict[str, Any], tuple[str, ...]]:
    """A model of megarlhf as the source of megatron2hf, with its config.json and notes for the user."""
    model, role = find_exported(source, role)
    tokenizer = find_tokenizer(source)
    architecture = Architecture.load(model)
    config = registry.write_config(architecture, str(model))
    reader = adapters.open_weights(model, architecture.vocab_size)
    scalar = role in ("reward", "critic")
    ignored = list(reader.ignored)
    # An actor that shares its trunk with the critic has both heads; one is exported, by role.
    others = [name for name in reader.specs if name.startswith(OTHER_HEAD[scalar])]
    notes: tuple[str, ...] = ()
    if others:
        notes = (f"left out: {', '.join(others)}; export that head with --role {'actor' if scalar else 'critic'}",)
    values = [name for name in reader.specs if name.startswith(Q_HEADS)]
    if values:
        notes += (f"left out: {', '.join(values)}; only 'megarlhf generate' uses Q heads (sampler.q_beta)",)
    for name in (*others, *values):
        del reader.specs[name]
        ignored.append(name)
    if (model / KEPT_CONFIG).is_file():
        config = {**huggingface.read_json(model / KEPT_CONFIG), **config}
        config.pop("quantization_config", None)  # our weights are none
    else:
        config["pad_token_id"] = None  # some families' default is an id that a small vocabulary does not have
    if tokenizer and not (model / KEPT_CONFIG).is_file():
        # Of NeMo or Megatron-LM, where the tokenizer alone says it; transformers' defaults would be others.
        try:
            tokens = load_tokenizer(tokenizer)
            config |= {f"{name}_token_id": getattr(tokens, f"{name}_id") for name in ("bos", "eos", "pad")}
        except UserError as error:
            notes += (f"config.json names no special tokens: {error}",)
    expected = registry.our_shapes(architecture, scalar)
    if scalar:
        missing = [name for name in registry.CONSTANTS if name not in reader.specs]
        if missing:
            raise UserError(f"{model}: tensor '{missing[0]}' is missing; this is no reward model or critic")
        bias, gain, constant = (reader.read(name).double().item() for name in registry.CONSTANTS)
        offset = gain * bias + constant
        classifier = registry.FAMILIES[architecture.family].classifier
        if classifier is None:
            raise UserError(
                f"{model}: transformers has no class for reward models of the family '{architecture.family}'; only the "
                "actor can be exported (--role actor)"
            )
        names = [classifier or _classifier(config["architectures"][0])]
        config |= {"architectures": names, "num_labels": 1, OFFSET: offset}
        for key in ("id2label", "label2id"):
            config.pop(key, None)
        if offset:
            notes += (f"transformers' score has no constant: add {OFFSET} = {offset:.6g} of config.json to it",)
    kept = {huggingface.GENERATION: model / KEPT_GENERATION} if (model / KEPT_GENERATION).is_file() else {}
    files: dict[str, Path | str] = {}
    if tokenizer:
        files |= {str(file): tokenizer / file for file in huggingface.tokenizer_files(tokenizer)}
        lone = list(tokenizer.glob("*.model"))
        if len(lone) == 1 and not any((tokenizer / name).is_file() for name in HF_MARKS):
            files |= spm.files(lone[0])
    steps = registry.steps_to_theirs(architecture, scalar)
    return Source(str(model), reader, architecture, scalar, expected, steps, ignored, kept, files), config, notes


def find_exported(source: Path, role: str | None) -> tuple[Path, str]:
    """(model directory, role) that megatron2hf exports from `source`. A critic that shares the actor's trunk is in
    the actor's directory."""
    try:
        model = find_model(source, role or "actor")
    except UserError as error:
        others = [other for other in ("reward", "critic") if role is None and _holds(source, other)]
        if others:
            raise UserError(f"{error}; say --role {others[0]}")
        if role != "critic":
            raise
        model = find_model(source, "actor")
        if "value_head.weight" not in torch_dist.Reader(model, None).stored:
            raise UserError(f"{source}: holds no critic; its actor has no value head")
    return model, role or (model.name if model.name in ("reward", "critic") else "actor")


def _holds(source: Path, role: str) -> bool:
    try:
        return bool(find_model(source, role))
    except UserError:
        return False


def _classifier(causal: str) -> str:
    return causal.replace("LMHeadModel", "ForSequenceClassification").replace("CausalLM", "SequenceClassification")
