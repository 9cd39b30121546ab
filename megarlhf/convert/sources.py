"""The sources of conversions to megarlhf: the readers of all formats, with the meaning of the tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megarlhf.checkpoint import pickles
from megarlhf.config import UserError
from megarlhf.convert import huggingface, megatron_keys, rank_files, registry, torch_dist, vocabulary
from megarlhf.convert.keys import Keys
from megarlhf.convert.mapping import Family
from megarlhf.convert.megatron_configs import megatron_fields, nemo1_fields, nemo2_fields
from megarlhf.convert.registry import Step
from megarlhf.convert.storage import Reader, Spec, understood
from megarlhf.models.spec import VOCABULARY, Architecture, Shape

# The source's own files, kept in the model directory: what they say beyond the architecture (special tokens, ...)
# returns with megatron2hf.
KEPT_CONFIG = "hf_config.json"
KEPT_GENERATION = "hf_generation_config.json"
OFFSET = "score_offset"  # in config.json: what a reward model adds to its score; transformers knows no such term
EMBEDDING = "embedding.word_embeddings.weight"
HASHED = re.compile(r"^([0-9a-f]{32}_)+")


@dataclass
class Source:
    where: str
    reader: Reader
    architecture: Architecture
    scalar: bool  # a reward model or critic
    expected: dict[str, Shape]
    steps: list[Step]
    ignored: list[str]
    kept: dict[str, Path] = field(default_factory=dict)  # name in the model directory -> file
    tokenizer: dict[str, Path | str] = field(default_factory=dict)  # name in tokenizer/ -> file, or its text


def hugging_face(source: Path, ignore: Collection[str] = ()) -> Source:
    config = huggingface.read_json(source / huggingface.CONFIG)
    where = str(source / huggingface.CONFIG)
    architecture = registry.read_config(config, where, ignore)
    with understood(where):
        scalar = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
        labels = config.get("num_labels", len(config.get("id2label") or [0, 1]))
        offset = float(config.get(OFFSET, 0.0))
    if scalar and labels != 1:
        raise UserError(f"{where}: a classifier with {labels} labels is no reward model; one with num_labels 1 is")
    reader = huggingface.Reader(source)
    ignored = _prepare(reader, registry.FAMILIES[architecture.family], architecture)
    kept = {KEPT_CONFIG: source / huggingface.CONFIG}
    if (source / huggingface.GENERATION).is_file():
        kept[KEPT_GENERATION] = source / huggingface.GENERATION
    files = huggingface.tokenizer_files(source)
    # AutoTokenizer asks config.json for the class where the tokenizer's own files do not name one
    tokenizer = {str(file): source / file for file in [*files, Path(huggingface.CONFIG)] if files}
    size = vocabulary.size(tokenizer)
    if size is not None and size > architecture.vocab_size:
        name = next(row.theirs[0] for row in registry.expand(architecture) if row.ours == EMBEDDING)
        raise UserError(
            f"{source}: the tokenizer has ids up to {size - 1}, but tensor '{name}' has {architecture.vocab_size} "
            "rows; use the tokenizer the model was trained with"
        )
    expected = registry.their_shapes(architecture, scalar)
    steps = registry.steps_to_ours(architecture, scalar, offset)
    return Source(str(source), reader, architecture, scalar, expected, steps, ignored, kept, tokenizer)


def _prepare(reader: huggingface.Reader, family: Family, architecture: Architecture) -> list[str]:
    """Bring a source's names to the table's: the bare model's prefix, buffers, a stored copy of a tied tensor. Returns
    the names that are left out."""
    if not any(name.startswith(family.prefix) for name in reader.specs):
        reader.add_prefix(family.prefix)
    ignored = [name for name in reader.specs if any(re.fullmatch(pattern, name) for pattern in family.buffers)]
    if architecture.tie_embeddings:
        ignored += _tied_head(reader, family, architecture)
    for name in ignored:
        del reader.specs[name]
    return ignored


def _tied_head(reader: huggingface.Reader, family: Family, architecture: Architecture) -> list[str]:
    """Some files store the output layer although it is tied. If it differs from the embedding, the configuration is
    wrong."""
    embedding = next(row.theirs[0] for row in family.rows(architecture) if row.ours == EMBEDDING)
    head = family.head
    if head not in reader.specs or embedding not in reader.specs:
        return []
    if not torch.equal(reader.read(head), reader.read(embedding)):
        raise UserError(
            f"{reader.directory}: '{head}' differs from '{embedding}' although config.json ties them; "
            "set tie_word_embeddings to false in config.json if the model was trained untied"
        )
    return [head]


def nemo(directory: Path, where: str, tokenizer: Path | None, ignore: Collection[str] = ()) -> Source:
    """An unpacked `.nemo`, or a NeMo 2 checkpoint."""
    if (directory / "weights").is_dir():
        return _nemo2(directory, where, tokenizer, ignore)
    path = directory / "model_config.yaml"
    if not path.is_file():
        raise UserError(f"{where}: neither a .nemo (model_config.yaml) nor a NeMo 2 checkpoint (weights/, context/)")
    config = _yaml(path, where)
    config = config["model"] if isinstance(config.get("model"), dict) else config
    said = f"{where}: model_config.yaml"
    fields = _fields(nemo1_fields, megatron_keys.NEMO1, config, said, ignore)
    with understood(said):
        files = _given(tokenizer) if tokenizer else _nemo1_tokenizer(config.get("tokenizer") or {}, directory)
        multiple = _multiple(config)
    weights = directory / "model_weights"
    if weights.is_dir():
        return _distributed(weights, where, fields, files, exact=None, multiple=multiple)
    return _by_rank(
        rank_files.find(directory, "model_weights.ckpt"), where, fields, files, exact=None, multiple=multiple
    )


def _nemo2(directory: Path, where: str, tokenizer: Path | None, ignore: Collection[str]) -> Source:
    if (directory / "context" / "model.yaml").is_file():
        config, name = _yaml(directory / "context" / "model.yaml", where).get("config"), "context/model.yaml"
    else:
        name = "context/io.json"
        with understood(f"{where}: {name}"):
            config = _from_io(huggingface.read_json(directory / "context" / "io.json").get("objects") or {})
    if not isinstance(config, dict):
        raise UserError(f"{where}: {name} describes no model; restore the file")
    fields = _fields(nemo2_fields, megatron_keys.NEMO2, config, f"{where}: {name}", ignore)
    own = directory / "context" / "nemo_tokenizer"
    files = _given(tokenizer) if tokenizer else _tokenizer_files(own)
    with understood(f"{where}: {name}"):
        multiple = _multiple(config)
    return _distributed(directory / "weights", where, fields, files, exact=None, multiple=multiple)


def _multiple(config: dict[str, Any]) -> int:
    """The vocabulary of the weights is padded to a multiple of this, in files of one rank and of all alike."""
    padding = config.get("make_vocab_size_divisible_by") or 128
    return max(1, int(padding) * int(config.get("tensor_model_parallel_size") or 1))


def _from_io(objects: dict[str, Any]) -> dict[str, Any]:
    """The plain values of the model's configuration in fiddle's graph."""
    for name, entry in objects.items():
        if re.fullmatch(r"\w*config_\d+", name) and any(
            "num_layers" in str(item[0]) for item in entry.get("items", ())
        ):
            out = {}
            for key, value in entry["items"]:
                match = re.fullmatch(r"Attr\(name='(\w+)'\)", key)
                if match and value.get("type") == "leaf":
                    out[match[1]] = value["value"]
                elif match and match[1] == "activation_func":
                    out["activation_func"] = {"_target_": f"{value.get('module')}.{value.get('name')}"}
            return out
    return {}


def megatron(
    source: Path, where: str, tokenizer: Path | None, vocab_size: int | None, ignore: Collection[str] = ()
) -> Source:
    """A Megatron-LM checkpoint: the directory with latest_checkpointed_iteration.txt, or one iteration's."""
    directory = source
    latest = source / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        iteration = latest.read_text().strip()
        name = f"iter_{int(iteration):07d}" if iteration.isdigit() else "release"
        directory = source / name
        if not directory.is_dir():
            raise UserError(f"{latest}: names {name}, which does not exist; restore it, or name one that does")
    files = _given(tokenizer) if tokenizer else {}
    if (directory / "common.pt").is_file():
        common = pickles.read(directory / "common.pt", foreign=True)
    else:
        ranks = rank_files.find(directory, "model_optim_rng.pt")
        if not ranks:
            raise UserError(f"{directory}: neither a Megatron-LM iteration nor a directory of iterations")
        common = pickles.read(ranks[min(ranks)], foreign=True)
    arguments = vars(common["args"]) if isinstance(common, dict) and "args" in common else None
    if not isinstance(arguments, dict):
        raise UserError(
            f"{directory}: has no arguments ('args'), so the architecture is unknown; save it with Megatron-LM"
        )
    fields = _fields(megatron_fields, megatron_keys.MEGATRON_LM, arguments, f"{directory}: args", ignore)
    with understood(f"{directory}: args"):
        exact = vocab_size or (arguments.get("vocab_size") and int(arguments["vocab_size"]))
        multiple = _multiple(arguments)
    if (directory / "common.pt").is_file():
        return _distributed(directory, where, fields, files, exact=exact, multiple=multiple)
    version = common.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2:
        raise UserError(
            f"{directory}: checkpoint_version {version} orders the rows of query, key and value in an older way; load "
            "and save it with a newer Megatron-LM first"
        )
    with understood(f"{directory}: args"):
        tensor, pipeline, expert = (int(arguments.get(f"{kind}_model_parallel_size") or 1)
                                    for kind in ("tensor", "pipeline", "expert"))  # fmt: skip
        own = int(arguments.get("expert_tensor_parallel_size") or tensor)
    if fields.get("num_experts") and own != tensor:
        raise UserError(
            f"{directory}: args: expert_tensor_parallel_size: {own} is not the tensor_model_parallel_size {tensor}; "
            "save the checkpoint as torch_dist"
        )
    if expert > 1 and pipeline == 1:
        ranks = rank_files.of_experts(ranks)
    return _by_rank(ranks, where, fields, files, exact=exact, multiple=multiple)


def _distributed(directory, where, fields, files, *, exact: int | None, multiple: int) -> Source:
    format_ = huggingface.read_json(directory / "metadata.json").get("sharded_backend")
    if format_ != "torch_dist":
        raise UserError(f"{where}: its weights are in the format '{format_}'; save them as torch_dist (NeMo 2.0 does)")
    return _cut(torch_dist.Reader(directory, None), where, fields, files, exact, multiple)


def _by_rank(ranks, where, fields, files, *, exact: int | None, multiple: int) -> Source:
    if not ranks:
        raise UserError(f"{where}: holds no weights (model_weights.ckpt, or in mp_rank_*/ or tp_rank_*_pp_rank_*/)")
    reader = rank_files.Reader(
        ranks, gated=fields["gated_mlp"], tied=fields["tie_embeddings"], experts=fields.get("num_experts")
    )
    return _cut(reader, where, fields, files, exact, multiple)


def _cut(reader: Reader, where: str, fields: dict, files: dict, exact: int | None, multiple: int) -> Source:
    """Without the rows that pad the vocabulary."""
    size = _vocabulary(reader, where, files, exact, multiple)
    for name in VOCABULARY:
        if name in reader.specs and reader.specs[name].shape[0] > size:
            reader.specs[name] = Spec((size, *reader.specs[name].shape[1:]), reader.specs[name].dtype)
    return _source(reader, where, fields | {"vocab_size": size}, files)


def _vocabulary(reader: Reader, where: str, files: dict, exact: int | None, multiple: int) -> int:
    """The true vocabulary: the files have it padded. Without a tokenizer the padding cannot be told and stays."""
    if EMBEDDING not in reader.specs:
        raise UserError(f"{where}: tensor '{EMBEDDING}' is missing; this is no language model")
    rows = reader.specs[EMBEDDING].shape[0]
    size = vocabulary.size(files)
    if max(size or 0, exact or 0) > rows:
        raise UserError(
            f"{where}: the tokenizer has {max(size or 0, exact or 0)} entries, but tensor '{EMBEDDING}' has {rows} "
            "rows; give the model's own tokenizer with --tokenizer"
        )
    if exact and exact < (size or 0):
        raise UserError(
            f"{where}: a vocabulary of {exact} would cut off entries of the tokenizer, which has {size}; give its size "
            "with --vocab-size, or the model's own tokenizer with --tokenizer"
        )
    if exact:
        return exact
    if size is not None and rows == -(-size // multiple) * multiple:
        return size
    return rows


def _source(reader, where: str, fields: dict[str, Any], files: dict) -> Source:
    architecture = registry.choose_family(registry.describe("megatron", fields, where))
    scalar = "value_head.weight" in reader.specs
    ours = registry.our_shapes(architecture, scalar)
    ignored = list(reader.ignored)
    if scalar and "output_layer.weight" in reader.specs:  # NeMo-Aligner keeps it, unused
        del reader.specs["output_layer.weight"]
        ignored.append("output_layer.weight")
    if architecture.tie_embeddings and "output_layer.weight" in reader.specs:
        if not torch.equal(reader.read("output_layer.weight"), reader.read(EMBEDDING)):
            raise UserError(f"{where}: 'output_layer.weight' differs from '{EMBEDDING}', although they are tied")
        del reader.specs["output_layer.weight"]
        ignored.append("output_layer.weight")
    constants = [name for name in registry.CONSTANTS if name in ours and name not in reader.specs]
    expected = {name: shape for name, shape in ours.items() if name not in constants}
    steps = [Step((name,), (name,), lambda tensors: tensors) for name in expected]
    steps += [registry.constant(name, registry.CONSTANTS[name]) for name in constants]
    return Source(where, reader, architecture, scalar, expected, steps, ignored, tokenizer=files)


def _fields(translate, keys: Keys, config: dict[str, Any], where: str, ignore: Collection[str]) -> dict[str, Any]:
    with understood(where):
        keys.check(config, ignore)
        return translate(config)


def _yaml(path: Path, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {path.name} cannot be read ({str(error).splitlines()[0]}); restore the file")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: {path.name} holds no settings; restore the file")

    def resolve(item: Any) -> Any:
        match = re.fullmatch(r"\$\{\.?(\w+)\}", item) if isinstance(item, str) else None
        return value.get(match[1]) if match else item

    return {key: resolve(item) for key, item in value.items()}


def _given(tokenizer: Path) -> dict[str, Path | str]:
    """The files of a tokenizer directory or of a SentencePiece `.model`."""
    if tokenizer.is_file():
        return {"tokenizer.model": tokenizer}
    files = _tokenizer_files(tokenizer)
    if not files:
        raise UserError(f"--tokenizer {tokenizer}: no tokenizer there; give a tokenizer's directory or .model file")
    return files


def _tokenizer_files(directory: Path) -> dict[str, Path | str]:
    return {str(file): directory / file for file in huggingface.tokenizer_files(directory)}


def _nemo1_tokenizer(config: dict[str, Any], directory: Path) -> dict[str, Path | str]:
    """The archive's tokenizer under plain names; {} if it is not in there (a hub name, or a path of the writer's)."""
    files: dict[str, Path | str] = {}
    for key, name in (("model", "tokenizer.model"), ("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        value = config.get(key)
        if isinstance(value, str) and value.startswith("nemo:"):
            path = directory / Path(value.removeprefix("nemo:")).name
            if path.is_file():
                files[name] = path
    if files.keys() == {"vocab.json", "merges.txt"}:
        files["tokenizer_config.json"] = json.dumps({"tokenizer_class": "GPT2Tokenizer"}) + "\n"
    return files
