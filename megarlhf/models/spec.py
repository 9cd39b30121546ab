"""`Architecture`: what a model *is*, apart from any checkpoint format, layout or precision.

Every checkpoint of this project carries its architecture (`architecture.yaml`), the converters translate it from and to
other projects' configurations, and `models/transformer_config.py` turns it into megatron-core's TransformerConfig.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megarlhf import config as configuration
from megarlhf.config import UserError

if TYPE_CHECKING:
    from megarlhf.cluster.parallel import ParallelConfig

Shape = tuple[int, ...]

FILE = "architecture.yaml"
# Training pads the rows of these to what its tensor-parallel size needs (`Architecture.padded_vocab_size`).
VOCABULARY = (
    "embedding.word_embeddings.weight", "output_layer.weight",
    "q_heads.first", "q_heads.second", "q_heads.slow_first", "q_heads.slow_second",
)  # fmt: skip
# Sizes must be less: layers and experts are gone through one by one, and sampling holds ids in float32.
MOST = {"num_layers": 2**14, "num_experts": 2**12, "vocab_size": 2**24}
RANGES = (("norm_epsilon", 0, 0.1), ("rotary_base", 1, 1e12), ("rotary_percent", 0, 1), ("init_std", 0, 10))


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretched rotary frequencies (transformers `rope_type: llama3`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"factor: must be at least 1, not {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: must be positive and below high_freq_factor {self.high_freq_factor}, not "
                f"{self.low_freq_factor}"
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"original_max_position_embeddings: must be at least 1, not {self.original_max_position_embeddings}"
            )


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer. `family` names the table that converts it (tools/convert); nothing else depends on
    it.

    `vocab_size` is the true vocabulary. A tensor-parallel layout adds rows (`padded_vocab_size`), which never receive
    probability.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads; num_attention_heads without grouped-query attention
    vocab_size: int
    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated_mlp: bool = True  # SwiGLU and its kin: act(gate) * up
    linear_bias: bool = False
    qkv_bias: bool = False  # a bias on q, k, v alone (qwen2); implied by linear_bias
    position_embedding: Literal["rope", "learned"] = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # a token sees so many, itself included (mistral 7B v0.1)
    tie_embeddings: bool = False  # the output layer shares the word embedding's weight
    init_std: float = 0.02
    qk_norm: bool = False  # every query and key head is normalised before it turns (qwen3)
    parallel_residual: bool = False  # x + attention(norm x) + mlp(norm x) (gpt_neox, falcon)
    shared_norm: bool = False  # of a parallel residual: attention and MLP read the same norm (falcon 7B)
    zero_centered_norm: bool = False  # norms scale by 1 + weight (gemma)
    scale_embedding: bool = False  # the word embedding is multiplied by sqrt(hidden_size) (gemma)
    num_experts: int | None = None  # a mixture of experts of ffn_hidden_size each; converts, but does not run yet
    experts_per_token: int | None = None
    renormalize_experts: bool = True  # the weights of a token's experts sum to one (mixtral)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and not 0 < value < MOST.get(field.name, 2**31):
                most = MOST.get(field.name, 2**31) - 1
                raise ValueError(f"{field.name}: must be from 1 to {most}, not {value}")
        for name, low, high in RANGES:
            if not low < getattr(self, name) <= high:
                raise ValueError(f"{name}: must be above {low} and at most {high:g}, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups: {self.num_query_groups} key/value heads do not divide {self.num_attention_heads} "
                "attention heads; every group must serve the same number of heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                "change one or set head_dim"
            )
        rotary = int(self.kv_channels * self.rotary_percent)  # channels that turn, in pairs
        if self.position_embedding == "rope" and (rotary < 2 or rotary % 2):
            raise ValueError(
                f"rotary_percent: {self.rotary_percent} of a head's {self.kv_channels} channels are {rotary}, but they "
                "turn in pairs; change it, or the size of a head"
            )
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm: needs parallel_residual true; otherwise the MLP has a norm of its own")
        if not (self.num_experts or 0) >= (self.experts_per_token or 0) or (
            (self.num_experts is None) != (self.experts_per_token is None)
        ):
            raise ValueError(
                f"experts_per_token: {self.experts_per_token} with num_experts {self.num_experts}; give both, with at "
                "most as many experts a token as there are"
            )

    @property
    def kv_channels(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, norms and biases included, vocabulary padding not."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, Shape]:
        """Every weight of the model in megatron-core's distributed checkpoints, name -> shape, without vocabulary
        padding. Layer numbers are global and in the name."""
        h, f, v = self.hidden_size, self.ffn_hidden_size, self.vocab_size
        attention = self.num_attention_heads * self.kv_channels
        qkv = attention + 2 * self.num_query_groups * self.kv_channels
        fc1 = 2 * f if self.gated_mlp else f
        norm = ("weight",) if self.normalization == "RMSNorm" else ("weight", "bias")

        out: dict[str, Shape] = {"embedding.word_embeddings.weight": (v, h)}
        if self.position_embedding == "learned":
            out["embedding.position_embeddings.weight"] = (self.max_position_embeddings, h)
        for i in range(self.num_layers):
            layer = f"decoder.layers.{i}"
            for kind in norm:
                out[f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"] = (h,)
                if self.qk_norm:
                    for which in "qk":
                        out[f"{layer}.self_attention.{which}_layernorm.{kind}"] = (self.kv_channels,)
                if self.num_experts:
                    out[f"{layer}.pre_mlp_layernorm.{kind}"] = (h,)
                elif not self.shared_norm:
                    out[f"{layer}.mlp.linear_fc1.layer_norm_{kind}"] = (h,)
            mlps = ["mlp"]
            if self.num_experts:
                out[f"{layer}.mlp.router.weight"] = (self.num_experts, h)
                mlps = [f"mlp.experts.experts.{expert}" for expert in range(self.num_experts)]
            for name, rows, columns in (
                ("self_attention.linear_qkv", qkv, h),
                ("self_attention.linear_proj", h, attention),
                *((f"{mlp}.linear_fc1", fc1, h) for mlp in mlps),
                *((f"{mlp}.linear_fc2", h, f) for mlp in mlps),
            ):
                out[f"{layer}.{name}.weight"] = (rows, columns)
                if self.linear_bias or (self.qkv_bias and name.endswith("qkv")):
                    out[f"{layer}.{name}.bias"] = (rows,)
        for kind in norm:
            out[f"decoder.final_layernorm.{kind}"] = (h,)
        if not self.tie_embeddings:
            out["output_layer.weight"] = (v, h)
        return out

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding at this tensor-parallel size: a multiple of 128 a rank, as megatron's default. The
        sampler draws in blocks of 128 ids (kernels/sampling.py), each of which must lie on one rank."""
        multiple = 128 * tensor
        return -(-self.vocab_size // multiple) * multiple

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(configuration.dump(self))

    @classmethod
    def load(cls, directory: Path) -> Architecture:
        path = directory / FILE
        if not path.is_file():
            raise UserError(
                f"{directory}: not a megarlhf model ({FILE} is missing); convert a Hugging Face model with "
                f"'python -m tools.convert hf2megatron SOURCE {directory}'"
            )
        return configuration.load(cls, path)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is computed. Give `checkpoint`, or `architecture` to start from random weights."""

    checkpoint: str | None = None  # a run, a checkpoint or a model directory
    architecture: Architecture | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 main weights in the optimizer
    dropout: float = 0.0
    recompute: Literal["none", "selective", "full"] = "none"  # activations to compute again in the backward pass

    def __post_init__(self):
        if (self.checkpoint is None) == (self.architecture is None):
            raise ValueError("checkpoint: give either checkpoint or architecture, not both and not neither")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be in [0, 1), not {self.dropout}")


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Refuse (UserError) a model that this layout cannot hold, before anything is built."""
    if architecture.num_experts:
        raise UserError(
            f"num_experts: a mixture of {architecture.num_experts} experts ({architecture.family}) can be converted "
            "but neither trained nor run yet; use a dense model"
        )
    for name, size in (
        ("num_attention_heads", architecture.num_attention_heads),
        ("num_query_groups", architecture.num_query_groups),
        ("ffn_hidden_size", architecture.ffn_hidden_size),
    ):
        if size % parallel.tensor:
            raise UserError(
                f"parallel.tensor: {parallel.tensor} does not divide the model's {name} {size}; "
                f"use a tensor size that divides it"
            )
    stages = parallel.pipeline * parallel.chunks
    if architecture.num_layers % stages:
        raise UserError(
            f"parallel.pipeline: the model's {architecture.num_layers} layers cannot be shared evenly by {stages} "
            "pipeline stages (pipeline x virtual_pipeline); use sizes that divide it"
        )


def check_length(architecture: Architecture, length: int, key: str) -> None:
    """Refuse (UserError) rows that are longer than the model's positions, also where rotary positions go on: the model
    was not trained there. `key` names the setting to lower."""
    if length > architecture.max_position_embeddings:
        raise UserError(
            f"{key}: rows of {length} tokens are longer than the model's {architecture.max_position_embeddings} "
            f"positions; lower it"
        )
