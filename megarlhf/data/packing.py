"""Which examples share a row: first-fit, in n log n steps.

Legend: K examples, R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

BLOCK = 2**20  # tokens that are moved at once


def first_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Each of K examples of `lengths`, in order, goes into the first row of at most `room` tokens that has space for it
    -> ((K,) the examples row by row, (R,) examples in each row).

    A binary tree over the rows has the largest space of each of its halves, so the first row with enough of it is found
    from the root downward (the max-segment tree for online first-fit: D. S. Johnson, Near-Optimal Bin Packing
    Algorithms, MIT, 1973).
    """
    assert not len(lengths) or lengths.max() <= room
    leaves = 1
    tree = array("q", [room, room])  # node n has the children 2n and 2n + 1; the leaves are rows, open or not
    rows = np.empty(len(lengths), np.int64)
    for example, length in enumerate(lengths.tolist()):
        if tree[1] < length:  # every row is open and too full: as many rows more
            tree = _doubled(tree, leaves, room)
            leaves *= 2
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        rows[example] = node - leaves
        tree[node] -= length
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            largest = left if left > right else right
            if tree[node] == largest:
                break
            tree[node] = largest
    return np.argsort(rows, kind="stable"), np.bincount(rows)


def _doubled(tree: array, leaves: int, room: int) -> array:
    """The tree with as many rows more, which are empty. Each level gets as many nodes at its right."""
    larger, first = array("q", [room, room]), 1
    while first <= leaves:
        larger.extend(tree[first : 2 * first])
        larger.extend([room] * first)
        first *= 2
    return larger


def gathered(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> Iterator[np.ndarray]:
    """Blocks of `flat`, whose example k is [starts[k], starts[k] + lengths[k]), with the examples in `order`."""
    ends, first = np.cumsum(lengths[order]), 0
    yield flat[:0]
    while first < len(order):
        done = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + BLOCK, side="right")))
        chosen = order[first:last]
        sizes = lengths[chosen]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield flat[np.repeat(starts[chosen], sizes) + within]
        first = last


def segments(counts: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Blocks of the number, from 1, of each token's example in its row. `counts`: (R,) examples in each row;
    `lengths`: (K,) their tokens, row by row."""
    firsts = np.cumsum(counts) - counts
    yield np.zeros(0, np.int32)
    numbers = (np.arange(len(lengths)) - np.repeat(firsts, counts) + 1).astype(np.int32)
    for start in range(0, len(lengths), BLOCK // 64):
        part = slice(start, start + BLOCK // 64)
        yield np.repeat(numbers[part], lengths[part])
