"""A share of the campaign over edits of config.json (python -m tests.campaigns.config_edits)."""

from __future__ import annotations

from collections import Counter

from tests.campaigns import config_edits


def test_no_edit_is_converted_to_another_model(tmp_path):
    keys = ("is_causal", "rope_scaling", "rope_theta", "head_dim", "rms_norm_eps", "hidden_dropout", "no_such_key")
    seen = list(config_edits.run(("llama-3.1-tied", "gpt_neox"), 1, tmp_path, keys))
    counts = Counter(verdict for *_, verdict, _ in seen)
    assert not [edit for edit in seen if edit[3].isupper()]
    assert counts["refused"] > 20 and counts["same"] > 5, counts  # it looks at both
