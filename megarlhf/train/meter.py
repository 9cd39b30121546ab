"""What a step costs: FLOP/s, their share of the devices' peak, and memory."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

from megarlhf.cluster import backend
from megarlhf.models.spec import Architecture
from megarlhf.train import work
from megarlhf.train.rl_config import OnlineRunConfig
from megarlhf.train.settings import OfflineRunConfig

PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "H20": 148e12}  # longer names first


def peak_flops() -> float | None:
    """FLOP/s of this rank's device in dense bf16 products, by its data sheet; None for a CPU and for other GPUs."""
    if not backend.on_cuda():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory() -> int:
    """The most bytes so far: on a GPU of the allocator, on a CPU of the process (resident)."""
    if backend.on_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux gives KiB


def offline_flops(settings: OfflineRunConfig, architecture: Architecture) -> float:
    """FLOPs of a token: the matrix products of the trained model with its weights, forward and backward (two for each
    forward one where weights train; one through frozen ones). Not counted: attention scores, recomputation, and a
    reference's forward passes."""
    layers = work.layer_parameters(architecture)
    head = architecture.hidden_size * architecture.vocab_size
    trained = settings.model.trained_layers or architecture.num_layers
    backward = 2 if settings.model.lora is None else 1
    return 2.0 * (architecture.num_layers * layers + head + backward * (trained * layers + head))


def online_flops(settings: OnlineRunConfig, architecture: Architecture) -> float:
    """FLOPs of a token of prompts and responses, all phases together: of `work.online_step`, which counts rows of full
    length, divided by their tokens."""
    phases = work.online_step(settings, architecture, 1, slots=1)
    tokens = settings.training.batch_size * (settings.prompts.length + settings.sampler.response_length)
    return sum(phase.flops for phase in phases.values()) / tokens


class Meter:
    """`flops`: of one token."""

    def __init__(self, flops: float):
        self.flops, self.peak = flops, peak_flops()

    def values(self, tokens: float, seconds: float) -> dict[str, float]:
        """Metrics of a step over `tokens` of the global batch; collective, for the rank that has most memory."""
        most = torch.tensor(float(peak_memory()), dtype=torch.float64, device=backend.device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rate = self.flops * tokens / seconds
        found = {"cost/flops_per_second": rate, "cost/memory_gb": most.item() / 1e9}
        return found | ({} if self.peak is None else {"cost/mfu": rate / (dist.get_world_size() * self.peak)})


def shown(values: dict[str, float]) -> dict[str, str]:
    """`Meter.values` for the step's line."""
    rate, memory = values["cost/flops_per_second"], {"memory": f"{values['cost/memory_gb']:.2f} GB"}
    if "cost/mfu" in values:
        return {"MFU": f"{values['cost/mfu']:.1%}"} | memory
    return {"GFLOP/s": f"{rate / 1e9:,.1f}"} | memory
