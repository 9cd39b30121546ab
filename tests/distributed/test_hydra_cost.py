"""One pass of the trunk for a policy and its hydra reference: FLOPs counted exactly, and the copied weights."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megarlhf.models.build import build
from megarlhf.models.hydra import Hydra
from tests.distributed.layouts import ADAM, LLAMA, examples, layout


def _linear(x, weight, *_, out_shape=None, **__) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * weight[0] * weight[1]


def _attention(query, key, value, *_, out_shape=None, **__) -> int:
    return sdpa_flop_count(query, key, value)


COUNTED = {  # what torch's table leaves out
    torch.ops.mkldnn._linear_pointwise: _linear,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}


def measure(depths, tops):
    """FLOPs of a forward pass of models with so many layers; FLOPs of policy and hydra reference with four layers, and
    the elements of the branch, for each number of trained layers."""
    rows, single, both = examples(), [], []
    options = dict(micro_batch_tokens=4096, dtype="fp32", optimizer=ADAM)
    with layout() as topology:
        for depth in depths:
            engine = build("actor", dataclasses.replace(LLAMA, num_layers=depth), topology, **options)
            with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
                engine.forward(rows)
            single.append(counter.get_total_flops())
        for top in tops:
            engine = build("actor", LLAMA, topology, trained_layers=top, **options)
            reference = Hydra(engine, top)
            with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
                reference.beside(rows, temperature=1.0)
            both.append((counter.get_total_flops(), reference.resident()["weights"] // 4))
    return single, both


def test_the_trunk_is_computed_once(ranks):
    tops = (1, 2, 3, 4)
    ((single, both),) = ranks.run(1, measure, (3, 4, 5), tops)
    layer = single[1] - single[0]
    assert layer == single[2] - single[1] > 2 * 131 * 36864  # 131 tokens, the elements of a layer's matrices; attention
    vocabulary = LLAMA.padded_vocab_size(1) * LLAMA.hidden_size
    for top, (flops, kept) in zip(tops, both, strict=True):
        assert flops == 2 * single[1] - (4 - top) * layer, top  # trunk + two tops, each with its head
        assert kept == top * (36864 + 2 * LLAMA.hidden_size) + LLAMA.hidden_size + vocabulary, top
    assert both[-1][0] == 2 * single[1]
