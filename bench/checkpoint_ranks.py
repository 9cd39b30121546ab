"""The memory that saving and loading a model with its optimizer add to each data-parallel rank, in bytes a parameter.

    torchrun --nproc-per-node 4 -m bench.checkpoint_ranks [--layers 8] [--directory /scratch]

Weights are bfloat16; saved are 2 bytes a parameter of weights and 12 of the optimizer, which the ranks share. The peak
of resident memory counts, with the pages of files that a rank reads.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from bench.one_rank import peak_memory
from megarlhf import checkpoint
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import backend, parallel
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="of a Llama with H 512 and V 32000 (default 8)")
    parser.add_argument("--directory", metavar="PATH", help="where to write (default: the temporary directory)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    backend.install()
    dist.init_process_group("gloo")
    topology = parallel.start(ParallelConfig())
    with tempfile.TemporaryDirectory(dir=arguments.directory) as own:
        box = [own]
        dist.broadcast_object_list(box)
        measure(Path(box[0]), arguments.layers, topology)
        dist.barrier()
    dist.destroy_process_group()


def measure(directory: Path, layers: int, topology: parallel.Topology) -> None:
    from megarlhf.models.build import build

    architecture = Architecture(
        "llama", num_layers=layers, hidden_size=512, ffn_hidden_size=1376, num_attention_heads=8, num_query_groups=4,
        vocab_size=32000, max_position_embeddings=64,
    )  # fmt: skip
    engine = build(
        "actor", architecture, topology, micro_batch_tokens=64, dtype="bf16", optimizer=OptimizerConfig(), seed=1
    )
    checkpoints = Checkpoints(directory, CheckpointConfig())
    with peak_memory() as saving:
        checkpoints.save(1, {"actor": engine}, {}, architecture.save)
    with peak_memory() as loading:
        checkpoint.load(engine, checkpoints.latest() / "actor", weights_only=False)
    everyone: list = [None] * topology.data_size
    dist.all_gather_object(everyone, (saving[0], loading[0]))
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for module in engine.modules for parameter in module.parameters())
        print(f"{count / 1e6:.1f} million parameters, {len(everyone)} data-parallel ranks; bytes a parameter:")
        for name, found in zip(("saving", "loading"), zip(*everyone, strict=True), strict=True):
            print(f"{name:8}", " ".join(f"{bytes / count:5.1f}" for bytes in found))


if __name__ == "__main__":
    main()
