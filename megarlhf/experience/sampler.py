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

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf import kernels
from megarlhf.batch import Prompts, Rollout
from megarlhf.cluster import backend, cuda_graphs, operations
from megarlhf.config import UserError
from megarlhf.experience.slots import Slots, Start
from megarlhf.kernels import sampling
from megarlhf.kernels.sampling import Draw, Sampled
from megarlhf.models.cache import VECTOR, Cache, Prefill, Step

if TYPE_CHECKING:
    from megarlhf.engine import Engine

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}  # computed at once: they fit a CPU's cache, and fill a GPU
# Steps between looks at which responses have ended, if that is not free: it waits for the device, and other stages must
# be told.
LOOK_EVERY = {"cpu": 4, "cuda": 16}
SLOTS = 16  # by default, where the device's memory is not known
FREE = 0.9  # of a device's free memory, for what `Sampler.slot_bytes` and `fixed_bytes` count


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
    def slots(self) -> int:
        """`micro_batch_size`, or its default without a GPU."""
        return self.micro_batch_size or SLOTS


class Sampler:
    """Samples from `engine`'s model. Build it once. Caches, and on a GPU recorded steps, have memory during `sample`
    alone: training has it otherwise, and recording anew takes as long as a few steps.

    prompt_length: P. seed: of the noise. pad_id: the id of padding, outside the vocabulary (default: the first id after
    it). eos_id: needed by `stop_at_eos`. with_entropy: record entropies too. lockstep: a group of data-parallel ranks
    that run the same forward passes, as expert parallelism needs; ranks that have finished run empty ones. rows: no
    call samples more responses on this rank, so that more slots are not needed. q_beta: for models with Q heads: tokens
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
    ):
        assert not q_beta or engine.modules[0].has_q
        architecture = engine.modules[0].architecture
        self.engine, self.topology, self.config = engine, engine.topology, config
        self.vocab_size, self.seed, self.with_entropy = architecture.vocab_size, seed, with_entropy
        self.eos_id, self.lockstep, self.prompt_length, self.q_beta = eos_id, lockstep, prompt_length, q_beta
        self.pad_id = architecture.vocab_size if pad_id is None else pad_id
        self.length = prompt_length + config.response_length
        self.columns = -(-self.length // VECTOR) * VECTOR  # of a slot
        check_sampling(config, architecture, prompt_length=prompt_length, eos_id=eos_id, pad_id=self.pad_id)

        parallel, device = self.topology.parallel, backend.device()
        self.tensor_group = self.topology.tensor_group if parallel.tensor > 1 else None
        self.parts = parallel.tensor if engine.config.sequence_parallel else 1  # a stream is a multiple of so many
        self.static = cuda_graphs.captures()
        free = not self.static and parallel.pipeline == 1
        self.look_every = 1 if free else LOOK_EVERY[device.type]
        size = config.micro_batch_size or self._slots_that_fit()
        if rows is not None:
            size = min(size, -(-rows // parallel.pipeline))
        size = -(-size // self.parts) * self.parts
        self.caches = [Cache(chunk, slots=parallel.pipeline * size, columns=self.columns) for chunk in engine.modules]
        self.groups = [_Group(self, number, size) for number in range(parallel.pipeline)]
        self._free()

    def _slots_that_fit(self) -> int:
        """Slots of each stage for which every rank has memory, a multiple of `parts`; SLOTS if it does not say.
        Collective."""
        backend.trim()
        free, _ = backend.memory()
        if not free:
            return SLOTS
        fitting = torch.tensor(int(FREE * free - self.fixed_bytes) // self.slot_bytes, device=backend.device())
        dist.all_reduce(fitting, op=dist.ReduceOp.MIN)
        return max(self.parts, int(fitting) // self.parts * self.parts)

    @property
    def slot_bytes(self) -> int:
        """Bytes that each further slot of every stage takes on this rank."""
        stages, chunks = self.topology.parallel.pipeline, self.engine.modules
        cache = sum(Cache.slot_bytes(chunk, columns=self.columns) for chunk in chunks)
        if self.topology.last_stage:  # logits of one stage's slots at a time, and what is computed from them
            return stages * cache + self._column_bytes() * len(chunks[-1].head_weight())
        # The prompts' hidden states wait until the next stage has taken them.
        states = self.prompt_length * self.engine.config.hidden_size * self.engine.config.params_dtype.itemsize
        return stages * (cache + len(chunks) * states // self.parts)

    def _column_bytes(self) -> int:
        """Bytes of a slot's logit in float32 and of the sampling kernels' scratch for it."""
        if self.config.top_k or self.config.top_p < 1:
            return 48  # the search for the threshold sorts int64 keys; measured: 41 beside the logit
        return 16 if self.q_beta else 8

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the slots: activations of the prompts that are computed at once."""
        config, parallel = self.engine.config, self.topology.parallel
        channels = 4 * config.hidden_size + 4 * config.ffn_hidden_size // parallel.tensor
        tokens = max(PREFILL_TOKENS[backend.device().type], self.prompt_length)  # a longer prompt is computed alone
        return tokens * channels * config.params_dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Responses that this rank's model computes at once."""
        return sum(group.size for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of this sampler on this rank beside the weights: caches and messages."""
        return sum(part.num_bytes for part in (*self.caches, *self.groups))

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
        try:
            self._run(on_tokens)
        finally:
            self._free()
        results = {name: value[:rows].contiguous() for name, value in self.results.items()}
        if self.topology.parallel.pipeline > 1:
            for value in results.values():
                dist.broadcast(value, src=self.topology.last_stage_rank, group=self.topology.pipeline_group)
        return rollout_of(self.prompts, self.sequence_ids, results, config, self.eos_id, self.pad_id)

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
            for what in list(group.sending):
                group.wait(what)

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
        weight = model.head_weight()
        project = operations.linear if weight.dtype.itemsize > 2 else kernels.linear_logits  # float32, as the trainer's
        logits = project(hidden, weight)
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
        for group in self.groups:
            group.record()

    def _free(self) -> None:
        for group in self.groups:
            group.forget()  # recorded steps, which have memory of their own
        for cache in self.caches:
            cache.free()
        backend.trim()


class _Group:
    """The slots that are computed together: the state of each, messages, and the step over tensors with fixed
    addresses."""

    def __init__(self, sampler: Sampler, number: int, size: int):
        self.sampler, self.topology, self.number, self.size = sampler, sampler.topology, number, size
        self.first = number * size  # of the cache's slots
        self.active = 0  # slots that are computed: the first so many
        pipeline = self.topology.pipeline_group
        stage, stages = self.topology.pipeline_rank, self.topology.parallel.pipeline
        self.before, self.behind = (dist.get_global_rank(pipeline, (stage + way) % stages) for way in (-1, 1))
        device = backend.device()
        zeros = partial(torch.zeros, size, dtype=torch.int64, device=device)
        # Of each slot: its newest token and its position; tokens sampled so far; its row, its sequence id, and whether
        # its EOS was sampled.
        self.tokens, self.positions, self.steps, self.rows, self.sequence_ids, self.ended = (zeros() for _ in range(6))
        self.visible = torch.zeros(size, 1, 1, sampler.columns, dtype=torch.bool, device=device)  # columns
        self.state = (self.tokens, self.positions, self.steps, self.rows, self.sequence_ids, self.ended, self.visible)
        self.logprobs, self.entropy = (torch.zeros(size, device=device) for _ in range(2))
        self.index = torch.arange(size, device=device)
        self.ages = [0] * size  # `steps`, known to the host
        self.awaited = 0  # tokens that the last stage sends back
        config, chunks = sampler.engine.config, sampler.engine.modules
        hidden = (len(chunks), size // sampler.parts, 1, config.hidden_size)
        self.received, self.sent = (torch.zeros(hidden, dtype=config.params_dtype, device=device) for _ in range(2))
        # Unfinished sends of each chunk, and of the rows (None). They are waited for one step later: before that the
        # receiver may itself wait for what this rank sends next.
        self.sending: dict[int | None, list[tuple[dist.Work, Tensor]]] = defaultdict(list)
        self.num_chunks = len(chunks)
        self.decode: list[Callable[[], None]] = []  # a step of each chunk, during `sample`

    def record(self) -> None:
        self.decode = [cuda_graphs.captured(partial(self._decode, chunk)) for chunk in range(self.num_chunks)]

    def forget(self) -> None:
        self.decode = []

    @property
    def num_bytes(self) -> int:
        tensors = (*self.state, self.logprobs, self.entropy, self.index, self.received, self.sent)
        return sum(x.numel() * x.element_size() for x in tensors)

    # ------------------------------------------------------------------------------------------- which rows

    def refill(self, step: int) -> None:
        """Before a step: receive the tokens of the one before; when it is time to look, let rows that have ended leave
        and others start."""
        sampler, slots = self.sampler, self.sampler.slots
        if step == 0:
            self.active, self.awaited = 0, 0
            self._put(range(self.size), [sampler.num_rows] * self.size)
        if self.awaited:
            self._receive(self.tokens[: self.awaited])
            self.ended[: self.awaited] |= self.tokens[: self.awaited] == sampler.eos_id
            self.awaited = 0
        config, self.starts, self.moves = sampler.config, [], []
        full = [row is not None and age >= config.response_length
                for row, age in zip(slots.held[self.number], self.ages, strict=True)]  # fmt: skip
        look = any(full) or (config.stop_at_eos and step % sampler.look_every == 0)
        if step == 0 or (look and slots.count(self.number)):
            self._change(self._decided(full))
        used = slots.used(self.number)
        self.prefills = self._parts()
        together, number = sampler.agreed(min(used, 1), len(self.prefills))
        self.prefills += [[]] * (number - len(self.prefills))
        wanted = self.size if sampler.static else max(used, 1)
        self.active = together * -(-wanted // sampler.parts) * sampler.parts
        self.ages = [age + 1 for age in self.ages]

    def _decided(self, full: list[bool]) -> list[int | None]:
        """The rows of this group from now on, the same on every stage: the first stage knows which have ended."""
        sampler, slots, compact = self.sampler, self.sampler.slots, not self.sampler.static
        if not sampler.config.stop_at_eos:  # all know
            return slots.refilled(self.number, full, compact=compact)
        self.wait(None)
        told = torch.empty_like(self.rows)
        if self.topology.first_stage:
            ended = [over or eos for over, eos in zip(full, self.ended.bool().tolist(), strict=True)]
            held = slots.refilled(self.number, ended, compact=compact)
            told.copy_(torch.tensor([-1 if row is None else row for row in held]))
        else:
            self._receive(told)
            held = [None if row < 0 else row for row in told.tolist()]
        if not self.topology.last_stage:
            self._send(told, None)
        return held

    def _change(self, held: list[int | None]) -> None:
        """Hold these rows from now on."""
        sampler, before = self.sampler, self.sampler.slots.held[self.number]
        self.starts, moves = sampler.slots.take(self.number, held)
        for source, target in moves:
            for x in self.state:
                x[target] = x[source]
            columns = sampler.size(before[source]) + self.ages[source]
            self.moves.append((self.first + source, self.first + target, columns))
            self.ages[target] = self.ages[source]
        self._put([start.slot - self.first for start in self.starts], [start.row for start in self.starts])
        left = [slot for slot, row in enumerate(held) if row is None]
        self._put(left, [sampler.num_rows] * len(left))

    def _put(self, slots: Sequence[int], rows: list[int]) -> None:
        """The state of slots in which these rows start: the newest token is the prompt's last. Row N is none."""
        if not rows:
            return
        sampler, device = self.sampler, self.tokens.device
        index, given = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        known = given.clamp(max=sampler.num_rows - 1)
        sizes = torch.tensor([sampler.size(row) for row in rows], device=device)
        self.tokens[index] = sampler.prompts.tokens[known // sampler.config.samples_per_prompt, -1]
        self.positions[index] = sizes - 1
        self.steps[index] = self.ended[index] = 0
        self.rows[index] = given
        self.sequence_ids[index] = sampler.sequence_ids[known]
        self.visible[index, 0, 0] = torch.arange(sampler.columns, device=device) < sizes[:, None] - 1
        for slot in slots:
            self.ages[slot] = 0

    def _parts(self) -> list[list[Start]]:
        """The rows that start, but for those that copy their prompt, in parts of about PREFILL_TOKENS."""
        parts, space = [], 0
        for start in self.starts:
            size = self.sampler.size(start.row) - 1
            if start.source is None and size:
                if size > space:
                    parts.append([])
                    space = PREFILL_TOKENS[self.tokens.device.type]
                parts[-1].append(start)
                space -= size
        return parts

    # ------------------------------------------------------------------------------------------- compute

    def compute(self, chunk: int) -> None:
        """One chunk of one step: the rows that move, the prompts of those that start, then the newest token of each
        slot."""
        self.wait(chunk)
        # Chunk by chunk: another group's row may have started in this step, and its prompt be copied from a slot here.
        for move in self.moves:
            self.sampler.caches[chunk].copy(*move)
        for part in self.prefills:
            self._prefill(chunk, part)
        for start in self.starts:
            if start.source not in (None, start.slot):
                self.sampler.caches[chunk].copy(start.source, start.slot, self.sampler.size(start.row) - 1)
        if not self._is_first(chunk):
            self._receive(self.received[chunk, : self.active // self.sampler.parts])
        self.decode[chunk]()
        if not self._is_last(chunk):
            self._send(self.sent[chunk, : self.active // self.sampler.parts], chunk)
        else:
            for name, target in self.sampler.results.items():
                target[self.rows, self.steps - 1] = getattr(self, name)
            if self.topology.parallel.pipeline > 1:
                self._send(self.tokens[: self.active].clone(), chunk)
        if chunk == self.num_chunks - 1 and self.topology.first_stage and not self.topology.last_stage:
            self.awaited = self.active

    def _prefill(self, chunk: int, starts: list[Start]) -> None:
        """Keys and values of the prompts of these rows without their last tokens."""
        sampler, device = self.sampler, self.tokens.device
        rows = torch.tensor([start.row for start in starts], dtype=torch.int64, device=device)
        slots = torch.tensor([start.slot for start in starts], dtype=torch.int64, device=device)
        lengths = tuple(sampler.size(start.row) - 1 for start in starts)
        sizes = torch.tensor(lengths, dtype=torch.int64, device=device)
        prompts = sampler.prompts.select(rows // sampler.config.samples_per_prompt)
        real = prompts.valid[:, :-1]
        tokens, ends = prompts.tokens[:, :-1][real], sizes.cumsum(0)
        positions = (real.cumsum(1) - 1)[real]
        spans = Prefill(
            lengths=lengths, bounds=F.pad(ends, (1, 0)).int(), read=self.index[: sampler.parts],
            cache=sampler.caches[chunk], slots=slots.repeat_interleave(sizes), positions=positions,
        )  # fmt: skip
        total = max(1, -(-len(tokens) // sampler.parts)) * sampler.parts
        tokens, positions = (F.pad(x, (0, total - len(x))) for x in (tokens, positions))
        hidden = None
        if not self._is_first(chunk):
            hidden = self.received.new_empty(total // sampler.parts, *self.received.shape[2:])
            self._receive(hidden)
        hidden = sampler.engine.modules[chunk].run(tokens, positions, spans, sampler.length, hidden)
        if not self._is_last(chunk):
            self._send(hidden, chunk)

    def _decode(self, chunk: int) -> None:
        """One chunk of a step of the active slots."""
        sampler, width = self.sampler, self.sampler.columns
        if not sampler.static:  # the columns in use
            held = sampler.slots.held[self.number]
            used = [sampler.size(row) + age for row, age in zip(held, self.ages, strict=True) if row is not None]
            width = -(-(max(used, default=2) - 1) // VECTOR) * VECTOR
        mine = slice(self.active)
        if chunk == 0:
            self.visible[self.index, 0, 0, self.positions] = True
        visible = self.visible[mine, ..., :width]
        bias = visible.new_zeros(visible.shape, dtype=sampler.engine.config.params_dtype)
        step = Step(
            sampler.caches[chunk], slice(self.first, self.first + self.active), self.index[mine], self.positions[mine],
            bias.masked_fill_(~visible, -torch.inf),
        )  # fmt: skip
        hidden = None if self._is_first(chunk) else self.received[chunk, : self.active // sampler.parts]
        hidden = sampler.engine.modules[chunk].run(
            self.tokens[mine], self.positions[mine], step, sampler.length, hidden
        )
        if self._is_last(chunk):
            self._draw(hidden)
        else:
            self.sent[chunk, : len(hidden)].copy_(hidden)
        if chunk == self.num_chunks - 1:
            self.positions.add_(1).clamp_(max=sampler.length - 1)
            self.steps.add_(1).clamp_(max=sampler.config.response_length)

    def _draw(self, hidden: Tensor) -> None:
        """The next tokens, from hidden states [s, 1, H] or their sequence shard."""
        if self.sampler.parts > 1:
            shard, hidden = hidden.contiguous(), hidden.new_empty(self.active, *hidden.shape[1:])
            dist.all_gather_into_tensor(hidden, shard, group=self.topology.tensor_group)
        mine = slice(self.active)
        sampled = self.sampler.draw(hidden[:, 0], self.sequence_ids[mine], self.steps[mine])
        for name, value in sampled._asdict().items():
            if value is not None:
                getattr(self, name)[mine] = value
        self.ended[mine] |= sampled.tokens == self.sampler.eos_id

    # ------------------------------------------------------------------------------------------- messages

    def _is_first(self, chunk: int) -> bool:
        """Whether this rank's `chunk` is the model's first."""
        return self.topology.first_stage and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        """Whether this rank's `chunk` is the model's last."""
        return self.topology.last_stage and chunk == self.num_chunks - 1

    # Last stage -> first has a communicator of its own: over NCCL, messages in both directions between two ranks would
    # otherwise wait for each other in one queue.

    def _receive(self, into: Tensor) -> None:
        group = self.topology.ring_group if self.topology.first_stage else self.topology.pipeline_group
        dist.irecv(into, self.before, group=group).wait()

    def _send(self, value: Tensor, what: int | None) -> None:
        group = self.topology.ring_group if self.topology.last_stage else self.topology.pipeline_group
        self.sending[what].append((dist.isend(value, self.behind, group=group), value))

    def wait(self, what: int | None) -> None:
        """For what was sent."""
        for work, _ in self.sending.pop(what, ()):
            work.wait()


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
