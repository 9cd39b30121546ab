"""A share of the campaign over edits of config.json (python -m tests.campaigns.config_edits)."""

from __future__ import annotations

from collections import Counter

from tests.campaigns import config_edits


def test_no_edit_is_converted_to_another_model(tmp_path):
    seen = list(config_edits.run(("llama-3.1-tied", "mistral", "gpt_neox"), 17, tmp_path))
    counts = Counter(verdict for *_, verdict, _ in seen)
    assert not [edit for edit in seen if edit[3].isupper()]
    assert counts["refused"] > 20 and counts["same"] > 10, counts  # it looks at both
