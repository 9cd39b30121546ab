"""The cost of a checkpoint: seconds, CPU seconds and memory of saving and of loading a model with its optimizer on one
rank, and of loading it without its checksums.

    python -m bench.checkpoint [--quick] [--json FILE] [--megabytes 400] [--directory /scratch]

Each figure is the minimum of `--repeat` runs. The ratio is one of CPU seconds, because wall seconds vary on a shared
disk. CPU seconds and memory include the processes that write in the background.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import backend, parallel
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the checkpoint (default 400)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each kind (default 3)")
    parser.add_argument("--directory", metavar="PATH", help="where to write (default: the temporary directory)")
    parser.add_argument("--quick", action="store_true", help="60 MB, twice: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    size, repeat = (60, 2) if arguments.quick else (arguments.megabytes, arguments.repeat)
    backend.install()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        figures = measure(Path(directory), size, repeat)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(directory: Path, megabytes: int, repeat: int) -> dict[str, Any]:
    """{"megabytes": of the model directory, name of a case: {"seconds", "cpu", "peak", "peak_writer"}}."""
    from megarlhf.models.build import build

    layers, hidden = 8, 512
    each = megabytes * 1e6 / 16 / layers  # parameters a layer: fp32 weights, the optimizer's copy and two moments
    width = max(64, int((each - 4 * hidden**2) / (3 * hidden)))
    architecture = Architecture(
        "llama", num_layers=layers, hidden_size=hidden, ffn_hidden_size=width, num_attention_heads=8,
        num_query_groups=8, vocab_size=512, max_position_embeddings=64,
    )  # fmt: skip
    topology = parallel.start(ParallelConfig())
    engine = build("actor", architecture, topology, micro_batch_tokens=1024, dtype="fp32", optimizer=OptimizerConfig())
    found: dict[str, Any] = {}
    for name, asynchronous in (("save", False), ("save, asynchronous", True)):
        checkpoints = Checkpoints(directory / name, CheckpointConfig(keep=1, asynchronous=asynchronous))

        def save(checkpoints: Checkpoints = checkpoints) -> None:
            checkpoints.save(1, {"actor": engine}, {}, lambda step: architecture.save(step / "actor"))
            checkpoints.finish()

        found[name] = report(name, save, repeat)
    source = directory / "save" / "checkpoints" / "step_00000001" / "actor"
    size = sum(path.stat().st_size for path in source.iterdir())
    runs = [shutil.copytree(source.parent, directory / f"copy{i}") / "actor" for i in range(2 * repeat)]
    for run in runs[repeat:]:
        (run.parent / "checksums.json").unlink(missing_ok=True)
    for name, copies in (("load", runs[:repeat]), ("load, without checksums", runs[repeat:])):
        left = iter(copies)  # a file that has been checked is not read again
        found[name] = report(name, lambda left=left: checkpoint.load(engine, next(left), weights_only=False), repeat)
    ratio = found["load"]["cpu"] / found["load, without checksums"]["cpu"]
    print(f"{size / 1e6:.0f} MB, {os.cpu_count()} cores; load, with / without checksums: {ratio:.2f}x the CPU seconds")
    return {"megabytes": size / 1e6, **found}


def report(name: str, work: Callable[[], None], repeat: int) -> dict[str, float]:
    seconds, processor = [], []
    for _ in range(repeat):
        before, started = os.times(), time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        processor.append(sum(os.times()[:4]) - sum(before[:4]))
    peak = [resource.getrusage(who).ru_maxrss / 1e3 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        f"{name:<26} {min(seconds):6.2f} s  {min(processor):6.2f} s of CPU  peak so far {peak[0]:,.0f} MB, of a "
        f"process that writes {peak[1]:,.0f} MB"
    )
    return {"seconds": min(seconds), "cpu": min(processor), "peak": peak[0], "peak_writer": peak[1]}


if __name__ == "__main__":
    main()
