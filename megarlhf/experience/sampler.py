"""Sampling responses from the training weights, by the model's own modules, in the training layout.

A token depends on (weights, prompt, seed, sequence id, step of the response) alone: not on the layout, the slot, the
other sequences or the order of the prompts (up to rounding: see kernels/sampling.py).

A slot holds one sequence. Its prompt but for the last token is prefilled: keys and values alone. Then every step feeds
the newest token of each slot, first the prompt's last, and samples the next. A response that has ended leaves its slot
to the next sequence.

Legend: N rows of this data-parallel rank, n samples a prompt, s slots of a group, P prompt columns, R response columns,
W >= P + R columns of a slot, H hidden size, V' vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.batch import Prompts, Rollout
from megarlhf.cluster import backend, cuda_graphs, residency
from megarlhf.config import UserError
from megarlhf.experience.routes import Routes
from megarlhf.experience.slot_group import PREFILL_TOKENS, SlotGroup
from megarlhf.experience.slot_memory import SLOTS, SlotMemory
from megarlhf.experience.slots import Slots
from megarlhf.kernels import sampling
from megarlhf.kernels.sampling import Draw, Sampled
from megarlhf.models.cache import VECTOR, Cache

if TYPE_CHECKING:
    from megarlhf.engine import Engine

# Steps between looks at which responses have ended, if that is not free: it waits for the device, and other stages must
# be told.
LOOK_EVERY = {"cpu": 4, "cuda": 16}


@dataclass(frozen=True)
class SamplerConfig(Draw):
    """How responses are sampled: the fields of `Draw`, and these."""

    response_length: int = 24  # R: at most so many sampled tokens; without stop_at_eos all, also past EOS (detail G4)
    stop_at_eos: bool = False  # a response ends with its first EOS; what follows is padding
    samples_per_prompt: int = 1  # they share the computation of the prompt
    # Slots: responses computed at once; with pipeline stages, for each stage. Default: on a GPU as many as its memory
    # holds when the sampler is built, on a CPU 16.
    micro_batch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("response_length", "samples_per_prompt", "micro_batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")

    @property
    def least_slots(self) -> int:
        """So many slots at least: without `micro_batch_size` memory decides on a GPU."""
        return self.micro_batch_size or (1 if backend.on_cuda() else SLOTS)


class Sampler:
    """Samples from `engine`'s model. Build it once. Caches, and on a GPU recorded steps, have memory during `sample`
    alone: training has it otherwise, and recording anew takes as long as a few steps.

    prompt_length: P. seed: of the noise. pad_id: the id of padding, outside the vocabulary (default: the first id after
    it). eos_id: needed by `stop_at_eos`. with_entropy: record entropies too. lockstep: a group of data-parallel ranks
    that run the same forward passes; ranks that have finished run empty ones. With expert parallelism it is always the
    model's data-parallel group. rows: no call samples more responses on this rank, so that more slots are not needed.
    record_experts: rollouts name each token's experts (`Sequences.experts`). q_beta: for models with Q heads: tokens
    are drawn from softmax((logits + q_beta Q) / temperature), Q the smaller of the slow copies' two values; top_k,
    top_p, log-probs and entropies are of this distribution. ILQL's logits + q_beta (Q - V) (arXiv:2206.11871, section
    4) give the same: V is equal for all tokens of a state.

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
        lockstep: dist.ProcessGroup | None = None,
        rows: int | None = None,
        q_beta: float = 0.0,
        record_experts: bool = False,
    ):
        assert not q_beta or engine.modules[0].has_q
        architecture = engine.modules[0].architecture
        self.engine, self.topology, self.config = engine, engine.topology, config
        self.vocab_size, self.seed, self.with_entropy = architecture.vocab_size, seed, with_entropy
        self.eos_id, self.prompt_length, self.q_beta = eos_id, prompt_length, q_beta
        self.lockstep = engine.topology.data_group if engine.topology.parallel.expert > 1 else lockstep
        self.pad_id = architecture.vocab_size if pad_id is None else pad_id
        self.length = prompt_length + config.response_length
        self.columns = -(-self.length // VECTOR) * VECTOR  # of a slot
        check_sampling(config, architecture, prompt_length=prompt_length, eos_id=eos_id, pad_id=self.pad_id)

        parallel, device = self.topology.parallel, backend.device()
        self.tensor_group = self.topology.tensor_group if parallel.tensor > 1 else None
        self.parts = parallel.tensor if engine.config.sequence_parallel else 1  # a stream is a multiple of so many
        # How many tokens go to an expert is not known beforehand, so a step with experts cannot be recorded.
        self.static = cuda_graphs.captures() and not architecture.num_experts
        free = not self.static and parallel.pipeline == 1
        self.look_every = 1 if free else LOOK_EVERY[device.type]
        self.memory = SlotMemory.of(
            engine, config, prompt_length=prompt_length, columns=self.columns, prefill=PREFILL_TOKENS[device.type],
            parts=self.parts, q_beta=q_beta, record=record_experts,
        )  # fmt: skip
        size = config.micro_batch_size or self.memory.fitting(multiple=self.parts)
        if rows is not None:
            size = min(size, -(-rows // parallel.pipeline))
        size = -(-size // self.parts) * self.parts
        self.record_experts, self.routes = record_experts, None
        self.caches = [
            Cache(chunk, slots=parallel.pipeline * size, columns=self.columns, record=record_experts)
            for chunk in engine.modules
        ]
        self.groups = [SlotGroup(self, number, size) for number in range(parallel.pipeline)]
        self._free()

    @property
    def slots_of_a_stage(self) -> int:
        """Responses that each stage's model computes at once."""
        return self.groups[0].size

    @property
    def num_slots(self) -> int:
        """Responses that this rank's model computes at once."""
        return sum(group.size for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of this sampler on this rank beside the weights: caches and messages."""
        return sum(part.num_bytes for part in (*self.caches, *self.groups))

    def resident(self) -> int:
        """Bytes of the caches on the device now: they have them during `sample`."""
        return sum(
            x.untyped_storage().nbytes() for cache in self.caches for x in (cache.keys, cache.values, cache.experts)
        )

    @torch.no_grad()  # not inference_mode: training writes to a buffer of megatron's and reads tables that it makes
    def sample(self, prompts: Prompts, on_tokens: Callable[[int], None] = lambda count: None) -> Rollout:
        """Responses to this data-parallel rank's prompts, (N / n, P) -> N rows, on every rank of its model. `on_tokens`
        is called after each step with the number of tokens sampled, those past an EOS not yet seen included."""
        config = self.config
        assert prompts.tokens.shape[1] == self.prompt_length, prompts.tokens.shape
        assert len(prompts), "no prompts"
        for module in self.engine.modules:
            module.eval()
        self.engine.sync_params()
        self.prompts = prompts.to(backend.device())
        self.prompt_sizes = prompts.valid.sum(1).tolist()
        self.sequence_ids = sample_ids(self.prompts, config.samples_per_prompt)
        self.num_rows = rows = len(self.sequence_ids)
        device = backend.device()
        shape = (rows + 1, config.response_length)  # slots without a row write to row N
        self.results = {
            "tokens": torch.full(shape, self.pad_id, device=device),
            "logprobs": torch.zeros(shape, device=device),
        }
        if self.with_entropy:
            self.results["entropy"] = torch.zeros(shape, device=device)
        self.slots = Slots(rows=rows, samples=config.samples_per_prompt, groups=len(self.groups),
                           size=self.groups[0].size)  # fmt: skip
        self._allocate()
        self.routes = None if not self.record_experts else Routes(
            self.engine, self.caches[0], rows=rows, columns=self.length, prompt_length=self.prompt_length,
            parts=self.parts,
        )  # fmt: skip
        try:
            self._run(on_tokens)
        finally:
            self._free()
        results = {name: value[:rows].contiguous() for name, value in self.results.items()}
        if self.topology.parallel.pipeline > 1:
            for value in results.values():
                dist.broadcast(value, src=self.topology.last_stage_rank, group=self.topology.pipeline_group)
        rollout = rollout_of(self.prompts, self.sequence_ids, results, config, self.eos_id, self.pad_id)
        if self.routes is None:
            return rollout
        routes, self.routes = self.routes, None
        return replace(rollout, experts=routes.result())

    def _run(self, on_tokens: Callable[[int], None]) -> None:
        """Every rank does its tasks in the order (step, chunk, group), and every message goes to a task that is later
        in the order (step, chunk, group, stage). Sends are asynchronous, so the first unfinished task always has its
        input, and there is no deadlock. As many groups as stages keep all stages busy."""
        step = 0
        while True:
            for chunk in range(len(self.caches)):
                for group in self.groups:
                    if chunk == 0:
                        group.refill(step)
                    if group.active:
                        group.compute(chunk)
            if not any(group.active for group in self.groups):
                break
            on_tokens(sum(self.slots.count(group.number) for group in self.groups))
            step += 1
        for group in self.groups:
            group.messages.wait_for_all()

    def size(self, row: int) -> int:
        """Tokens of a row's prompt; 1 for row N, which is none."""
        return 1 if row == self.num_rows else self.prompt_sizes[row // self.config.samples_per_prompt]

    def agreed(self, active: int, prefills: int) -> tuple[int, int]:
        """The largest of each over the ranks in lockstep."""
        if self.lockstep is None:
            return active, prefills
        both = torch.tensor([active, prefills], device=backend.device())
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.lockstep)
        return tuple(both.tolist())

    def draw(self, hidden: Tensor, sequence_ids: Tensor, steps: Tensor) -> Sampled:
        """(s, H) hidden states of the last stage -> a token a row."""
        model = self.engine.modules[-1]
        logits = model.logits(hidden)
        if self.q_beta:
            logits.add_(model.q_heads.slow_values(hidden), alpha=self.q_beta)
        return sampling.sample(
            logits,
            self.config,
            seed=self.seed,
            sequence_ids=sequence_ids,
            steps=steps,
            vocab_size=self.vocab_size,
            with_entropy=self.with_entropy,
            tp_group=self.tensor_group,
        )

    def _allocate(self) -> None:
        backend.trim()  # sampling cannot use the free memory that other phases leave
        for cache in self.caches:
            cache.allocate()
        with cuda_graphs.together():
            for group in self.groups:
                group.record()
        residency.note()

    def _free(self) -> None:
        for group in self.groups:
            group.forget()  # recorded steps, which have memory of their own
        for cache in self.caches:
            cache.free()
        backend.trim()


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
