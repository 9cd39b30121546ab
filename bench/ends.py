"""Forced ends of responses: a sequence ends with EOS after a number of tokens that depends on its id alone, in every
system. Until then it gets no EOS. The cost of this is measured, so that the benchmarks can leave it out.

The systems differ in their environments, so only the functions import them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

TABLE = 2**14  # sequence ids beyond it have the lengths of those from 0 on again


class Ends:
    """Lengths of responses, uniform from `low` to `high` tokens, from a fixed seed; the last token is `eos_id`."""

    def __init__(self, low: int, high: int, eos_id: int):
        generator = random.Random(0)
        self.lengths = torch.tensor([generator.randint(low, high) for _ in range(TABLE)])
        self.eos_id = eos_id
        self.cpu = self.wall = 0.0  # seconds that the forcing took

    @classmethod
    def of(cls, fractions: tuple[float, float], response: int, eos_id: int) -> Ends:
        """Between two fractions of the response length, and at least 1."""
        return cls(max(1, round(fractions[0] * response)), round(fractions[1] * response), eos_id)

    def of_ids(self, sequence_ids: Tensor) -> Tensor:
        """(N,) tokens of these sequences, the EOS included."""
        return self.lengths[sequence_ids % TABLE]

    def check(self, tokens: Tensor, sequence_ids: Tensor) -> int:
        """Number of tokens of (N, R) responses up to their ends. Fails if one ends elsewhere."""
        with self.uncounted():
            found = (tokens == self.eos_id).int().argmax(1) + 1
            assert torch.equal(found, self.of_ids(sequence_ids)), (found, self.of_ids(sequence_ids))
            return int(found.sum())

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Add the time of the block to the forcing's."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def taken(self) -> dict[str, float]:
        """Seconds since the last call."""
        seconds = {"cpu": self.cpu, "wall": self.wall}
        self.cpu = self.wall = 0.0
        return seconds


@contextlib.contextmanager
def forced(ends: Ends) -> Iterator[None]:
    """The sampler of the megarlhf in this process, of any version, with these ends. The log-prob of a replaced token is
    right, so that the gate passes. Not under tensor parallelism."""
    from megarlhf.kernels import sampling

    plain = sampling.sample

    def sample(logits, draw, *, sequence_ids, tp_group=None, **options):
        assert tp_group is None, "a rank has only some of the logits"
        found = plain(logits, draw, sequence_ids=sequence_ids, tp_group=tp_group, **options)
        with ends.uncounted():
            step = options["steps"] if "steps" in options else options["step"]  # of each sequence; of all in older ones
            last = ends.of_ids(sequence_ids) - 1
            early = (found.tokens == ends.eos_id) & (step < last)
            tokens = found.tokens.masked_fill(early, ends.eos_id + 1).masked_fill(step == last, ends.eos_id)
            change = logits.gather(1, tokens[:, None]) - logits.gather(1, found.tokens[:, None])
            logprobs = found.logprobs + change[:, 0].float() / draw.temperature
            return found._replace(tokens=tokens, logprobs=logprobs)

    sampling.sample = sample
    try:
        yield
    finally:
        sampling.sample = plain


class Processor:
    """The same for `generate` of transformers: a logits processor for prompts of `columns` columns."""

    def __init__(self, ends: Ends, sequence_ids: Tensor, columns: int):
        self.ends, self.columns = ends, columns
        self.last = ends.of_ids(sequence_ids) - 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with self.ends.uncounted():
            step, eos = input_ids.shape[1] - self.columns, self.ends.eos_id
            scores[step < self.last, eos] = -torch.inf
            over = (step == self.last).nonzero().squeeze(1)
            scores[over] = -torch.inf
            scores[over, eos] = 0
        return scores
