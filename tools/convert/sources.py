"""Where a conversion to our format starts: the readers of all formats, with what the tensors mean."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megarlhf import config as configuration
from megarlhf.checkpoint import pickles
from megarlhf.config import UserError
from megarlhf.models.shapes import Shape
from megarlhf.models.spec import Architecture
from tools.convert import huggingface, rank_files, registry, torch_dist, vocabulary
from tools.convert.mapping import Family
from tools.convert.megatron_configs import megatron_fields, nemo1_fields, nemo2_fields
from tools.convert.registry import Step
from tools.convert.storage import Reader

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


def hugging_face(source: Path) -> Source:
    config = huggingface.read_json(source / huggingface.CONFIG)
    where = str(source / huggingface.CONFIG)
    architecture = registry.read_config(config, where)
    scalar = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
    labels = config.get("num_labels", len(config.get("id2label") or [0, 1]))
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
    steps = registry.steps_to_ours(architecture, scalar, float(config.get(OFFSET, 0.0)))
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
    """Some files store the output layer although it is tied; if it differs, the configuration is wrong."""
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


@contextlib.contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Path]:
    """A `.nemo` archive as a directory: itself if it is one, else unpacked beside the target and removed at the end."""
    if source.is_dir():
        yield source
        return
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nemo-", dir=beside) as directory:
        unpack(source, Path(directory))
        yield Path(directory)


def unpack(source: Path, directory: Path) -> None:
    """Only plain files and folders, only into `directory`: an archive can name any path, and links that lead away."""
    try:
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                parts = Path(member.name).parts
                if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
                    raise UserError(
                        f"{source}: refused, its member '{member.name}' leads out of the archive or is no plain file"
                    )
                path = directory.joinpath(*parts)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    shutil.copyfileobj(archive.extractfile(member), file, 1 << 24)
    except FileExistsError:
        raise UserError(f"{source}: its member '{member.name}' stands twice in it; pack it again")
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error}); give a .nemo file, or the directory it unpacks to")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{source}: not a complete .nemo archive ({error}); fetch it again")


def nemo(directory: Path, where: str, tokenizer: Path | None) -> Source:
    """An unpacked `.nemo`, or a NeMo 2 checkpoint."""
    if (directory / "weights").is_dir():
        return _nemo2(directory, where, tokenizer)
    path = directory / "model_config.yaml"
    if not path.is_file():
        raise UserError(f"{where}: neither a .nemo (model_config.yaml) nor a NeMo 2 checkpoint (weights/, context/)")
    config = _yaml(path, where)
    config = config["model"] if isinstance(config.get("model"), dict) else config
    fields = _fields(nemo1_fields, config, f"{where}: model_config.yaml")
    files = _given(tokenizer) if tokenizer else _nemo1_tokenizer(config.get("tokenizer") or {}, directory)
    padding = config.get("make_vocab_size_divisible_by") or 128
    ranks = config.get("tensor_model_parallel_size") or 1
    weights = directory / "model_weights"
    if weights.is_dir():
        return _distributed(weights, where, fields, files, exact=None, multiple=padding)
    return _by_rank(
        rank_files.find(directory, "model_weights.ckpt"), where, fields, files, exact=None, multiple=padding * ranks
    )


def _nemo2(directory: Path, where: str, tokenizer: Path | None) -> Source:
    if (directory / "context" / "model.yaml").is_file():
        model = _yaml(directory / "context" / "model.yaml", where)
        config, name = model.get("config") or {}, "context/model.yaml"
    else:
        objects = huggingface.read_json(directory / "context" / "io.json").get("objects") or {}
        config, name = _from_io(objects), "context/io.json"
    fields = _fields(nemo2_fields, config, f"{where}: {name}")
    files = _given(tokenizer or directory / "context" / "nemo_tokenizer")
    return _distributed(
        directory / "weights", where, fields, files, exact=None, multiple=config["make_vocab_size_divisible_by"]
    )


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


def megatron(source: Path, where: str, tokenizer: Path | None, vocab_size: int | None) -> Source:
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
    fields = _fields(megatron_fields, arguments, f"{directory}: args")
    exact = vocab_size or arguments.get("vocab_size")
    multiple = arguments.get("make_vocab_size_divisible_by", 128) * arguments.get("tensor_model_parallel_size", 1)
    if (directory / "common.pt").is_file():
        return _distributed(directory, where, fields, files, exact=exact, multiple=multiple)
    version = common.get("checkpoint_version", 0)
    if version < 2:
        raise UserError(
            f"{directory}: checkpoint_version {version} orders the rows of query, key and value in an older way; load "
            "and save it with a newer Megatron-LM first"
        )
    return _by_rank(ranks, where, fields, files, exact=exact, multiple=multiple)


def _distributed(directory, where, fields, files, *, exact: int | None, multiple: int) -> Source:
    format_ = huggingface.read_json(directory / "metadata.json").get("sharded_backend")
    if format_ != "torch_dist":
        raise UserError(f"{where}: its weights are in the format '{format_}'; save them as torch_dist (NeMo 2.0 does)")
    stored = torch_dist.Reader(directory, None)
    vocab_size = _vocabulary(stored, where, files, exact, multiple)
    return _source(torch_dist.Reader(directory, vocab_size), where, fields | {"vocab_size": vocab_size}, files)


def _by_rank(ranks, where, fields, files, *, exact: int | None, multiple: int) -> Source:
    if not ranks:
        raise UserError(f"{where}: holds no weights (model_weights.ckpt, or in mp_rank_*/ or tp_rank_*_pp_rank_*/)")
    options = dict(gated=fields["gated_mlp"], tied=fields["tie_embeddings"])
    vocab_size = _vocabulary(rank_files.Reader(ranks, None, **options), where, files, exact, multiple)
    reader = rank_files.Reader(ranks, vocab_size, **options)
    return _source(reader, where, fields | {"vocab_size": vocab_size}, files)


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
    if exact:
        return exact
    if size is not None and rows == -(-size // multiple) * multiple:
        return size
    return rows


def _source(reader, where: str, fields: dict[str, Any], files: dict) -> Source:
    try:
        architecture = configuration.from_dict(Architecture, {"family": "megatron", **fields}, where)
    except ValueError as error:
        raise UserError(str(error))
    architecture = registry.choose_family(architecture)
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


def _fields(translate, config: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        return translate(config)
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing")
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}")


def _yaml(path: Path, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{where}: {path.name} cannot be read ({str(error).splitlines()[0]}); restore the file")
    if not isinstance(value, dict):
        raise UserError(f"{where}: {path.name} holds no settings; restore the file")

    def resolve(item: Any) -> Any:
        match = re.fullmatch(r"\$\{\.?(\w+)\}", item) if isinstance(item, str) else None
        return value.get(match[1]) if match else item

    return {key: resolve(item) for key, item in value.items()}


def _given(tokenizer: Path) -> dict[str, Path | str]:
    """The files of a tokenizer directory or of a SentencePiece `.model`."""
    if tokenizer.is_file():
        return {"tokenizer.model": tokenizer}
    return {str(file): tokenizer / file for file in huggingface.tokenizer_files(tokenizer)}


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
