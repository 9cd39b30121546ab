"""Sampling responses of fixed length from the training weights, in the training layout.

A token depends on (weights, prompt, seed, sequence id, position in the response) alone: not on the layout, the
micro-batches, the other rows or the padding (up to rounding: see kernels/sampling.py).

Memory a rank, beside the weights: the caches of the micro-batches in flight, W (P + R) L G D * 2 elements for W rows in
flight, and O(B V / TP) for the logits of one micro-batch. See `Sampler.num_bytes`.

Legend: N rows of this data-parallel rank, n samples a prompt, B rows of a micro-batch, W = B * in flight, P prompt
columns, R response columns, S = P + R, V' vocabulary columns of this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.batch import Prompts, Rollout
from megarlhf.cluster import backend, cuda_graphs
from megarlhf.config import UserError
from megarlhf.kernels import sampling
from megarlhf.kernels.sampling import Draw, Sampled

if TYPE_CHECKING:
    from megarlhf.engine import Engine

EXIT_EVERY = 16  # tokens between checks whether every response has ended; a check waits for the device


@dataclass(frozen=True)
class SamplerConfig(Draw):
    """How responses are sampled: the fields of `Draw`, and these."""

    response_length: int = 24  # R: number of sampled tokens, also past EOS (detail G4)
    stop_at_eos: bool = False  # tokens after the first EOS become padding
    samples_per_prompt: int = 1  # they share the computation of the prompt
    micro_batch_size: int = 16  # rows computed at once; with pipeline stages, rows in flight for each stage

    def __post_init__(self):
        super().__post_init__()
        for name in ("response_length", "samples_per_prompt", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.micro_batch_size % self.samples_per_prompt:
            raise ValueError(
                f"micro_batch_size: {self.micro_batch_size} is not a multiple of samples_per_prompt "
                f"{self.samples_per_prompt}; the samples of a prompt are computed together"
            )


class Sampler:
    """Samples from `engine`'s model. Build it once. If steps are captured as CUDA graphs, its buffers keep their
    addresses until it is deleted; otherwise the caches are allocated during `sample` alone.

    prompt_length: P. seed: of the noise. pad_id: the id of padding, outside the vocabulary (default: the first id after
    it). eos_id: needed by `stop_at_eos`. with_entropy: record entropies too.

    Raises UserError if these cannot work with the model.
    """

    def __init__(
        self,
        engine: Engine,
        config: SamplerConfig,
        *,
        prompt_length: int,
        seed: int = 0,
        eos_id: int | None = None,
        pad_id: int | None = None,
        with_entropy: bool = False,
    ):
        from megarlhf.experience.decoding import Decoder

        architecture = engine.modules[0].architecture
        self.engine, self.topology, self.config = engine, engine.topology, config
        self.vocab_size, self.seed, self.with_entropy = architecture.vocab_size, seed, with_entropy
        self.eos_id = eos_id
        self.pad_id = architecture.vocab_size if pad_id is None else pad_id
        self.length = prompt_length + config.response_length
        check_sampling(config, architecture, prompt_length=prompt_length, eos_id=eos_id, pad_id=self.pad_id)

        self.group = self.topology.tensor_group if self.topology.parallel.tensor > 1 else None
        rows, stages = config.micro_batch_size, self.topology.parallel.pipeline
        self.decoders = [Decoder(chunk, self.topology, max_length=self.length) for chunk in engine.modules]
        self.slots = [_Slot(self, rows) for _ in range(stages)]
        self.wave = stages * rows
        self._free_caches()

    @property
    def num_bytes(self) -> int:
        """Bytes of this sampler on this rank beside the weights: caches and messages."""
        return sum(slot.num_bytes for slot in self.slots)

    @torch.inference_mode()
    def sample(self, prompts: Prompts, on_tokens: Callable[[int], None] = lambda count: None) -> Rollout:
        """Responses to this data-parallel rank's prompts, (N / n, P) -> N rows, on every rank of its model.

        Any number of prompts is allowed; a smaller last wave is padded with copies. `on_tokens` is called after each
        step with the number of tokens sampled.
        """
        config, samples = self.config, self.config.samples_per_prompt
        assert prompts.tokens.shape[1] == self.length - config.response_length, prompts.tokens.shape
        assert len(prompts), "no prompts"
        for chunk in self.engine.chunks:
            chunk.eval()
        self.engine.sync_params()
        prompts = prompts.to(backend.device())
        sequence_ids = sample_ids(prompts, samples)
        shape = (len(sequence_ids), config.response_length)
        results = {
            "tokens": torch.full(shape, self.pad_id, device=sequence_ids.device),
            "logprobs": torch.zeros(shape, device=sequence_ids.device),
        }
        if self.with_entropy:
            results["entropy"] = torch.zeros_like(results["logprobs"])
        self._allocate_caches()
        for start in range(0, len(sequence_ids), self.wave):
            self._wave(prompts, sequence_ids, start, results, on_tokens)
        self._free_caches()
        if self.topology.parallel.pipeline > 1:
            for value in results.values():
                dist.broadcast(value, src=self.topology.last_stage_rank, group=self.topology.pipeline_group)
        return rollout_of(prompts, sequence_ids, results, config, self.eos_id, self.pad_id)

    def _allocate_caches(self) -> None:
        if not cuda_graphs.captures():  # a captured step needs fixed addresses
            backend.trim()  # sampling cannot use the free memory that other phases leave
            for slot in self.slots:
                for cache in slot.caches:
                    cache.allocate()

    def _free_caches(self) -> None:
        if not cuda_graphs.captures():
            for slot in self.slots:
                for cache in slot.caches:
                    cache.free()
            backend.trim()

    # ------------------------------------------------------------------------------------------- the schedule

    def _wave(self, prompts: Prompts, sequence_ids: Tensor, start: int, results: dict[str, Tensor], on_tokens) -> None:
        """The rows from `start`, one micro-batch a slot.

        Every rank does its tasks in the order (step, chunk, slot), and every message goes to a task that is later in
        the order (step, chunk, slot, stage). Sends are asynchronous, so the first unfinished task always has its input,
        and there is no deadlock. As many slots as stages keep all stages busy.
        """
        config, samples = self.config, self.config.samples_per_prompt
        starts = range(start, start + self.wave, config.micro_batch_size)
        for slot, first in zip(self.slots, starts, strict=True):
            rows = torch.arange(first, first + config.micro_batch_size, device=sequence_ids.device)
            rows.clamp_(max=len(sequence_ids) - 1)
            slot.begin(prompts.select(rows[::samples] // samples), sequence_ids[rows])
        for step in range(config.response_length):
            for chunk in range(len(self.decoders)):
                for slot in self.slots:
                    slot.compute(step, chunk)
            on_tokens(min(self.wave, len(sequence_ids) - start))
            if self.topology.last_stage:
                for slot, first in zip(self.slots, starts, strict=True):
                    for name, target in results.items():
                        part = target[first : first + config.micro_batch_size, step]
                        part.copy_(slot.sampled[name][: len(part)])
            if config.stop_at_eos and (step + 1) % EXIT_EVERY == 0 and self._finished(results["tokens"], start):
                break
        for slot in self.slots:
            slot.end(step)

    def _finished(self, tokens: Tensor, start: int) -> bool:
        """Whether every response of this wave has its EOS; the same answer on every stage."""
        finished = (tokens[start : start + self.wave] == self.eos_id).any(1).all().int()
        if self.topology.parallel.pipeline > 1:
            dist.broadcast(finished, src=self.topology.last_stage_rank, group=self.topology.pipeline_group)
        return bool(finished)

    def draw(self, hidden: Tensor, sequence_ids: Tensor, steps: Tensor) -> Sampled:
        """(B, H) hidden states of the last stage, (B,) sequence ids and (B,) steps -> a token a row."""
        return sampling.sample(
            self.decoders[-1].logits(hidden),
            self.config,
            seed=self.seed,
            sequence_ids=sequence_ids,
            steps=steps,
            vocab_size=self.vocab_size,
            with_entropy=self.with_entropy,
            tp_group=self.group,
        )


class _Slot:
    """A micro-batch in flight: its caches, its messages, and the decode step over tensors with fixed addresses."""

    def __init__(self, sampler: Sampler, rows: int):
        self.sampler, self.topology = sampler, sampler.topology
        config, device = sampler.engine.config, backend.device()
        pipeline = self.topology.pipeline_group
        stage, stages = self.topology.pipeline_rank, self.topology.parallel.pipeline
        self.before, self.behind = (dist.get_global_rank(pipeline, (stage + way) % stages) for way in (-1, 1))
        self.caches = [decoder.cache(rows, sampler.length) for decoder in sampler.decoders]
        self.sequence_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens drawn of each row
        self.sampled = {
            "tokens": torch.zeros(rows, dtype=torch.int64, device=device),
            "logprobs": torch.zeros(rows, device=device),
            "entropy": torch.zeros(rows, device=device),
        }
        hidden = (len(sampler.decoders), rows, config.hidden_size)
        self.received, self.sent = (torch.zeros(hidden, dtype=config.params_dtype, device=device) for _ in range(2))
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.decode = [cuda_graphs.captured(partial(self._decode, chunk)) for chunk in range(len(sampler.decoders))]

    @property
    def num_bytes(self) -> int:
        tensors = (*self.sampled.values(), self.sequence_ids, self.steps, self.received, self.sent)
        return sum(cache.num_bytes for cache in self.caches) + sum(x.numel() * x.element_size() for x in tensors)

    def begin(self, prompts: Prompts, sequence_ids: Tensor) -> None:
        self.prompts = prompts
        self.sequence_ids.copy_(sequence_ids)
        self.steps.zero_()

    def compute(self, step: int, chunk: int) -> None:
        """One chunk of one step: step 0 reads the prompts, every other the token before."""
        first, last = self.topology.first_stage and chunk == 0, self._ends(chunk)
        if step > 0:
            if not first:
                self._receive(self.received[chunk])
            elif not last:
                self._receive(self.sampled["tokens"])
            self._wait()
            self.decode[chunk]()
            sent = self.sampled["tokens"] if last else self.sent[chunk]
        else:
            x = self.prompts.tokens
            if not first:
                x = self.received.new_empty(*x.shape, self.received.shape[-1])
                self._receive(x)
            self._wait()
            sent = self.sampler.decoders[chunk].prefill(self.caches[chunk], x, self.prompts.valid)
            if last:
                self._draw(sent[:, -1].repeat_interleave(self.sampler.config.samples_per_prompt, 0))
                sent = self.sampled["tokens"]
        if self.topology.parallel.pipeline > 1 and not (last and step + 1 == self.sampler.config.response_length):
            group = self.topology.ring_group if self.topology.last_stage else self.topology.pipeline_group
            self.sending.append((dist.isend(sent, self.behind, group=group), sent))

    def end(self, step: int) -> None:
        """After the last `step`: receive the tokens that no further step receives."""
        if self.topology.first_stage and not self._ends(0) and step + 1 < self.sampler.config.response_length:
            self._receive(self.sampled["tokens"])
        self._wait()

    def _decode(self, chunk: int) -> None:
        first = self.topology.first_stage and chunk == 0
        decoder = self.sampler.decoders[chunk]
        hidden = decoder.decode(self.caches[chunk], self.sampled["tokens"] if first else self.received[chunk])
        if self._ends(chunk):
            self._draw(hidden)
        else:
            self.sent[chunk].copy_(hidden)

    def _draw(self, hidden: Tensor) -> None:
        sampled = self.sampler.draw(hidden, self.sequence_ids, self.steps)
        for name, value in sampled._asdict().items():
            if value is not None:
                self.sampled[name].copy_(value)
        self.steps.add_(1)

    def _ends(self, chunk: int) -> bool:
        """Whether this rank's `chunk` is the model's last."""
        return self.topology.last_stage and chunk == len(self.sampler.decoders) - 1

    def _receive(self, into: Tensor) -> None:
        # Last stage -> first has a communicator of its own: over NCCL, messages in both directions between two ranks
        # would otherwise wait for each other in one queue.
        group = self.topology.ring_group if self.topology.first_stage else self.topology.pipeline_group
        dist.irecv(into, self.before, group=group).wait()

    def _wait(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def check_sampling(config: SamplerConfig, architecture, *, prompt_length: int, eos_id: int | None, pad_id: int) -> None:
    """Refuse (UserError) options that a model of this `models.spec.Architecture` cannot sample with."""
    length, table = prompt_length + config.response_length, architecture.max_position_embeddings
    if architecture.position_embedding == "learned" and length > table:
        raise UserError(
            f"response_length: prompts of {prompt_length} tokens and responses of {config.response_length} need "
            f"{length} positions, but the model has {table}; shorten one of them"
        )
    if 0 <= pad_id < architecture.vocab_size:
        raise UserError(
            f"pad_id: {pad_id} is in the vocabulary of {architecture.vocab_size} tokens, so it could be sampled and "
            f"taken for padding; use an id from {architecture.vocab_size} on (no model reads it)"
        )
    if config.stop_at_eos and (eos_id is None or not 0 <= eos_id < architecture.vocab_size):
        raise UserError(
            f"stop_at_eos: the tokenizer's EOS id is {eos_id}, which this model cannot sample; use the tokenizer the "
            "model was trained with, or stop_at_eos: false"
        )


def sample_ids(prompts: Prompts, samples: int) -> Tensor:
    """(N,) sequence ids of the samples."""
    return (prompts.sequence_ids[:, None] * samples + torch.arange(samples, device=prompts.tokens.device)).flatten()


def rollout_of(
    prompts: Prompts, sequence_ids: Tensor, results: dict[str, Tensor], config: SamplerConfig, eos_id, pad_id: int
) -> Rollout:
    """The prompts with their sampled responses; `results`: tokens, log-probs and perhaps entropies, (N, R) each."""
    mask = torch.ones_like(results["tokens"], dtype=torch.bool)
    if config.stop_at_eos:
        is_eos = results["tokens"] == eos_id
        mask = is_eos.cumsum(1) == is_eos  # no EOS so far, or this is the first
        results = {name: value.masked_fill(~mask, pad_id if name == "tokens" else 0) for name, value in results.items()}
    each = prompts.map(lambda value: value.repeat_interleave(config.samples_per_prompt, 0))
    return Rollout(
        tokens=torch.cat([each.tokens.masked_fill(~each.valid, pad_id), results.pop("tokens")], 1),
        mask=mask,
        segments=torch.cat([each.valid, mask], 1).long(),
        prompt_len=prompts.tokens.shape[1],
        sequence_ids=sequence_ids,
        prompt_ids=each.prompt_ids,
        group_ids=each.sequence_ids,
        **results,
    )
