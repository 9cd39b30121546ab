"""transformers and ours agree: the same checkpoint, converted, gives the same log-probs under every layout, and
training carries it back."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf import checkpoint
from megarlhf.batch import Sequences
from megarlhf.convert import convert
from megarlhf.models.build import build
from megarlhf.models.spec import Architecture
from tests.convert.test_sources import FIXTURES
from tests.distributed.layouts import layout, share

SIZES = dict(vocab_size=503, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def hf_model(family, **changes):
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
        Olmo2Config,
        Phi3Config,
        Qwen2Config,
        Qwen3Config,
        Starcoder2Config,
    )

    llama = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
                 num_key_value_heads=4, max_position_embeddings=64)  # fmt: skip
    stretched = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=16)  # fmt: skip
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    longrope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.3], long_factor=[1.5, 2.0, 4.0],
                    partial_rotary_factor=0.75)  # fmt: skip
    gemma3_rope = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
    windowed = dict(sliding_window=7, use_sliding_window=True)
    gemma2 = dict(head_dim=16, query_pre_attn_scalar=10, sliding_window=7, num_key_value_heads=4)
    neox = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
                max_position_embeddings=64)  # fmt: skip
    falcon = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=8, ffn_hidden_size=96,
                  max_position_embeddings=64)  # fmt: skip
    kind, fields = {
        "gpt2": (GPT2Config, dict(n_embd=64, n_layer=4, n_head=8, n_positions=64)),
        "llama": (LlamaConfig, llama),
        "llama3": (LlamaConfig, {**llama, "tie_word_embeddings": True, "rope_parameters": stretched}),
        "mistral": (MistralConfig, {**llama, "head_dim": 12, "sliding_window": None}),
        "mistral window": (MistralConfig, {**llama, "sliding_window": 7}),
        "qwen2": (Qwen2Config, {**llama, "tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, {**llama, "head_dim": 16}),
        "gemma": (GemmaConfig, {**llama, "head_dim": 16}),
        "llama attention bias": (LlamaConfig, {**llama, "attention_bias": True}),
        "llama linear": (
            LlamaConfig,
            {**llama, "rope_parameters": dict(rope_type="linear", rope_theta=1e4, factor=4.0)},
        ),
        "llama dynamic": (
            LlamaConfig,
            {**llama, "rope_parameters": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)},
        ),
        "llama yarn": (LlamaConfig, {**llama, "rope_parameters": {**yarn, "beta_fast": 2.0, "beta_slow": 0.2}}),
        "qwen2 window": (Qwen2Config, {**llama, **windowed, "max_window_layers": 1}),
        "qwen3 window": (Qwen3Config, {**llama, **windowed, "head_dim": 16, "max_window_layers": 3}),
        "gemma2": (Gemma2Config, {**llama, **gemma2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        "gemma3": (
            Gemma3TextConfig,
            {**llama, **gemma2, "sliding_window_pattern": 3, "rope_parameters": gemma3_rope},
        ),
        "phi3": (Phi3Config, {**llama, "sliding_window": 7}),
        "phi4 mini": (Phi3Config, {**llama, "original_max_position_embeddings": 32, "rope_parameters": longrope}),
        "olmo2": (Olmo2Config, {**llama, "rms_norm_eps": 1e-3}),
        "granite": (
            GraniteConfig,
            {
                **llama,
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 0.5,
            },
        ),
        "glm4": (
            Glm4Config,
            {
                **llama,
                "head_dim": 16,
                "rope_parameters": dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
            },
        ),
        "starcoder2": (Starcoder2Config, {**llama, "sliding_window": 7}),
        "gpt_neox": (GPTNeoXConfig, neox),
        "gpt_neox in turn": (GPTNeoXConfig, {**neox, "use_parallel_residual": False}),
        "falcon 7b": (FalconConfig, falcon),
        "falcon 40b": (FalconConfig, {**falcon, "new_decoder_architecture": True, "num_kv_heads": 4}),
        "falcon 11b": (
            FalconConfig,
            {
                **falcon,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
                "num_ln_in_parallel_attn": 1,
                "tie_word_embeddings": False,
            },
        ),
        "falcon in turn": (FalconConfig, {**falcon, "parallel_attn": False, "multi_query": False, "bias": True}),
    }[family]
    # eager: torch's own attention caps no scores
    model = AutoModelForCausalLM.from_config(kind(**fields, **(SIZES | changes)), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # in a fresh model norms are one and biases zero, which hides mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, valid) [8, 32], left-padded by 0 to 20."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 503, (8, 32), generator=generator)
    valid = torch.arange(32) >= torch.tensor([0, 3, 5, 20, 1, 0, 11, 7])[:, None]
    return torch.where(valid, tokens, 0), valid


def hf_logprobs(model, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=valid.long(), position_ids=positions).logits.double()
    return logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def our_logprobs(directory, tokens, valid, cases):
    """Token log-probs of this rank's rows under each layout: [(data rank, (B, S - 1))]."""
    results = []
    batch = Sequences(tokens=tokens, mask=valid[:, 1:] & valid[:, :-1], segments=valid.long())
    for sizes in cases:
        with layout(**sizes) as topology:
            architecture = Architecture.load(Path(directory) / "actor")
            engine = build("reference", architecture, topology, micro_batch_tokens=64, dtype="fp32")
            checkpoint.load(engine, Path(directory) / "actor", weights_only=True)
            results.append((topology.data_rank, engine.forward(share(batch, topology))["logprobs"]))
    return results


LAYOUTS = {
    1: [{}],
    2: [dict(tensor=2), dict(tensor=2, sequence=True), dict(pipeline=2), {}],
    4: [dict(tensor=2, pipeline=2), dict(tensor=2, pipeline=2, sequence=True)],
}
ONE_GROUP = {1: [{}], 2: [dict(pipeline=2)], 4: [dict(pipeline=4)]}  # one key/value head cannot be cut
FAMILIES = ["gpt2", "llama", "llama3", "mistral", "mistral window", "qwen2", "qwen3", "gemma", "gpt_neox",
            "gpt_neox in turn", "falcon 7b", "falcon 40b", "falcon 11b", "falcon in turn"]  # fmt: skip
NEW = ["gemma2", "gemma3", "phi3", "phi4 mini", "olmo2", "qwen2 window", "qwen3 window", "llama linear",
       "llama dynamic", "llama yarn", "llama attention bias", "granite", "glm4", "starcoder2"]  # fmt: skip


def check_logprobs(ranks, tmp_path, family, layouts):
    model = hf_model(family)
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "ours")
    tokens, valid = prompts()
    expected = hf_logprobs(model, tokens, valid)
    counted = valid[:, 1:] & valid[:, :-1]
    for world_size, cases in layouts.items():
        for answers in ranks.run(world_size, our_logprobs, tmp_path / "ours", tokens, valid, cases):
            for case, (data_rank, got) in zip(cases, answers, strict=True):
                part = slice(data_rank * len(got), (data_rank + 1) * len(got))
                worst = (got - expected[part])[counted[part]].abs().max().item()
                assert worst < 1e-4, (world_size, case, worst)
                assert not got[~counted[part]].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(ranks, tmp_path, family):
    check_logprobs(ranks, tmp_path, family, ONE_GROUP if family == "falcon 7b" else LAYOUTS)


@pytest.mark.parametrize("family", NEW)
def test_more_families_equal_transformers(ranks, tmp_path, family):
    """The rows are longer than the windows, and of different lengths."""
    check_logprobs(ranks, tmp_path, family, {1: [{}], 2: [dict(tensor=2, sequence=True), dict(pipeline=2)]})


# Fields of a family's architecture with other values. All must show in the log-probs. A name: of its rope_scaling.
FEATURES = {
    "gemma2": [dict(attention_softcap=None), dict(logit_softcap=None), dict(attention_scale=None),
               dict(sliding_window=6), dict(full_attention_layers=()), dict(full_attention_layers=(0, 2)),
               dict(scale_embedding=False), dict(zero_centered_norm=False)],
    "gemma3": [dict(local_rotary_base=None), dict(local_rotary_base=5e5), dict(rope_scaling=None),
               dict(attention_scale=None), dict(full_attention_layers=(3,))],
    "phi3": [dict(sliding_window=None), dict(sliding_window=8)],
    "phi4 mini": [dict(rope_scaling=None), "attention_factor", "short_factor"],
    "qwen2 window": [dict(sliding_window=None, full_attention_layers=()), dict(full_attention_layers=(0, 1))],
    "llama linear": [dict(rope_scaling=None)],
    "llama yarn": [dict(rope_scaling=None), "attention_factor", "beta_slow", "factor"],
    "granite": [dict(attention_scale=None), dict(embedding_multiplier=1.0), dict(residual_multiplier=1.0),
                dict(logit_divisor=1.0)],
    "glm4": [dict(rotary_base=1e4)],
    "olmo2": [dict(norm_epsilon=1e-6)],
}  # fmt: skip


def changed_logprobs(directory, tokens, valid, changes):
    """Log-probs of the model with each of `changes` of its architecture."""
    results, own = [], Architecture.load(Path(directory) / "actor")
    batch = Sequences(tokens=tokens, mask=valid[:, 1:] & valid[:, :-1], segments=valid.long())
    others = {"attention_factor": 1.0, "short_factor": (1.0,) * 3, "beta_slow": 1.5, "factor": 8.0}
    with layout() as topology:
        for change in changes:
            if isinstance(change, str):
                change = dict(rope_scaling=dataclasses.replace(own.rope_scaling, **{change: others[change]}))
            changed = dataclasses.replace(own, **change)
            engine = build("reference", changed, topology, micro_batch_tokens=64, dtype="fp32")
            checkpoint.load(engine, Path(directory) / "actor", weights_only=True)
            results.append(engine.forward(batch)["logprobs"])
    return results


@pytest.mark.parametrize("family", FEATURES)
def test_every_feature_shows(ranks, tmp_path, family):
    """Left out, it makes another model: the comparisons above can fail."""
    model = hf_model(family)
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "ours")
    tokens, valid = prompts()
    expected, counted = hf_logprobs(model, tokens, valid), valid[:, 1:] & valid[:, :-1]
    (found,) = ranks.run(1, changed_logprobs, tmp_path / "ours", tokens, valid, FEATURES[family])
    for change, got in zip(FEATURES[family], found, strict=True):
        assert (got - expected)[counted].abs().max() > 1e-3, change


@pytest.mark.long
@pytest.mark.parametrize("family", NEW)
def test_more_families_in_more_layouts(ranks, tmp_path, family):
    more = [dict(tensor=4), dict(tensor=2, pipeline=2, sequence=True), dict(pipeline=4)]
    check_logprobs(ranks, tmp_path, family, {2: [dict(tensor=2), {}], 4: more})


@pytest.mark.shared
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_mha", "tiny_gpt2"])
def test_logits_of_files_written_by_others(ranks, shared, tmp_path, name):
    """The fixtures' expected logits were computed by another version of transformers."""
    convert.hf2megatron(shared / "fixtures" / "hf" / name, tmp_path / "ours")
    assert_expected(ranks, tmp_path / "ours", shared / "fixtures" / "hf" / name)


@pytest.mark.shared
@pytest.mark.parametrize("fixture", FIXTURES)
def test_logits_of_nemo_and_megatron_lm(ranks, shared, tmp_path, fixture):
    """The checkpoints have the weights of the Hugging Face fixtures, and with our architecture they give its logits."""
    command, twin = FIXTURES[fixture]
    convert.COMMANDS[command](shared / "fixtures" / fixture, tmp_path / "ours")
    assert_expected(ranks, tmp_path / "ours", shared / "fixtures" / "hf" / twin)


def assert_expected(ranks, ours, source):
    """`ours` gives the logits that `source` expects."""
    expected = np.load(source / "expected.npz")
    tokens = torch.from_numpy(expected["input_ids"])
    logprobs = torch.from_numpy(expected["logits"]).double()[:, :-1].log_softmax(-1)
    logprobs = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    for world_size, case in ((1, {}), (4, dict(tensor=2, pipeline=2))):
        for answers in ranks.run(world_size, our_logprobs, ours, tokens, everything, [case]):
            assert (answers[0][1] - logprobs).abs().max() < 1e-4, (world_size, case)
