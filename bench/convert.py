"""hf2megatron and megatron2hf against `cp` of the same bytes: throughput and peak memory.

    python -m bench.convert [--quick] [--json FILE]

A generated Llama-shaped bf16 checkpoint of 2.2 GB (--quick: 0.6 GB) in the temporary directory. Conversions and `cp`
alternate, each in a fresh process; a figure is the minimum of several runs. The time of a conversion is that of its
work, including the SHA-256 of all bytes read and written, until all files are on the disk. `cp` is timed once until it
returns, and once until its files are on the disk. Memory is the peak resident set of the whole process, interpreter and
torch included. All files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = dict(model_type="llama", hidden_size=2048, intermediate_size=5632, num_attention_heads=16,
             num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048,
             tie_word_embeddings=False)  # fmt: skip
COMMANDS = {"hf2megatron": ("hf", "ours"), "megatron2hf": ("ours", "back")}  # source and target
CHILD = """
import json, os, sys, time
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as megarlhf/convert/__main__.py has it
from pathlib import Path
from megarlhf.convert import convert
start = time.perf_counter()
getattr(convert, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]))
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1]
print(json.dumps({"seconds": seconds, "peak": 1024 * int(peak)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.6 GB and fewer runs: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        layers, runs = (4, 3) if arguments.quick else (22, 5)
        figures = measure(Path(directory), layers, runs)
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(root: Path, layers: int, runs: int) -> dict:
    sizes = generate(root / "hf", layers)
    figures: dict = {"bytes": sum(sizes), "allowed": sum(sorted(sizes)[-2:]) + 500_000_000}
    found: dict[str, list[dict]] = {"cp": [], **{command: [] for command in COMMANDS}}
    for _ in range(runs):
        found["cp"].append(copy(root / "hf", root / "copy"))
        for command, (source, target) in COMMANDS.items():
            shutil.rmtree(root / target, ignore_errors=True)
            done = subprocess.run(
                [sys.executable, "-c", CHILD, command, str(root / source), str(root / target)],
                check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            found[command].append(json.loads(done.stdout))
    figures["cp"] = {kind: min(run[kind] for run in found["cp"]) for kind in ("alone", "synced")}
    for command in COMMANDS:
        figures[command] = {
            "seconds": min(run["seconds"] for run in found[command]),
            "peak": max(run["peak"] for run in found[command]),
        }
    name = "model.safetensors"
    figures["identical"] = (root / "hf" / name).read_bytes() == (root / "back" / name).read_bytes()
    return figures


def generate(directory: Path, layers: int) -> list[int]:
    """Write random weights, a tensor at a time. Returns their sizes in bytes."""
    import torch

    from megarlhf.convert import huggingface, registry
    from megarlhf.convert.storage import Spec

    config = {**MODEL, "num_hidden_layers": layers}
    directory.mkdir()
    huggingface.write_json(directory / huggingface.CONFIG, config)
    shapes = registry.their_shapes(registry.read_config(config, "bench"))
    specs = {name: Spec(shape, torch.bfloat16) for name, shape in shapes.items()}
    writer = huggingface.Writer(directory, specs)
    writer.create()
    for name, spec in specs.items():
        noise = torch.randint(-(2**15), 2**15, (spec.numel,), dtype=torch.int16)
        writer.write(name, noise.view(torch.bfloat16).view(spec.shape))
    writer.finish([writer.close()])
    return [spec.nbytes for spec in specs.values()]


def copy(source: Path, target: Path) -> dict[str, float]:
    """Seconds until `cp` returns, and until its files are on the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied = time.perf_counter() - start
    for path in target.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    synced = time.perf_counter() - start
    shutil.rmtree(target)
    return {"alone": copied, "synced": synced}


def report(figures: dict) -> None:
    gigabytes = figures["bytes"] / 1e9
    for command in COMMANDS:
        seconds, peak = figures[command]["seconds"], figures[command]["peak"] / 1e6
        text = f"{command}: {gigabytes:.2f} GB at {gigabytes / seconds:.2f} GB/s"
        for kind, name in (("synced", "cp + fsync"), ("alone", "cp alone")):
            theirs = figures["cp"][kind]
            text += f"; {theirs / seconds:.0%} of {name} ({gigabytes / theirs:.2f} GB/s)"
        print(text)
        limit = figures["allowed"] / 1e6
        print(f"{command}: peak memory {peak:.0f} MB of {limit:.0f} MB (the two largest tensors + 500 MB)")
    print(f"there and back: {'identical' if figures['identical'] else 'DIFFERENT'} bytes")


if __name__ == "__main__":
    main()
