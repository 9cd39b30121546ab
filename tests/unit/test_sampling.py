"""The sampling kernel on one rank: its noise, its distribution, its log-probs, its filters."""

import dataclasses
import json
import math

import pytest
import torch

from megarlhf.kernels import sampling
from megarlhf.kernels.noise import gumbel, philox
from megarlhf.kernels.sampling import Draw, sample, torch_records
from tests import reference
from tests.unit.test_kernels import run_python


def draw(logits, options=None, *, vocab_size=None, seed=0, ids=None, steps=None, with_entropy=False):
    ids = torch.arange(len(logits)) if ids is None else ids
    steps = torch.zeros_like(ids) if steps is None else steps
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    return sample(
        logits, options or Draw(), seed=seed, sequence_ids=ids, steps=steps, vocab_size=vocab_size,
        with_entropy=with_entropy,
    )  # fmt: skip


def random_logits(rows, vocab_size, *, scale=2.0, seed=0):
    """(rows, padded vocabulary), the padding made tempting."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, -(-vocab_size // 128) * 128, generator=generator) * scale
    logits[:, vocab_size:] = 100.0
    return logits


# Random123's kat_vectors for philox4x32-10: counter, key, words.
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_is_the_published_one(counter, key, words):
    assert [int(word) for word in philox(tuple(map(torch.tensor, counter)), tuple(key))] == words


def test_noise_depends_on_its_counter_alone():
    ids, steps = torch.tensor([3, 2**40 + 3, 4]), torch.tensor([0, 0, 9])
    whole = gumbel(7, ids, steps, stream=0, first=0, count=500)
    for first, count in ((1, 5), (4, 8), (250, 250), (499, 1)):
        part = gumbel(7, ids[1:], steps[1:], stream=0, first=first, count=count)
        assert torch.equal(part, whole[1:, first : first + count])
    for other in (
        gumbel(8, ids, steps, stream=0, first=0, count=500),
        gumbel(7 + 2**40, ids, steps, stream=0, first=0, count=500),
        gumbel(7, ids, steps + 1, stream=0, first=0, count=500),
        gumbel(7, ids, steps, stream=1, first=0, count=500),
        gumbel(7, ids + 2**33, steps, stream=0, first=0, count=500),
    ):
        assert (other == whole).float().mean() < 0.01
    assert (whole[0] == whole[1]).float().mean() < 0.01  # ids that share their low word


@pytest.mark.parametrize("stream", [0, 1])
def test_noise_is_that_of_the_documented_counter(stream):
    """Samples of a seed must stay the same from version to version."""
    ids, steps, seed = [5, 2**40 + 5, 2**62 + 1], [0, 2**32 - 1, 7], 2**40 + 9
    noise = gumbel(seed, torch.tensor(ids), torch.tensor(steps), stream=stream, first=5, count=9)
    for row, (sequence, step) in enumerate(zip(ids, steps, strict=True)):
        for index in range(5, 14):
            counter = (stream * 2**31 + index // 4, step, sequence % 2**32, sequence // 2**32)
            words = philox(tuple(map(torch.tensor, counter)), (9, 2**8))
            exact = -math.log(-math.log1p(-(int(words[index % 4]) + 0.5) / 2**32))
            assert noise[row, index - 5].item() == pytest.approx(exact, rel=1e-5, abs=1e-6), (row, index)


def test_noise_is_gumbel():
    ids = torch.arange(2000)
    values = gumbel(1, ids, torch.zeros_like(ids), stream=0, first=0, count=100).flatten().double().sort().values
    exact = torch.exp(-torch.exp(-values))
    distance = (exact - torch.linspace(0, 1, len(values), dtype=torch.float64)).abs().max()
    assert distance < 1.95 / len(values) ** 0.5  # Kolmogorov-Smirnov: exceeded once in a thousand


def filtered(p, options):
    """What is left of `p` (V,), largest first, by sorting."""
    order = p.argsort(descending=True)
    kept = p[order]
    if options.top_k:
        kept[options.top_k :] = 0
    if options.top_p < 1:
        kept[1:][kept.cumsum(0)[:-1] >= options.top_p * kept.sum()] = 0
    out = torch.zeros_like(p)
    out[order] = kept / kept.sum()
    return out


@pytest.mark.parametrize(
    "options",
    [Draw(), Draw(temperature=0.7), Draw(top_k=20), Draw(top_p=0.8), Draw(top_k=50, top_p=0.7, temperature=1.5)],
    ids=str,
)
def test_40000_draws_have_the_exact_distribution(options):
    vocab_size, count = 503, 40_000
    logits = random_logits(1, vocab_size)
    # 400 sequences at 100 places each: the counters that training uses
    tokens = torch.cat([
        draw(logits.expand(400, -1), options, vocab_size=vocab_size, steps=torch.full((400,), step)).tokens
        for step in range(count // 400)
    ])  # fmt: skip
    p = filtered((logits[0, :vocab_size].double() / options.temperature).softmax(-1), options)
    found, expected = torch.bincount(tokens, minlength=vocab_size), count * p
    assert found[p == 0].sum() == 0  # nor is the padding, or bincount would be longer
    assert len(found) == vocab_size
    rare = expected < 5
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5, (chi_square, freedom)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [Draw(temperature=0.7), Draw(greedy=True, temperature=2.0), Draw(top_k=3)], ids=str)
def test_logprob_and_entropy_are_those_of_the_unfiltered_distribution(options, dtype):
    logits = random_logits(64, 1000).to(dtype)
    logits[0, 5:500] = -torch.inf
    got = draw(logits, options, vocab_size=1000, with_entropy=True)
    want = reference.logprobs(logits[:, :1000].double(), got.tokens, temperature=options.temperature)
    torch.testing.assert_close(got.logprobs, want.logprobs.float(), rtol=0, atol=5e-6)
    torch.testing.assert_close(got.entropy, want.entropy.float(), rtol=0, atol=5e-6)


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(3, 256)
    logits[1, [200, 7, 130]] = 1.0
    logits[2, 255] = 1.0
    assert draw(logits, Draw(greedy=True)).tokens.tolist() == [0, 7, 255]


def test_certain_tokens_are_sampled():
    logits = torch.full((4, 384), -torch.inf)
    logits[torch.arange(4), torch.tensor([0, 127, 128, 383])] = 3.0
    got = draw(logits, with_entropy=True)
    assert got.tokens.tolist() == [0, 127, 128, 383]
    assert got.logprobs.tolist() == got.entropy.tolist() == [0.0] * 4


def test_nan_gives_a_token_of_the_vocabulary():
    got = draw(torch.full((2, 128), torch.nan), vocab_size=100)
    assert (got.tokens < 100).all() and (got.tokens >= 0).all() and got.logprobs.isnan().all()


def test_ties_at_the_threshold_all_pass():
    logits = torch.zeros(2000, 128)
    logits[:, :3] = 1.0
    assert set(draw(logits, Draw(top_k=2)).tokens.tolist()) == {0, 1, 2}
    assert set(draw(logits, Draw(top_k=4)).tokens.tolist()) == set(range(128))


def test_top_p_of_negative_and_large_logits():
    logits = torch.tensor([[-1000.0, -1001.0, -1002.0, -1010.0]]).repeat(500, 32)[:, :128]
    logits[:, 4:] = -torch.inf
    assert set(draw(logits, Draw(top_p=0.9)).tokens.tolist()) == {0, 1}  # 0.665 + 0.245


@pytest.mark.parametrize(
    "field", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_bad_options_are_refused(field):
    with pytest.raises(ValueError, match=f"^{next(iter(field))}: "):
        dataclasses.replace(Draw(), **field)


OPTIONS = [Draw(), Draw(greedy=True), Draw(top_k=7), Draw(temperature=0.3, top_p=0.8)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_at_its_own_step_is_drawn_as_among_rows_at_that_step(options):
    logits, steps = random_logits(64, 503), torch.arange(64) * 5 % 4
    mixed = draw(logits, options, vocab_size=503, steps=steps, with_entropy=True)
    tokens = set()
    for step in range(4):
        alike = draw(logits, options, vocab_size=503, steps=torch.full((64,), step), with_entropy=True)
        tokens.add(tuple(alike.tokens.tolist()))
        for name, value in mixed._asdict().items():
            assert torch.equal(value[steps == step], getattr(alike, name)[steps == step]), (name, step)
    assert len(tokens) == (1 if options.greedy else 4)


def check_triton(device):
    """The Triton kernels do what the torch ones do, on the first shard and on a later one; ties, -inf, large ids, rows
    at different steps, numbers that are not adjacent in memory."""
    from megarlhf.kernels.triton_sampling import triton_records

    for vocab_size, dtype, seed in ((503, torch.float32, 2**40 + 5), (90, torch.bfloat16, 2**63 + 3)):
        logits = random_logits(16, vocab_size, scale=3.0)[:, :vocab_size].to(device, dtype)
        logits[0, 3:80] = -torch.inf
        logits[1, [5, 87]] = 20.0
        ids = torch.arange(16, device=device) * (2**30 + 7)
        steps = torch.tensor([3, 0, 2**32 - 1, 3], device=device).repeat(4)
        for options, start in zip(OPTIONS * 2, [0] * 4 + [1280] * 4, strict=True):
            threshold = None if options.greedy or options == Draw() else logits.float().quantile(0.9, dim=1)
            arguments = dict(temperature=options.temperature, greedy=options.greedy, start=start, threshold=threshold,
                             seed=seed, sequence_ids=ids, steps=steps, with_entropy=True)  # fmt: skip
            got, want = (rows(logits, **arguments) for rows in (triton_records, torch_records))
            assert torch.equal(got[:, 1:4], want[:, 1:4]), (vocab_size, options, start)  # token, its logit, top
            torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-5)
            for step in steps.unique() if start == 0 else ():
                here = (steps == step).nonzero()[:, 0]
                alike = {"sequence_ids": ids[here].repeat_interleave(2)[::2], "steps": step.expand(len(here)),
                         "threshold": None if threshold is None else threshold[here]}  # fmt: skip
                found = triton_records(logits[here], **(arguments | alike))
                assert torch.equal(found, got[here]), (vocab_size, options, step)


def check_triton_thresholds(device):
    """The filters' thresholds are torch's, bit for bit: ties, -inf, a width that is no multiple of a tile."""
    from megarlhf.kernels import triton_sampling

    logits = random_logits(6, 2500, scale=3.0)[:, :2500].to(device)
    logits[0, 3:2000] = -torch.inf
    logits[1, [5, 87, 90]] = 20.0
    logits[2] = -logits[2].abs() - 100
    logits[3] = logits[3].round()
    for dtype in (torch.float32, torch.bfloat16):
        for options in (Draw(top_k=7), Draw(top_k=5000), Draw(top_p=0.8, temperature=0.3), Draw(top_k=40, top_p=0.5)):
            want, found = (
                sampling._threshold(logits.to(dtype), options, None, histogram_of)
                for histogram_of in (sampling.torch_histogram, triton_sampling.triton_histogram)
            )
            assert torch.equal(want, found), (options, dtype, want, found)


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    run_python(
        "-c",
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from tests.unit import test_sampling as cases\n"
        "cases.check_triton('cpu'); cases.check_triton_thresholds('cpu')",
    )


def test_triton_on_sm90(tmp_path):
    """Compiled for Hopper without a GPU: at most 128 registers, nothing spilled."""
    pytest.importorskip("triton")
    code = """
import json
from megarlhf.kernels import triton_sampling as kernels
from tests.sm90_gate import measure
found = {}
for logits, on in (("bf16", False), ("bf16", True), ("fp32", True)):
    flags = dict(ENTROPY=on, FILTER=on)
    found[f"stats {logits} {on}"] = measure(
        kernels.block_stats_kernel, logits, on, 1, kernels.TILE_WARPS, TILE=kernels.TILE_BLOCKS, **flags)
    found[f"pick {logits} {on}"] = measure(
        kernels.pick_kernel, logits, on, 1, kernels.PICK_WARPS, BLOCKS=1024, GREEDY=logits == "fp32", FIRST_STREAM=0,
        SECOND_STREAM=1, **flags)
    for shift in (24, 0):
        found[f"histogram {logits} {on} {shift}"] = measure(
            kernels.histogram_kernel, logits, on, 1, kernels.HISTOGRAM_WARPS, SHIFT=shift, MASSES=on, FLOOR=on,
            TILE=kernels.HISTOGRAM_TILE)
print(json.dumps(found))
"""
    measured = json.loads(run_python("-c", code, TRITON_CACHE_DIR=str(tmp_path)))
    assert len(measured) == 12
    for name, cost in measured.items():
        assert cost["registers"] <= 128 and not (cost["stack"] or cost["local"] or cost["spills"]), (name, cost)
