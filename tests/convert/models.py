"""Tiny random Hugging Face models, saved the way transformers saves them, and plain ways to look at directories."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

LLAMA = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=61, max_position_embeddings=64, eos_token_id=7)  # fmt: skip
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=16)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.3], long_factor=[1.5, 2.0, 4.0],
                partial_rotary_factor=0.75)  # fmt: skip
GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
               "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
NEOX = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, vocab_size=61,
            max_position_embeddings=64, eos_token_id=7)  # fmt: skip
FALCON = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=61, max_position_embeddings=64,
              eos_token_id=7)  # fmt: skip
GPT2 = dict(n_embd=32, n_layer=3, n_head=4, vocab_size=61, n_positions=32, bos_token_id=3, eos_token_id=3)

CASES = {
    "llama": (LlamaConfig, LLAMA),
    "llama-3.1-tied": (LlamaConfig, {**LLAMA, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-bias-head_dim": (LlamaConfig, {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16,
                                          "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "mistral": (MistralConfig, {**LLAMA, "sliding_window": None, "head_dim": 12}),
    "qwen2": (Qwen2Config, LLAMA),
    "qwen2-tied": (Qwen2Config, {**LLAMA, "tie_word_embeddings": True, "vocab_size": 67}),
    "qwen3": (Qwen3Config, {**LLAMA, "head_dim": 16}),
    "qwen3-tied": (Qwen3Config, {**LLAMA, "head_dim": 8, "tie_word_embeddings": True, "vocab_size": 67}),
    "gemma": (GemmaConfig, {**LLAMA, "head_dim": 16, "num_key_value_heads": 1}),
    "llama-attention-bias": (LlamaConfig, {**LLAMA, "attention_bias": True}),
    "llama-linear": (LlamaConfig, {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                                                "rope_theta": 1e4}}),
    "llama-dynamic": (LlamaConfig, {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0,
                                                                 "rope_theta": 1e4}}),
    "llama-yarn": (LlamaConfig, {**LLAMA, "rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5,
                                                              "attention_factor": 1.2}}),
    "mistral-window": (MistralConfig, {**LLAMA, "sliding_window": 5}),
    "qwen2-window": (Qwen2Config, {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-yarn": (Qwen2Config, {**LLAMA, "rope_parameters": YARN}),
    "qwen3-window": (Qwen3Config, {**LLAMA, "head_dim": 16, "use_sliding_window": True, "sliding_window": 5,
                                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma2": (Gemma2Config, {**LLAMA, "head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 5,
                              "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (Gemma3TextConfig, {**LLAMA, "head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 5,
                                  "sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPE}),
    "phi3": (Phi3Config, {**LLAMA, "pad_token_id": 0, "sliding_window": 5}),
    "phi4-mini": (Phi3Config, {**LLAMA, "pad_token_id": 0, "original_max_position_embeddings": 32,
                               "tie_word_embeddings": True, "rope_parameters": LONGROPE}),
    "olmo2": (Olmo2Config, LLAMA),
    "olmo2-bias": (Olmo2Config, {**LLAMA, "attention_bias": True, "num_key_value_heads": 4}),
    "granite": (GraniteConfig, {**LLAMA, "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
                                "residual_multiplier": 0.4, "logits_scaling": 2.5, "tie_word_embeddings": True}),
    "glm4": (Glm4Config, {**LLAMA, "head_dim": 16, "pad_token_id": 0}),
    "starcoder2": (Starcoder2Config, {**LLAMA, "sliding_window": 5}),
    "starcoder2-no-bias": (Starcoder2Config, {**LLAMA, "use_bias": False, "tie_word_embeddings": False}),
    "gpt_neox": (GPTNeoXConfig, NEOX),
    "gpt_neox-sequential-tied": (GPTNeoXConfig, {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True,
                                                 "rope_parameters": {"rope_theta": 5e3, "rope_type": "default",
                                                                     "partial_rotary_factor": 0.5}}),
    "falcon-7b": (FalconConfig, FALCON),
    "falcon-new": (FalconConfig, {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
                                  "tie_word_embeddings": False}),
    "falcon-new-shared": (FalconConfig, {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
                                         "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 44}),
    "falcon-sequential-bias": (FalconConfig, {**FALCON, "parallel_attn": False, "multi_query": False, "bias": True}),
    "mixtral": (MixtralConfig, {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16,
                                "intermediate_size": 48}),
    "qwen2_moe": (Qwen2MoeConfig, {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                   "shared_expert_intermediate_size": 40}),
    "qwen3_moe": (Qwen3MoeConfig, {**LLAMA, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                   "head_dim": 16, "norm_topk_prob": True}),
    "gpt2": (GPT2Config, GPT2),
    "gpt2-untied": (GPT2Config, {**GPT2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"}),
}  # fmt: skip


def save(case: str, directory: Path, dtype: torch.dtype = torch.float32, **options) -> Path:
    """Every parameter is drawn anew: in a fresh model biases are zero and norms one, which hides mistakes."""
    kind, fields = CASES[case]
    model = AutoModelForCausalLM.from_config(kind(**fields)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(directory, **options)
    words = {f"w{i}": i for i in range(60)} | {"[UNK]": 60}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]"))).save_pretrained(directory)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        out.update(load_file(path))
    return out


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name
