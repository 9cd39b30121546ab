"""The kernels that `bench.gpu_stages` measures, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

Work = tuple[str, int, Callable[[], object]]  # name, bytes of logits or caches that it must read and write


def rows(count: int, columns: int, device: str, dtype: torch.dtype) -> Iterator[Work]:
    from megarlhf.kernels import shard

    logits = torch.randn(count, columns, device=device).to(dtype)
    target, ones = torch.empty_like(logits), torch.ones(count, device=device)
    labels = torch.randint(columns, (count,), device=device)
    for entropy in (False, True):
        options = shard.CallOptions.of(
            logits, columns, temperature=1.0, vocab_size=None, tp_group=None, backend="auto", with_entropy=entropy,
            entropy_grad=True,
        )  # fmt: skip
        forward = partial(options.kernels.logprob_stats, logits, labels, temperature=1.0, with_entropy=entropy)
        stats = forward()
        merged = shard.merge(stats[None], options)
        scalars = shard.grad_scalars(options, merged.weights[0], merged.entropy, ones, ones if entropy else None)
        backward = partial(shard.write_logprob_grad, options, logits, labels, stats, target, scalars)
        yield f"log-probs{', entropy' * entropy}: forward", logits.nbytes, forward
        yield f"log-probs{', entropy' * entropy}: backward", 2 * logits.nbytes, backward


def draws(count: int, columns: int, device: str) -> Iterator[Work]:
    from megarlhf.kernels import sampling

    logits = torch.randn(count, columns // sampling.BLOCK * sampling.BLOCK, device=device)
    ids, steps = torch.arange(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    for name, fields in (("all tokens", {}), ("greedy", {"greedy": True}), ("top_p", {"top_p": 0.9})):
        sample = partial(
            sampling.sample, logits, sampling.Draw(**fields), seed=0, sequence_ids=ids, steps=steps,
            vocab_size=logits.shape[1],
        )  # fmt: skip
        yield f"sampling, {name}", logits.nbytes, sample


def steps(device: str, dtype: torch.dtype, small: bool) -> Iterator[Work]:
    """In bfloat16, heads of 128. "1 slot": its columns are read in parts. "ragged": from 1 to all columns. Each in a
    graph of 20 launches over as many layers, since one alone takes less time than its launch."""
    from megarlhf.kernels import decode

    layers, (slots, columns, groups, heads, hidden, inner) = 20, (64, 2048, 8, 4, 4096, 14336)
    if small:
        layers, (slots, columns, groups, heads, hidden, inner) = 2, (3, 70, 2, 4, 64, 128)
    one = torch.zeros(1, device=device, dtype=dtype)
    if (kernels := decode.fused_for(one)) is None:
        return

    def recorded(work: Callable[[int], object]) -> Callable[[], object]:
        work(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                work(layer)
        return graph.replay

    keys, values = torch.randn(2, layers, slots, groups, columns, 128, device=device, dtype=dtype)
    ragged = torch.linspace(0, columns - 1, slots, device=device).long()
    for name, last in (("1 slot", ragged[-1:]), ("full", ragged[-1:].repeat(slots)), ("ragged", ragged)):
        rows, new = torch.arange(len(last), device=device), torch.randn(len(last), groups, heads + 2, 128).to(one)
        turns = torch.randn(len(last), 128, device=device)
        query, key, value = new[:, :, :heads], new[:, :, heads], new[:, :, heads + 1]

        def attend(layer, query=query, rows=rows, last=last):
            return kernels.attend(query, keys[layer], values[layer], rows, last, window=None, scale=0.09)

        def store(layer, parts=(query, key, value), rows=rows, last=last, turns=turns):
            return kernels.rotate_and_store(*parts, keys[layer], values[layer], rows, last, turns)

        token = 2 * groups * 128 * one.element_size()
        yield f"decode step, attention: {name}", layers * token * int((last + 1).sum()), recorded(attend)
        yield f"decode step, rotation and cache: {name}", layers * 2 * new.nbytes, recorded(store)
    x, weight = torch.randn(slots, hidden, device=device).to(one), torch.ones(hidden, device=device).to(one)
    options = dict(epsilon=1e-5, zero_centred=False)
    add_norm = recorded(lambda layer: kernels.add_norm(x, None, x, weight, None, **options))
    yield "decode step, sum and norm", layers * 3 * x.nbytes, add_norm
    wide = torch.randn(slots, 2 * inner, device=device).to(one)
    activate = recorded(lambda layer: kernels.activate(wide, None, "silu", gated=True))
    yield "decode step, activation", layers * 3 * wide.nbytes // 2, activate
