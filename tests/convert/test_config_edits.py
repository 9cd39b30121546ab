"""A share of the campaign over edits of config.json (python -m tests.campaigns.config_edits)."""

from __future__ import annotations

from collections import Counter

from tests.campaigns import config_edits


def test_no_edit_is_converted_to_another_model(tmp_path):
    keys = ("is_causal", "rope_scaling", "rope_theta", "head_dim", "rms_norm_eps", "hidden_dropout", "no_such_key")
    seen = list(config_edits.run(("llama-3.1-tied", "gpt_neox"), 1, tmp_path, keys))
    public = {  # keys of models that people have published
        "llama": ("is_llama_config", "rope_interleaved", "sliding_window", "use_sliding_window"),
        "gpt_neox": (
            "max_sequence_length", "model_max_length", "_num_labels", "sep_token_id", "min_new_tokens",
            "neftune_noise_alpha", "_flash_attn_2_enabled", "transformers.js_config", "attention_probs_dropout_prob",
            "hidden_dropout_prob", "hidden_act",
        ),
    }  # fmt: skip
    for case, keys in public.items():
        more = list(config_edits.run((case,), 1, tmp_path / "public", keys))
        same = [(key, value) for _, key, value, verdict, _ in more if verdict == "same"]
        assert {key for key, _ in same} == {*keys}
        assert ("rope_interleaved", True) not in same and ("sliding_window", 4) not in same
        assert case == "llama" or ("hidden_act", "gelu_fast") in same
        seen += more
    counts = Counter(verdict for *_, verdict, _ in seen)
    assert not [edit for edit in seen if edit[3].isupper()]
    assert counts["refused"] > 20 and counts["same"] > 5, counts  # it looks at both
