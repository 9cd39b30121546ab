"""Slots of the sampler that are computed together: which rows they hold, their prefill, and a step of decoding.

Legend: N rows of this data-parallel rank, s slots of the group, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf.cluster import backend, cuda_graphs
from megarlhf.experience.slots import Slots, Start
from megarlhf.experience.stage_messages import StageMessages
from megarlhf.models.cache import VECTOR, Prefill, Step

if TYPE_CHECKING:
    from megarlhf.batch import Prompts
    from megarlhf.cluster.parallel import Topology
    from megarlhf.engine import Engine
    from megarlhf.experience.routes import Routes
    from megarlhf.kernels.sampling import Sampled
    from megarlhf.models.cache import Cache

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}  # computed at once: they fit a CPU's cache, and fill a GPU


class Owner(Protocol):
    """What a group reads of the `sampler.Sampler` that it belongs to. The second part is of one call of `sample`."""

    engine: Engine
    topology: Topology
    config: Any  # a `SamplerConfig`
    eos_id: int | None
    parts: int
    static: bool
    look_every: int
    columns: int
    length: int
    caches: list[Cache]

    prompts: Prompts
    sequence_ids: Tensor
    num_rows: int
    slots: Slots
    results: dict[str, Tensor]
    routes: Routes | None

    def size(self, row: int) -> int: ...
    def agreed(self, active: int, prefills: int) -> tuple[int, int]: ...
    def draw(self, hidden: Tensor, sequence_ids: Tensor, steps: Tensor) -> Sampled: ...


class SlotGroup:
    """The slots that are computed together: the state of each, messages, and the step over tensors with fixed
    addresses."""

    def __init__(self, sampler: Owner, number: int, size: int):
        self.sampler, self.topology, self.number, self.size = sampler, sampler.topology, number, size
        self.first = number * size  # of the cache's slots
        self.active = 0  # slots that are computed: the first so many
        self.messages = StageMessages(self.topology)
        device = backend.device()
        zeros = partial(torch.zeros, size, dtype=torch.int64, device=device)
        # Of each slot: its newest token and its position; tokens sampled so far; its row, its sequence id, and whether
        # its EOS was sampled.
        self.tokens, self.positions, self.steps, self.rows, self.sequence_ids, self.ended = (zeros() for _ in range(6))
        self.state = (self.tokens, self.positions, self.steps, self.rows, self.sequence_ids, self.ended)
        self.logprobs, self.entropy = (torch.zeros(size, device=device) for _ in range(2))
        self.index = torch.arange(size, device=device)
        self.ages = [0] * size  # `steps`, known to the host
        self.awaited = 0  # tokens that the last stage sends back
        config, chunks = sampler.engine.config, sampler.engine.modules
        hidden = (len(chunks), size // sampler.parts, 1, config.hidden_size)
        self.received, self.sent = (torch.zeros(hidden, dtype=config.params_dtype, device=device) for _ in range(2))
        self.num_chunks = len(chunks)
        self.decode: list[Callable[[], None]] = []  # a step of each chunk, during `sample`

    def record(self) -> None:
        record = cuda_graphs.captured if self.sampler.static else lambda step: step
        self.decode = [record(partial(self._decode, chunk)) for chunk in range(self.num_chunks)]

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
            self.messages.receive(self.tokens[: self.awaited])
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
        self.messages.wait(None)
        told = torch.empty_like(self.rows)
        if self.topology.first_stage:
            ended = [over or eos for over, eos in zip(full, self.ended.bool().tolist(), strict=True)]
            held = slots.refilled(self.number, ended, compact=compact)
            told.copy_(torch.tensor([-1 if row is None else row for row in held]))
        else:
            self.messages.receive(told)
            held = [None if row < 0 else row for row in told.tolist()]
        if not self.topology.last_stage:
            self.messages.send(told, None)
        return held

    def _change(self, held: list[int | None]) -> None:
        """Hold these rows from now on."""
        sampler, before = self.sampler, self.sampler.slots.held[self.number]
        if sampler.routes:
            for slot, row in enumerate(before):
                if row is not None and row not in held:
                    sampler.routes.leave(row, self.first + slot, prompt=sampler.size(row), steps=self.ages[slot])
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
        self.messages.wait(chunk)
        # Chunk by chunk: another group's row may have started in this step, and its prompt be copied from a slot here.
        for move in self.moves:
            self.sampler.caches[chunk].copy(*move)
        for part in self.prefills:
            self._prefill(chunk, part)
        for start in self.starts:
            if start.source not in (None, start.slot):
                self.sampler.caches[chunk].copy(start.source, start.slot, self.sampler.size(start.row) - 1)
        if not self._is_first(chunk):
            self.messages.receive(self.received[chunk, : self.active // self.sampler.parts])
        self.decode[chunk]()
        if not self._is_last(chunk):
            self.messages.send(self.sent[chunk, : self.active // self.sampler.parts], chunk)
        else:
            for name, target in self.sampler.results.items():
                target[self.rows, self.steps - 1] = getattr(self, name)
            if self.topology.parallel.pipeline > 1:
                self.messages.send(self.tokens[: self.active].clone(), chunk)
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
        if sampler.routes:
            spans = replace(spans, record=sampler.routes.blank(total))
        tokens, positions = (F.pad(x, (0, total - len(x))) for x in (tokens, positions))
        hidden = None
        if not self._is_first(chunk):
            hidden = self.received.new_empty(total // sampler.parts, *self.received.shape[2:])
            self.messages.receive(hidden)
        hidden = sampler.engine.modules[chunk].run(tokens, positions, spans, sampler.length, hidden)
        if sampler.routes:
            sampler.routes.store(spans.record, spans.slots, spans.positions)
        if not self._is_last(chunk):
            self.messages.send(hidden, chunk)

    def _decode(self, chunk: int) -> None:
        """One chunk of a step of the active slots."""
        sampler, width = self.sampler, self.sampler.columns
        if not sampler.static:  # the columns in use
            held = sampler.slots.held[self.number]
            used = [sampler.size(row) + age for row, age in zip(held, self.ages, strict=True) if row is not None]
            width = -(-(max(used, default=2) - 1) // VECTOR) * VECTOR
        mine = slice(self.active)
        record = sampler.routes.blank(self.active) if sampler.routes else None
        step = Step(
            cache=sampler.caches[chunk], slots=slice(self.first, self.first + self.active), rows=self.index[mine],
            positions=self.positions[mine], width=width, record=record,
        )  # fmt: skip
        hidden = None if self._is_first(chunk) else self.received[chunk, : self.active // sampler.parts]
        hidden = sampler.engine.modules[chunk].run(
            self.tokens[mine], self.positions[mine], step, sampler.length, hidden
        )
        if sampler.routes:
            sampler.routes.store(step.record, self.first + self.index[mine], self.positions[mine])
        if self._is_last(chunk):
            self._draw(hidden)
        else:
            self.sent[chunk, : len(hidden)].copy_(hidden)
        if chunk == self.num_chunks - 1:
            self.positions.add_(self.rows < sampler.num_rows)  # an empty slot sees its first column alone
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

    def _is_first(self, chunk: int) -> bool:
        """Whether this rank's `chunk` is the model's first."""
        return self.topology.first_stage and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        """Whether this rank's `chunk` is the model's last."""
        return self.topology.last_stage and chunk == self.num_chunks - 1
