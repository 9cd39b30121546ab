"""The kernels of a decode step against float64: in the interpreter (`python -m tests.decode_cases`, with
TRITON_INTERPRET=1) and, in tests/gpu, on a GPU."""

from __future__ import annotations

import itertools
import math

import torch

from megarlhf.kernels import decode
from tests import interpreter

ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # of the largest number: bfloat16 rounds by 1/256 at most


def draws(device: str, dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def near(found: torch.Tensor, exact: torch.Tensor, error: float, what) -> None:
    assert found.isfinite().all(), what
    largest = (found.double() - exact).abs().max() / exact.abs().max()
    assert largest <= error, (what, largest.item())


# (tokens, groups, heads of a group, head size, channels that turn; None: positions are learned)
SHAPES = [(3, 2, 1, 64, 64), (2, 1, 4, 80, 20), (2, 2, 8, 128, 128), (1, 1, 71, 64, 64), (2, 2, 3, 48, None),
          (2, 2, 2, 8, 2)]  # fmt: skip


def check_rotate_and_store(kernels, device: str, dtype: torch.dtype) -> None:
    """Against float64, and the bits of megatron's operations; nothing else of the cache changes."""
    for tokens, groups, heads, size, turning in SHAPES:
        what = tokens, groups, heads, size, turning, dtype
        (product,) = draws(device, dtype, (tokens, groups, heads + 2, size))
        for contiguous in (False, True):  # parts of one product; or behind a norm of queries and keys
            query, key, value = product[:, :, :heads], product[:, :, heads], product[:, :, heads + 1]
            if contiguous:
                query, key = query.contiguous(), key.contiguous()
            keys, values = torch.full((2, tokens + 2, groups, 21, size), torch.nan, dtype=dtype, device=device)
            rows = torch.arange(tokens, device=device).flip(0) + 1
            positions = torch.tensor([20, 0, 7], device=device)[:tokens]
            turns = angles = None
            if turning:
                powers = torch.arange(0, turning, 2, device=device, dtype=torch.float64) / turning
                angles = positions[:, None].double() * 1e4**-powers
                turns = torch.cat([angles.cos(), angles.sin()], 1).float()
            arguments = rows, positions, turns
            found = kernels.rotate_and_store(query, key, value, keys, values, *arguments)
            expected = query.double(), key.double()
            if turning:
                expected = [turned(x.double(), angles.view(tokens, *[1] * (x.dim() - 2), -1)) for x in (query, key)]
            stored = [x[rows, :, positions] for x in (keys, values)]
            error = ERROR[dtype] if turning else 0
            near(found, expected[0], error, ("query", what))
            near(stored[0], expected[1], error, ("key", what))
            assert torch.equal(stored[1], value), what
            assert int(keys.isfinite().sum()) == int(values.isfinite().sum()) == tokens * groups * size, what
            if turning:
                bits = [megatrons(x, turns.view(tokens, *[1] * (x.dim() - 2), -1)) for x in (query, key)]
                assert torch.equal(found, bits[0]) and torch.equal(stored[0], bits[1]), what


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As complex numbers: channel i with channel i + d / 2 for the first d channels."""
    half = angles.shape[-1]
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag, x[..., 2 * half :]], -1)


def megatrons(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """t cos + rotate_half(t) sin in float32, one operation after the other, as megatron's rope_utils does in torch."""
    cos, sin = (part.repeat_interleave(2, -1).unflatten(-1, (-1, 2)).mT.flatten(-2) for part in turns.chunk(2, -1))
    t, rest = x[..., : turns.shape[-1]].float(), x[..., turns.shape[-1] :]
    left, right = t.chunk(2, -1)
    return torch.cat([(t * cos + torch.cat([-right, left], -1) * sin).to(x.dtype), rest], -1)


def check_attend(kernels, device: str, dtype: torch.dtype) -> None:
    """Slots of all lengths, empty ones, several tokens of one slot, windows, capped scores, and nan behind what a token
    sees."""
    shapes = [(1, 64), (4, 80), (8, 128)]
    options = [(None, 1, None), (None, 4, None), (50, 1, None), (1, 2, None)]
    cases = [*itertools.product(shapes, options), ((71, 64), (None, 2, None))]
    cases += [((4, 80), (None, 2, 3.0)), ((8, 128), (50, 1, 1.0))]
    for (heads, size), (window, splits, softcap) in cases:
        groups, columns = 2, 176
        rows = torch.tensor([3, 0, 1, 0, 4], device=device)
        positions = torch.tensor([175, 0, 63, 1, 64], device=device)
        what = heads, size, window, splits, softcap, dtype
        (product,), (keys, values) = (
            draws(device, dtype, (len(rows), groups, heads + 2, size)),
            draws(device, dtype, *[(5, groups, columns, size)] * 2),
        )
        for slot in range(5):
            last = positions[rows == slot].max().item() if slot in rows else -1
            for x in (keys, values):
                x[slot, :, last + 1 :] = torch.nan
                if window and slot != 0:
                    x[slot, :, : max(0, last - window + 1)] = torch.nan
        query, scale = 4 * product[:, :, :heads], 1 / math.sqrt(size)
        found = kernels.attend(
            query, keys, values, rows, positions, window=window, scale=scale, softcap=softcap, splits=splits
        )
        for token, (row, last) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            columns_seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
            k, v = (x[row, :, columns_seen].double() for x in (keys, values))
            scores = scale * query[token].double() @ k.mT
            exact = (scores if softcap is None else softcap * (scores / softcap).tanh()).softmax(-1) @ v
            near(found[token], exact, 2 * ERROR[dtype], (token, what))  # weights are rounded, too


def check_add_norm(kernels, device: str, dtype: torch.dtype) -> None:
    for size, biased, rms, centred in (
        (256, False, True, False), (200, True, False, False), (2048, True, True, True), (24, False, False, True),
    ):  # fmt: skip
        x, residual, bias, weight, shift = draws(device, dtype, (5, 1, size), (5, 1, size), *[(size,)] * 3)
        residual[0] = -x[0] + 1e-3  # where epsilon counts
        found = kernels.add_norm(
            x, bias if biased else None, residual, weight, None if rms else shift, epsilon=1e-5, zero_centred=centred
        )
        total = x.double() + residual.double() + (bias.double() if biased else 0)
        near(found[0], total, ERROR[dtype], ("total", size))
        centre = found[0].double()
        centre = centre if rms else centre - centre.mean(-1, keepdim=True)
        exact = centre / (centre.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + centred)
        near(found[1], exact if rms else exact + shift.double(), ERROR[dtype], ("norm", size, rms, centred))


def check_activate(kernels, device: str, dtype: torch.dtype) -> None:
    for (name, plain), (gated, biased) in itertools.product(
        decode.ACTIVATIONS.items(), [(True, False), (True, True), (False, True)]
    ):
        x, bias = draws(device, dtype, (3, 1, 2 * 1030), (2 * 1030,))
        x[0, 0, :4] = torch.tensor([-30.0, 30, -3, 0], device=device, dtype=dtype)
        whole = 3 * (x.double() + (bias.double() if biased else 0))
        found = kernels.activate(3 * x, 3 * bias if biased else None, name, gated=gated)
        exact = plain(whole[..., :1030]) * whole[..., 1030:] if gated else plain(whole)
        near(found, exact, 2 * ERROR[dtype], (name, gated, biased))  # rounded up to three times


CHECKS = (check_rotate_and_store, check_attend, check_add_norm, check_activate)


def check_all(device: str) -> None:
    from megarlhf.kernels import triton_decode

    for check in CHECKS:
        for dtype in ERROR:
            check(triton_decode, device, dtype)


if __name__ == "__main__":
    interpreter.mend()
    check_all("cpu")
