"""Rows as streams of tokens, against slow loops: which tokens, which spans, which outputs; and how rows are cut into
micro-batches, dealt to ranks and put into blocks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from megarlhf.batch import Comparisons, Sequences
from megarlhf.stream import Blocks, Spans, cut, num_tokens, shares, stream_of

KINDS = ("left", "right", "packed", "holes", "whole", "nothing counts", "prompts")


def make_rows(kind: str, seed: int, count: int = 6, columns: int = 13) -> Sequences:
    """Random rows; a token that counts is never the first of its segment."""
    random = np.random.RandomState(seed)
    prompt_len = int(random.randint(2, columns)) if kind == "prompts" else 1
    segments = np.zeros((count, columns), np.int64)
    for row in range(count):
        size = int(random.randint(1, columns + 1))
        if kind in ("left", "prompts"):
            segments[row, columns - size :] = 1
        elif kind in ("right", "nothing counts"):
            segments[row, :size] = 1
        elif kind == "packed":  # also a row of padding alone, and segments of one token
            edges = np.sort(random.randint(0, columns + 1, random.randint(1, 6)))
            for number, (start, end) in enumerate(itertools.pairwise(edges)):
                segments[row, start:end] = number + 1
        elif kind == "holes":
            segments[row] = np.sort(random.randint(1, 4, columns)) * (random.random_sample(columns) < 0.6)
    found = Sequences(
        tokens=torch.from_numpy(random.randint(0, 100, (count, columns))),
        mask=torch.zeros(count, columns - prompt_len, dtype=torch.bool),
        segments=None if kind == "whole" else torch.from_numpy(segments),
        prompt_len=prompt_len,
    )
    if kind == "nothing counts":
        return found
    _, positions, _, places = slow(found)
    mask = np.zeros((count, columns), bool)
    for (row, column), position in zip(places, positions, strict=True):
        mask[row, column] = position > 0 and random.random_sample() < 0.6
    return dataclasses.replace(found, mask=torch.from_numpy(mask[:, prompt_len:]))


def slow(rows: Sequences) -> tuple[list[int], list[int], list[int], list[tuple[int, int]]]:
    """(ids, positions, lengths of the spans, (row, column) of each id) of the real tokens."""
    tokens, positions, lengths, places = [], [], [], []
    for row in range(len(rows)):
        before = 0
        for column, token in enumerate(rows.tokens[row].tolist()):
            segment = 1 if rows.segments is None else int(rows.segments[row, column])
            if segment == 0:
                continue
            if segment != before:
                lengths.append(0)
            positions.append(lengths[-1])
            lengths[-1] += 1
            tokens.append(token)
            places.append((row, column))
            before = segment
    return tokens, positions, lengths, places


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_the_real_tokens(kind, seed):
    rows = make_rows(kind, seed)
    tokens, positions, lengths, places = slow(rows)
    width = rows.tokens.shape[1] - rows.prompt_len
    wanted = [(index, row * width + column - rows.prompt_len) for index, (row, column) in enumerate(places)
              if column >= rows.prompt_len and rows.mask[row, column - rows.prompt_len]]  # fmt: skip
    for total in (None, len(tokens), len(tokens) + 5):
        stream = stream_of(rows, total)
        padding = [0] * ((total or len(tokens)) - len(tokens))
        assert stream.tokens.tolist() == tokens + padding
        assert stream.positions.tolist() == positions + padding
        assert stream.spans.lengths == tuple(lengths) and all(lengths)
        assert stream.spans.bounds.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert stream.spans.bounds.dtype == torch.int32
        assert stream.spans.num_real == len(tokens)
        assert stream.counted.tolist() == [index for index, _ in wanted]
        assert stream.places.tolist() == [place for _, place in wanted]
        assert stream.labels.tolist() == [tokens[index] for index, _ in wanted]
        assert stream.shape == rows.mask.shape
        assert stream.max_length == max(lengths, default=1)
    assert num_tokens(rows).sum() == len(tokens)
    assert num_tokens(rows).tolist() == [sum(row == place for place, _ in places) for row in range(len(rows))]
    # Every counted token of the rows is found, and no others: the loop's own check.
    assert torch.equal(stream.labels, rows.tokens[:, rows.prompt_len :][rows.mask])


def test_the_cases_are_hard():
    """What the kinds promise is in the rows above."""
    found = {kind: [make_rows(kind, seed) for seed in range(8)] for kind in KINDS}
    assert any((num_tokens(rows) == 0).any() for rows in found["packed"])
    assert any(rows.segments.max() > 2 for rows in found["packed"])
    real = [rows.segments > 0 for rows in found["holes"]]
    assert any(((x[:, :-2] & ~x[:, 1:-1]) & x[:, 2:]).any() for x in real)
    assert any(rows.prompt_len > 4 for rows in found["prompts"])
    assert all(sum(bool(rows.mask.any()) for rows in found[kind]) > 5 for kind in KINDS if kind != "nothing counts")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_return_to_their_rows(kind):
    rows = make_rows(kind, 3)
    stream = stream_of(rows, 100)
    values = torch.randn(len(stream.counted), 2, requires_grad=True)
    found = stream.aligned(values)
    assert found.shape == (*rows.mask.shape, 2)
    expected = torch.zeros_like(found)
    expected[rows.mask] = values
    assert torch.equal(found, expected)
    (found * torch.arange(found.numel()).view_as(found)).sum().backward()
    places = torch.arange(found.numel()).view_as(found)[rows.mask]
    assert torch.equal(values.grad, places.float())


def test_a_mask_that_counts_padding_is_refused():
    rows = make_rows("right", 0)
    with pytest.raises(AssertionError, match="the mask counts padding"):
        stream_of(dataclasses.replace(rows, mask=torch.ones_like(rows.mask)))


def test_more_tokens_than_there_is_room_for_are_refused():
    rows = make_rows("left", 0)
    with pytest.raises(AssertionError):
        stream_of(rows, int(num_tokens(rows).sum()) - 1)


def test_emptied_rows_have_one_token_that_does_not_count():
    rows = dataclasses.replace(make_rows("packed", 1), together=3)
    empty = rows.emptied()
    assert len(empty) == 3 and empty.together == 3 and empty.prompt_len == rows.prompt_len
    assert not empty.mask.any()
    assert num_tokens(empty).tolist() == [1, 1, 1]
    stream = stream_of(empty)
    assert stream.spans.lengths == (1, 1, 1) and stream.positions.tolist() == [0, 0, 0] and not len(stream.counted)
    assert stream.shape == (3, rows.mask.shape[1])
    # Other stages keep their other tensors, of as many rows; and a row without segments is emptied as well.
    pairs = Comparisons(
        tokens=rows.tokens, mask=rows.mask, segments=None, together=2, ranks=torch.arange(6), margins=torch.zeros(6)
    )
    empty = pairs.emptied()
    assert isinstance(empty, Comparisons) and empty.ranks.tolist() == [0, 1]
    assert num_tokens(empty).tolist() == [1, 1]
    assert num_tokens(pairs).tolist() == [13] * 6  # the rows themselves are as before


# ------------------------------------------------------------------------------------------------- micro-batches


def of_lengths(lengths, columns=40, together=1) -> Sequences:
    segments = (torch.arange(columns) < torch.tensor(lengths)[:, None]).long()
    mask = torch.zeros(len(lengths), columns - 1, dtype=torch.bool)
    return Sequences(tokens=segments, mask=mask, segments=segments, together=together)


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 17, 40, 100, 10_000])
def test_rows_are_cut_into_micro_batches(together, budget):
    random = np.random.RandomState(budget + together)
    for _ in range(20):
        lengths = random.randint(0, 41, together * random.randint(1, 12))
        rows = of_lengths(lengths.tolist(), together=together)
        found = cut(rows, budget)
        assert all(torch.equal(one, other) for one, other in zip(found, cut(rows, budget), strict=True))
        assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))  # every row once
        sums = []
        for index in found:
            units = index.view(-1, together)
            assert torch.equal(units[:, :1] + torch.arange(together), units)
            assert (units[:, 0] % together == 0).all()
            sums.append(int(lengths[index.numpy()].sum()))
            assert sums[-1] <= budget or len(units) == 1  # a long one alone
        # No micro-batch was started for nothing: first-fit leaves no two that fit into one.
        assert all(sum(pair) > budget for pair in itertools.combinations(sums, 2))


def test_the_longest_rows_come_first_and_equal_ones_in_their_order():
    found = [index.tolist() for index in cut(of_lengths([5, 9, 5, 40, 5, 1]), 10)]
    assert found == [[3], [1], [0, 4], [2, 5]]
    found = [index.tolist() for index in cut(of_lengths([6, 6, 4, 4, 4, 4, 2, 2]), 16)]
    assert found == [[0, 2, 4, 6], [1, 3, 5, 7]]  # as many tokens in each


def test_micro_batches_that_cannot_be_even_are_filled_in_turn():
    found = [index.tolist() for index in cut(of_lengths([6, 4, 4, 3, 3]), 10)]
    assert found == [[0, 1], [2, 3, 4]]  # even would be 9 and 11


def test_rows_that_are_whole():
    rows = Sequences(tokens=torch.zeros(5, 8, dtype=torch.int64), mask=torch.zeros(5, 7, dtype=torch.bool))
    assert [len(index) for index in cut(rows, 16)] == [2, 2, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_are_dealt_evenly(ranks):
    random = np.random.RandomState(ranks)
    for number in range(30):
        lengths = random.randint(1, 1000, ranks * random.randint(1, 20)) if number else np.full(ranks * 3, 7)
        found = shares(lengths, ranks)
        assert found.shape == (ranks, len(lengths) // ranks)
        assert sorted(found.ravel().tolist()) == list(range(len(lengths)))  # every row once
        assert (np.diff(found, axis=1) > 0).all()  # in their old order
        tokens = lengths[found].sum(1)
        assert tokens.max() - tokens.min() <= lengths.max() - lengths.min()
        assert np.array_equal(found, shares(lengths, ranks))
    lengths = random.permutation(np.arange(1, 6 * ranks + 1))
    assert len(set(lengths[shares(lengths, ranks)].sum(1))) == 1  # back and forth: equal sums


# -------------------------------------------------------------------------------------------------------- blocks


def random_lengths(random) -> tuple[int, ...]:
    return tuple(random.randint(1, random.choice([2, 5, 60, 3000]), random.randint(1, 40)).tolist())


def test_blocks_hold_each_token_once():
    random = np.random.RandomState(0)
    for number in range(60):
        lengths = random_lengths(random) if number else (4, 4, 4)
        blocks = Blocks.of(lengths, torch.device("cpu"))
        total, places = sum(lengths), sum(rows * length for rows, length in blocks.shapes)
        assert sum(rows for rows, _ in blocks.shapes) == len(lengths)
        assert total <= places <= Blocks.WASTE * total
        if blocks.index is None:  # nothing to move: one block of the tokens in their order
            assert blocks.shapes == [(len(lengths), lengths[0])] and len(set(lengths)) == 1
            assert blocks.inverse is None and blocks.real is None
            continue
        assert blocks.index.shape == (places,) and blocks.inverse.shape == (total,) and blocks.real.shape == (places, 1)
        assert torch.equal(blocks.index[blocks.inverse], torch.arange(total))
        real = blocks.real[:, 0]
        assert torch.equal(blocks.inverse.sort().values, real.nonzero()[:, 0])
        # Each row of a block is one span from its first token on, then padding.
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        starts = np.cumsum(lengths) - lengths
        seen, start = [], 0
        for rows, length in blocks.shapes:
            for row in range(rows):
                part = slice(start + row * length, start + (row + 1) * length)
                size = int(real[part].sum())
                assert real[part].tolist() == [True] * size + [False] * (length - size)
                span = int(owner[blocks.index[part][0]])
                assert size == lengths[span] and blocks.index[part][0] == starts[span]
                assert torch.equal(blocks.index[part][:size], starts[span] + torch.arange(size))
                seen.append(span)
            start += rows * length
        assert sorted(seen) == list(range(len(lengths)))


def test_few_blocks_for_many_lengths():
    """Their number grows with the logarithm of the lengths, not with the number of spans."""
    lengths = tuple(range(1, 4000))
    assert len(Blocks.of(lengths, torch.device("cpu")).shapes) < 45


def test_no_spans():
    spans = Spans((), torch.zeros(1, dtype=torch.int32))
    assert spans.num_real == 0 and spans.blocks().shapes == []
