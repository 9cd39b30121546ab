"""`GPT`: one pipeline chunk of a model with a head. The only importer of megatron's GPTModel."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf.cluster import backend
from megarlhf.cluster.parallel import Topology
from megarlhf.models import layer_specs
from megarlhf.models.attention import Attention
from megarlhf.models.cache import Step
from megarlhf.models.embedding import WordEmbedding
from megarlhf.models.heads import QHeads, ScalarHead, WordHead
from megarlhf.models.layers import Layer, ParallelResidualLayer
from megarlhf.models.spec import Architecture
from megarlhf.stream import Spans, Stream

Head = Literal["logprobs", "values", "scores", "logprobs+values", "logprobs+values+q"]


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
        self._table: Tensor | None = None
        self.topology = topology
        self.head = head
        self.has_words, self.has_q = words, head.endswith("+q")
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
        self.decoder.layers[-1].select()
        if words:
            self.output_layer.__class__ = WordHead  # the same parameters, hooks and keys; another forward
        else:
            del self.output_layer
        if head != "logprobs":
            self.value_head = ScalarHead(config, "scores" if head == "scores" else "values", topology.tensor_group)
        if self.has_q:
            self.q_heads = QHeads(
                config, architecture.padded_vocab_size(topology.parallel.tensor), topology.tensor_group
            )

    def forward(
        self,
        stream: Stream,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_states: bool = False,
        ref_states: Tensor | None = None,
        ref_weight: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Hidden states [T, 1, H] for the next stage (its sequence shard under sequence parallelism); on the last stage
        the head's outputs by name, each (B, R) in fp32, 0 where a token does not count. `temperature` and
        `with_entropy` are options of the log-prob head. `with_states` adds "states", (B, R, H), from which the counted
        tokens are predicted. `ref_states` and `ref_weight`, the reference's states and its head's weight, add "kl"."""
        spans = stream.spans
        if self.post_process:
            spans = dataclasses.replace(spans, read=self._read(stream))
        hidden = self.run(stream.tokens, stream.positions, spans, stream.max_length)
        if not self.post_process:
            return hidden
        outputs = self.value_head(hidden, stream) if self.head != "logprobs" else {}
        if self.has_words:
            options = dict(weight=self.head_weight(), vocab_size=self.architecture.vocab_size, temperature=temperature)
            outputs |= self.output_layer(hidden, stream, with_entropy=with_entropy, **options)
            if with_states:
                outputs["states"] = stream.aligned(self.output_layer.states(hidden, stream))
            if ref_weight is not None:
                outputs["kl"] = self.output_layer.kl(hidden, stream, ref_states, ref_weight=ref_weight, **options)
        if self.has_q:
            outputs |= self.q_heads(hidden, stream, vocab_size=self.architecture.vocab_size)
        return outputs

    def run(
        self, tokens: Tensor, positions: Tensor, spans: Spans | Step, max_length: int, hidden: Tensor | None = None
    ) -> Tensor:
        """The layers of this chunk over (T,) tokens -> [T, 1, H], after the final norm on the last stage. `hidden`: the
        output of the stage before, unless a schedule has given it (`set_input_tensor`). `max_length`: a bound of the
        positions."""
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens[None], position_ids=positions[None])
            if self.embedding_scale != 1:
                hidden = hidden * self.embedding_scale
        elif hidden is None:
            hidden = self.decoder.input_tensor
        rotary = None
        if self.position_embedding_type == "rope":
            rotary = self._angles(max_length)[positions]
        if torch.is_grad_enabled():
            return self.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=spans
            )
        for layer in self.decoder.layers:  # the same without what a backward pass needs
            hidden, _ = layer(hidden, rotary_pos_emb=rotary, packed_seq_params=spans)
        return hidden if self.decoder.final_layernorm is None else self.decoder.final_layernorm(hidden)

    def _angles(self, length: int) -> Tensor:
        """[at least `length`, 1, 1, d]: the rotary angles of positions. A captured step reads the table, so it belongs
        to this chunk; megatron drops the older of its own."""
        if self._table is None or len(self._table) < length:
            self._table = self.rotary_pos_emb(1 << (length - 1).bit_length())
        return self._table

    def _read(self, stream: Stream) -> Tensor:
        """The tokens whose output the head reads. A value or a log-prob belongs to the state before a token, a score to
        the text up to and including it (detail G1). Sequence parallelism cuts them into equal parts."""
        read = stream.counted if self.head == "scores" else stream.counted - 1
        parts = self.topology.parallel.tensor if self.config.sequence_parallel else 1
        return torch.nn.functional.pad(read, (0, -len(read) % parts if len(read) else parts))

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
