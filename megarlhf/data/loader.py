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
from megarlhf.data.sft import Examples
from megarlhf.stream import shares


def rows_of_step(step: int, *, num_rows: int, global_batch: int, seed: int) -> np.ndarray:
    """(G,) indices of the rows of global batch `step`. The epochs' permutations are concatenated: a batch may contain
    the end of one epoch and the start of the next, so every epoch has every row exactly once."""
    epochs, places = np.divmod(np.arange(step * global_batch, (step + 1) * global_batch), num_rows)
    return np.array([permutation(seed, int(e), num_rows)[p] for e, p in zip(epochs, places, strict=True)], np.int64)


@lru_cache(maxsize=2)  # a cache of a pure function: a batch has rows of one epoch, or of two adjacent ones
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of rows in `epoch`."""
    # RandomState, not Generator or torch.randperm: only its stream is promised to stay the same in later versions, and
    # a run may be resumed in another container.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(size)
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
        return rows_of_step(step, num_rows=len(self.data), global_batch=self.global_batch, seed=self.seed)

    def batch(self, step: int) -> Sequences:
        """Training batch `step` (from 0): after it, (step + 1) * global_batch rows have been consumed. (B, S)"""
        return self._batch(self.rows(step), np.ones(self.global_batch, bool))

    def num_tokens(self, step: int) -> int:
        """Tokens of global batch `step`, padding not counted."""
        return int(self.data.lengths[self.rows(step)].sum())

    def epoch_batches(self) -> Iterator[Sequences]:
        """Every row once, in the order of the file, for evaluation. The last batch is padded with rows whose mask is
        all False, so that it has the shape of the others and divides by `dp_size`. (B, S) each"""
        for start in range(0, len(self.data), self.global_batch):
            rows = np.arange(start, start + self.global_batch)
            real = rows < len(self.data)
            yield self._batch(np.where(real, rows, start), real)

    def __len__(self) -> int:
        """Batches an epoch, the incomplete one included."""
        return -(-len(self.data) // self.global_batch)

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> Sequences:
        """Global batch of `rows` (G,), of which the `real` (G,) ones count -> this rank's part."""
        mine = self._mine(rows)
        parts = [self.data.row(row) for row in rows[mine]]
        parts = [
            (tokens, mask if counts else np.zeros_like(mask), segments)
            for (tokens, mask, segments), counts in zip(parts, real[mine], strict=True)
        ]
        return Sequences(*padded(parts, self.pad_id))

    def _mine(self, rows: np.ndarray) -> np.ndarray:
        """This rank's rows of a global batch: indices into `rows`."""
        return shares(self.data.lengths[rows], self.dp_size)[self.dp_rank]


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
