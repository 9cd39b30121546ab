"""transformers and ours agree: the same checkpoint, converted, gives the same log-probs under every layout, and
training carries it back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf import checkpoint
from megarlhf.batch import Sequences
from megarlhf.models.build import build
from megarlhf.models.spec import Architecture
from tests.convert.test_sources import FIXTURES
from tests.distributed.layouts import layout, share
from tools.convert import convert

SIZES = dict(vocab_size=503, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def hf_model(family):
    from transformers import (
        AutoModelForCausalLM,
        FalconConfig,
        GemmaConfig,
        GPT2Config,
        GPTNeoXConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    llama = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
                 num_key_value_heads=4, max_position_embeddings=64)  # fmt: skip
    stretched = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=16)  # fmt: skip
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
    model = AutoModelForCausalLM.from_config(kind(**fields, **SIZES))
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(ranks, tmp_path, family):
    model = hf_model(family)
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "ours")
    tokens, valid = prompts()
    expected = hf_logprobs(model, tokens, valid)
    counted = valid[:, 1:] & valid[:, :-1]
    for world_size, cases in (ONE_GROUP if family == "falcon 7b" else LAYOUTS).items():
        for answers in ranks.run(world_size, our_logprobs, tmp_path / "ours", tokens, valid, cases):
            for case, (data_rank, got) in zip(cases, answers, strict=True):
                part = slice(data_rank * len(got), (data_rank + 1) * len(got))
                worst = (got - expected[part])[counted[part]].abs().max().item()
                assert worst < 1e-4, (world_size, case, worst)
                assert not got[~counted[part]].any()


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
