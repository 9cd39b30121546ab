"""The cost of `megarlhf.kernels`, compared with other implementations.

    python bench/kernels.py [--quick] [--json FILE] [--device cpu|cuda] [--threads N]

Measures forward + backward of the token log-probabilities, without entropy, which the others do not compute. "linear":
the head computes them from hidden states. "given": from random logits; of megarlhf these are the row kernels, called as
the head calls them for a chunk, and the gradient overwrites the logits.

Every method runs in a process of its own, for two reasons. On a CPU, memory can only be measured as the peak resident
set size minus the resident set before the call. And an allocator that another method has used would hide page faults.
Time on a CPU is process CPU time, the minimum of the repetitions; rounds alternate between the methods. On CUDA: wall
time between synchronisations, and the allocator's peak.

Bandwidth is effective: the necessary bytes (logits read once forward, read and written once backward) divided by the
time. The last lines are the bounds of the project; the exit status is 1 if one is missed.

Legend: N rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from megarlhf.kernels import shard

ROOT = Path(__file__).resolve().parent.parent
VOCABULARIES = (32000, 50257, 128256)


# Methods on given logits (N, V) and labels (N,) -> log-probabilities (N,)


def given_naive(logits, labels):
    return F.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


class RowKernels(torch.autograd.Function):
    """The operations of `linear_logprobs` on the logits of a chunk."""

    @staticmethod
    def forward(ctx, logits, labels, backend):
        ctx.options = shard.CallOptions.of(
            logits, logits.shape[1], temperature=1.0, vocab_size=None, tp_group=None, backend=backend
        )
        stats = ctx.options.kernels.logprob_stats(logits, labels, temperature=1.0, with_entropy=False)
        merged = shard.merge(stats[None], ctx.options)
        ctx.save_for_backward(logits, labels, stats, merged.weights[0])
        return merged.logprobs

    @staticmethod
    def backward(ctx, grad):
        logits, labels, stats, weight = ctx.saved_tensors
        scalars = shard.grad_scalars(ctx.options, weight, None, grad, None)
        shard.write_logprob_grad(ctx.options, logits, labels, stats, logits.detach(), scalars)
        return logits, None, None


def given_ours(logits, labels):
    return RowKernels.apply(logits, labels, "auto")


def given_ours_torch(logits, labels):
    return RowKernels.apply(logits, labels, "torch")


def given_megatron(logits, labels):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        parallel_state.initialize_model_parallel()
    return -vocab_parallel_cross_entropy(logits[:, None], labels[:, None])[:, 0]


def given_liger(logits, labels):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return -liger_cross_entropy(logits, labels, reduction="none")


# Methods on hidden (N, H), weight (V, H), labels (N,)


def linear_naive(hidden, weight, labels):
    return F.log_softmax(hidden @ weight.t(), -1).gather(-1, labels[:, None])[:, 0]


def linear_ours(hidden, weight, labels):
    from megarlhf.kernels import linear_logprobs

    return linear_logprobs(hidden[:, None], weight, labels).logprobs


def linear_liger(hidden, weight, labels):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return -liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="none")


def methods(device: str) -> dict:
    found = {
        "given": {"naive": given_naive, "ours": given_ours, "megatron": given_megatron},
        "linear": {"naive": linear_naive, "ours": linear_ours},
    }
    if device == "cuda":
        found["given"]["ours, torch"] = given_ours_torch
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):  # its kernels need Triton: no CPU
        found["given"]["liger"], found["linear"]["liger"] = given_liger, linear_liger
    return found


class Meter:
    """Seconds between the laps of a block, and its peak memory in bytes."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to the current resident set
        self.base, self.laps = self.peak(), [self.now()]
        return self

    def lap(self) -> None:
        self.laps.append(self.now())

    def __exit__(self, *_):
        self.bytes = self.peak() - self.base
        self.seconds = [end - start for start, end in zip(self.laps, self.laps[1:], strict=False)]

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def peak(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def worker(kind: str, name: str, vocabulary: int, device: str, threads: int) -> None:
    """Run one method: a repetition for each line on stdin, with a line of JSON as its result."""
    torch.set_num_threads(threads)
    method = methods(device)[kind][name]
    rows, size, dtype = shape(device)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator) * 4 / size**0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    upstream = torch.randn(rows, generator=generator).to(device)
    for _ in sys.stdin:
        inputs = (hidden, weight) if kind == "linear" else (hidden @ weight.t(),)
        with Meter(device) as meter:
            output = method(*inputs, labels)
            meter.lap()
            gradients = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
            meter.lap()
        answer = {"forward": meter.seconds[0], "backward": meter.seconds[1], "bytes": meter.bytes}
        answer["check"] = [output.mean().item(), gradients[0].float().norm().item()]
        del inputs, output, gradients
        if device == "cuda" and kind == "given":
            answer["copy_bandwidth"] = copy_bandwidth(rows, vocabulary, dtype)
        print(json.dumps(answer), flush=True)


def shape(device: str) -> tuple[int, int, torch.dtype]:
    return (8192, 4096, torch.bfloat16) if device == "cuda" else (2048, 512, torch.float32)


def copy_bandwidth(rows: int, columns: int, dtype: torch.dtype) -> float:
    source = torch.empty(rows, columns, dtype=dtype, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    with Meter("cuda") as meter:
        target.copy_(source)
        meter.lap()
    return 2 * source.nbytes / meter.seconds[0]


def compare(kind: str, vocabulary: int, device: str, threads: int, rounds: int) -> dict:
    """{method: its minimum times and its peak}, from rounds that alternate between the methods; the first round warms
    up."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, name, str(vocabulary), device, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": str(threads)},
        )
        for name in methods(device)[kind]
    }  # fmt: skip
    answers: dict[str, list] = {name: [] for name in processes}
    for _ in range(rounds + 1):
        for name, process in processes.items():
            print(file=process.stdin, flush=True)
            answers[name].append(json.loads(process.stdout.readline()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    for name in answers:
        for mine, naive in zip(answers[name][0]["check"], answers["naive"][0]["check"], strict=True):
            assert abs(mine - naive) < 0.02 * abs(naive), (name, "computes something else", mine, naive)
    return {
        name: {
            key: max(a[key] for a in taken[1:]) if "band" in key else min(a[key] for a in taken[1:])
            for key in taken[0] if key != "check"
        }
        for name, taken in answers.items()
    }  # fmt: skip


def report(results: dict, device: str) -> None:
    rows, _, dtype = shape(device)
    for kind, by_vocabulary in results.items():
        for vocabulary, measured in by_vocabulary.items():
            elements = rows * int(vocabulary) * dtype.itemsize
            print(f"\n{kind}: N {rows}, V {vocabulary}, {dtype}, {device}")
            columns = f"{'forward s':>11}{'backward s':>11}{'total':>9}{'x naive':>9}{'extra MiB':>11}{'x naive':>9}"
            print(" " * 16 + columns, f"{'GB/s forward, backward' if kind == 'given' else '':>24}")
            naive = measured["naive"]
            for name, m in measured.items():
                total, base = m["forward"] + m["backward"], naive["forward"] + naive["backward"]
                speed = f"{elements / m['forward'] / 1e9:12.1f}{2 * elements / m['backward'] / 1e9:11.1f}"
                print(f"  {name:14}{m['forward']:11.4f}{m['backward']:11.4f}{total:9.4f}{total / base:9.2f}"
                      f"{m['bytes'] / 2**20:11.1f}{m['bytes'] / naive['bytes']:9.3f}",
                      f"{speed if kind == 'given' else '':>24}")  # fmt: skip


def bounds(results: dict, device: str) -> list[tuple[str, float, float]]:
    """(name, measured value, upper bound)."""
    if device == "cuda":
        rows, _, dtype = shape(device)
        ours = results["given"]["128256"]["ours"]
        ideal = rows * 128256 * dtype.itemsize / ours["copy_bandwidth"]
        return [
            ("forward, given logits: time / time of a copy's bandwidth", ours["forward"] / ideal, 1 / 0.85),
            ("backward, given logits: time / time of a copy's bandwidth", ours["backward"] / (2 * ideal), 1 / 0.85),
        ]
    found = []
    for kind, time_bound, memory_bound in (("linear", 1.15, 0.25), ("given", 0.5, 0.1)):
        ours, naive = (results[kind]["32000"][name] for name in ("ours", "naive"))
        seconds = [m["forward"] + m["backward"] for m in (ours, naive)]
        found.append((f"{kind}: CPU time, ours / naive", seconds[0] / seconds[1], time_bound))
        found.append((f"{kind}: peak extra memory, ours / naive", ours["bytes"] / naive["bytes"], memory_bound))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one vocabulary and two rounds: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; waiting OpenMP threads count as CPU time")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, name, vocabulary, device, threads = arguments.worker
        worker(kind, name, int(vocabulary), device, int(threads))
        return 0
    device = arguments.device
    vocabularies = VOCABULARIES if not arguments.quick else (128256,) if device == "cuda" else (32000,)
    results = {
        kind: {str(v): compare(kind, v, device, arguments.threads, 2 if arguments.quick else 4) for v in vocabularies}
        for kind in ("given", "linear")
    }
    report(results, device)
    print("\nbounds")
    checked = bounds(results, device)
    for what, measured, limit in checked:
        print(f"  {what}: {measured:.3f}, at most {limit:.3f}: {'holds' if measured <= limit else 'MISSED'}")
    if arguments.json:
        figures = {
            "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {arguments.threads} thread(s)",
            "torch": torch.__version__, "rows": shape(device)[0], "hidden": shape(device)[1],
            "dtype": str(shape(device)[2]), "results": results,
            "bounds": [{"what": what, "measured": measured, "limit": limit} for what, measured, limit in checked],
        }  # fmt: skip
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(measured > limit for _, measured, limit in checked))


if __name__ == "__main__":
    sys.exit(main())
