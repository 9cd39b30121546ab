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
from megarlhf.convert.mapping import cat
from megarlhf.convert.storage import Spec
from megarlhf.models.spec import VOCABULARY

RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?|tp_rank_(\d+)_pp_rank_(\d+)")
Place = tuple[int, int, int]  # tensor, pipeline and expert rank
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
# An expert's weight, with its number among those of its file: of megatron's layers, and of Transformer Engine's.
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))")
EXPERT_NAME = re.compile(r".*\.mlp\.experts\.experts\.\d+\..*")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
TIED_COPY = ("word_embeddings.weight", "word_embeddings_for_head.weight")
ROWS = re.compile(r".*(linear_qkv|linear_fc1|linear_fc1_up)\.(weight|bias)")
COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight|value_head\.weight")


def canonical(name: str, first_expert: int | None = None) -> str:
    """megatron-core's name (as TransformerEngine's layers and its distributed checkpoints have it). `first_expert`: the
    number of the file's first expert in a model with experts, whose MLPs have the norm before them apart."""
    name = name[PREFIX.match(name).end() :]
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    if first_expert is not None:
        name = name.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
        if match := EXPERT.fullmatch(name):
            block, number, linear = match[1], match[2] or match[5], match[3] or match[4]
            name = f"{block}.experts.{first_expert + int(number)}.{linear}.weight"
    return name


class Reader:
    """The tensors of all rank files, merged over tensor and pipeline ranks, read one at a time."""

    def __init__(self, files: dict[Place, Path], *, gated: bool, tied: bool, experts: int | None = None):
        """experts: of the whole model, shared evenly by the expert ranks."""
        self.specs: dict[str, Spec] = {}
        self.ignored: list[str] = []
        self._gated = gated
        self._where = next(iter(files.values())).parent.parent
        self._parts: dict[str, list[Tensor]] = {}  # by tensor rank
        size, stages, shares = (1 + max(column) for column in zip(*files, strict=True))
        if shares > 1 and (experts or 0) % shares:
            raise UserError(f"{self._where}: {shares} expert ranks cannot share {experts or 'no'} experts evenly")
        for rank in range(size):
            first = 0
            for stage in range(stages):
                end = first
                for share in range(shares):
                    if (rank, stage, share) not in files:
                        which = f", expert rank {share}" if shares > 1 else ""
                        raise UserError(
                            f"{self._where}: the file of tensor rank {rank}, pipeline rank {stage}{which} is missing; "
                            "restore it"
                        )
                    number = None if experts is None else share * (experts // shares)
                    end = max(end, self._add(files[rank, stage, share], first, rank, number, copies=share > 0))
                first = end
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

    def _add(self, path: Path, first: int, rank: int, first_expert: int | None, *, copies: bool) -> int:
        """Add one file of a tensor rank, whose layers and experts are numbered from these. `copies`: what is no expert
        stands in another file too. Returns the number after its last layer."""
        content = pickles.read(path, foreign=True)
        end = first
        for name, tensor in _flat(weights(content, path)):
            if IGNORED.fullmatch(name):
                self.ignored.append(f"{path.parent.name}/{name}" if path.parent != self._where else name)
                continue
            name = canonical(name, first_expert)
            match = LAYER.fullmatch(name)
            if match:
                end = max(end, first + int(match[1]) + 1)
                name = f"decoder.layers.{first + int(match[1])}.{match[2]}"
            if name in TIED_COPY:
                name = "output_layer.weight"  # of a tied model, kept on the last stage
            if copies and not EXPERT_NAME.fullmatch(name):
                if name not in self._parts or not torch.equal(self._parts[name][rank], tensor):
                    raise UserError(f"{path}: tensor '{name}' differs between the expert ranks, which must agree")
                continue
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


def find(directory: Path, name: str) -> dict[Place, Path]:
    """{place: file} of the files called `name` in the rank directories of `directory`. A single number behind the
    tensor rank is taken for the pipeline rank; see `of_experts`."""
    files = {}
    for path in sorted(directory.glob(f"*/{name}")):
        match = RANK.fullmatch(path.parent.name)
        if match:
            places = match.group(1, 2, 3) if match[1] else (match[4], match[5], None)
            files[tuple(int(place or 0) for place in places)] = path
    if (directory / name).is_file():
        files[0, 0, 0] = directory / name
    return files


def of_experts(files: dict[Place, Path]) -> dict[Place, Path]:
    """The files of a checkpoint with expert ranks and one pipeline stage: their directories name tensor and expert
    rank."""
    return {(tensor, 0, expert): path for (tensor, expert, _), path in files.items()}


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
