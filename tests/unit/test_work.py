"""train/work.py against torch's own count of what transformers' model does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megarlhf.models.spec import Architecture
from megarlhf.train import work

SIZES = dict(num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=4,
             vocab_size=503, max_position_embeddings=64)  # fmt: skip


def counted(length):
    model = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=160, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=503, attn_implementation="eager",
    ))  # fmt: skip
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(torch.zeros(2, length, dtype=torch.int64))
    return counter.get_total_flops()


def test_a_forward_pass():
    """Eager attention computes what causality masks as well, twice what we count; at two lengths that shows."""
    architecture = Architecture("llama", **SIZES)
    for length in (8, 48):
        tokens = 2 * length
        attention = 4 * tokens * length * 3 * 64
        expected = counted(length) - attention / 2
        assert work.trunk(architecture, 2, length, length) == pytest.approx(expected, rel=2e-3)  # + rotary angles


def test_a_step(tmp_path):
    from megarlhf.config import from_dict
    from megarlhf.train.rl_config import run_config

    architecture = Architecture("llama", **SIZES)

    def step(**more):
        settings = {
            "run": "r", "model": {"checkpoint": "c", "dtype": "fp32"}, "prompts": {"path": "p", "length": 16},
            "sampler": {"response_length": 8}, "scoring": {"sources": [{"function": "judge:score"}]},
            "training": {"batch_size": 32, "epochs": 2, "micro_batch_size": 8}, **more,
        }  # fmt: skip
        return work.online_step(from_dict(run_config("ppo"), settings, "test"), architecture, 1)

    one, shared = step(), step(critic={"kind": "shared"})
    assert one["score"].flops == 0
    rows, words = work.trunk(architecture, 32, 24, 8), 2 * 32 * 8 * 64 * 503
    assert one["evaluate"].flops == 3 * rows + 2 * words
    assert one["learn"].flops == 2 * (2 * 3 * rows + 3 * words)
    assert shared["learn"].flops == 2 * (3 * rows + 3 * words)
    # decoding with a cache does what one pass over the whole would do
    assert one["sample"].flops == pytest.approx(rows + words, rel=0.01)
    twice = step(training={"batch_size": 64, "epochs": 2, "micro_batch_size": 8})
    assert twice["learn"].flops == 2 * one["learn"].flops
