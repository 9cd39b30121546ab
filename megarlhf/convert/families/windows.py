"""Sliding windows of some layers: `layer_types`, and the settings from which transformers makes it."""

from __future__ import annotations

from typing import Any

from megarlhf.models.spec import Architecture

SLIDING, FULL = "sliding_attention", "full_attention"


def windows_from(config: dict[str, Any], window: int | None, sliding: list[bool]) -> dict[str, Any]:
    """Architecture's fields, from the size of a window and the layers that have one unless `layer_types` says."""
    count, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in (SLIDING, FULL):
                raise ValueError(
                    f"layer_types: {kind} has no counterpart in megarlhf; only {SLIDING} and {FULL} can be converted"
                )
        if len(kinds) != count:
            raise ValueError(f"layer_types: has {len(kinds)} entries for {count} layers; restore the file")
        sliding = [kind == SLIDING for kind in kinds]
    if window is None or not any(sliding):
        if kinds is not None and any(sliding):
            raise ValueError(f"layer_types: {SLIDING} without a sliding_window; set its size or remove the key")
        return {}
    return dict(sliding_window=window, full_attention_layers=[i for i, local in enumerate(sliding) if not local])


def layer_types(architecture: Architecture) -> list[str]:
    return [FULL if architecture.window(layer) is None else SLIDING for layer in range(architecture.num_layers)]
