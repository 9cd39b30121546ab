"""Checkpoints with one torch.save file a rank: NeMo 1's `model_weights.ckpt` and Megatron-LM's `model_optim_rng.pt`.

They carry the names of the code that wrote them (megatron-core's, or the older ones of NeMo and Megatron-LM), number
the layers of every pipeline stage from 0 and cut tensors over the tensor-parallel ranks. `Reader` shows the whole model
under megatron-core's names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.checkpoint import pickles
from megarlhf.config import UserError
from megarlhf.models.spec import VOCABULARY
from tools.convert.mapping import cat
from tools.convert.storage import Spec

RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?|tp_rank_(\d+)_pp_rank_(\d+)")
PREFIX = re.compile(r"((model|module)\d*\.)*(_orig_mod\.)?")
IGNORED = re.compile(r".*(_extra_state|rotary_pos_emb\.inv_freq)$")
# Names of the code before megatron-core, in the order in which they are replaced.
RENAMED = (
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"^decoder\.final_(layer)?norm\.", "decoder.final_layernorm."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.input_(layer)?norm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\2"),
    (r"\.(post_attention_(?:layer)?norm|pre_mlp_layernorm)\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\2"),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_h_to_4h_2\.", ".linear_fc1_up."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"^rm_head\.", "value_head."),
)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
TIED_COPY = ("word_embeddings.weight", "word_embeddings_for_head.weight")
ROWS = re.compile(r".*(linear_qkv|linear_fc1|linear_fc1_up)\.(weight|bias)")
COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight|value_head\.weight")


def canonical(name: str) -> str:
    """megatron-core's name (as TransformerEngine's layers and its distributed checkpoints have it)."""
    name = name[PREFIX.match(name).end() :]
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


class Reader:
    """The tensors of all rank files, merged over tensor and pipeline ranks, read one at a time."""

    def __init__(self, files: dict[tuple[int, int], Path], *, gated: bool, tied: bool):
        self.specs: dict[str, Spec] = {}
        self.ignored: list[str] = []
        self._gated = gated
        self._where = next(iter(files.values())).parent.parent
        self._parts: dict[str, list[Tensor]] = {}  # by tensor rank
        stages = 1 + max(stage for _, stage in files)
        size = 1 + max(rank for rank, _ in files)
        for rank in range(size):
            first = 0
            for stage in range(stages):
                if (rank, stage) not in files:
                    raise UserError(
                        f"{self._where}: the file of tensor rank {rank}, pipeline rank {stage} is missing; restore it"
                    )
                first = self._add(files[rank, stage], first, last=stage == stages - 1)
        for name, parts in self._parts.items():
            if len(parts) != size:
                raise UserError(f"{self._where}: tensor '{name}' stands in {len(parts)} of {size} rank files")
        self._check_tied(tied)
        for name, parts in self._parts.items():
            if name.endswith(("linear_fc1_up.weight", "linear_fc1_up.bias")):
                continue
            blank = self._merge(name, [torch.empty(part.shape, device="meta") for part in parts], self._up(name, True))
            self.specs[name] = Spec(tuple(blank.shape), parts[0].dtype)

    def read(self, name: str) -> Tensor:
        parts = self._parts[name]
        cut = name in VOCABULARY or ROWS.fullmatch(name) or COLUMNS.fullmatch(name)
        if not cut and not all(torch.equal(part, parts[0]) for part in parts[1:]):
            raise UserError(f"{self._where}: tensor '{name}' differs between the tensor ranks, which must agree")
        return self._merge(name, parts, self._up(name))[: self.specs[name].shape[0]].clone()

    def _add(self, path: Path, first: int, *, last: bool) -> int:
        """Add one file, whose layers are numbered from `first`. Returns the number after its last layer."""
        content = pickles.read(path, foreign=True)
        end = first
        for name, tensor in _flat(weights(content, path)):
            if IGNORED.fullmatch(name):
                self.ignored.append(f"{path.parent.name}/{name}" if path.parent != self._where else name)
                continue
            name = canonical(name)
            match = LAYER.fullmatch(name)
            if match:
                end = max(end, first + int(match[1]) + 1)
                name = f"decoder.layers.{first + int(match[1])}.{match[2]}"
            if name in TIED_COPY:
                name = "output_layer.weight"  # of a tied model, kept on the last stage
            self._parts.setdefault(name, []).append(tensor)
        return end

    def _check_tied(self, tied: bool) -> None:
        """The last stage of a tied model has a copy of the embedding."""
        copies = self._parts.get("output_layer.weight")
        if not tied or copies is None:
            return
        for embedding, copy in zip(self._parts.get("embedding.word_embeddings.weight", ()), copies, strict=False):
            if not torch.equal(embedding, copy):
                raise UserError(
                    f"{self._where}: 'output_layer.weight' differs from 'embedding.word_embeddings.weight', although "
                    "the configuration ties them; set share_embeddings_and_output_weights to false if it was trained so"
                )
        del self._parts["output_layer.weight"]
        self.ignored.append("output_layer.weight")

    def _up(self, name: str, meta: bool = False) -> list[Tensor] | None:
        """The other half of a gated MLP, in old files a tensor of its own."""
        parts = self._parts.get(name.replace("linear_fc1.", "linear_fc1_up."))
        if "linear_fc1." not in name or parts is None:
            return None
        return [torch.empty(part.shape, device="meta") for part in parts] if meta else parts

    def _merge(self, name: str, parts: list[Tensor], up: list[Tensor] | None) -> Tensor:
        if up is not None:
            return cat([*parts, *up])
        if self._gated and re.fullmatch(r".*linear_fc1\.(weight|bias)", name):  # each rank has [its gate; its up]
            halves = [part.chunk(2) for part in parts]
            return cat([gate for gate, _ in halves] + [up for _, up in halves])
        if name in VOCABULARY or ROWS.fullmatch(name):
            return cat(parts)
        if COLUMNS.fullmatch(name):
            return cat(parts, dim=1)
        return parts[0]


def find(directory: Path, name: str) -> dict[tuple[int, int], Path]:
    """{(tensor rank, pipeline rank): file} of the files called `name` in the rank directories of `directory`."""
    files = {}
    for path in sorted(directory.glob(f"*/{name}")):
        match = RANK.fullmatch(path.parent.name)
        if match:
            tensor, pipeline = (match[1], match[2]) if match[1] else (match[3], match[4])
            files[int(tensor), int(pipeline or 0)] = path
        elif re.match(r"mp_rank_\d+_\d+_\d+$", path.parent.name):
            raise UserError(f"{path}: expert-parallel files cannot be read; save the checkpoint as torch_dist")
    if (directory / name).is_file():
        files[0, 0] = directory / name
    return files


def weights(content: Any, path: Path) -> dict[str, Any]:
    """The model's state in what a file holds."""
    if isinstance(content, dict) and any(re.fullmatch(r"model[1-9]\d*", str(key)) for key in content):
        raise UserError(f"{path}: written with virtual pipeline stages; save the checkpoint as torch_dist")
    for key in ("model", "model0", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            return content[key]
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__} instead of a model's state")
    return content


def _flat(state: dict[str, Any], prefix: str = ""):
    """(name, value) of nested dictionaries (Megatron-LM before megatron-core), without what is no tensor."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) or str(key).endswith("_extra_state"):
            yield prefix + str(key), value
