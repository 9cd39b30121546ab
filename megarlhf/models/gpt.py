"""`GPT`: one pipeline chunk of a model with a head. The only importer of megatron's GPTModel."""

from __future__ import annotations

import math
from typing import Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import batch
from megarlhf.batch import Sequences
from megarlhf.cluster import backend
from megarlhf.cluster.parallel import Topology
from megarlhf.models import layer_specs
from megarlhf.models.attention import Attention
from megarlhf.models.embedding import WordEmbedding
from megarlhf.models.heads import ScalarHead, WordHead
from megarlhf.models.layers import Layer, ParallelResidualLayer
from megarlhf.models.spec import Architecture

Head = Literal["logprobs", "values", "scores", "logprobs+values"]


class GPT(GPTModel):
    """One chunk of a model: the layers of one (virtual) pipeline stage, with a head on the last stage.

    megatron builds the modules. The forward pass is ours, because RLHF needs neither logits nor megatron's loss.
    """

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        topology: Topology,
        head: Head,
        vp_stage: int | None = None,
    ):
        first = topology.first_stage and not vp_stage
        last = topology.last_stage and (vp_stage is None or vp_stage == topology.parallel.chunks - 1)
        words = head.startswith("logprobs")
        super().__init__(
            config,
            layer_specs.block_spec(
                config,
                Attention,
                vp_stage,
                pipeline_rank=topology.pipeline_rank,
                layer_type=ParallelResidualLayer if architecture.parallel_residual else Layer,
                shared_norm=architecture.shared_norm,
            ),
            vocab_size=architecture.padded_vocab_size(topology.parallel.tensor),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tie_embeddings and words,
            position_embedding_type={"rope": "rope", "learned": "learned_absolute"}[architecture.position_embedding],
            rotary_percent=architecture.rotary_percent,
            rotary_base=architecture.rotary_base,
            vp_stage=vp_stage,
            pg_collection=topology.groups,
        )
        self.architecture = architecture
        self.topology = topology
        self.head = head
        self.has_words = words
        # In the embedding's own precision, as transformers has it: bf16 makes 55.5 of sqrt(3072).
        scale = math.sqrt(config.hidden_size) if architecture.scale_embedding else 1.0
        self.embedding_scale = torch.tensor(scale, dtype=config.params_dtype).item()
        if first:
            self.embedding.word_embeddings.__class__ = WordEmbedding
            if architecture.position_embedding == "learned":  # megatron leaves them in fp32 on the CPU
                self.embedding.position_embeddings.to(device=backend.device(), dtype=config.params_dtype)
        if architecture.rope_scaling:
            self.rotary_pos_emb.inv_freq = scaled_frequencies(architecture).to(self.rotary_pos_emb.inv_freq.device)
        if not last:
            return
        if words:
            self.output_layer.__class__ = WordHead  # the same parameters, hooks and keys; another forward
        else:
            del self.output_layer
        if head != "logprobs":
            self.value_head = ScalarHead(config, "scores" if head == "scores" else "values")

    def forward(
        self,
        sequences: Sequences,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_states: bool = False,
        ref_weight: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Hidden states [S, B, H] for the next stage (its sequence shard under sequence parallelism); on the last stage
        the head's outputs by name, each (B, R) in fp32. `temperature` and `with_entropy` are options of the log-prob
        head. `with_states` adds "states", (B, R, H), from which the response is predicted. `ref_weight`, the head's
        weight of the reference whose states the sequences carry (`Compared`), adds "kl"."""
        tokens, segments = sequences.tokens, sequences.segments
        hidden = None  # set_input_tensor gave the decoder the previous stage's
        if self.pre_process:
            positions = None
            if self.position_embedding_type == "learned_absolute":
                row = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
                positions = row if segments is None else batch.positions(segments)
            if segments is not None:
                tokens = tokens.masked_fill(segments == 0, 0)  # the id of padding may lie outside the vocabulary
            hidden = self.embedding(input_ids=tokens, position_ids=positions)
            if self.embedding_scale != 1:
                hidden = hidden * self.embedding_scale
        # Rotary attention depends on the distance of two tokens alone, so padding and packing need no shift.
        rotary = self.rotary_pos_emb(tokens.shape[1]) if self.position_embedding_type == "rope" else None
        mask = None if segments is None else batch.attention_mask(segments)
        if self.post_process:
            self.decoder.layers[-1].num_skipped = skipped = self._num_skipped(sequences)
            sequences = sequences.without_columns(skipped)  # what the heads see
        hidden = self.decoder(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        outputs = self.value_head(hidden, sequences) if self.head != "logprobs" else {}
        if self.has_words:
            outputs |= self.output_layer(
                hidden,
                sequences,
                weight=self.head_weight(),
                vocab_size=self.architecture.vocab_size,
                temperature=temperature,
                with_entropy=with_entropy,
            )
        if with_states:
            outputs["states"] = self.output_layer.states(hidden, sequences)
        if ref_weight is not None:
            outputs["kl"] = self.output_layer.kl(
                hidden,
                sequences,
                weight=self.head_weight(),
                ref_weight=ref_weight,
                vocab_size=self.architecture.vocab_size,
                temperature=temperature,
            )
        return outputs

    def _num_skipped(self, sequences: Sequences) -> int:
        """Number of leading positions whose output no head uses: those before the last of the prompt. None is skipped
        where the backward pass recomputes layers, perhaps after another batch has set another number."""
        if sequences.segments is None or (self.training and self.config.recompute_granularity == "full"):
            return 0
        unused = sequences.prompt_len - 1
        return unused - unused % self.topology.parallel.tensor if self.config.sequence_parallel else unused

    def head_weight(self) -> Tensor:
        """The output layer's weight on the last stage, [V', H]: the word embedding's if they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """As megatron's, without the empty `_extra_state` entries that layers keep for FP8."""
        if self.has_words:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:  # GPTModel and LanguageModule expect an output layer here
            state = super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def scaled_frequencies(architecture: Architecture) -> Tensor:
    """Llama 3.1's rotary frequencies, [rotary_dim / 2]: wavelengths beyond the original context are divided by
    `factor`, short ones kept, with a linear blend in between (transformers `rope_type: llama3`)."""
    scaling, dim = architecture.rope_scaling, int(architecture.kv_channels * architecture.rotary_percent)
    frequencies = architecture.rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)
