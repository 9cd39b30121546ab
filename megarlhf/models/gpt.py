"""`GPT`: one pipeline chunk of a model with a head. The only importer of megatron's GPTModel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import kernels
from megarlhf.cluster import backend, operations
from megarlhf.cluster.parallel import Topology
from megarlhf.kernels.products import capped_
from megarlhf.models import experts, layer_specs
from megarlhf.models.attention import Attention, SelfAttention
from megarlhf.models.cache import Step
from megarlhf.models.embedding import WordEmbedding
from megarlhf.models.heads import QHeads, ScalarHead, WordHead
from megarlhf.models.layers import Block, Layer, ParallelResidualLayer
from megarlhf.models.rotary import attention_factor, frequencies, plain_frequencies
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
        mlp_values: bool = False,
        norms_apart: bool = False,
    ):
        first = topology.first_stage and not vp_stage
        last = topology.last_stage and (vp_stage is None or vp_stage == topology.parallel.chunks - 1)
        words = head.startswith("logprobs")
        super().__init__(
            config,
            layer_specs.block_spec(
                config,
                SelfAttention,
                Attention,
                vp_stage,
                pipeline_rank=topology.pipeline_rank,
                layer_type=ParallelResidualLayer if architecture.parallel_residual else Layer,
                shared_norm=architecture.shared_norm,
                norms_apart=norms_apart,
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
        self.decoder.__class__ = Block
        experts.prepare(self.decoder.layers, architecture)
        self.architecture = architecture
        self._tables: tuple[Tensor, Tensor] | None = None
        self.branch: Any = None  # `hydra.Branch` of a policy with a hydra reference
        self.topology = topology
        self.head = head
        self.has_words, self.has_q = words, head.endswith("+q")
        # In the embedding's own precision, as transformers has it: bf16 makes 55.5 of sqrt(3072).
        scale = math.sqrt(config.hidden_size) if architecture.scale_embedding else 1.0
        scale *= architecture.embedding_multiplier
        self.embedding_scale = torch.tensor(scale, dtype=config.params_dtype).item()
        if first:
            self.embedding.word_embeddings.__class__ = WordEmbedding
            if architecture.position_embedding == "learned":  # megatron leaves them in fp32 on the CPU
                self.embedding.position_embeddings.to(device=backend.device(), dtype=config.params_dtype)
        if architecture.rope_scaling:
            self.rotary_pos_emb.inv_freq = frequencies(architecture).to(self.rotary_pos_emb.inv_freq.device)
        if not last:
            return
        self.decoder.layers[-1].select()
        if words:
            self.output_layer.__class__ = WordHead  # the same parameters, hooks and keys; another forward
        else:
            del self.output_layer
        if head != "logprobs":
            output = "scores" if head == "scores" else "values"
            self.value_head = ScalarHead(config, output, topology.tensor_group, mlp=mlp_values)
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
        branched: bool = False,
        with_kl: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Hidden states [T, 1, H] for the next stage (its sequence shard under sequence parallelism); on the last stage
        the head's outputs by name, each (B, R) in fp32, 0 where a token does not count. `temperature` and
        `with_entropy` are options of the log-prob head. `with_states` adds "states", (B, R, H), from which the counted
        tokens are predicted. `ref_states` and `ref_weight`, the reference's states and its head's weight, add "kl".
        `branched`: of the policy and its hydra reference (hydra.py), with "kl" if `with_kl`."""
        spans = stream.spans
        if self.post_process:
            spans = dataclasses.replace(spans, read=self._read(stream))
        if branched:
            return self.branch.forward(stream, spans, temperature=temperature, with_kl=with_kl)
        hidden = self.run(stream.tokens, stream.positions, spans, stream.max_length)
        if not self.post_process:
            return hidden
        return self.heads(
            hidden, stream, temperature=temperature, with_entropy=with_entropy, with_states=with_states,
            ref_states=ref_states, ref_weight=ref_weight,
        )  # fmt: skip

    def heads(
        self,
        hidden: Tensor,
        stream: Stream,
        *,
        temperature: float,
        with_entropy: bool = False,
        with_states: bool = False,
        ref_states: Tensor | None = None,
        ref_weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The outputs of the last stage's hidden states, as in `forward`."""
        outputs = self.value_head(hidden, stream) if self.head != "logprobs" else {}
        if self.has_words:
            options = dict(weight=self.head_weight(), **self.word_options(temperature))
            outputs |= self.output_layer(hidden, stream, with_entropy=with_entropy, **options)
            if with_states:
                outputs["states"] = stream.aligned(self.output_layer.states(hidden, stream))
            if ref_weight is not None:
                outputs["kl"] = self.output_layer.kl(hidden, stream, ref_states, ref_weight=ref_weight, **options)
        if self.has_q:
            outputs |= self.q_heads(hidden, stream, vocab_size=self.architecture.vocab_size)
        return outputs

    def word_options(self, temperature: float) -> dict[str, Any]:
        """Options of the log-prob head: which distribution it makes of a state. `logit_divisor` divides logits, as the
        temperature does."""
        return dict(
            vocab_size=self.architecture.vocab_size, temperature=temperature * self.architecture.logit_divisor,
            softcap=self.architecture.logit_softcap,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) states of the last stage -> (N, V') this rank's logits, as the log-prob head has them: float32 or
        wider. No gradients."""
        weight, architecture = self.head_weight(), self.architecture
        if weight.dtype.itemsize > 2:
            logits = capped_(operations.linear(hidden, weight), architecture.logit_softcap)
        else:
            logits = kernels.linear_logits(hidden, weight, softcap=architecture.logit_softcap)
        return logits if architecture.logit_divisor == 1 else logits.div_(architecture.logit_divisor)

    def run(
        self, tokens: Tensor, positions: Tensor, spans: Spans | Step, max_length: int, hidden: Tensor | None = None
    ) -> Tensor:
        """The layers of this chunk over (T,) tokens -> [T, 1, H], after the final norm on the last stage. `hidden`: the
        output of the stage before, unless a schedule has given it (`set_input_tensor`). `max_length`: a bound of the
        positions."""
        hidden = self.entered(tokens, positions, hidden)
        rotary = None
        if isinstance(spans, Step):
            if self.position_embedding_type == "rope":
                spans = dataclasses.replace(spans, turns=self._rotary_tables(max_length)[1][positions])
        else:
            rotary = self.rotary(positions, max_length)
        if torch.is_grad_enabled():
            return self.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=spans
            )
        return self.normed(self.through(self.decoder.layers, hidden, rotary, spans))

    def entered(self, tokens: Tensor, positions: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The input of this chunk's layers; the arguments of `run`."""
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens[None], position_ids=positions[None])
            if self.embedding_scale != 1:
                hidden = hidden * self.embedding_scale
        elif hidden is None:
            hidden = self.decoder.input_tensor
        return hidden

    def rotary(self, positions: Tensor, max_length: int) -> Tensor | None:
        """[T, 1, 1, d]: the rotary angles of (T,) positions below `max_length`; None if the model has none. Of a model
        with two kinds [T, 1, 1, 2 d]: those of layers without a window, then those of layers with one."""
        return self._rotary_tables(max_length)[0][positions] if self.position_embedding_type == "rope" else None

    def through(
        self, layers: Iterable[torch.nn.Module], hidden: Tensor, rotary: Tensor | None, spans: Spans | Step
    ) -> Tensor:
        """Some of the layers, without what a backward pass needs."""
        for layer in layers:
            hidden, _ = layer(hidden, rotary_pos_emb=rotary, packed_seq_params=spans)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """After the final norm, on the last stage."""
        return hidden if self.decoder.final_layernorm is None else self.decoder.final_layernorm(hidden)

    def _rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """The rotary angles of at least `length` positions, [positions, 1, 1, d], whose halves are equal; and their
        cosines and sines, [positions, d], scaled as the model has them. Of two kinds, as in `rotary`, one after the
        other. A captured step reads them, so they belong to this chunk; megatron drops the older of its own."""
        if self._tables is None or len(self._tables[0]) < length:
            length, architecture = 1 << (length - 1).bit_length(), self.architecture
            kinds = [self.rotary_pos_emb(length)]
            if architecture.local_rotary_base is not None:
                local = plain_frequencies(architecture.rotary_channels, architecture.local_rotary_base)
                half = torch.outer(torch.arange(length).float(), local).to(kinds[0].device)
                kinds.append(torch.cat([half, half], 1)[:, None, None])
            halves = [angles[:, 0, 0, : angles.shape[-1] // 2] for angles in kinds]
            factor = attention_factor(architecture.rope_scaling)
            turns = [torch.cat([half.cos() * factor, half.sin() * factor], 1) for half in halves]
            self._tables = torch.cat(kinds, -1), torch.cat(turns, -1)
        return self._tables

    def _read(self, stream: Stream) -> Tensor:
        """The tokens whose output the head reads. A value or a log-prob belongs to the state before a token, a score to
        the text up to and including it (detail G1). Sequence parallelism cuts them into equal parts."""
        read = stream.counted if self.head == "scores" else stream.counted - 1
        parts = self.topology.parallel.tensor if self.config.sequence_parallel else 1
        return torch.nn.functional.pad(read, (0, -len(read) % parts if len(read) else parts))

    def global_name(self, name: str) -> str:
        """The name of one of this chunk's parameters in the whole model, the same with Transformer Engine's layers and
        megatron's own: its layer counted over all stages, norms as in checkpoints, and the word embedding's for the
        last stage's copy of a tied embedding."""
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            layer = self.decoder.layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if layer.is_moe_layer:
                parts[3:] = experts.global_name(layer.mlp, parts[3:])
            inner = ".".join(parts[3:])
            for own, kept in layer.submodules_config.sharded_state_dict_keys_map.items():
                if inner.startswith(own):
                    parts[3:] = [kept + inner.removeprefix(own)]
        if name == "output_layer.weight" and self.share_embeddings_and_output_weights:
            parts = ["embedding", "word_embeddings", "weight"]
        return ".".join(parts)

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
