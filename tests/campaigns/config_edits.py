"""Edits of config.json, one key at a time: none is converted to a model with other log-probs than transformers'.

    python -m tests.campaigns.config_edits [--cases llama,gpt2] [--every N]

For every family a tiny random model is saved and each key of its config.json, each key that its configuration class
knows, and keys of other families or of nobody get other values. What hf2megatron accepts is computed on both sides from
the same edited file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, logging

from megarlhf.config import UserError
from megarlhf.convert import convert, logits
from megarlhf.models.spec import Architecture, check_length
from tests.convert.models import CASES, save

ALL = ("llama", "llama-3.1-tied", "llama-bias-head_dim", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox",
       "gpt_neox-sequential-tied", "falcon-7b", "falcon-new", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3",
       "phi3", "phi4-mini", "olmo2", "granite", "glm4", "starcoder2", "qwen2-window", "llama-yarn")  # fmt: skip
TOLERANCE = 1e-4
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "tanh")
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)  # fmt: skip
ROPES = (None, {}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, LLAMA3, {**LLAMA3, "rope_theta": 100.0},
         {"rope_type": "default", "rope_theta": 100.0}, {"rope_theta": 100.0}, {"partial_rotary_factor": 0.5},
         {"type": "default", "rope_type": "linear", "factor": 4.0},
         {"full_attention": {"rope_theta": 5.0}})  # fmt: skip
# Keys that some family, some version or nobody reads.
OTHERS: dict[str, tuple] = {
    "is_causal": (False, None, 0, "no"), "is_decoder": (True, False), "is_encoder_decoder": (True,),
    "rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": (100.0, 10000.0, None), "rotary_pct": (0.5, 1.0),
    "rotary_emb_base": (100, 10000), "partial_rotary_factor": (0.5, 1.0, None), "sliding_window": (4, 10**6, None),
    "use_sliding_window": (True, False), "max_window_layers": (0, 1), "attention_chunk_size": (4,),
    "layer_types": (["sliding_attention"] * 3, ["full_attention"] * 3, ["full_attention"] * 2, []),
    "attention_bias": (True, False), "mlp_bias": (True, False), "bias": (True,), "head_dim": (4, 8, 16, None),
    "use_bidirectional_attention": (True, False), "original_max_position_embeddings": (8,),
    "attn_logit_softcapping": (5.0,), "final_logit_softcapping": (5.0,), "query_pre_attn_scalar": (64,),
    "logits_mup_width_multiplier": (2.0,), "logits_scaling": (2.0,), "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,), "no_rope_layers": ([0, 1],), "attention_multiplier": (0.5,),
    "use_parallel_residual": (False,), "parallel_attn": (False,), "alibi": (True,), "multi_query": (False,),
    "n_embed": (16,), "hidden_size": (16, 64), "num_attention_heads": (2, 8), "num_hidden_layers": (2, 4),
    "num_key_value_heads": (1, 2, 4), "hidden_act": ACTIVATIONS, "pruned_heads": ({"0": [1]},),
    "hidden_activation": ACTIVATIONS, "activation_function": ACTIVATIONS, "activation": ACTIVATIONS,
    "use_mrope": (True,), "scale_attn_weights": (False,), "scale_attn_by_inverse_layer_idx": (True,),
    "reorder_and_upcast_attn": (True,), "add_cross_attention": (True,), "unpadded_vocab_size": (50,),
    "quantization_config": ({"quant_method": "fp8"},), "transformers_weights": ("other.safetensors",),
    "text_config": ({},), "use_qk_norm": (True,), "qk_layernorm": (True,), "num_experts": (2, 8),
    "num_local_experts": (2, 8), "num_experts_per_tok": (1, 2), "norm_topk_prob": (True, False),
    "decoder_sparse_step": (2,), "mlp_only_layers": ([1],), "moe_intermediate_size": (12,), "n_inner": (None, 64),
    "model_type": ("llama", "mistral", "qwen2", "gemma", "granite"), "no_such_key": (1,),
    "tie_encoder_decoder": (True,), "torch_dtype": ("float16",), "dtype": ("bfloat16",),
    "_attn_implementation": ("sdpa",), "attn_implementation": ("sdpa",), "output_hidden_states": (True,),
    "architectures": (None, ["LlamaModel"]), "pretraining_tp": (2,), "num_labels": (1, 5),
    "max_sequence_length": (8,), "model_max_length": (8,), "is_llama_config": (True,), "_num_labels": (2,),
    "sep_token_id": (3,), "min_new_tokens": (2,), "neftune_noise_alpha": (5.0,), "_flash_attn_2_enabled": (True,),
    "transformers.js_config": ({"dtype": "q4"},), "rope_interleaved": (False, True),
    "attention_probs_dropout_prob": (0.5,), "hidden_dropout_prob": (0.5,),
}  # fmt: skip


def values(value: Any) -> tuple:
    """Other values of the same key, of its kind and of others."""
    if isinstance(value, bool):
        return (not value, None)
    if isinstance(value, int):
        return (2 * value, value + 1, 1, 0, -1, None, str(value))
    if isinstance(value, float):
        return (10 * value, 0.5, 0.0, None, "x")
    if isinstance(value, str):
        return ("x", None)
    if isinstance(value, list):
        return ([], None)
    if isinstance(value, dict):
        return ({}, None, *({**value, key: other} for key in value for other in values(value[key])))
    return (True, 1, 0.5, "x")


def edits(directory: Path) -> list[tuple[str, Any]]:
    """(key, value) of all edits of the config.json in `directory`, each once."""
    config = json.loads((directory / "config.json").read_text())
    known = {**AutoConfig.from_pretrained(directory).to_dict(), **config}
    wanted = [(key, other) for key, value in known.items() for other in values(value)]
    wanted += [(key, other) for key, others in OTHERS.items() for other in others]
    wanted += [(key, ...) for key in config]  # left out
    texts = {json.dumps([key, str(value) if value is ... else value]): (key, value) for key, value in wanted}
    return [(key, value) for key, value in texts.values() if value is ... or key not in config or config[key] != value]


@dataclass
class Case:
    """A tiny model as it was saved, with what it computes there and here."""

    name: str
    source: Path
    topology: Any
    tokens: torch.Tensor

    def __post_init__(self):
        self.config = json.loads((self.source / "config.json").read_text())
        self.parsed = AutoConfig.from_pretrained(self.source).to_dict()
        self.ours: dict[Architecture, torch.Tensor] = {}
        theirs, ours = self.theirs(self.source), self.here(self.source)
        self.base = theirs
        assert (theirs - ours).abs().max() < TOLERANCE, self.name

    def judge(self, key: str, value: Any) -> tuple[str, str]:
        """(verdict, details): refused, same, theirs fails, DIFFERS, or TRACEBACK."""
        edited = {name: old for name, old in self.config.items() if name != key}
        if value is not ...:
            edited[key] = value
        with tempfile.TemporaryDirectory(dir=self.source.parent) as work:
            source = Path(work, "source")
            shutil.copytree(self.source, source, copy_function=os.link)
            (source / "config.json").unlink()
            (source / "config.json").write_text(json.dumps(edited))
            try:
                ours = self.here(source)
            except UserError as error:
                said = str(error)
                return ("refused", said) if "\n" not in said else ("TRACEBACK", said)
            except Exception as error:
                return "TRACEBACK", f"{type(error).__name__}: {error}"
            try:
                theirs = self.theirs(source)
            except Exception as error:
                return "theirs fails", f"{type(error).__name__}: {error}".splitlines()[0]
        worst = (ours - theirs).abs().max().item()
        both = torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().any()
        return ("same" if both or worst <= TOLERANCE else "DIFFERS"), f"{worst:.1e}"

    def theirs(self, source: Path) -> torch.Tensor:
        if source != self.source and AutoConfig.from_pretrained(source).to_dict() == self.parsed:
            return self.base
        return logits.their_logprobs(source, self.tokens)

    def here(self, source: Path) -> torch.Tensor:
        """Ours, converted anew wherever the architecture is another."""
        with tempfile.TemporaryDirectory(dir=self.source.parent) as work:
            target = Path(work, "ours")
            convert.hf2megatron(source, target)
            architecture = Architecture.load(target / "actor")
            check_length(architecture, self.tokens.shape[1], "rows")
            if architecture not in self.ours:
                model = target / "actor"
                self.ours[architecture] = logits.outputs(self.topology, model, architecture, self.tokens, False)
        return self.ours[architecture]


def run(
    cases: tuple[str, ...], every: int, root: Path, only: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, Any, str, str]]:
    """(case, key, value, verdict, details) of every `every`-th edit of `cases`, of the keys `only` if there are any."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens = torch.randint(0, 61, (logits.ROWS, logits.LENGTH), generator=torch.Generator().manual_seed(0))
    number = 0
    with logits.alone() as topology:
        for name in cases:
            case = Case(name, save(name, root / name), topology, tokens)
            for key, value in edits(case.source):
                if only and key not in only:
                    continue
                number += 1
                if number % every == 0:
                    yield (name, key, value, *case.judge(key, value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(ALL), help=f"of {', '.join(CASES)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th edit")
    parser.add_argument("--all", action="store_true", help="print every edit, not only the failures")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as root:
        for case, key, value, verdict, details in run(tuple(options.cases.split(",")), options.every, Path(root)):
            counts[case, verdict] += 1
            if verdict.isupper() or options.all:
                said = "left out" if value is ... else json.dumps(value)
                print(f"{case:26} {key} = {said}: {verdict} ({details[:200]})", flush=True)
    verdicts = ("refused", "same", "theirs fails", "DIFFERS", "TRACEBACK")
    print(f"{'':26}" + "".join(f"{verdict:>14}" for verdict in verdicts))
    for case in options.cases.split(","):
        print(f"{case:26}" + "".join(f"{counts[case, verdict]:14}" for verdict in verdicts))
    failed = sum(count for (_, verdict), count in counts.items() if verdict.isupper())
    print(f"{counts.total() - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
