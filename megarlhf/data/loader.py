"""Batches of a step: a pure function of (data set, seed, step), so that resuming needs no state but the step.

Legend: G rows of the global batch, B = G / dp_size rows of this rank, S tokens a row, K rows of the data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from megarlhf.batch import Sequences
from megarlhf.config import UserError
from megarlhf.data.files import Part
from megarlhf.data.sft import Examples
from megarlhf.data.stored import release
from megarlhf.stream import shares


def rows_of_step(step: int, *, num_rows: int, global_batch: int, seed: int, parts: tuple[Part, ...] = ()) -> np.ndarray:
    """(G,) indices of the rows of global batch `step`. The epochs are concatenated: a batch may contain the end of one
    epoch and the start of the next. Every epoch has every row exactly once; with `parts`, those of `weighted_epoch`."""
    size = sum(part.size for part in parts) if parts else num_rows
    epochs, places = np.divmod(np.arange(step * global_batch, (step + 1) * global_batch), size)
    orders = {
        int(epoch): weighted_epoch(parts, seed, int(epoch)) if parts else permutation(seed, int(epoch), size)
        for epoch in np.unique(epochs)
    }
    return np.array([orders[int(e)][p] for e, p in zip(epochs, places, strict=True)], np.int64)


@lru_cache(maxsize=2)  # a cache of a pure function: a batch has rows of one epoch, or of two adjacent ones
def permutation(seed: int, epoch: int, size: int, stream: int = 0) -> np.ndarray:
    """The order of rows in `epoch`. Other streams have other orders."""
    # RandomState, not Generator or torch.randperm: only its stream is promised to stay the same in later versions, and
    # a run may be resumed in another container.
    entropy = (seed, epoch, stream) if stream else (seed, epoch)
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(entropy))).permutation(size)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=2)
def weighted_epoch(parts: tuple[Part, ...], seed: int, epoch: int) -> np.ndarray:
    """The rows of `epoch` in order. Each file is read pass after pass, every row once a pass; an epoch has the next
    `Part.size` rows of each. After any number of epochs the rows of a file have occurred equally often, up to one."""
    rows, first = [], 0
    for number, part in enumerate(parts, start=1):
        start, stop, size = epoch * part.size, (epoch + 1) * part.size, part.num_groups
        for turn in range(start // size, -(-stop // size)):
            begin, end = max(start - turn * size, 0), min(stop - turn * size, size)
            whole = end - begin == size  # the rows are shuffled below
            rows.append(first + (np.arange(size) if whole else permutation(seed, turn, size, number)[begin:end]))
        first += size
    order = np.concatenate(rows)[permutation(seed, epoch, sum(part.size for part in parts))]
    order.flags.writeable = False
    return order


class Loader:
    """This data-parallel rank's share of every global batch.

    The global batch has the same rows for every `dp_size`; each rank holds as many of them, about equally many tokens
    (`shares`). Rows are padded at the right, outside mask and segments, with the id `pad_id` (0 if the tokenizer has
    none).

    Raises UserError if `dp_size` does not divide `global_batch`.
    """

    def __init__(
        self,
        data: Examples,
        *,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        pad_id: int | None = None,
    ):
        assert len(data) > 0 and 0 <= dp_rank < dp_size
        if global_batch < 1 or global_batch % dp_size:
            raise UserError(
                f"the global batch of {global_batch} rows cannot be shared evenly by {dp_size} data-parallel ranks; "
                f"make it a multiple of {dp_size}"
            )
        self.data = data
        self.global_batch = global_batch
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed = seed
        self.pad_id = 0 if pad_id is None else pad_id

    def rows(self, step: int) -> np.ndarray:
        """(G,) indices of the rows of global batch `step`."""
        return rows_of_step(
            step, num_rows=len(self.data), global_batch=self.global_batch, seed=self.seed, parts=self.data.parts
        )

    def batch(self, step: int) -> Sequences:
        """Training batch `step` (from 0): after it, (step + 1) * global_batch rows have been consumed. (B, S)"""
        return self._batch(self.rows(step), np.ones(self.global_batch, bool))

    def num_tokens(self, step: int) -> int:
        """Tokens of global batch `step`, padding not counted."""
        return int(self.data.lengths_of(self.rows(step)).sum())

    def epoch_batches(self) -> Iterator[Sequences]:
        """Every row once, in the order of the file, for evaluation. The last batch is padded with rows whose mask is
        all False, so that it has the shape of the others and divides by `dp_size`. (B, S) each"""
        for start in range(0, len(self.data), self.global_batch):
            rows = np.arange(start, start + self.global_batch)
            real = rows < len(self.data)
            yield self._batch(np.where(real, rows, start), real)

    def __len__(self) -> int:
        """Batches of `epoch_batches`, the incomplete one included."""
        return -(-len(self.data) // self.global_batch)

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> Sequences:
        """Global batch of `rows` (G,), of which the `real` (G,) ones count -> this rank's part."""
        mine = self._mine(rows)
        parts = [self.data.row(row) for row in rows[mine]]
        parts = [
            (tokens, mask if counts else np.zeros_like(mask), segments)
            for (tokens, mask, segments), counts in zip(parts, real[mine], strict=True)
        ]
        batch = Sequences(*padded(parts, self.pad_id))
        release()
        return batch

    def _mine(self, rows: np.ndarray) -> np.ndarray:
        """This rank's rows of a global batch: indices into `rows`."""
        return shares(self.data.lengths_of(rows), self.dp_size)[self.dp_rank]


def padded(
    rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, mask, segments) of each row, of any lengths -> (B, S), (B, S - 1) and (B, S): padded at the right, and
    without the mask of the first token, which is never predicted."""
    length = max(2, *(len(tokens) for tokens, _, _ in rows))
    all_tokens = np.full((len(rows), length), pad_id, np.int64)
    all_masks = np.zeros((len(rows), length - 1), bool)
    all_segments = np.zeros((len(rows), length), np.int64)
    for target, (tokens, mask, segments) in enumerate(rows):
        all_tokens[target, : len(tokens)] = tokens
        all_masks[target, : len(tokens) - 1] = mask[1:]
        all_segments[target, : len(tokens)] = 1 if segments is None else segments
    return tuple(torch.from_numpy(x) for x in (all_tokens, all_masks, all_segments))
