"""Rotary frequencies and attention factors are transformers' own."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarlhf.config import UserError
from megarlhf.convert import registry
from megarlhf.models.rope_scaling import RopeScaling
from megarlhf.models.rotary import attention_factor, frequencies
from megarlhf.models.spec import check_length

SIZES = dict(hidden_size=1024, num_attention_heads=8, max_position_embeddings=32768, num_hidden_layers=2,
             intermediate_size=64, vocab_size=100)  # fmt: skip
FACTORS = [1 + 0.25 * i for i in range(64)]
CASES = {
    "linear": dict(rope_type="linear", factor=8.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192),
    "yarn without original": dict(rope_type="yarn", factor=4.0),
    "yarn, all settings": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, beta_fast=8.0,
                               beta_slow=2.0, attention_factor=1.3, truncate=False),
    "longrope": dict(rope_type="longrope", short_factor=FACTORS, long_factor=FACTORS[::-1],
                     original_max_position_embeddings=4096),
    "longrope, all settings": dict(rope_type="longrope", short_factor=FACTORS, long_factor=FACTORS, factor=2.0,
                                   attention_factor=1.1, original_max_position_embeddings=4096),
}  # fmt: skip


def architecture_of(rope):
    config = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 5e5, **rope})
    return config, registry.read_config(config.to_dict(), "config.json")


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case):
    config, architecture = architecture_of(dict(CASES[case]))
    expected, factor = ROPE_INIT_FUNCTIONS[CASES[case]["rope_type"]](config)
    torch.testing.assert_close(frequencies(architecture), expected, rtol=2e-6, atol=0)
    assert attention_factor(architecture.rope_scaling) == pytest.approx(factor, rel=1e-12)
    back = registry.write_config(architecture, "ours")
    assert registry.read_config(back, "ours") == architecture
    again, _ = ROPE_INIT_FUNCTIONS[CASES[case]["rope_type"]](LlamaConfig(**back))
    assert torch.equal(again, expected)


def test_rows_for_which_frequencies_would_be_others_are_refused():
    """Dynamic scaling and longrope change with the length of a row, yarn does not."""
    for case, longest in (("dynamic", 32768), ("longrope", 4096), ("yarn", 32768), ("yarn, all settings", 65536),
                          ("yarn without original", 131072)):  # fmt: skip
        _, architecture = architecture_of(dict(CASES[case]))
        assert architecture.longest_row == longest, case
        check_length(architecture, longest, "data.max_length")
        with pytest.raises(UserError, match=f"data.max_length: rows of {longest + 1} tokens"):
            check_length(architecture, longest + 1, "data.max_length")
    _, plain = architecture_of(dict(rope_type="default"))
    _, dynamic = architecture_of(dict(CASES["dynamic"]))
    assert torch.equal(frequencies(plain), frequencies(dynamic))


BAD = {
    "kind longrope": (dict(kind="longrope"), "short_factor"),
    "factors of another kind": (dict(kind="yarn", short_factor=(1.0,)), "short_factor"),
    "betas": (dict(kind="yarn", beta_fast=1.0, beta_slow=2.0), "beta_slow"),
    "attention factor": (dict(kind="yarn", attention_factor=0.0), "attention_factor"),
    "negative": (dict(kind="longrope", short_factor=(-1.0,), long_factor=(1.0,)), "short_factor"),
    "length": (dict(kind="longrope", short_factor=(1.0,), long_factor=(1.0,), original_max_position_embeddings=1),
               "original_max"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_settings(case):
    changes, key = BAD[case]
    with pytest.raises(ValueError, match=f"^{key}"):
        dataclasses.replace(RopeScaling(), **changes)
