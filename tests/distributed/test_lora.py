"""Adapters: gradients as slow float64 code has them, the same training in every layout, and a reference that is the
policy without them, to the bit."""

import dataclasses
import zlib

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.config import UserError
from megarlhf.convert import registry
from megarlhf.experience import gate
from megarlhf.experience.gate import GateConfig
from megarlhf.experience.rollout import evaluate
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models import lora, quantized
from megarlhf.models.build import build
from megarlhf.models.model_config import LINEARS, LoraConfig
from tests.distributed.layouts import ADAM, GPT2, LLAMA, examples, full_weights, layout, set_full_weights, share
from tests.distributed.test_sampler import P, R, make_prompts

FAMILIES = {"llama": LLAMA, "gpt2": GPT2}
UNCLIPPED = dataclasses.replace(ADAM, clip_grad=0.0)
CONFIGS = {
    "all": LoraConfig(rank=3, alpha=4.0),
    "usual": LoraConfig(rank=4, alpha=2.0, rslora=True, targets=("q_proj", "v_proj")),
    "some": LoraConfig(rank=2, targets=("k_proj", "linear_proj", "up_proj")),
}


def draw(engine):
    """Random adapters in which B is not zero, the same in every layout."""
    weights = full_weights(engine)
    for name, value in weights.items():
        if lora.is_adapter(name) and ".b_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weights[name] = torch.randn(value.shape, generator=generator) * 0.05
    set_full_weights(engine, weights)
    if engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def train(cases):
    """[(family, adapters, ParallelConfig fields, recompute and dropout)] -> [(weights at the start, gradients of the
    first step, losses and norms, weights after three steps)]."""
    results = []
    for family, adapters, sizes in cases:
        options = dict(micro_batch_tokens=48, dtype="fp32", seed=7, recompute=sizes.get("recompute", "none"))
        own = {name: value for name, value in sizes.items() if name != "recompute"}
        with layout(**own) as topology:
            engine = build(
                "actor", FAMILIES[family], topology, optimizer=UNCLIPPED, total_steps=3, adapters=CONFIGS[adapters],
                **options,
            )  # fmt: skip
            bare = build("reference", FAMILIES[family], topology, **options)
            reference = lora.Reference(engine)
            rows = share(examples(seed=9), topology)
            assert torch.equal(engine.forward(rows)["logprobs"], bare.forward(rows)["logprobs"])  # B is zero
            draw(engine)
            started = lora.Reference(engine, started=True)
            first = engine.forward(rows)["logprobs"]
            before, steps, gradients = full_weights(engine), [], None
            for step in range(3):
                means = engine.step(share(examples(seed=step), topology), sft_loss)
                steps.append((means["loss"].value, means["grad_norm"].value))
                if step == 0:
                    gradients = full_weights(engine, lambda p: getattr(p, "main_grad", torch.zeros_like(p)))
            engine.sync_params()
            trained = engine.forward(rows)["logprobs"]
            assert not torch.equal(trained, first)
            assert torch.equal(reference.forward(rows)["logprobs"], bare.forward(rows)["logprobs"])
            assert torch.equal(started.forward(rows)["logprobs"], first)
            assert torch.equal(engine.forward(rows)["logprobs"], trained)  # the adapters are back
            frozen = [p for module in engine.modules for n, p in module.named_parameters() if not lora.is_adapter(n)]
            assert not any(p.requires_grad or hasattr(p, "main_grad") for p in frozen)
            after = full_weights(engine)
            with lora.replaced(engine.modules, dataclasses.replace(CONFIGS[adapters], rank=1)):
                pass
            assert torch.equal(engine.forward(rows)["logprobs"], trained)
            lora.merge(engine.modules)
            with lora.off(engine.modules):
                torch.testing.assert_close(engine.forward(rows)["logprobs"], trained, rtol=0, atol=2e-5)
            results.append((before, gradients, steps, after))
    return results


CASES = {
    1: [("llama", "all", dict(recompute="full"))],
    2: [
        ("llama", "all", dict(tensor=2)),
        ("llama", "all", dict(tensor=2, sequence=True)),
        ("llama", "usual", dict(tensor=2, sequence=True, recompute="selective")),
        ("llama", "some", dict(pipeline=2)),
        ("llama", "all", dict(pipeline=2, virtual_pipeline=2, recompute="full")),
        ("llama", "all", dict(overlap_grad_reduce=True, overlap_param_gather=True)),
        ("gpt2", "all", dict(tensor=2, sequence=True)),
        ("gpt2", "all", dict(pipeline=2, distributed_optimizer=False)),
    ],
    4: [
        ("llama", "all", dict(tensor=2, pipeline=2, sequence=True)),
        ("gpt2", "some", dict(tensor=2, pipeline=2)),
        ("llama", "some", dict(pipeline=4)),
    ],
    8: [("llama", "all", dict(tensor=2, pipeline=2, sequence=True))],  # and two data-parallel ranks
}


@pytest.fixture(scope="module")
def single(ranks):
    """{(family, adapters): what one rank gave}"""
    cases = sorted({case[:2] for world in CASES.values() for case in world})
    (results,) = ranks.run(1, train, [(*case, {}) for case in cases])
    return dict(zip(cases, results, strict=True))


def close(left, right, tolerance=1e-5):
    return (left - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 8))])
def test_training_does_not_depend_on_the_layout(ranks, single, world_size):
    answers = ranks.run(world_size, train, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        for answer in answers:  # every rank
            expected = single[case[:2]]
            steps = torch.tensor(answer[number][2])
            torch.testing.assert_close(steps, torch.tensor(expected[2]), rtol=1e-5, atol=0, msg=str(case))
            for got, wanted in ((answer[number][0], expected[0]), (answer[number][3], expected[3])):
                assert got.keys() == wanted.keys(), case
                for name, value in wanted.items():
                    if lora.is_adapter(name):
                        assert close(got[name], value), (case, name)
                    else:
                        assert torch.equal(answer[number][3][name], answer[number][0][name]), (case, name)


OF_PROJECTION = {name: linear for linear, names in LINEARS.items() for name in names}
BLOCK = {"linear_qkv": "self_attention", "linear_proj": "self_attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}
THEIRS = {"self_attention": "self_attn", "mlp": "mlp"}


@pytest.mark.parametrize("adapters", ["all", "usual", "some"])
def test_gradients_equal_slow_float64(single, adapters):
    """transformers' Llama in float64, with W + scale * B A as the weight of every projection, by autograd."""
    from transformers import AutoConfig, AutoModelForCausalLM

    weights, gradients, (step, *_), _ = single["llama", adapters]
    config = CONFIGS[adapters]
    theirs = registry.write_config(LLAMA, "")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs)).double()
    ours = {}
    for name, value in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        ours[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value.double()
    tensors = {}
    for part in registry.steps_to_theirs(LLAMA):
        tensors |= dict(zip(part.outputs, part.convert([ours[name] for name in part.inputs]), strict=True))
    leaves = {}
    scale = config.alpha / (config.rank**0.5 if config.rslora else config.rank)
    for layer in range(LLAMA.num_layers):
        for projection, linear in OF_PROJECTION.items():
            parts = [name for name in LINEARS[linear] if {name, linear} & set(config.targets)]
            if projection not in parts:
                continue
            block, first = BLOCK[linear], parts.index(projection) * config.rank
            place = f"decoder.layers.{layer}.{block}.{linear}_lora"
            a = ours[f"{place}.a"][first : first + config.rank].clone().requires_grad_()
            b = ours[f"{place}.b_{projection}"].clone().requires_grad_()
            leaves[f"{place}.a", first], leaves[f"{place}.b_{projection}", None] = a, b
            name = f"model.layers.{layer}.{THEIRS[block]}.{projection}.weight"
            tensors[name] = tensors[name] + scale * (b @ a)
    batch = examples(seed=0)
    positions = (batch.segments.cumsum(1) - 1).clamp(min=0)
    inputs = (batch.tokens,)
    options = dict(attention_mask=batch.segments, position_ids=positions)
    logits = torch.func.functional_call(model, tensors, inputs, options).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    loss = -(logprobs * batch.mask).sum() / batch.mask.sum()
    loss.backward()
    assert step[0] == pytest.approx(loss.item(), rel=1e-6)
    for (name, first), leaf in leaves.items():
        found = gradients[name] if first is None else gradients[name][first : first + config.rank]
        assert close(found.double(), leaf.grad, 2e-5), name
    assert step[1] == pytest.approx(sum(leaf.grad.square().sum().item() for leaf in leaves.values()) ** 0.5, rel=1e-5)


def sample_and_check(cases):
    """[ParallelConfig fields] -> what the gate says of the trained engine's own sampler, and of one that has the
    adapters from before the last update."""
    said = []
    for sizes in cases:
        with layout(**sizes) as topology:
            options = dict(micro_batch_tokens=48, dtype="fp32", seed=7, adapters=CONFIGS["all"])
            architecture = dataclasses.replace(LLAMA, init_std=0.1)
            engine = build("actor", architecture, topology, optimizer=UNCLIPPED, total_steps=2, **options)
            stale = build("actor", architecture, topology, **options)
            reference, config = lora.Reference(engine), GateConfig(every=2)
            engine.step(share(examples(seed=0), topology), sft_loss)
            stale.follow(engine, 0.0)
            engine.step(share(examples(seed=1), topology), sft_loss)
            for step, source in enumerate((engine, stale), start=2):
                draw = SamplerConfig(response_length=R, micro_batch_size=4)
                rollout = Sampler(source, draw, prompt_length=P, seed=1).sample(make_prompts(8))
                signals = evaluate(rollout, actor=engine, reference=reference, critic=None, temperature=1.0)
                assert config.due(step) == (step == 2)  # as in the loop, between other steps
                try:
                    said.append(gate.run_gate(
                        rollout, signals, actor=engine, at_start=False, temperature=1.0, config=config
                    )["gate/sampler"])  # fmt: skip
                except UserError as error:
                    said.append(str(error))
    return said


def test_the_gate_finds_stale_adapters(ranks):
    for said in ranks.run(2, sample_and_check, [dict(tensor=2, sequence=True), dict(pipeline=2)]):
        for own, stale in (said[:2], said[2:]):
            assert own < 1e-5, own
            assert "'sampler' differs" in stale and "weights out of date in the sampler" in stale


WIDE = dataclasses.replace(LLAMA, num_layers=2, hidden_size=128, init_std=0.05)
BIASED = dataclasses.replace(GPT2, num_layers=2, hidden_size=128)


def train_quantized(cases):
    """[(architecture, ParallelConfig fields and recompute)] -> the losses of two steps over a base in NF4, and the
    adapters after them. The same base in fp32, rounded to what NF4 holds, gives the same."""
    results = []
    for architecture, sizes in cases:
        recompute = sizes.get("recompute", "none")
        with layout(**{name: value for name, value in sizes.items() if name != "recompute"}) as topology:
            found = []
            for change in (quantized.round_weights, quantized.quantize):
                engine = build(
                    "actor", architecture, topology, optimizer=UNCLIPPED, total_steps=2, seed=7, dtype="fp32",
                    micro_batch_tokens=48, adapters=CONFIGS["all"], recompute=recompute,
                )  # fmt: skip
                change(engine.modules)
                steps = [engine.step(share(examples(seed=n), topology), sft_loss)["loss"].value for n in range(2)]
                rollout = Sampler(engine, SamplerConfig(response_length=R), prompt_length=P).sample(make_prompts(8))
                gap = (rollout.logprobs - engine.forward(rollout)["logprobs"]).mul(rollout.mask).abs().max().item()
                weights = {name: value for name, value in full_weights(engine).items() if lora.is_adapter(name)}
                found.append((steps, weights, gap))
            held = {name for module in engine.modules for name, _ in module.named_parameters()}
            assert not [name for name in held if "linear_" in name and name.endswith(".weight")]
            results.append(found)
    return results


QUANTIZED = {
    1: [(WIDE, {}), (BIASED, {})],
    2: [(WIDE, dict(tensor=2, sequence=True)), (WIDE, dict(pipeline=2, recompute="full")), (BIASED, dict(tensor=2))],
}


def test_a_quantized_base(ranks):
    (single,) = ranks.run(1, train_quantized, QUANTIZED[1])
    expected = {"llama": single[0][0], "gpt2": single[1][0]}
    cases = [(1, single)] + [(2, answer) for answer in ranks.run(2, train_quantized, QUANTIZED[2])]
    for world, answer in cases:
        for (architecture, sizes), found in zip(QUANTIZED[world], answer, strict=True):
            for steps, weights, gap in found:
                wanted = expected[architecture.family]
                torch.testing.assert_close(torch.tensor(steps), torch.tensor(wanted[0]), rtol=1e-5, atol=0)
                assert all(close(weights[name], wanted[1][name], 2e-5) for name in wanted[1]), sizes
                assert gap < 1e-4, gap
