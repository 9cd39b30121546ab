"""Rotary positions in a config.json, both ways: their base, the share of channels that turn, and how they were
stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.models.rope_scaling import RopeScaling
from megarlhf.models.spec import Architecture

ROPE = " rope_parameters rope_scaling rope_theta partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
# Of each rope_type: the settings that it needs, and those that it may have.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (("factor",), (ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor")),
    "longrope": (("short_factor", "long_factor"), (ORIGINAL, "factor", "attention_factor")),
}


def rope_from(
    config: Mapping[str, Any],
    base: float = 10000.0,
    percent: float = 1.0,
    base_key: str = "rope_theta",
    percent_key: str = "partial_rotary_factor",
) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling` (whose type was once `type`); `base`
    and `percent` are the defaults. `rope_scaling` has precedence over `rope_parameters`, as in transformers 5. A
    contradiction between them is refused, because other versions may have another precedence."""
    said = {key: _rope(key, config[key], config) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    key = next(iter(said), "rope_parameters")
    rope = said.get(key, {})
    effective = {
        "rope_theta": rope.get("rope_theta", config.get(base_key, base)),
        "partial_rotary_factor": rope.get("partial_rotary_factor", config.get(percent_key, percent)),
    }
    names = {"rope_theta": {"rope_theta", base_key}, "partial_rotary_factor": {"partial_rotary_factor", percent_key}}
    remedy = "remove the one that is wrong"
    for place, values in [*said.items(), ("", config)]:
        for name, value in effective.items():
            for other in sorted(names[name] & values.keys()):
                if values[other] != value:
                    where = f"{place}: its {other}" if place else f"{other}:"
                    raise ValueError(f"{where} {values[other]} contradicts {name} {value}; {remedy}")
        if place and values["scaling"] != rope["scaling"]:
            raise ValueError(f"{place}: contradicts {key}; {remedy}")
    rotary = dict(rotary_base=effective["rope_theta"], rotary_percent=effective["partial_rotary_factor"])
    return rotary if not rope or rope["scaling"] is None else {**rotary, "rope_scaling": rope["scaling"]}


def rope_to(architecture: Architecture) -> dict[str, Any]:
    """The keys of config.json; transformers 4 reads the first two, transformers 5 the third."""
    scaling = scaling_to(architecture)
    return dict(
        rope_theta=architecture.rotary_base,
        rope_scaling=scaling,
        rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": architecture.rotary_base},
    )


def scaling_to(architecture: Architecture) -> dict[str, Any] | None:
    """What `rope_scaling` says; settings that may be absent and have their default are."""
    scaling = architecture.rope_scaling
    if scaling is None:
        return None
    needed, optional = KINDS[scaling.kind]
    usual = RopeScaling(kind=scaling.kind, short_factor=scaling.short_factor, long_factor=scaling.long_factor)
    out: dict[str, Any] = {"rope_type": scaling.kind}
    for name in needed + optional:
        value = getattr(scaling, name)
        if name == "factor" and name in optional and value == _ratio(architecture.max_position_embeddings, scaling):
            continue
        if name in needed or name == ORIGINAL or value != getattr(usual, name):
            out[name] = list(value) if isinstance(value, tuple) else value
    return out


def _ratio(length: int, scaling: RopeScaling) -> float:
    """The factor of longrope where it is not given."""
    return max(1.0, length / scaling.original_max_position_embeddings)


def _rope(key: str, value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """One of the two dictionaries: the frequencies' base and share, and the `scaling`, None for none."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: {value} is no set of settings; restore the file")
    rope = dict(value)
    out = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kinds = [rope.pop(name) for name in ("rope_type", "type") if name in rope] or ["default"]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"{key}: its rope_type {kinds[0]} contradicts its type {kinds[1]}; remove the wrong one")
    kind = kinds[0]
    if kind not in KINDS:
        raise ValueError(
            f"{key}: rope_type '{kind}' has no counterpart in megarlhf; only {', '.join(KINDS)} can be converted"
        )
    needed, optional = KINDS[kind]
    rope = {name: setting for name, setting in rope.items() if setting is not None or name not in optional}
    if not set(needed) <= rope.keys() <= {*needed, *optional}:
        may = f" and may have {', '.join(optional)}" if optional else ""
        raise ValueError(
            f"{key}: rope_type {kind} needs exactly {', '.join(needed) or 'nothing'}{may}, not "
            f"{', '.join(map(str, rope)) or 'none'}"
        )
    if kind == "default":
        return {**out, "scaling": None}
    if ORIGINAL in optional:
        # transformers lets a key of the whole file prevail (phi3), and otherwise takes the length of all rows.
        length = config.get("max_position_embeddings", 2048)
        rope[ORIGINAL] = config.get(ORIGINAL, rope.get(ORIGINAL, length))
        rope.setdefault("factor", max(1.0, length / rope[ORIGINAL]))
    return {**out, "scaling": {"kind": kind, **rope}}
