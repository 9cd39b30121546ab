"""Gemma 3, its text models: Gemma 2's layers without caps, with norms of queries and keys, five layers with a sliding
window to one without, and rotary frequencies of another base in these."""

from __future__ import annotations

from typing import Any

from megarlhf.convert.families import gemma2, llama
from megarlhf.convert.families.windows import FULL, SLIDING, windows_from
from megarlhf.convert.mapping import Family
from megarlhf.convert.rope import rope_from, scaling_to
from megarlhf.models.spec import Architecture

BASE, LOCAL_BASE, PATTERN = 1e6, 1e4, 6  # where a file does not say


def from_config(config: dict[str, Any]) -> dict[str, Any]:
    config = {"max_position_embeddings": 131072, **config}
    if config.get("sliding_window", 4096) is None:
        raise ValueError("sliding_window: null is no Gemma 3's; set the size of the window")
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", PATTERN))
    local = [bool((i + 1) % pattern) for i in range(config["num_hidden_layers"])]
    windows = windows_from(config, config.get("sliding_window", 4096), local)
    plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    rope, base = two_ropes(config)
    return {
        **gemma2.common_from({**plain, "rope_theta": rope["rotary_base"]}),
        **rope,
        **windows,
        "local_rotary_base": base if windows else None,
        "qk_norm": True,
        "attention_softcap": None,  # transformers has the key, but does not read it
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def two_ropes(config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The rotary fields of layers without a window, and the base of those with one. transformers 5 writes
    `rope_parameters` with an entry for each; 4 `rope_theta`, `rope_scaling` and `rope_local_base_freq`."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not nested.keys() <= {FULL, SLIDING}:
        raise ValueError(f"rope_parameters: a Gemma 3 model has {FULL} and {SLIDING} there; restore the file")
    whole = {**config, "rope_parameters": nested.get(FULL)}
    rope = rope_from(whole, BASE)
    local = {"rope_parameters": nested.get(SLIDING)}
    if "rope_local_base_freq" in config:
        local["rope_theta"] = config["rope_local_base_freq"]
    local = rope_from(local, LOCAL_BASE)
    if "rope_scaling" in local or local["rotary_percent"] != 1:
        raise ValueError(f"rope_parameters: {SLIDING}: only the default kind can be converted")
    return rope, local["rotary_base"]


def to_config(architecture: Architecture) -> dict[str, Any]:
    scaling = scaling_to(architecture)
    local = LOCAL_BASE if architecture.local_rotary_base is None else architecture.local_rotary_base
    return {
        **gemma2.common_to(architecture),
        "architectures": ["Gemma3ForCausalLM"],
        "final_logit_softcapping": architecture.logit_softcap,
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: {**(scaling or {"rope_type": "default"}), "rope_theta": architecture.rotary_base},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


KEYS = gemma2.KEYS.also(
    "rope_local_base_freq sliding_window_pattern _sliding_window_pattern", {"attn_logit_softcapping": (None,)}
)
FAMILY = Family(
    "gemma3_text", from_config, to_config, gemma2.rows, llama.FAMILY.prefix, llama.FAMILY.buffers, KEYS,
    classifier="Gemma3TextForSequenceClassification",
)  # fmt: skip
