"""Rotary frequencies (Su et al. 2021, arXiv:2104.09864), plain and stretched, as transformers has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarlhf.models.rope_scaling import RopeScaling
from megarlhf.models.spec import Architecture


def frequencies(architecture: Architecture) -> Tensor:
    """[d / 2] float32: the angle by which each pair of the d channels that turn does so from a token to the next."""
    dim, base = architecture.rotary_channels, architecture.rotary_base
    plain = plain_frequencies(dim, base)
    scaling = architecture.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # up to the longest row the latter is plain
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "longrope":
        return plain / torch.tensor(scaling.short_factor, dtype=torch.float32)
    return _yarn(plain, scaling, dim, base)


def plain_frequencies(dim: int, base: float) -> Tensor:
    """[dim / 2] float32"""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def attention_factor(scaling: RopeScaling | None) -> float:
    """Cosines and sines are multiplied by it: yarn's (Peng et al. 2023, arXiv:2309.00071, equation 15, whose sqrt(1/t)
    this is) and longrope's (Ding et al. 2024, arXiv:2402.13753)."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths beyond the original length are divided by `factor`, short ones kept, with a linear blend in
    between."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def _yarn(frequencies: Tensor, scaling: RopeScaling, dim: int, base: float) -> Tensor:
    """NTK by parts (arXiv:2309.00071, section 3.2): a linear ramp over the channels between those that turn `beta_fast`
    times over the original length, kept, and those that turn `beta_slow` times, stretched."""

    def channel(turns: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
