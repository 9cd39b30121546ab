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
from megarlhf.models import mixture
from megarlhf.models.rope_scaling import RopeScaling

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
RANGES = (
    ("norm_epsilon", 0, 0.1), ("rotary_base", 1, 1e12), ("local_rotary_base", 1, 1e12), ("rotary_percent", 0, 1),
    ("init_std", 0, 10), ("attention_scale", 0, 1e6), ("attention_softcap", 0, 1e6), ("logit_softcap", 0, 1e6),
    ("embedding_multiplier", 0, 1e6), ("residual_multiplier", 0, 1e6), ("logit_divisor", 0, 1e6),
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer. `family` names the table that converts it (megarlhf/convert); nothing else depends on
    it.

    `vocab_size` is the true vocabulary. A tensor-parallel layout adds rows (`padded_vocab_size`), which never receive
    probability.
    """

    family: str  # the model_type of its Hugging Face files: llama, qwen2, ...
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of the MLP; with gated_mlp, of the gate and of the other half each
    num_attention_heads: int  # query heads
    num_query_groups: int  # key/value heads; num_attention_heads without grouped-query attention
    vocab_size: int  # tokens, without padding
    max_position_embeddings: int  # the longest row, in tokens
    head_dim: int | None = None  # default: hidden_size / num_attention_heads
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated_mlp: bool = True  # SwiGLU and its kin: act(gate) * up
    linear_bias: bool = False  # a bias on every matrix of the layers
    qkv_bias: bool = False  # a bias on q, k, v alone (qwen2); implied by linear_bias
    proj_bias: bool = False  # with qkv_bias: also on attention's output (llama with attention_bias)
    position_embedding: Literal["rope", "learned"] = "rope"
    rotary_base: float = 10000.0  # of the angles' frequencies (rope_theta)
    rotary_percent: float = 1.0  # the share of a head's channels that turn
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # a token sees so many, itself included (mistral 7B v0.1)
    full_attention_layers: tuple[int, ...] = ()  # with a window: layers, from 0, that have none (gemma 2 and 3, qwen2)
    local_rotary_base: float | None = None  # of the layers with a window, which do not scale it; default: same (gemma3)
    attention_scale: float | None = None  # of the scores; default: 1 / sqrt(size of a head) (gemma 2 and 3, granite)
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap) (gemma2)
    logit_softcap: float | None = None  # logits become cap * tanh(logit / cap) (gemma2)
    logit_divisor: float = 1.0  # logits are divided by it (granite's logits_scaling)
    tie_embeddings: bool = False  # the output layer shares the word embedding's weight
    init_std: float = 0.02  # standard deviation of initial weights
    qk_norm: bool = False  # every query and key head is normalised before it turns (qwen3)
    qk_norm_joint: bool = False  # ... all query heads as one vector, and all key heads (olmo2)
    norms: Literal["before", "after", "both"] = "before"  # of attention and MLP: olmo2 after, gemma 2 and 3, glm4 both
    parallel_residual: bool = False  # x + attention(norm x) + mlp(norm x) (gpt_neox, falcon)
    shared_norm: bool = False  # of a parallel residual: attention and MLP read the same norm (falcon 7B)
    zero_centered_norm: bool = False  # norms scale by 1 + weight (gemma)
    scale_embedding: bool = False  # the word embedding is multiplied by sqrt(hidden_size) (gemma)
    embedding_multiplier: float = 1.0  # ... by this (granite)
    residual_multiplier: float = 1.0  # what attention and MLP add to the residual is multiplied by it (granite)
    num_experts: int | None = None  # a mixture of experts of ffn_hidden_size each, in every layer (models/experts.py)
    experts_per_token: int | None = None  # that compute each token
    renormalize_experts: bool = True  # the weights of a token's experts sum to one (mixtral)
    # of an expert beside them that computes every token, weighted by a sigmoid gate (qwen2_moe)
    shared_expert_size: int | None = None

    def __post_init__(self):
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and not isinstance(value, bool) and not 0 < value < MOST.get(each.name, 2**31):
                most = MOST.get(each.name, 2**31) - 1
                raise ValueError(f"{each.name}: must be from 1 to {most}, not {value}")
        for name, low, high in RANGES:
            if getattr(self, name) is not None and not low < getattr(self, name) <= high:
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
        rotary = self.rotary_channels  # in pairs
        if self.position_embedding == "rope" and (rotary < 2 or rotary % 2):
            raise ValueError(
                f"rotary_percent: {self.rotary_percent} of a head's {self.kv_channels} channels are {rotary}, but they "
                "turn in pairs; change it, or the size of a head"
            )
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(self.rope_scaling, name)) != rotary // 2:
                    raise ValueError(f"rope_scaling.{name}: must have a number for each of {rotary // 2} frequencies")
        if self.full_attention_layers:
            if self.sliding_window is None:
                raise ValueError("full_attention_layers: needs sliding_window; without it all layers are such")
            if not all(0 <= layer < self.num_layers for layer in self.full_attention_layers):
                raise ValueError(f"full_attention_layers: must be layers from 0 to {self.num_layers - 1}")
        if self.local_rotary_base is not None and (self.sliding_window is None or self.position_embedding != "rope"):
            raise ValueError("local_rotary_base: needs sliding_window and rotary positions")
        if self.qk_norm and self.qk_norm_joint:
            raise ValueError("qk_norm_joint: is another norm than qk_norm; set one of the two")
        if (self.qk_norm_joint or self.norms == "after") and self.normalization != "RMSNorm":
            raise ValueError("normalization: qk_norm_joint and norms after need RMSNorm")
        if self.proj_bias and not self.qkv_bias:
            raise ValueError("proj_bias: needs qkv_bias true")
        if self.parallel_residual and (self.norms != "before" or self.residual_multiplier != 1):
            raise ValueError("parallel_residual: has norms before and no residual_multiplier")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm: needs parallel_residual true; otherwise the MLP has a norm of its own")
        if not (self.num_experts or 0) >= (self.experts_per_token or 0) or (
            (self.num_experts is None) != (self.experts_per_token is None)
        ):
            raise ValueError(
                f"experts_per_token: {self.experts_per_token} with num_experts {self.num_experts}; give both, with at "
                "most as many experts a token as there are"
            )
        if self.shared_expert_size and not self.num_experts:
            raise ValueError("shared_expert_size: stands beside other experts; give num_experts too, or remove it")

    @property
    def kv_channels(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that turn."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row for which this model's positions are computed, and computed exactly. Longrope has
        other frequencies beyond its original length; yarn's rows may be `factor` times theirs."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            return min(self.max_position_embeddings, scaling.original_max_position_embeddings)
        if scaling is not None and scaling.kind == "yarn":
            return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))
        return self.max_position_embeddings

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a layer, from 0, itself included; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window

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
            if self.qk_norm_joint:
                out[f"{layer}.self_attention.query_norm.weight"] = (attention,)
                out[f"{layer}.self_attention.key_norm.weight"] = (self.num_query_groups * self.kv_channels,)
            for kind in norm:
                if self.qk_norm:
                    for which in "qk":
                        out[f"{layer}.self_attention.{which}_layernorm.{kind}"] = (self.kv_channels,)
                if self.norms != "before":
                    out[f"{layer}.post_attention_layernorm.{kind}"] = (h,)
                    out[f"{layer}.post_mlp_layernorm.{kind}"] = (h,)
                if self.norms == "after":
                    continue
                out[f"{layer}.self_attention.linear_qkv.layer_norm_{kind}"] = (h,)
                if self.num_experts:
                    out[f"{layer}.pre_mlp_layernorm.{kind}"] = (h,)
                elif not self.shared_norm:
                    out[f"{layer}.mlp.linear_fc1.layer_norm_{kind}"] = (h,)
            mlps = ["mlp"]
            if self.num_experts:
                out[f"{layer}.mlp.router.weight"] = (self.num_experts, h)
                mlps = [f"mlp.experts.experts.{expert}" for expert in range(self.num_experts)]
            if self.shared_expert_size:
                fc1_rows = 2 * self.shared_expert_size if self.gated_mlp else self.shared_expert_size
                out[f"{layer}.mlp.shared_experts.gate_weight"] = (1, h)
                out[f"{layer}.mlp.shared_experts.linear_fc1.weight"] = (fc1_rows, h)
                out[f"{layer}.mlp.shared_experts.linear_fc2.weight"] = (h, self.shared_expert_size)
            for name, rows, columns in (
                ("self_attention.linear_qkv", qkv, h),
                ("self_attention.linear_proj", h, attention),
                *((f"{mlp}.linear_fc1", fc1, h) for mlp in mlps),
                *((f"{mlp}.linear_fc2", h, f) for mlp in mlps),
            ):
                out[f"{layer}.{name}.weight"] = (rows, columns)
                biased = (self.qkv_bias and name.endswith("qkv")) or (self.proj_bias and name.endswith("proj"))
                if self.linear_bias or biased:
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
                f"'megarlhf convert hf2megatron SOURCE {directory}'"
            )
        return configuration.load(cls, path)


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Refuse (UserError) a model that this layout cannot hold, before anything is built."""
    mixture.check_layout(architecture, parallel)
    whole = architecture.num_experts is not None  # tensor parallelism leaves experts whole
    for name, size in (
        ("num_attention_heads", architecture.num_attention_heads),
        ("num_query_groups", architecture.num_query_groups),
        ("ffn_hidden_size", 0 if whole else architecture.ffn_hidden_size),
        ("shared_expert_size", architecture.shared_expert_size or 0),
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
    if length > architecture.longest_row:
        raise UserError(
            f"{key}: rows of {length} tokens are longer than the model's {architecture.longest_row} positions; lower it"
        )
