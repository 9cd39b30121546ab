"""`ModelConfig`: the model's section of a configuration, with its adapters, and which of the weights train."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megarlhf.config import PathName, UserError
from megarlhf.models.mixture import ExpertsConfig
from megarlhf.models.spec import Architecture

# Names of scalar and Q heads begin so. They train beside adapters, and checkpoints have them with these.
HEADS = ("value_head.", "q_heads.")
# The linear layers of a transformer layer and the projections in each, in the order of their rows.
LINEARS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def projections(architecture: Architecture, linear: str) -> dict[str, int]:
    """The projections of a linear layer and the rows of each. A MLP without a gate has up_proj alone."""
    d = architecture.kv_channels
    rows = {
        "q_proj": architecture.num_attention_heads * d,
        "k_proj": architecture.num_query_groups * d,
        "v_proj": architecture.num_query_groups * d,
        "gate_proj": architecture.ffn_hidden_size,
        "up_proj": architecture.ffn_hidden_size,
    }
    names = [name for name in LINEARS[linear] if name != "gate_proj" or architecture.gated_mlp]
    return {name: rows.get(name, architecture.hidden_size) for name in names}


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: they train instead of the weights (models/lora.py)."""

    rank: int = 16
    alpha: float = 32.0  # the adapters' output is multiplied by alpha / rank
    rslora: bool = False  # ... by alpha / sqrt(rank) instead
    targets: tuple[str, ...] = tuple(LINEARS)  # linear layers, or single projections by peft's names (q_proj, ...)
    dropout: float = 0.0  # of the adapters' input
    checkpoint: PathName | None = None  # adapters to start from; default: new ones, which change nothing at the start
    quantization: Literal["none", "nf4"] = "none"  # of the frozen linear layers; nf4: 4 bits a weight (QLoRA)

    def __post_init__(self):
        if not 1 <= self.rank <= 2**14:
            raise ValueError(f"rank: must be from 1 to {2**14}, not {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha: must be positive, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be in [0, 1), not {self.dropout}")
        known = [*LINEARS, *(name for names in LINEARS.values() for name in names)]
        if unknown := [name for name in self.targets if name not in known]:
            raise ValueError(f"targets: '{unknown[0]}' is no linear layer; known: {', '.join(known)}")
        if not self.targets:
            raise ValueError(f"targets: is empty, so nothing would train; known: {', '.join(known)}")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def projections(self, architecture: Architecture, linear: str) -> tuple[str, ...]:
        """The projections of a linear layer that have an adapter."""
        return tuple(name for name in projections(architecture, linear) if {name, linear} & set(self.targets))

    def num_parameters(self, architecture: Architecture) -> int:
        """Parameters of all adapters: an A for each projection from its layer's input, a B to its rows."""
        inputs = {"linear_proj": architecture.num_attention_heads * architecture.kv_channels,
                  "linear_fc2": architecture.ffn_hidden_size}  # fmt: skip
        total = 0
        for linear in LINEARS:
            rows, columns = projections(architecture, linear), inputs.get(linear, architecture.hidden_size)
            total += sum(rows[name] + columns for name in self.projections(architecture, linear))
        return total * self.rank * architecture.num_layers

    def same_shape(self, other: LoraConfig, architecture: Architecture) -> bool:
        """Whether adapters of the two hold the same numbers and mean the same."""
        numbers = self.rank, self.scale, self.quantization
        return numbers == (other.rank, other.scale, other.quantization) and all(
            self.projections(architecture, linear) == other.projections(architecture, linear) for linear in LINEARS
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is computed. Give `checkpoint`, or `architecture` to start from random weights."""

    checkpoint: PathName | None = None  # a run, a checkpoint or a model directory
    architecture: Architecture | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 main weights in the optimizer
    dropout: float = 0.0
    recompute: Literal["none", "selective", "full"] = "none"  # activations to compute again in the backward pass
    trained_layers: int | None = None  # train only so many layers from the top, the final norm and the heads
    lora: LoraConfig | None = None  # train adapters; default: all weights
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self):
        if self.lora is not None and self.trained_layers is not None:
            raise ValueError("trained_layers: with lora all layers' own weights are frozen; remove one of the two")
        if self.lora is not None and self.checkpoint is None:
            raise ValueError("lora: adapters are for a trained model; give checkpoint, or remove lora")
        if (self.checkpoint is None) == (self.architecture is None):
            raise ValueError("checkpoint: give either checkpoint or architecture, not both and not neither")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be in [0, 1), not {self.dropout}")
        if self.trained_layers is not None and self.trained_layers < 1:
            raise ValueError(
                f"trained_layers: must be at least 1, not {self.trained_layers}; leave it out to train all"
            )

    def check_layers(self, architecture: Architecture) -> None:
        """Refuse (UserError) to train more layers than there are."""
        if self.trained_layers is not None and self.trained_layers > architecture.num_layers:
            raise UserError(
                f"model.trained_layers: {self.trained_layers} are more than the model's {architecture.num_layers} "
                "layers; lower it, or leave it out to train all"
            )

    def check_hydra(self, kind: str) -> None:
        """Refuse (UserError) a reference of this kind that has no trunk to grow from."""
        if kind == "hydra" and self.trained_layers is None:
            raise UserError(
                "reference.kind: hydra shares the layers that do not train, and all do; give model.trained_layers, or "
                "use separate"
            )


def in_top_layers(architecture: Architecture, count: int, name: str) -> bool:
    """Whether a weight with this global name trains where the top `count` layers do: they, the final norm, an output
    layer of its own, and value and Q heads. Embeddings are frozen, and with them a tied output layer."""
    part, _, rest = name.partition(".layers.")
    if part == "decoder":
        return int(rest.partition(".")[0]) >= architecture.num_layers - count
    return name.startswith(("decoder.final_layernorm.", "output_layer.", "value_head.", "q_heads."))
