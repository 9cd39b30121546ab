"""Which keys of a source's configuration a conversion understands.

An unknown key may change the network without a trace in the weights, so every key needs an entry in a table: `used`
(translated), `fixed` (only some of its values give a network that megarlhf computes), or `harmless` (no effect on the
network). Any other key is refused by its name. `--ignore KEY` admits one such key.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Keys:
    used: str  # names
    fixed: dict[str, tuple]  # name -> the values that can be converted
    harmless: str  # patterns of the shell, such as lr_*
    null_is_absent: bool = False  # the format writes an option without a value as null

    def also(self, used: str = "", fixed: dict[str, tuple] | None = None, harmless: str = "") -> Keys:
        """These tables with more keys; a key with values here becomes fixed."""
        left = [name for name in self.used.split() if name not in (fixed or {})]
        return Keys(
            " ".join([*left, used]), self.fixed | (fixed or {}), f"{self.harmless} {harmless}", self.null_is_absent
        )

    def check(self, config: dict[str, Any], ignore: Collection[str] = ()) -> None:
        """ValueError("key: what; remedy") for the first key that may change the network."""
        for key, value in config.items():
            if key in self.fixed and not any(same(value, other) for other in self.fixed[key]):
                known = " or ".join(map(_said, self.fixed[key]))
                raise ValueError(f"{key}: {_said(value)} has no counterpart in megarlhf; only {known} can be converted")
            known = key in self._used or key in self.fixed or key in ignore or self._harmless.fullmatch(key)
            if not known and not (value is None and self.null_is_absent):
                raise ValueError(
                    f"{key}: {_said(value)} is a setting that the converter does not know, so it may make another "
                    f"network; if it changes nothing that the model computes, say --ignore {key}"
                )

    @cached_property
    def _used(self) -> frozenset[str]:
        return frozenset(self.used.split())

    @cached_property
    def _harmless(self) -> re.Pattern[str]:
        return re.compile("|".join(fnmatch.translate(pattern) for pattern in self.harmless.split()))


def same(value: Any, other: Any) -> bool:
    """Equal, where true is not 1 but 1 is 1.0."""
    return value == other and (type(value) is bool) == (type(other) is bool)


def _said(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# What every family of a config.json reads the same.
HUGGING_FACE = Keys(
    used="""
        model_type architectures num_labels id2label label2id score_offset vocab_size tie_word_embeddings
        initializer_range
    """,
    fixed={
        "is_causal": (True,),
        "is_decoder": (False, True),
        "is_encoder_decoder": (False,),
        "tie_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "use_bidirectional_attention": (None, False),
        "pruned_heads": ({}, None),
    },
    # where it comes from, and how it is loaded and run; what it returns; token ids and the defaults of generate();
    # training
    harmless="""
        _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype auto_map custom_pipelines
        tokenizer_class prefix problem_type finetuning_task task_specific_params torchscript use_bfloat16 unsloth_*
        transformers.js_config is_llama_config _num_labels _flash_attn_2_enabled max_sequence_length model_max_length
        _attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation

        use_cache output_past output_attentions output_hidden_states output_scores output_router_logits return_dict
        use_return_dict return_dict_in_generate

        bos_token_id eos_token_id pad_token_id unk_token_id mask_token_id cls_token_id sep_token_id
        decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length max_new_tokens min_length
        min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
        typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens

        attention_dropout hidden_dropout classifier_dropout attn_pdrop embd_pdrop resid_pdrop chunk_size_feed_forward
        gradient_checkpointing neftune_noise_alpha tf_legacy_loss router_aux_loss_coef
    """,
)
