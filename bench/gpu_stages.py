"""One stage of `bench.gpu` in a process of its own: every figure is a line of JSON on its standard output,

{"what": ..., "value": ..., "unit": ...}     with "share" and "of": a ratio, and to what
{"what": ..., "error": ...}                  what is wrong
{"what": ..., "skipped": ...}                why it could not be measured

python -m bench.gpu_stages STAGE [--quick]
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, __file__.rpartition("/")[0])
import gpu_kernels
import one_rank

from megarlhf.cluster import backend

CUDA = backend.on_cuda()  # before torch asks the driver: it sets the environment
import torch  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float32  # of bandwidths and rates
DTYPE = "bf16" if CUDA else "fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    small = not CUDA or arguments.quick
    for figure in STAGES[arguments.stage](small):
        print(json.dumps(figure), flush=True)


# --------------------------------------------------------------------------------------------------- measuring


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The least of some repetitions, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def copy_bandwidth(small: bool) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(2**24 if small else 2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def architecture(small: bool):
    """A Llama of 1.1B parameters with groups of four heads, or a tiny one."""
    from megarlhf.models.spec import Architecture

    layers, hidden, inner, heads, vocabulary = (2, 64, 128, 4, 2048) if small else (22, 2048, 5632, 32, 32000)
    return Architecture(
        "llama", num_layers=layers, hidden_size=hidden, ffn_hidden_size=inner, num_attention_heads=heads,
        num_query_groups=heads // 4, vocab_size=vocabulary, max_position_embeddings=4096, init_std=0.02,
    )  # fmt: skip


def sequences(rows: int, length: int, vocabulary: int, ragged: bool):
    """Prompts and responses of half the length each; `ragged`: some tokens of each are padding."""
    from megarlhf.batch import Sequences

    generator, half = torch.Generator().manual_seed(0), length // 2
    place = torch.arange(half)
    given, said = torch.randint(half // 4, half + 1, (2, rows, 1), generator=generator) if ragged else (half, half)
    real = torch.cat([(place >= half - given).expand(rows, -1), (place < said).expand(rows, -1)], 1)
    return Sequences(
        tokens=torch.randint(0, vocabulary, (rows, length), generator=generator),
        mask=real[:, half:].clone(), segments=real.long(), prompt_len=half,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- stages


def environment(small: bool) -> Iterator[dict]:
    import platform

    def version(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "absent"

    yield {"what": "Python, processor", "value": f"{platform.python_version()}, {platform.machine()}"}
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        yield {"what": "GPU", "value": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_"
               f"{properties.major}{properties.minor}, {properties.multi_processor_count} multiprocessors"}  # fmt: skip
        yield {"what": "CUDA, cuDNN, NCCL", "value": f"{torch.version.cuda}, {torch.backends.cudnn.version()}, "
               f"{'.'.join(map(str, torch.cuda.nccl.version()))}"}  # fmt: skip
    for name in ("triton", "transformer-engine", "transformers"):
        found = version(name, name + "-cu13", name + "-cu12") if name.startswith("transformer-") else version(name)
        yield {"what": name, "value": found}
    apex = [name for name in ("amp_C", "fused_weight_gradient_mlp_cuda") if importlib.util.find_spec(name)]
    yield {"what": "apex's extensions", "value": ", ".join(apex) or "absent"}
    backend.install()
    for what, value in backend.describe(torch.bfloat16).items():
        yield {"what": what, "value": value}
    if CUDA:
        x = torch.zeros(1, device=DEVICE)
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        yield {"what": "expandable segments", "value": str(settings.get("expandable_segments"))}
        del x
    yield {"what": "copy", "value": copy_bandwidth(small) / 1e9, "unit": "GB/s"}
    size = 512 if small else 8192
    matrix = torch.randn(size, size, device=DEVICE).to(HALF)
    rate = 2 * size**3 / seconds(lambda: matrix @ matrix)
    yield {"what": f"matrix product of {size}, {DTYPE}", "value": rate / 1e12, "unit": "TFLOP/s"}


def probes(small: bool) -> Iterator[dict]:
    one_rank.start()
    for what, probe in PROBES.items():
        try:
            yield {"what": what, **probe()}
        except Exception as error:
            yield {"what": what, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def off(found: torch.Tensor, exact: torch.Tensor, most: float) -> dict:
    """The relative error; an error if it is larger than `most` or not finite."""
    error = ((found.detach().double().cpu() - exact.cpu()).norm() / exact.cpu().norm()).item()
    assert error <= most, f"relative error {error:.1e}, at most {most:.0e}"
    return {"value": error, "unit": "relative error"}


def float32_products() -> dict:
    """TF32 would be off by 1e-3."""
    a = torch.randn(512, 512, device=DEVICE)
    return off(a @ a, a.double() @ a.double(), 1e-6)


def wide_sums() -> dict:
    """The weight's gradient of the head: a float32 total += a product of bfloat16."""
    from megarlhf.kernels import products

    a, b = torch.randn(2, 256, 256, device=DEVICE).bfloat16()
    total = torch.ones(256, 256, device=DEVICE)
    exact = 1 + a.double() @ b.double()
    products.accumulate(total, *(x if CUDA else x.float() for x in (a, b)))
    return off(total, exact, 1e-6 if products.WIDE_PRODUCTS else 1e-2)


def wide_logits() -> dict:
    from megarlhf.kernels import linear_logits, products

    hidden, weight = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.randn(512, 256, device=DEVICE).bfloat16()
    return off(linear_logits(hidden, weight), hidden.double() @ weight.double().t(),
               1e-6 if products.WIDE_PRODUCTS else 1e-2)  # fmt: skip


def attended(length: int, queries: int) -> dict:
    """`operations.attend` with a mask against float64, forward and backward, with groups and low scores."""
    from megarlhf.cluster import operations

    torch.manual_seed(0)
    dtype = torch.bfloat16 if CUDA else torch.float32
    sizes = [(4, heads, size, 64) for heads, size in ((8, queries), (2, length), (2, length))]
    inputs = [
        torch.randn(size, device=DEVICE).mul_(scale).to(dtype) for size, scale in zip(sizes, (8, 8, 1), strict=True)
    ]
    column = torch.arange(length, device=DEVICE)
    mask = (column <= column[length - queries :, None])[None, None]
    results = []
    for convert in (lambda x: x, lambda x: x.double().cpu()):
        given = [convert(x).detach().requires_grad_() for x in inputs]
        context = operations.attend(*given, mask.to(given[0].device))
        context.sum().backward()
        results.append(torch.cat([context.flatten(), *(x.grad.flatten() for x in given)]))
    return off(results[0], results[1].double(), 2e-2 if CUDA else 1e-4)


def decode_attention() -> dict:
    """The heads of a group as queries, and a mask of one row a slot: no cuDNN, no keys copied."""
    from megarlhf.cluster import operations

    dtype, (slots, groups, heads, columns) = torch.bfloat16 if CUDA else torch.float32, (16, 4, 8, 512)
    query = torch.randn(slots, groups, heads, 64, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, slots, groups, columns, 64, device=DEVICE).to(dtype)
    lengths = torch.arange(slots, device=DEVICE) * 30 + 1
    mask = (torch.arange(columns, device=DEVICE) < lengths[:, None])[:, None, None]
    exact = [x.double().cpu() for x in (query, keys, values)]
    scores = (exact[0] @ exact[1].mT / 8).masked_fill(~mask.cpu(), -torch.inf)
    found = off(operations.attend(query, keys, values, mask), scores.softmax(-1) @ exact[2], 1e-2)
    taken = seconds(lambda: operations.attend(query, keys, values, mask))
    return {"value": f"{found['value']:.1e} relative error, {1e6 * taken:.0f} us"}


def flash(window: int | None = None) -> dict:
    """The variable-length kernel against attention in blocks, forward and backward."""
    from megarlhf.models import attention
    from megarlhf.stream import Spans

    if not CUDA:
        return {"skipped": "for a GPU"}
    lengths = (1, 200, 64, 333, 7)
    bounds = torch.tensor((0, *lengths), device=DEVICE).cumsum(0).int()
    spans, total = Spans(lengths, bounds), sum(lengths) + 3
    inputs = [torch.randn(total, heads, 64, device=DEVICE).bfloat16() for heads in (8, 2, 2)]
    assert attention._has_flash(inputs[0], 0.0), "no variable-length kernel: attention is computed in blocks"
    results = []
    for over, convert in ((attention.over_spans_flash, lambda x: x), (attention.over_spans, torch.Tensor.float)):
        given = [convert(x).detach().requires_grad_() for x in inputs]
        context = over(*given, spans, window=window, scale=0.125, dropout=0.0)
        context.float().square().sum().backward()
        results.append(torch.cat([context.flatten(), *(x.grad.flatten() for x in given)]))
    return off(results[0], results[1].double(), 2e-2)


def transformer_engine() -> dict:
    """Log-probs of a small model in bfloat16 on its layers against megatron's own."""
    if not backend.uses_transformer_engine(torch.bfloat16):
        return {"skipped": "Transformer Engine is not used here"}
    from megarlhf.cluster import parallel

    parallel.stop()
    topology, sizes = parallel.start(parallel.ParallelConfig()), architecture(True)
    batch, plain, found = sequences(8, 64, sizes.vocab_size, True), backend.uses_transformer_engine, []
    for uses in (True, False):
        backend.uses_transformer_engine = lambda dtype, uses=uses: uses
        engine = one_rank.build("actor", sizes, topology, rows=8, columns=64, dtype="bf16", seed=1)
        found.append(engine.forward(batch)["logprobs"])
    backend.uses_transformer_engine = plain
    return off(found[0], found[1].double(), 1e-2)


PROBES: dict[str, Callable[[], dict]] = {
    "float32 products are not TF32": float32_products,
    "float32 += bfloat16 @ bfloat16": wide_sums,
    "float32 logits of bfloat16": wide_logits,
    "attention with a mask, 192 keys": lambda: attended(192, 192),
    "attention with a mask, the last 65 of 576": lambda: attended(576, 65),
    "attention of a decode step": decode_attention,
    "variable-length attention": flash,
    "variable-length attention with a window": lambda: flash(50),
    "Transformer Engine's layers": transformer_engine,
}


def kernels(small: bool) -> Iterator[dict]:
    """Of log-probs: N 8192, V 128256 in bfloat16; of sampling: 256 rows of float32; of a decode step: see there."""
    bandwidth, columns = copy_bandwidth(small), 4096 if small else 128256
    works = (
        gpu_kernels.rows(256 if small else 8192, columns, DEVICE, HALF),
        gpu_kernels.draws(16 if small else 256, columns, DEVICE), gpu_kernels.steps(DEVICE, HALF, small),
    )  # fmt: skip
    for name, moved, work in (one for some in works for one in some):
        rate = moved / seconds(work)
        yield {"what": name, "value": rate / 1e9, "unit": "GB/s", "share": rate / bandwidth,
               "of": "a copy's bandwidth"}  # fmt: skip
        gc.collect()
    if not CUDA:
        yield {"what": "kernels of a decode step", "skipped": "for a GPU"}


def decode(small: bool) -> Iterator[dict]:
    """A step's time is the difference of two response lengths, so that prefill and recording are not in it."""
    from megarlhf.train import work

    topology, sizes, bandwidth = one_rank.start(), architecture(small), copy_bandwidth(small)
    prompt, response = (16, 16) if small else (256, 256)
    engine = one_rank.build("actor", sizes, topology, rows=64, columns=prompt, dtype=DTYPE, seed=1)
    width = engine.config.params_dtype.itemsize
    weights = width * (work.layer_parameters(sizes) * sizes.num_layers + sizes.hidden_size * sizes.vocab_size)
    token = width * 2 * sizes.num_layers * sizes.num_query_groups * sizes.kv_channels

    def sampling(slots: int, length: int) -> Callable[[], object]:
        from megarlhf.batch import Prompts
        from megarlhf.experience.sampler import Sampler, SamplerConfig

        sampler = Sampler(engine, SamplerConfig(response_length=length, micro_batch_size=slots), prompt_length=prompt)
        tokens, ids = torch.randint(0, sizes.vocab_size, (slots, prompt)), torch.arange(slots)
        prompts = Prompts(tokens=tokens, valid=torch.ones_like(tokens, dtype=torch.bool), sequence_ids=ids,
                          prompt_ids=ids)  # fmt: skip
        return lambda: sampler.sample(prompts)

    for slots in (2, 8) if small else (1, 32, 128, 256):
        short, long = (seconds(sampling(slots, length), 2) for length in (response // 2, response))
        step = (long - short) / (response - response // 2)
        floor = (weights + slots * token * (prompt + 0.75 * response)) / bandwidth
        yield {"what": f"decode step, {slots} slots, {prompt} + {response} tokens", "value": 1e3 * step, "unit": "ms",
               "share": floor / step, "of": "its bytes at a copy's bandwidth"}  # fmt: skip
        yield {"what": f"sampling, {slots} slots, prefill and recording included", "value": slots * response / long,
               "unit": "tokens/s"}  # fmt: skip
    yield without_kernels(sampling, response)
    if not CUDA:
        yield {"what": "kernels of a decode step", "skipped": "for a GPU"}
        return
    counts = []
    for length in (8, 16):
        sample = sampling(32, length)
        sample()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            sample()
            synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    launched = (counts[1] - counts[0]) / 8
    yield {"what": "kernels of a decode step, 32 slots", "value": launched, "unit": "launched"}
    yield {"what": "kernels a layer, the head's shared out", "value": launched / sizes.num_layers, "unit": "launched"}


def without_kernels(sampling: Callable[[int, int], Callable[[], object]], response: int) -> dict:
    """A step of 32 slots by torch's operations in the place of the kernels of a decode step."""
    from megarlhf.kernels import decode

    what = "decode step, 32 slots, without its Triton kernels"
    if decode.fused_for(torch.zeros(1, device=DEVICE)) is None:
        return {"what": what, "skipped": "it has none here"}
    plain, decode.fused_for = decode.fused_for, lambda x: None
    try:
        short, long = (seconds(sampling(32, length), 2) for length in (response // 2, response))
    finally:
        decode.fused_for = plain
    return {"what": what, "value": 1e3 * (long - short) / (response - response // 2), "unit": "ms"}


def train(small: bool) -> Iterator[dict]:
    from megarlhf.optim import OptimizerConfig

    topology, sizes = one_rank.start(), architecture(small)
    rows, length = (8, 64) if small else (64, 1024)
    plain = backend.uses_transformer_engine
    for uses in (True, False) if plain(torch.bfloat16) else (False,):
        backend.uses_transformer_engine = lambda dtype, uses=uses: uses and dtype != torch.float32
        engine = one_rank.build("actor", sizes, topology, rows=16, columns=length, dtype=DTYPE, seed=1,
                                optimizer=OptimizerConfig(lr=1e-6))  # fmt: skip
        for ragged in (False, True):
            name = f"{'Transformer Engine' if uses else 'megatron'}, {'ragged' if ragged else 'full'} rows"
            yield from rates(name, engine, sequences(rows, length, sizes.vocab_size, ragged))
        del engine
        gc.collect()


def rates(name: str, engine, batch) -> Iterator[dict]:
    """FLOP/s of real tokens."""
    from megarlhf.algorithms.supervised import sft_loss
    from megarlhf.train import work

    sizes, flops, losses = engine.modules[0].architecture, 0.0, []
    for real, mask in zip(batch.segments > 0, batch.mask, strict=True):
        counted = int(mask.sum())
        flops += work.trunk(sizes, 1, int(real.sum()), counted) + 2.0 * counted * sizes.hidden_size * sizes.vocab_size
    taken = seconds(lambda: losses.append(engine.step(batch, sft_loss)["loss"].value), 3)
    yield {"what": f"update, {name}", "value": 3 * flops / taken / 1e12, "unit": "TFLOP/s"}
    yield {"what": f"update, {name}: loss of the first", "value": losses[0], "unit": "nats"}
    taken = seconds(lambda: engine.forward(batch), 3)
    yield {"what": f"forward pass, {name}", "value": flops / taken / 1e12, "unit": "TFLOP/s"}


def memory(small: bool) -> Iterator[dict]:
    from megarlhf.algorithms.supervised import sft_loss
    from megarlhf.batch import Prompts
    from megarlhf.experience.sampler import Sampler, SamplerConfig
    from megarlhf.optim import OptimizerConfig

    topology, sizes = one_rank.start(), architecture(small)
    rows, length = (8, 64) if small else (64, 1024)
    batch, half, found = sequences(rows, length, sizes.vocab_size, True), length // 2, []

    def phase(name: str, work: Callable[[], object]) -> object:
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            result = work()
            peak, used, held = (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(),
                                torch.cuda.memory_reserved())  # fmt: skip
        else:
            before = one_rank.status("VmRSS")
            with one_rank.peak_memory() as peaks:
                result = work()
            peak, used, held = before + peaks[0], one_rank.status("VmRSS"), 0
        found.append({"what": f"{name}: peak", "value": peak / 2**20, "unit": "MiB"})
        after = {"what": f"{name}: afterwards", "value": used / 2**20, "unit": "MiB"}
        found.append(after | ({"share": used / held, "of": "what the allocator holds"} if held else {}))
        return result

    def built(trains: bool):
        options = {"optimizer": OptimizerConfig(lr=1e-6)} if trains else {}
        return one_rank.build("actor", sizes, topology, rows=16, columns=length, dtype=DTYPE, seed=1, **options)

    with backend.loading():
        actor = phase("actor, with optimizer", lambda: built(True))
        reference = phase("reference", lambda: built(False))
    sampler = Sampler(actor, SamplerConfig(response_length=half, micro_batch_size=rows), prompt_length=half)
    prompts = Prompts(tokens=batch.tokens[:, :half], valid=batch.segments[:, :half] > 0,
                      sequence_ids=torch.arange(rows), prompt_ids=torch.arange(rows))  # fmt: skip
    for turn in ("first", "second"):
        phase(f"sampling, {turn} step", lambda: sampler.sample(prompts))
        phase(f"log-probs of both, {turn} step", lambda: [engine.forward(batch) for engine in (actor, reference)])
        phase(f"update, {turn} step", lambda: actor.step(batch, sft_loss))
    yield from found
    yield {"what": "the sampler's caches and messages", "value": sampler.num_bytes / 2**20, "unit": "MiB"}


STAGES = {"environment": environment, "probes": probes, "kernels": kernels, "decode": decode, "train": train,
          "memory": memory}  # fmt: skip

if __name__ == "__main__":
    main()
