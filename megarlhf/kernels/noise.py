"""Counter-based noise: every number is a function of (seed, sequence id, step, index) alone, so it does not depend on
the rank that draws it, on the order of the rows or on how a batch is cut.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the generator of Random123 and of
Triton's `tl.philox`). The key is the 64-bit seed; the counter is (stream << 31 | index >> 2, step, sequence id's low
word, its high word), of whose four output words index & 3 is used.

Legend: N rows, n numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# A token is drawn in two levels (`sampling`): a block of so many vocabulary ids, and an id of it. A stream for each.
BLOCK = 128
BLOCK_NOISE, TOKEN_NOISE = 0, 1
WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words a counter. All words are int64 tensors (of shapes that broadcast) holding 32-bit values."""
    a, b, c, d = counter
    for round_ in range(ROUNDS):
        k0, k1 = ((k + round_ * step) & WORD for k, step in zip(key, KEY_STEPS, strict=True))
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wrap modulo 2^64: the bits are right
        a, b, c, d = ((right >> 32) & WORD) ^ b ^ k0, right & WORD, ((left >> 32) & WORD) ^ d ^ k1, left & WORD
    return a, b, c, d


def gumbel(seed: int, sequence_ids: Tensor, steps: Tensor, *, stream: int, first: int, count: int) -> Tensor:
    """(N, count) float32 standard Gumbel variates with the indices from `first` (below 2^31), for the rows'
    `sequence_ids` (N,) and `steps` (N,), both int64; `stream` is 0 or 1.

    -log E with E = -log(1 - u) and u = (word + 1/2) / 2^32. Small E decide a maximum, and there u has float32's full
    relative precision; in the more usual -log(-log(u)) they come from u near 1, where float32 has a grid of 2^-24.
    """
    quads = torch.arange(first // 4, -(-(first + count) // 4), device=sequence_ids.device) + (stream << 31)
    ids = sequence_ids[:, None]
    words = philox((quads, steps[:, None], ids & WORD, (ids >> 32) & WORD), split_seed(seed))
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, first % 4 : first % 4 + count]
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def split_seed(seed: int) -> tuple[int, int]:
    """The low and high word of a seed: Philox's key."""
    return seed & WORD, (seed >> 32) & WORD
