"""`RopeScaling`: rotary frequencies that were stretched for rows longer than those of pretraining. `models/rotary.py`
computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies, by transformers' names (its `rope_type`).

    `dynamic` and `longrope` depend on the length of a row: up to the original length they are the plain (longrope: the
    short) frequencies, and longer rows are refused (`Architecture.longest_row`).
    """

    factor: float = 8.0  # wavelengths that are stretched become so many times longer
    low_freq_factor: float = 1.0  # llama3: stretched in full: wavelengths above the original length / this
    high_freq_factor: float = 4.0  # llama3: left alone: wavelengths below the original length / this
    # The original length: tokens, before the stretch. Linear and dynamic scaling do not read it.
    original_max_position_embeddings: int = 8192
    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"  # how wavelengths are stretched
    beta_fast: float = 32.0  # yarn: left alone: channels that turn more often than this over the original length
    beta_slow: float = 1.0  # yarn: stretched in full: channels that turn less often than this
    truncate: bool = True  # yarn: these two bounds are rounded to whole channels
    attention_factor: float | None = None  # yarn, longrope: of cosines and sines; default: follows from factor
    short_factor: tuple[float, ...] = ()  # longrope: the stretch of each frequency up to the original length (phi3)
    long_factor: tuple[float, ...] = ()  # longrope: beyond it; kept for the way back to transformers

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"factor: must be at least 1, not {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: must be positive and below high_freq_factor {self.high_freq_factor}, not "
                f"{self.low_freq_factor}"
            )
        least = 2 if self.kind == "longrope" else 1  # its attention factor divides by the logarithm
        if self.original_max_position_embeddings < least:
            raise ValueError(
                f"original_max_position_embeddings: must be at least {least}, not "
                f"{self.original_max_position_embeddings}"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"beta_slow: must be positive and below beta_fast {self.beta_fast}, not {self.beta_slow}")
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"attention_factor: must be positive, not {self.attention_factor}")
        for name in ("short_factor", "long_factor"):
            if any(value <= 0 for value in getattr(self, name)):
                raise ValueError(f"{name}: must have positive numbers alone")
            if (self.kind == "longrope") != bool(getattr(self, name)):
                raise ValueError(f"{name}: belongs to kind longrope, which needs it")
