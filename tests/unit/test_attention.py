"""Attention over spans against a slow loop over tokens in float64, with and without a window; and its memory, which
grows linearly."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.batch import Sequences
from megarlhf.models.attention import _Gather, over_spans
from megarlhf.models.build import build
from megarlhf.stream import Blocks, Spans
from tests.distributed.layouts import ADAM, LLAMA, layout

SPANS = {
    "one": (7,),
    "equal, one block": (5, 5, 5, 5),
    "of one token": (1, 1, 1),
    "ragged": (3, 17, 1, 40, 9, 9, 2, 33),
    "two blocks": (30, 2, 29, 2),
    "falling": (16, 15, 14, 13),
}


def spans_of(lengths: tuple[int, ...]) -> Spans:
    return Spans(lengths, torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int())


def slow(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], window: int | None, scale: float
) -> Tensor:
    """[T, h, D], [T, g, D] twice -> [T, h * D]: token by token and head by head."""
    repeats, start, found = query.shape[1] // key.shape[1], 0, []
    for length in lengths:
        for token in range(start, start + length):
            seen, row = slice(max(start, token + 1 - (window or length)), token + 1), []
            for head in range(query.shape[1]):
                weights = (key[seen, head // repeats] @ query[token, head] * scale).softmax(0)
                row.append(weights @ value[seen, head // repeats])
            found.append(torch.cat(row))
        start += length
    found += [query.new_zeros(query[0].numel())] * (len(query) - start)
    return torch.stack(found)


def make_inputs(total: int, heads: int, groups: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    random = np.random.RandomState(seed)
    shapes = [(total, heads, 6), (total, groups, 6), (total, groups, 6)]
    return [torch.from_numpy(random.standard_normal(shape)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 4, 16])
@pytest.mark.parametrize("heads, groups, padding", [(4, 4, 0), (4, 2, 1), (6, 1, 9), (4, 2, 0)])
@pytest.mark.parametrize("name", SPANS)
def test_forward_and_backward_against_a_slow_loop(name, heads, groups, padding, window):
    lengths = SPANS[name]
    total = sum(lengths) + padding
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        inputs = make_inputs(total, heads, groups, dtype)
        copies = [x.detach().double().requires_grad_() for x in inputs]
        # also of the padding's output, whose gradient must go nowhere
        factor = torch.from_numpy(np.random.RandomState(1).standard_normal((total, heads * 6)))
        found = over_spans(*inputs, spans_of(lengths), window=window, scale=0.7, dropout=0.0)
        expected = slow(*copies, lengths, window, 0.7)
        assert found.dtype == dtype and found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        (found * factor.to(dtype)).sum().backward()
        (expected * factor).sum().backward()
        for got, want in zip(inputs, copies, strict=True):
            torch.testing.assert_close(got.grad.double(), want.grad, rtol=0, atol=20 * tolerance)
            assert not got.grad[total - padding :].any()  # exactly 0
        assert not found[total - padding :].any()


def test_padding_is_never_read():
    """Neither by outputs nor by gradients, even if it is not a number."""
    lengths = SPANS["ragged"]
    inputs = make_inputs(sum(lengths) + 3, 4, 2, torch.float32)
    with torch.no_grad():
        for x in inputs:
            x[-3:] = math.nan
    found = over_spans(*inputs, spans_of(lengths), window=None, scale=1.0, dropout=0.0)
    assert found.isfinite().all()
    found.sum().backward()
    assert all(x.grad.isfinite().all() and not x.grad[-3:].any() for x in inputs)


def test_spans_do_not_see_each_other():
    """A span's output has the same bits, whatever the others hold."""
    lengths = SPANS["ragged"]
    spans = spans_of(lengths)
    inputs = [x.detach() for x in make_inputs(sum(lengths), 4, 2, torch.float32)]
    attend = partial(over_spans, window=None, scale=1.0, dropout=0.0)
    found = attend(*inputs, spans)
    for number in range(len(lengths)):
        mine = slice(int(spans.bounds[number]), int(spans.bounds[number + 1]))
        others = [torch.full_like(x, 1e4) for x in inputs]
        for x, own in zip(others, inputs, strict=True):
            x[mine] = own[mine]
        assert torch.equal(attend(*others, spans)[mine], found[mine])


def test_one_block_moves_no_token(monkeypatch):
    """Equal spans, one span, and none to move: the tokens are the block."""

    def refused(*_):
        raise AssertionError("tokens are moved")

    monkeypatch.setattr(_Gather, "apply", refused)
    attend = partial(over_spans, window=None, scale=1.0, dropout=0.0)
    for lengths in ((5, 5, 5), (9,)):
        attend(*make_inputs(sum(lengths) + 2, 4, 2, torch.float32), spans_of(lengths))
    with pytest.raises(AssertionError, match="tokens are moved"):
        attend(*make_inputs(14, 4, 2, torch.float32), spans_of((9, 5)))


def test_gradients_of_gathers():
    """Of padding blocks, in which a place repeats a token but nothing comes back from it, and of taking tokens out."""
    blocks = Blocks.of((3, 1, 8, 7), torch.device("cpu"))
    tokens = torch.randn(19, 2, dtype=torch.float64, requires_grad=True)
    real = blocks.real.double()

    def pack(x):  # as attention does: nothing reads the output of padding
        return _Gather.apply(x, blocks.index, blocks.inverse, None) * real

    assert torch.autograd.gradcheck(pack, tokens)
    places = torch.randn(len(blocks.index), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _Gather.apply(x, blocks.inverse, blocks.index, blocks.real), places)
    for window in (None, 3):
        attend = partial(over_spans, spans=spans_of((3, 1, 8, 7)), window=window, scale=0.7, dropout=0.0)
        assert torch.autograd.gradcheck(attend, make_inputs(21, 4, 2, torch.float64), fast_mode=True)


# --------------------------------------------------------------------------------------------------------- memory


def allocated(function: Callable[[], object]) -> tuple[int, int]:
    """(the peak of the bytes that torch allocates on the CPU in `function`, the largest allocation)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    sizes = [event["args"]["Bytes"] for event in events]
    return max(itertools.accumulate(sizes)), max(sizes)


def test_allocations_are_seen():
    peak, largest = allocated(lambda: (torch.ones(1000, 1000) @ torch.ones(1000, 10)).sum())
    assert 4_000_000 <= largest < 4_001_000 and 4_080_000 <= peak < 4_082_000


def is_linear(peaks: dict[int, int], tolerance: float) -> None:
    """Each further token costs as many bytes everywhere."""
    tokens, sizes = zip(*sorted(peaks.items()), strict=True)
    each = [(sizes[i + 1] - sizes[i]) / (tokens[i + 1] - tokens[i]) for i in range(len(tokens) - 1)]
    assert max(each) <= (1 + tolerance) * min(each), peaks


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("more", [(), (500, 30, 7)])
def test_the_memory_of_attention_is_linear_in_the_tokens(more, window):
    """Of a forward and backward pass. A matrix of the pairs of 8192 tokens has 256 MiB."""
    peaks = {}
    for length in (1024, 2048, 4096, 8192):
        lengths = (length, *more)
        inputs = make_inputs(sum(lengths), 2, 1, torch.float32)
        attend = partial(over_spans, *inputs, spans_of(lengths), window=window, scale=1.0, dropout=0.0)
        peaks[sum(lengths)], largest = allocated(lambda attend=attend: attend().sum().backward())
        assert largest <= 2**20, lengths  # the buffer of torch's kernel
    is_linear(peaks, 0.03 if window is None else 0.15)


def model_memory(recompute: str, cases: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """[lengths of rows] -> [(peak, largest allocation) of an update with them]."""
    architecture = dataclasses.replace(LLAMA, max_position_embeddings=8192)
    found = []
    with layout() as topology:
        engine = build("actor", architecture, topology, micro_batch_tokens=10_000, dtype="fp32", optimizer=ADAM,
                       recompute=recompute)  # fmt: skip
        for lengths in [cases[-1], *cases]:  # the first update allocates buffers that are kept
            segments = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
            tokens = torch.randint(0, 503, segments.shape, generator=torch.Generator().manual_seed(1))
            rows = Sequences(tokens=tokens, mask=segments[:, 1:] > 0, segments=segments)
            found.append(allocated(partial(engine.step, rows, sft_loss)))
    return found[1:]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_memory_of_an_update_is_linear_in_the_tokens(ranks, recompute):
    more = (40, 300, 7) if recompute == "none" else ()
    cases = [(length, *more) for length in (1024, 2048, 4096)]
    (found,) = ranks.run(1, model_memory, recompute, cases)
    is_linear({sum(case): peak for case, (peak, _) in zip(cases, found, strict=True)}, 0.05)
    for case, (_, largest) in zip(cases, found, strict=True):
        assert largest <= max(2**20, 4 * 520 * sum(case)), case  # some states of each token
