"""The sampler against `generate` of transformers: the same weights and prompts, fixed length, one thread, fp32.

    python -m bench.sampler [--quick] [--json FILE]

Times are CPU seconds of the process, the minimum of several runs; the two systems alternate. transformers runs without
an EOS token and without filters, so it computes only what fixed-length sampling needs. Memory is the peak resident set
of a fresh process during sampling, minus its resident set after the weights were loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
MODEL = dict(num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4,
             vocab_size=32000, max_position_embeddings=2048, initializer_range=0.05)  # fmt: skip
PROMPT, RESPONSE = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs and sizes: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--memory", type=int, metavar="ROWS", help=argparse.SUPPRESS)  # one measurement, in a process
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in THREADS.items()):  # libraries read them when they load
        done = subprocess.run([sys.executable, "-m", "bench.sampler", *sys.argv[1:]], env={**os.environ, **THREADS})
        sys.exit(done.returncode)
    if arguments.memory:
        print(json.dumps(memory(arguments.model, arguments.memory)))
        return
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), arguments.quick)
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(directory: Path, quick: bool) -> dict:
    runs, lengths, counts = (2, (16, 64), (32,)) if quick else (5, (16, 64, 256), (32, 64, 128))
    theirs = hugging_face(directory / "hf")
    from tools.convert.convert import hf2megatron

    hf2megatron(directory / "hf", directory / "ours")
    engine = load(directory / "ours")
    return {
        "speed": [speed(engine, theirs, rows, greedy, runs) for rows in (32, 64) for greedy in (False, True)],
        "length": [length(engine, response, runs) for response in lengths],
        "memory": [in_a_process(directory / "ours", count) for count in counts],
    }


def speed(engine, theirs, rows: int, greedy: bool, runs: int) -> dict:
    """Tokens a CPU second, ours and theirs, and (greedy) the fraction of equal tokens."""
    import torch

    prompts = make_prompts(rows)
    sampler = make_sampler(engine, rows, RESPONSE, greedy)
    options = dict(max_new_tokens=RESPONSE, do_sample=not greedy, eos_token_id=None, pad_token_id=0)
    options |= {} if greedy else dict(temperature=1.0, top_k=0, top_p=1.0)

    def generate():
        return theirs.generate(prompts.tokens.masked_fill(~prompts.valid, 0), attention_mask=prompts.valid.long(),
                               **options)[:, PROMPT:]  # fmt: skip

    times = {"ours": [], "theirs": []}
    for _ in range(runs):
        seconds, mine = cpu_seconds(lambda: sampler.sample(prompts).tokens[:, PROMPT:])
        times["ours"].append(seconds)
        with torch.inference_mode():
            seconds, other = cpu_seconds(generate)
        times["theirs"].append(seconds)
    assert other.shape == mine.shape
    rates = {name: rows * RESPONSE / min(values) for name, values in times.items()}
    equal = (mine == other).float().mean().item() if greedy else None
    return {"rows": rows, "greedy": greedy, **rates, "ratio": rates["ours"] / rates["theirs"], "equal_tokens": equal}


def length(engine, response: int, runs: int) -> dict:
    """CPU microseconds a token at one response length, without the prompt's pass."""
    rows, prompts = 32, make_prompts(32)
    short, full = make_sampler(engine, rows, 1, False), make_sampler(engine, rows, response, False)
    first = min(cpu_seconds(lambda: short.sample(prompts))[0] for _ in range(runs))
    whole = min(cpu_seconds(lambda: full.sample(prompts))[0] for _ in range(runs))
    return {"response_length": response, "us_per_token": 1e6 * (whole - first) / (rows * (response - 1))}


def memory(model: Path, rows: int) -> dict:
    """Bytes that sampling adds to the process at its peak, and the terms of the formula: buffers of the sampler (caches
    and messages), one float32 (B, V') of logits, and the hidden states of the prompts with the activations of those
    that are computed at once."""
    import ctypes

    from megarlhf.experience.decoding import PREFILL_TOKENS

    engine = load(model)
    architecture = engine.modules[0].architecture
    make_sampler(engine, rows, 2, False).sample(make_prompts(rows))  # one-time allocations of libraries
    prompts = make_prompts(rows)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not be reused without being counted
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    sampler = make_sampler(engine, rows, RESPONSE, False)
    sampler.sample(prompts)
    hidden, inner = architecture.hidden_size, architecture.ffn_hidden_size
    at_once = min(PREFILL_TOKENS["cpu"], rows * PROMPT)  # residual, normed; [gate; up], act(gate), product
    return {
        "rows": rows,
        "weights": 4 * sum(p.numel() for p in engine.modules[0].parameters()),
        "measured": status("VmHWM") - before,
        "held": sampler.num_bytes,
        "logits": 4 * rows * architecture.padded_vocab_size(1),
        "prompts": 4 * (2 * rows * PROMPT * hidden + at_once * (2 * hidden + 4 * inner)),
    }


def in_a_process(model: Path, rows: int) -> dict:
    command = [sys.executable, "-m", "bench.sampler", "--memory", str(rows), "--model", str(model)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def report(figures: dict) -> None:
    print(f"{'rows':>5} {'':8} {'ours':>10} {'transformers':>13}   tokens per CPU second")
    for line in figures["speed"]:
        kind = "greedy" if line["greedy"] else "sampled"
        equal = f", {line['equal_tokens']:.1%} of tokens equal" if line["greedy"] else ""
        rates = f"{line['ours']:>10,.0f} {line['theirs']:>13,.0f}"
        print(f"{line['rows']:>5} {kind:8} {rates}   {line['ratio']:.2f} x{equal}")
    for line in figures["length"]:
        print(f"response length {line['response_length']:>4}: {line['us_per_token']:.0f} us of CPU a token (32 rows)")
    for line in figures["memory"]:
        mib = {name: value / 2**20 for name, value in line.items()}
        formula = mib["held"] + mib["logits"] + mib["prompts"]
        print(
            f"{line['rows']:>5} rows: {mib['measured']:.1f} MiB at the peak above the weights' {mib['weights']:.1f}; "
            f"formula {formula:.1f} = caches {mib['held']:.1f} + logits {mib['logits']:.1f} + prompts "
            f"{mib['prompts']:.1f}; measured / formula {mib['measured'] / formula:.2f}"
        )


# ----------------------------------------------------------------------------------------------- set-up


def hugging_face(directory: Path):
    """A random Llama of transformers, saved to `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, tie_word_embeddings=False)).eval()
    model.save_pretrained(directory)
    return model


def load(directory: Path):
    """The converted model as an Engine on one rank."""
    import torch

    from megarlhf.cluster import backend

    torch.set_num_threads(1)
    backend.install()
    import torch.distributed as dist

    from megarlhf import checkpoint
    from megarlhf.cluster import parallel
    from megarlhf.cluster.parallel import ParallelConfig
    from megarlhf.models.build import build
    from megarlhf.models.spec import Architecture

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = directory / "actor"
    engine = build(
        "actor", Architecture.load(model), parallel.start(ParallelConfig()), micro_batch_size=1, dtype="fp32"
    )
    checkpoint.load(engine, model, weights_only=True)
    return engine


def make_prompts(rows: int):
    """Left-padded prompts of 32 to 64 tokens."""
    import torch

    from megarlhf.batch import Prompts

    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(PROMPT // 2, PROMPT + 1, (rows,), generator=generator)
    return Prompts(
        tokens=torch.randint(0, MODEL["vocab_size"], (rows, PROMPT), generator=generator),
        valid=torch.arange(PROMPT) >= (PROMPT - sizes)[:, None],
        sequence_ids=torch.arange(rows),
        prompt_ids=torch.arange(rows),
    )


def make_sampler(engine, rows: int, response: int, greedy: bool):
    from megarlhf.experience.sampler import Sampler, SamplerConfig

    config = SamplerConfig(response_length=response, micro_batch_size=rows, greedy=greedy)
    return Sampler(engine, config, prompt_length=PROMPT)


def cpu_seconds(function):
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def status(key: str) -> int:
    """Bytes from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
