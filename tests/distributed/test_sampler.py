"""The sampler: the same tokens under every layout, micro-batch size, order and padding; with and without a cache; and
transformers' own. The models have large weights, so that distributions are far from flat, and biases and norms that
matter."""

import dataclasses
import zlib

import pytest
import torch

from megarlhf.algorithms.supervised import sft_loss
from megarlhf.batch import Prompts
from megarlhf.config import UserError
from megarlhf.experience.sampler import Sampler, SamplerConfig, check_sampling
from megarlhf.kernels import sampling
from megarlhf.kernels.sampling import Draw
from megarlhf.models.build import build
from megarlhf.models.spec import RopeScaling
from tests.distributed.layouts import ADAM, FALCON, GEMMA, GEMMA2, GPT2, LLAMA, NEOX, OLMO2, layout
from tests.uncached import sample_without_cache

P, R, ROWS = 8, 16, 512
FAMILIES = {
    "llama": dataclasses.replace(LLAMA, init_std=0.15),
    "gpt2": dataclasses.replace(GPT2, init_std=0.15),
}
ODD = {  # what the two families leave out
    "rope scaling, qkv bias, tied": dataclasses.replace(
        FAMILIES["llama"], qkv_bias=True, tie_embeddings=True, num_query_groups=2,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=16),
    ),
    "head size, partly rotary, LayerNorm": dataclasses.replace(
        FAMILIES["llama"], head_dim=16, rotary_percent=0.5, normalization="LayerNorm", linear_bias=True,
        activation="gelu", gated_mlp=False,
    ),
    "sliding window": dataclasses.replace(FAMILIES["llama"], sliding_window=5),
    "neox": dataclasses.replace(NEOX, init_std=0.15),
    "falcon": dataclasses.replace(FALCON, init_std=0.15),
    "gemma": dataclasses.replace(GEMMA, init_std=0.05),
    "gemma2": dataclasses.replace(GEMMA2, init_std=0.05),
    "olmo2": dataclasses.replace(OLMO2, init_std=0.15),
}  # fmt: skip


def make_prompts(rows=ROWS, padding=0, seed=0):
    """Left-padded prompts of 2 to P tokens, with `padding` more columns."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, P + 1, (rows,), generator=generator)
    tokens = torch.randint(0, 503, (rows, P), generator=generator)
    tokens = torch.cat([torch.zeros(rows, padding, dtype=torch.int64), tokens], 1)
    valid = torch.arange(P + padding) >= (P + padding - sizes)[:, None]
    return Prompts(tokens=tokens.masked_fill(~valid, 503), valid=valid, sequence_ids=torch.arange(rows),
                   prompt_ids=torch.arange(rows) + 100)  # fmt: skip


def make_engine(architecture, topology, *, micro_batch_tokens=200, optimizer=None):
    """A model whose weights do not depend on the layout, biases and norms included."""
    engine = build("actor", architecture, topology, micro_batch_tokens=micro_batch_tokens, dtype="fp32", seed=3,
                   optimizer=optimizer)  # fmt: skip
    size, rank = topology.parallel.tensor, topology.tensor_rank
    for module in engine.modules:
        for name, parameter in module.named_parameters():
            if not name.endswith("bias") and "norm" not in name:
                continue
            if name.startswith("decoder.layers."):
                first, _, number, rest = name.split(".", 3)
                name = f"{first}.{module.decoder.layers[int(number)].layer_number}.{rest}"
            split = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.randn(len(parameter) * (size if split else 1), generator=generator)
            with torch.no_grad():
                parameter.add_(0.3 * (full.chunk(size)[rank] if split else full))
    return engine


def by_id(rollout):
    """(tokens, log-probs) of the responses in the order of their sequence ids."""
    order = rollout.sequence_ids.argsort()
    return rollout.tokens[order, rollout.prompt_len :], rollout.logprobs[order]


def gap(left, right):
    return (left - right).abs().max().item()


def rollouts(cases):
    """[(family, micro-batch size, order, ParallelConfig fields)] -> the responses of all ROWS prompts on this rank's
    model: (sequence ids, tokens, log-probs), and what the sampler without a cache and Engine.forward say of some."""
    results = []
    for family, micro, order, sizes in cases:
        with layout(**sizes) as topology:
            optimizer = ADAM if order == "reversed" else None  # wrapped for training, or bare
            engine = make_engine(FAMILIES[family], topology, micro_batch_tokens=96, optimizer=optimizer)
            config = SamplerConfig(response_length=R, micro_batch_size=micro)
            sampler = Sampler(engine, config, prompt_length=P, seed=11, with_entropy=True)
            rows = torch.arange(ROWS).chunk(topology.data_size)[topology.data_rank]
            rows = {"forward": rows, "reversed": rows.flip(0), "odd first": torch.cat([rows[1::2], rows[::2]])}[order]
            rollout = sampler.sample(make_prompts().select(rows))

            some = rollout.select(slice(0, 8))
            slow = sample_without_cache(engine, make_prompts().select(rows[:8]), config, seed=11, with_entropy=True)
            trainer = engine.forward(some, with_entropy=True)
            agree = {
                "cache tokens": 0.0 if torch.equal(some.tokens, slow.tokens) else 1.0,
                "cache logprobs": gap(some.logprobs, slow.logprobs),
                "cache entropy": gap(some.entropy, slow.entropy),
                "forward logprobs": gap(some.logprobs, trainer["logprobs"]),
                "forward entropy": gap(some.entropy, trainer["entropy"]),
            }
            results.append((rollout.sequence_ids, *by_id(rollout), agree))
    return results


CASES = {
    1: [("llama", 512, "forward", {}), ("gpt2", 512, "forward", {}), ("llama", 48, "reversed", {}),
        ("gpt2", 7, "odd first", {})],
    2: [
        ("llama", 160, "forward", dict(tensor=2)),
        ("gpt2", 100, "reversed", dict(tensor=2)),
        ("llama", 128, "odd first", dict(tensor=2, sequence=True)),
        ("llama", 128, "forward", dict(pipeline=2)),
        ("gpt2", 33, "forward", dict(pipeline=2)),
        ("llama", 64, "reversed", dict(pipeline=2, virtual_pipeline=2)),
        ("llama", 40, "odd first", {}),
        ("gpt2", 64, "reversed", {}),
    ],
    4: [("llama", 128, "forward", dict(tensor=2, pipeline=2, sequence=True)),
        ("gpt2", 200, "odd first", dict(tensor=2, pipeline=2))],
}  # fmt: skip


@pytest.fixture(scope="module")
def truth(ranks):
    (results,) = ranks.run(1, rollouts, CASES[1])
    return results


@pytest.mark.long
@pytest.mark.parametrize("world_size", CASES)
def test_tokens_do_not_depend_on_the_layout(ranks, truth, world_size):
    answers = [truth] if world_size == 1 else ranks.run(world_size, rollouts, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        _, tokens, logprobs, _ = truth[list(FAMILIES).index(case[0])]
        assert tokens.max() < 503 and len(tokens.unique()) > 400 and len(tokens.unique(dim=0)) == ROWS
        seen = set()
        for answer in answers:  # every rank
            ids, got_tokens, got_logprobs, agree = answer[number]
            ids = ids.sort().values
            seen |= set(ids.tolist())
            assert torch.equal(got_tokens, tokens[ids]), (case, (got_tokens != tokens[ids]).any(1).sum())
            assert gap(got_logprobs, logprobs[ids]) < 1e-5, case
            for what, difference in agree.items():
                assert difference < 1e-5, (case, what, difference)
        assert len(seen) == ROWS


def variations():
    """On one rank: what must not matter, and what must."""
    found = {}
    with layout() as topology:
        for family, architecture in {**FAMILIES, **ODD}.items():
            engine = make_engine(architecture, topology)
            short = make_prompts(32)

            def sample(prompts, seed=11, engine=engine, **fields):
                config = SamplerConfig(response_length=R, micro_batch_size=16, **fields)
                return Sampler(engine, config, prompt_length=prompts.tokens.shape[1], seed=seed).sample(prompts)

            plain = sample(short)
            slow = sample_without_cache(engine, short, SamplerConfig(response_length=R), seed=11)
            found[family, "cache"] = torch.equal(plain.tokens, slow.tokens)
            found[family, "forward"] = gap(plain.logprobs, engine.forward(plain)["logprobs"]) < 1e-5
            for padding in (5, 40):
                padded = sample(make_prompts(32, padding=padding))
                found[family, f"padded by {padding}"] = torch.equal(padded.tokens[:, padding:], plain.tokens)
            # sample j of the prompt with id s is what a prompt with id 4 s + j gets, alone or not
            alone = dataclasses.replace(short, sequence_ids=4 * short.sequence_ids + 2)
            samples = sample(short, samples_per_prompt=4)
            found[family, "samples of a prompt"] = torch.equal(samples.tokens[2::4], sample(alone).tokens)
            found[family, "log-probs of samples"] = gap(samples.logprobs[2::4], sample(alone).logprobs) < 1e-5
            groups = (samples.prompt_ids, short.prompt_ids), (samples.group_ids, short.sequence_ids)
            found[family, "ids of samples"] = all(torch.equal(a, b.repeat_interleave(4)) for a, b in groups)
            found[family, "another seed"] = not torch.equal(sample(short, seed=12).tokens, plain.tokens)
            hot = sample(short, temperature=0.7)
            found[family, "temperature"] = gap(hot.logprobs, engine.forward(hot, temperature=0.7)["logprobs"]) < 1e-5
            found[family, "temperature matters"] = not torch.equal(hot.tokens, plain.tokens)
    return found


def test_what_matters_and_what_does_not(ranks):
    (found,) = ranks.run(1, variations)
    assert all(found.values()), [what for what, holds in found.items() if not holds]


def stopping(sizes):
    """Rows that end early do not change the tokens before, leave no message behind, and save the steps after."""
    with layout(**sizes) as topology:
        engine = make_engine(FAMILIES["llama"], topology, micro_batch_tokens=1)
        config = SamplerConfig(response_length=40, micro_batch_size=1)
        fixed = Sampler(engine, config, prompt_length=P, seed=1).sample(make_prompts(5))
        eos = int(fixed.tokens[0, P + 3])
        sampler = Sampler(
            engine, dataclasses.replace(config, stop_at_eos=True), prompt_length=P, seed=1, eos_id=eos
        )  # fmt: skip
        counts: list[list[int]] = []
        rollouts = []
        for rows in (make_prompts(5).select(slice(0, 1)), make_prompts(5)):
            counts.append([])
            rollouts.append(sampler.sample(rows, on_tokens=counts[-1].append))
        return eos, fixed, rollouts, [sum(count) for count in counts]


@pytest.mark.parametrize("sizes", [{}, dict(pipeline=2)], ids=str)
def test_stop_at_eos(ranks, sizes):
    for eos, fixed, rollouts, counts in ranks.run(sizes.get("pipeline", 1), stopping, sizes):
        assert counts[0] == 4  # of 40: the first ends after 4, and a pipeline looks every 4
        for rollout in rollouts:
            for row, (tokens, mask) in enumerate(zip(rollout.tokens, rollout.mask, strict=True)):
                whole = fixed.tokens[row, P:].tolist()
                length = whole.index(eos) + 1 if eos in whole else 40
                assert mask.tolist() == [True] * length + [False] * (40 - length)
                assert tokens[P:].tolist() == whole[:length] + [503] * (40 - length)
                assert torch.equal(rollout.logprobs[row, :length], fixed.logprobs[row, :length])
                assert not rollout.logprobs[row, length:].any()
                assert torch.equal(rollout.segments[row, P:] > 0, mask)


# ----------------------------------------------------------------------------------------------- slots and refills

# Few tokens, so that one of them ends responses everywhere.
TINY = dict(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=12, init_std=0.2)
REFILLED = {
    "llama": dataclasses.replace(LLAMA, **TINY, num_query_groups=2),
    "llama 6": dataclasses.replace(LLAMA, **TINY | dict(num_layers=6), num_query_groups=2),  # for three stages
    "gpt2": dataclasses.replace(GPT2, **TINY, num_query_groups=4),
}
PROMPTS, LONG, EOS = 10, 14, 5  # LONG: of a response
SIZES = {"mixed": (1, P), "one": (1, 1), "full": (P, P)}


def few_prompts(kind: str) -> Prompts:
    """Prompts of 1 to P tokens, all of 1, or all of P."""
    generator = torch.Generator().manual_seed(3)
    least, most = SIZES[kind]
    sizes = torch.randint(least, most + 1, (PROMPTS,), generator=generator)
    sizes[1], sizes[4] = least, most
    valid = torch.arange(P) >= (P - sizes)[:, None]
    tokens = torch.randint(0, 12, (PROMPTS, P), generator=generator).masked_fill(~valid, 12)
    return Prompts(tokens=tokens, valid=valid, sequence_ids=torch.arange(PROMPTS), prompt_ids=torch.arange(PROMPTS))


def refills(cases):
    """[(family, kind of prompts, samples a prompt, slots, order, ParallelConfig fields)] -> (sequence ids, lengths in
    the order of the rows, responses by id, tokens sampled in each step, what Engine.forward and the sampler without a
    cache say of some)."""
    results = []
    for family, kind, samples, slots, order, sizes in cases:
        with layout(**sizes) as topology:
            engine = make_engine(REFILLED[family], topology, micro_batch_tokens=150)
            config = SamplerConfig(
                response_length=LONG, micro_batch_size=slots, samples_per_prompt=samples, stop_at_eos=True
            )
            options = dict(seed=4, eos_id=EOS, with_entropy=True)
            rows = torch.arange(PROMPTS).chunk(topology.data_size)[topology.data_rank]
            if order == "shuffled":
                rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(8))]
            prompts, counts = few_prompts(kind).select(rows), []
            sampler = Sampler(engine, config, prompt_length=P, **options)
            rollout = sampler.sample(prompts, on_tokens=counts.append)

            count = min(len(rollout), 12)
            some, few = rollout.select(slice(0, count)), prompts.select(slice(0, -(-count // samples)))
            slow = sample_without_cache(engine, few, config, **options).select(slice(0, count))
            trainer = engine.forward(some, with_entropy=True)
            agree = {
                "cache tokens": 0.0 if torch.equal(some.tokens, slow.tokens) else 1.0,
                "cache logprobs": gap(some.logprobs, slow.logprobs),
                "forward logprobs": gap(some.logprobs, trainer["logprobs"]),
                "forward entropy": gap(some.entropy, trainer["entropy"]),
            }
            order = rollout.sequence_ids.argsort()
            named = {name: getattr(rollout, name)[order] for name in ("mask", "entropy", "segments")}
            tokens, logprobs = by_id(rollout)
            results.append((rollout.sequence_ids, rollout.mask.sum(1).tolist(),
                            named | {"tokens": tokens, "logprobs": logprobs}, counts, agree))  # fmt: skip
    return results


TRUTHS = [("llama", "mixed", 1), ("llama", "mixed", 4), ("llama", "one", 4), ("llama", "full", 1), ("gpt2", "mixed", 4),
          ("llama 6", "mixed", 4)]  # fmt: skip
SEQUENCE = dict(tensor=2, pipeline=2, sequence=True)
REFILLS = {
    1: [("llama", "mixed", 1, 4, "forward", {}), ("llama", "mixed", 1, 64, "shuffled", {}),
        ("llama", "mixed", 4, 16, "shuffled", {}), ("llama", "mixed", 4, 1, "forward", {}),
        ("llama", "one", 4, 3, "forward", {}), ("llama", "full", 1, 4, "shuffled", {}),
        ("gpt2", "mixed", 4, 7, "shuffled", {})],
    2: [("llama", "mixed", 4, 4, "shuffled", dict(tensor=2)), ("llama", "mixed", 1, 64, "shuffled", dict(tensor=2)),
        ("llama", "mixed", 4, 3, "forward", dict(tensor=2, sequence=True)),
        ("llama", "one", 4, 16, "shuffled", dict(tensor=2, sequence=True)),
        ("llama", "mixed", 4, 4, "forward", dict(pipeline=2)), ("gpt2", "mixed", 4, 5, "shuffled", dict(pipeline=2)),
        ("llama", "full", 1, 1, "forward", dict(pipeline=2)),
        ("llama", "mixed", 4, 4, "shuffled", dict(pipeline=2, virtual_pipeline=2)),
        ("llama", "mixed", 1, 64, "forward", dict(pipeline=2, virtual_pipeline=2)),
        ("llama", "mixed", 1, 2, "forward", {})],
    3: [("llama 6", "mixed", 4, 4, "shuffled", dict(pipeline=3)),
        ("llama 6", "mixed", 4, 3, "forward", dict(pipeline=3, virtual_pipeline=2))],
    4: [("llama", "mixed", 4, 4, "forward", dict(pipeline=4)), ("llama", "mixed", 1, 16, "shuffled", dict(pipeline=4)),
        ("llama", "mixed", 4, 3, "shuffled", SEQUENCE), ("llama", "one", 4, 5, "forward", SEQUENCE),
        ("llama", "mixed", 1, 1, "forward", dict(tensor=2, pipeline=2)),
        ("llama", "full", 1, 2, "forward", dict(pipeline=2))],
}  # fmt: skip


@pytest.fixture(scope="module")
def refilled_truth(ranks):
    """Of one rank with a slot for each row."""
    found = {}
    (answers,) = ranks.run(1, refills, [(*which, PROMPTS * which[2], "forward", {}) for which in TRUTHS])
    for (family, kind, samples), (ids, lengths, named, counts, agree) in zip(TRUTHS, answers, strict=True):
        assert torch.equal(ids, torch.arange(PROMPTS * samples))
        assert len(set(lengths)) > 3 + samples, lengths  # they end at many places
        assert counts == [sum(length > step for length in lengths) for step in range(LONG)]
        assert max(agree.values()) < 1e-5, agree
        found[family, kind, samples] = named
    return found


def makespan(lengths: list[int], slots: int) -> int:
    """Steps of rows that start in their order, each in the slot that is free first."""
    free = [0] * slots
    for length in lengths:
        free[free.index(min(free))] += length
    return max(free)


@pytest.mark.long
@pytest.mark.parametrize("world_size", REFILLS)
def test_refilled_slots_give_the_same_responses(ranks, refilled_truth, world_size):
    answers = ranks.run(world_size, refills, REFILLS[world_size])
    for number, case in enumerate(REFILLS[world_size]):
        family, kind, samples, slots, _, sizes = case
        truth, seen = refilled_truth[family, kind, samples], set()
        for answer in answers:  # every rank
            ids, lengths, named, counts, agree = answer[number]
            order = ids.sort().values
            seen |= set(ids.tolist())
            for name in ("tokens", "mask", "segments"):
                assert torch.equal(named[name], truth[name][order]), (case, name)
            for name in ("logprobs", "entropy"):
                assert gap(named[name], truth[name][order]) < 1e-5, (case, name)
            assert max(agree.values()) < 1e-5, (case, agree)

            tensor, stages = sizes.get("tensor", 1), sizes.get("pipeline", 1)
            parts = tensor if sizes.get("sequence") else 1
            together = stages * -(-slots // parts) * parts
            waves = [lengths[start : start + together] for start in range(0, len(lengths), together)]
            if stages == 1:  # an end is seen at once
                assert sum(counts) == sum(lengths), case
                assert len(counts) == makespan(lengths, together), case
            else:  # ... or up to 3 steps later
                late = [min(length + 3, LONG) for length in lengths]
                assert sum(lengths) <= sum(counts) <= sum(late), case
                assert sum(lengths) / together <= len(counts) <= sum(late) / together + max(late), case
            assert max(counts) <= together and min(counts) > 0, case
            if len(waves) > 2 and together > 1:
                assert len(counts) < sum(map(max, waves)), case
        assert seen == set(range(PROMPTS * samples)), case


def in_lockstep(cases):
    """[(ParallelConfig fields, in lockstep)] -> (sequence ids, responses, forward passes of each of this rank's layers,
    tokens sampled in each step); the ranks have different numbers of prompts."""
    results = []
    for sizes, lockstep in cases:
        with layout(**sizes) as topology:
            engine = make_engine(REFILLED["llama"], topology)
            config = SamplerConfig(response_length=LONG, micro_batch_size=3, samples_per_prompt=2, stop_at_eos=True)
            sampler = Sampler(
                engine, config, prompt_length=P, seed=4, eos_id=EOS, lockstep=topology.data_group if lockstep else None
            )
            layers = [layer for module in engine.modules for layer in module.decoder.layers]
            passes, counts = [0] * len(layers), []

            def count(number, passes=passes):
                passes[number] += 1

            for number, layer in enumerate(layers):
                layer.register_forward_hook(lambda *_, number=number, count=count: count(number))
            rows = (slice(0, 3), slice(3, PROMPTS))[topology.data_rank]
            rollout = sampler.sample(few_prompts("mixed").select(rows), on_tokens=counts.append)
            results.append((rollout.sequence_ids, rollout.tokens[:, P:], passes, counts))
    return results


LOCKSTEP = {
    2: [({}, True), ({}, False)],
    4: [(dict(pipeline=2), True), (dict(tensor=2, sequence=True), True), (dict(pipeline=2, virtual_pipeline=2), True)],
}


@pytest.mark.long
@pytest.mark.parametrize("world_size", LOCKSTEP)
def test_ranks_in_lockstep_run_the_same_forward_passes(ranks, world_size):
    (alone,) = ranks.run(1, everything_at_once)
    answers = ranks.run(world_size, in_lockstep, LOCKSTEP[world_size])
    for number, (sizes, lockstep) in enumerate(LOCKSTEP[world_size]):
        found = [answer[number] for answer in answers]
        for ids, tokens, _, _ in found:
            assert torch.equal(tokens, alone[ids]), (sizes, lockstep)
        passes = {count for _, _, counts, _ in found for count in counts}
        steps = {len(counts) for *_, counts in found}
        assert (len(passes) == 1) == (len(steps) == 1) == lockstep, (sizes, lockstep, passes, steps)
        if lockstep:  # one rank had nothing to do in the end
            assert any(counts[-1] == 0 for *_, counts in found) and any(counts[-1] > 0 for *_, counts in found)


def everything_at_once():
    """All responses of the prompts above, on one rank."""
    with layout() as topology:
        engine = make_engine(REFILLED["llama"], topology)
        config = SamplerConfig(response_length=LONG, micro_batch_size=64, samples_per_prompt=2, stop_at_eos=True)
        sampler = Sampler(engine, config, prompt_length=P, seed=4, eos_id=EOS)
        return sampler.sample(few_prompts("mixed")).tokens[:, P:]


def drawn(options, vocab_size):
    """Tokens of the same logits, whole on one rank or split."""
    with layout(tensor=torch.distributed.get_world_size()) as topology:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(300, vocab_size, generator=generator).mul_(3)
        logits[:, 5] = logits[:, vocab_size - 3]  # equals, on different ranks
        columns = -(-vocab_size // (128 * topology.parallel.tensor)) * 128
        padded = torch.nn.functional.pad(logits, (0, columns * topology.parallel.tensor - vocab_size), value=50.0)
        shard = padded[:, columns * topology.tensor_rank : columns * (topology.tensor_rank + 1)]
        return [
            sampling.sample(
                shard, option, seed=1, sequence_ids=torch.arange(300), steps=torch.arange(300) % 5,
                vocab_size=vocab_size, with_entropy=True, tp_group=topology.tensor_group,
            )
            for option in options
        ]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [100, 503])  # 100: the second rank has padding alone
def test_split_logits_give_the_same_tokens(ranks, vocab_size):
    options = [Draw(), Draw(greedy=True), Draw(top_k=7), Draw(top_p=0.6), Draw(top_k=9, top_p=0.8, temperature=0.5)]
    (whole,) = ranks.run(1, drawn, options, vocab_size)
    for split in ranks.run(2, drawn, options, vocab_size):
        for option, one, two in zip(options, whole, split, strict=True):
            assert torch.equal(one.tokens, two.tokens), option
            assert one.tokens.max() < vocab_size
            assert gap(one.logprobs, two.logprobs) < 1e-5 and gap(one.entropy, two.entropy) < 1e-5, option


def greedy(sources):
    """(transformers' greedy tokens, ours) for the Hugging Face models in `sources`, {directory: converted}."""
    from transformers import AutoModelForCausalLM

    from megarlhf import checkpoint
    from megarlhf.models.spec import Architecture

    found = []
    for source, ours in sources:
        with layout(tensor=torch.distributed.get_world_size()) as topology:
            engine = build(
                "actor", Architecture.load(ours), topology, micro_batch_tokens=100, dtype="fp32"
            )  # fmt: skip
            checkpoint.load(engine, ours, weights_only=True)
            prompts = make_prompts(24)
            prompts = dataclasses.replace(prompts, tokens=prompts.tokens % 61)
            sampler = Sampler(
                engine, SamplerConfig(response_length=R, greedy=True, micro_batch_size=10), prompt_length=P
            )  # fmt: skip
            tokens = sampler.sample(prompts).tokens[:, P:]
            theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().generate(
                prompts.tokens, attention_mask=prompts.valid.long(), max_new_tokens=R, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )[:, P:]  # fmt: skip
            found.append((tokens, theirs))
    return found


def test_greedy_is_transformers_greedy(ranks, tmp_path):
    from megarlhf.convert import convert
    from tests.convert.models import save

    sources = []
    for case in ("llama", "llama-3.1-tied", "gpt2", "qwen3"):
        source = save(case, tmp_path / case)
        convert.hf2megatron(source, tmp_path / f"{case}-ours")
        sources.append((source, tmp_path / f"{case}-ours" / "actor"))
    for size in (1, 2):
        for answer in ranks.run(size, greedy, sources):
            for (source, _), (ours, theirs) in zip(sources, answer, strict=True):
                assert torch.equal(ours, theirs), (source.name, size)
                assert len(ours.unique(dim=0)) > 12  # not all the same loop


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (dict(response_length=60), {}, "8 tokens and responses of 60 need 68 positions, but the model has 64"),
        ({}, dict(pad_id=502), "pad_id: 502 is in the vocabulary of 503 tokens"),
        (dict(stop_at_eos=True), dict(eos_id=None), "stop_at_eos: the tokenizer's EOS id is None"),
        (dict(stop_at_eos=True), dict(eos_id=503), "stop_at_eos: the tokenizer's EOS id is 503"),
    ],
)
def test_what_cannot_be_sampled_is_refused(fields, options, message):
    options = {"prompt_length": P, "eos_id": 0, "pad_id": 503, **options}
    with pytest.raises(UserError, match=message) as caught:
        check_sampling(SamplerConfig(**fields), GPT2, **options)
    assert "\n" not in str(caught.value)
    check_sampling(SamplerConfig(response_length=60), LLAMA, prompt_length=P, eos_id=None, pad_id=503)  # no table


@pytest.mark.parametrize(
    "fields",
    [dict(response_length=0), dict(samples_per_prompt=0), dict(micro_batch_size=0),
     dict(temperature=0.0)],
)  # fmt: skip
def test_bad_sizes_are_refused(fields):
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: "):
        SamplerConfig(**fields)


def sampled_first():
    """A model samples before anything else, in larger streams than it learns in: megatron keeps the larger buffers."""
    with layout(tensor=2, sequence=True) as topology:
        engine = make_engine(FAMILIES["llama"], topology, micro_batch_tokens=24, optimizer=ADAM)
        rollout = Sampler(engine, SamplerConfig(response_length=R, micro_batch_size=32), prompt_length=P).sample(
            make_prompts(32)
        )
        difference = gap(engine.forward(rollout)["logprobs"], rollout.logprobs)
        return difference, engine.step(rollout, sft_loss)["grad_norm"].value


def test_a_model_learns_after_it_has_sampled(ranks):
    for difference, grad_norm in ranks.run(2, sampled_first):
        assert difference < 1e-5 and grad_norm > 0


def fitted(free, sizes):
    """The default slots where a device says how much memory it has free."""
    from unittest import mock

    from megarlhf.cluster import backend

    with layout(**sizes) as topology:
        engine = make_engine(FAMILIES["llama"], topology)
        fixed = 0
        found = []
        for rows, given in ((None, None), (6, None), (None, 3)):
            config = SamplerConfig(response_length=R, micro_batch_size=given)
            with mock.patch.object(backend, "memory", lambda: (free and free + 2**20 * topology.rank, 2 * free)):
                sampler = Sampler(engine, config, prompt_length=P, rows=rows)
            fixed = fixed or sampler.memory.fixed
            caches = sum(cache.num_bytes for cache in sampler.caches)
            one = sum(group.size for group in sampler.groups) // len(sampler.groups)
            found.append((one, caches, fixed, sampler.memory.slot))
        return found


@pytest.mark.parametrize("sizes", [dict(tensor=2), dict(tensor=2, sequence=True), dict(pipeline=2)])
def test_slots_fill_the_memory_of_the_rank_that_has_least(ranks, sizes):
    free = 2**27
    both = ranks.run(2, fitted, free, sizes)
    assert len({tuple(one for one, *_ in found) for found in both}) == 1
    fitting, bounded, given = both[0]
    assert fitting[0] > 100 and given[0] == (4 if sizes.get("sequence") else 3)
    assert bounded[0] == (3 if sizes.get("pipeline") else 6)
    for (slots, caches, fixed, each), *_ in both:
        assert caches <= slots * each and fixed + caches < 0.9 * free
    # the rank that has least has no room for one percent more
    slots, _, fixed, each = both[0][0]
    tight = max(found[0][2] + 1.01 * found[0][0] * found[0][3] for found in both)
    assert tight > 0.9 * free, (slots, fixed, each)
    assert [found[0][0] for found in ranks.run(2, fitted, 0, sizes)] == [16, 16]  # not known, as on a CPU
