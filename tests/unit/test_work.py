"""train/work.py against torch's own count of what transformers' model does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megarlhf.models.spec import Architecture
from megarlhf.train import work

LENGTH = 24
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


def ours(read):
    """FLOPs of our layers over 2 rows of LENGTH tokens, from the shapes of what they compute."""
    import megarlhf.cluster.operations as operations
    from megarlhf.models.build import build
    from megarlhf.models.cache import Cache, Prefill
    from megarlhf.stream import Spans
    from tests.distributed.layouts import layout

    done, real = [], operations.attend

    def attend(query, key, value, mask, **options):
        done.append(4 * query.shape[0] * query.shape[1] * query.shape[2] ** 2 / 2 * query.shape[3])
        return real(query, key, value, mask, **options)

    with layout() as topology:
        chunk = build(
            "reference", Architecture("llama", **SIZES), topology, micro_batch_tokens=64, dtype="fp32"
        ).modules[0]
        for module in chunk.decoder.modules():
            if getattr(module, "weight", None) is not None and module.weight.dim() == 2:
                module.register_forward_hook(
                    lambda module, inputs, _: done.append(2 * len(inputs[0]) * module.weight.numel())
                )
        tokens, positions = torch.zeros(2 * LENGTH, dtype=torch.int64), torch.arange(LENGTH).repeat(2)
        bounds = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
        rows = torch.arange(2).repeat_interleave(LENGTH)
        if read:
            where = (torch.arange(2)[:, None] * LENGTH + torch.arange(LENGTH - read, LENGTH)).flatten()
            spans = Spans((LENGTH, LENGTH), bounds, where)
        else:
            cache = Cache(chunk, slots=2, columns=LENGTH)
            cache.allocate()
            spans = Prefill((LENGTH, LENGTH), bounds, rows[:0], cache=cache, slots=rows, positions=positions)
        operations.attend = attend
        try:
            with torch.no_grad():
                chunk.run(tokens, positions, spans, LENGTH)
        finally:
            operations.attend = real
    return sum(done)


def test_a_forward_pass():
    """Eager attention computes what causality masks as well, twice what we count; at two lengths that shows."""
    architecture = Architecture("llama", **SIZES)
    for length in (8, 48):
        tokens = 2 * length
        attention = 4 * tokens * length * 3 * 64
        expected = counted(length) - attention / 2
        assert work.trunk(architecture, 2, length, length) == pytest.approx(expected, rel=2e-3)  # + rotary angles


@pytest.mark.parametrize("read", [24, 9, 0])
def test_the_model_counts_as_many(ranks, read):
    """Where the head reads few tokens, as in responses behind long prompts; none in the prefill of sampling."""
    (found,) = ranks.run(1, ours, read)
    assert found == pytest.approx(work.trunk(Architecture("llama", **SIZES), 2, LENGTH, read), rel=1e-6)


def test_a_step(tmp_path):
    from megarlhf.config import from_dict
    from megarlhf.train.rl_config import run_config

    architecture = Architecture("llama", **SIZES)

    def step(slots=16, **more):
        settings = {
            "run": "r", "model": {"checkpoint": "c", "dtype": "fp32"}, "prompts": {"path": "p", "length": 16},
            "sampler": {"response_length": 8}, "scoring": {"sources": [{"function": "judge:score"}]},
            "training": {"batch_size": 32, "epochs": 2, "micro_batch_tokens": 192}, **more,
        }  # fmt: skip
        return work.online_step(from_dict(run_config("ppo"), settings, "test"), architecture, 1, slots=slots)

    one, shared = step(), step(critic={"kind": "shared"})
    assert one["score"].flops == 0
    adapters = {"model": {"checkpoint": "c", "dtype": "fp32", "lora": {}}}
    assert step(**adapters, critic={"kind": "adapters"}) == step(**adapters)
    rows, words = work.trunk(architecture, 32, 24, 8), 2 * 32 * 8 * 64 * 503
    assert one["evaluate"].flops == 3 * rows + 2 * words
    assert one["learn"].flops == 2 * (2 * 3 * rows + 3 * words)
    assert shared["learn"].flops == 2 * (3 * rows + 3 * words)
    top = {"model": {"checkpoint": "c", "dtype": "fp32", "trained_layers": 1}}
    alone, hydra = step(**top), step(**top, reference={"kind": "hydra"})
    below = 2 * work.layer(architecture, 32, 24)  # of three layers
    assert alone["evaluate"] == one["evaluate"] and hydra["learn"] == alone["learn"]
    assert hydra["evaluate"].flops == pytest.approx(one["evaluate"].flops - below, rel=1e-12)
    assert alone["learn"].flops == pytest.approx(one["learn"].flops - 2 * 2 * 2 * below, rel=1e-12)
    # decoding with a cache does what one pass over all tokens but the last would do
    assert one["sample"].flops == pytest.approx(work.trunk(architecture, 32, 23, 8) + words, rel=0.01)
    twice = step(training={"batch_size": 64, "epochs": 2, "micro_batch_tokens": 192})
    assert twice["learn"].flops == 2 * one["learn"].flops
    # 32 rows in 2 rounds of 16 slots, or in 1: each of the 9 passes of a round reads the weights
    weights = 4 * (3 * work.layer_parameters(architecture) + 64 * 503)
    assert step(slots=16)["sample"].bytes - step(slots=32)["sample"].bytes == 9 * weights
