"""Published step times of other trainers, and what the model of `megarlhf plan` says of each.

The trainers differ from this one: vLLM samples, ZeRO-3 gathers weights for every micro-batch, Adam runs on the host,
context parallelism divides rows. What only they have is described here, with parameters of its own. A pass of a model
over a micro-batch is that of this project's cost model.

Sources: OpenRLHF: arXiv:2405.11143, tables 3 and 5. NeMo-RL 0.3: its release notes of 2025-07-21, recipes
grpo_math_8B_megatron and grpo_math_70B_megatron (rows packed to 4096 tokens a micro-batch in training, 16384 in
scoring); reruns: its issue 959. NeMo-RL 0.4: its performance summary. Pre-training: NVIDIA's table of NeMo 25.x on H100
in bf16, as MFU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from megarlhf import config
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.models.spec import Architecture
from megarlhf.plan import hardware, model_work
from megarlhf.plan.hardware import Efficiencies
from megarlhf.plan.job import Job, Model, Shape
from megarlhf.plan.memory import elements
from megarlhf.plan.time import Machine, seconds
from megarlhf.plan.work import Work

LONGEST = 1024  # OpenRLHF: tokens of the longest response of each batch, the limit
PROMPT = 150  # NeMo-RL: mean tokens of a prompt
GENERATED = 4096 - PROMPT  # NeMo-RL: steps until the longest response ends, the limit
ADAM = 28  # bytes of memory that an update reads and writes for a parameter
ENTRIES = config.load(hardware.Table, hardware.TABLE).gpus


@dataclass(frozen=True)
class Parameters:
    """What is fitted. The first three become the efficiencies of `plan/hardware.yaml`."""

    matmul: float = 0.6  # share of the GPU's FLOP/s
    memory: float = 0.6  # share of its memory's bandwidth
    link: float = 0.4  # share of NVLink's and the network's bandwidth
    tokens: float = 800.0  # OpenRLHF: mean tokens of a row, prompt and response; not published, the same in its rows
    gather: float = 0.25  # OpenRLHF: share of NVLink's bandwidth that ZeRO-3's gathers of weights reach
    adam: float = 1.5e8  # OpenRLHF: parameters a second and GPU of Adam on the host
    phase: float = 4.0  # NeMo-RL: seconds of a phase beside computing: moving weights and optimizer, dispatch
    sync: float = 3e9  # both: bytes a second of weights from the trainer to vLLM

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a few small values)
    def machine(self, gpu: str) -> Machine:
        shares = Efficiencies(self.matmul, self.memory, self.link)
        return hardware.machine(gpu, hardware.resolved(gpu, ENTRIES, str(hardware.TABLE)), shares)


def llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, words: int) -> Architecture:
    return Architecture("llama", layers, hidden, ffn, heads, groups, words, 131072)


LLAMAS = {
    "Llama-2-7B": llama(32, 4096, 11008, 32, 32, 32000),
    "Llama-2-13B": llama(40, 5120, 13824, 40, 40, 32000),
    "CodeLlama-34B": llama(48, 8192, 22016, 64, 8, 32016),
    "Llama-2-70B": llama(80, 8192, 28672, 64, 8, 32000),
    "Llama-3.1-8B": llama(32, 4096, 14336, 32, 8, 128256),
    "Llama-3.1-70B": llama(80, 8192, 28672, 64, 8, 128256),
}


@dataclass(frozen=True)
class Cell:
    """One published figure."""

    system: str
    model: str
    phase: str
    seconds: float
    predict: Callable[[Parameters], float]

    @property
    def name(self) -> str:
        return f"{self.system}, {self.model}, {self.phase}"

    def error(self, parameters: Parameters) -> float:
        """Predicted / published - 1."""
        return self.predict(parameters) / self.seconds - 1


@functools.cache
def micro_batch(name: str, rows: int, length: int, tensor: int, recompute: str, trains: bool) -> tuple[Job, Work]:
    """A pass of a whole model over a micro-batch, all of its tokens counted, by this project's cost model."""
    model = Model("actor", LLAMAS[name], "logprobs", trains)
    parallel = ParallelConfig(tensor=tensor, sequence=tensor > 1)
    job = Job("", (model,), Shape(rows, length, length, rows * length), parallel, tensor, recompute=recompute)
    stream = model_work.Stream((length,) * rows, rows * length)
    return job, (model_work.train if trains else model_work.forward)(job, model, 0, stream)


def weights(name: str) -> int:
    """Parameters."""
    return LLAMAS[name].num_parameters


def decoding(name: str, machine: Machine, *, steps: float, tokens: float, context: float, tensor: int) -> float:
    """Seconds of one vLLM engine. steps: decode steps, one after the other; tokens: generated in them; context: mean
    tokens that one of them attends to."""
    a = LLAMAS[name]
    matrices = weights(name) - a.hidden_size * a.vocab_size  # the word embedding is looked up
    cache = 4 * a.num_layers * a.num_query_groups * a.kv_channels  # of a token
    moved = steps * 2 * matrices + tokens * context * cache
    flops = tokens * (2 * matrices + 4 * context * a.hidden_size * a.num_layers)
    return moved / tensor / machine.bandwidth + flops / tensor / (machine.flops * machine.reach)


def zero(name: str, p: Parameters, gpus: int, *, micro_batches: float, tokens: float, trains: bool) -> float:
    """Seconds of passes under ZeRO-3 over `tokens` tokens of all GPUs. Training recomputes, and gathers three times."""
    machine = p.machine("a800")
    job, work = micro_batch(name, 8, LONGEST, 1, "full" if trains else "none", trains)
    gathered = (3 if trains else 1) * micro_batches * 2 * weights(name) * (gpus - 1) / gpus
    return (
        seconds(work, job, machine).total * tokens / gpus / (8 * LONGEST)
        + gathered * p.link / p.gather / machine.near.bandwidth
    )


def megatron(
    name: str, machine: Machine, gpus: int, *, rows: int, length: int, budget: int, updates: int, trains: bool,
    tensor: int = 1, pipeline: int = 1, context: int = 1, chunks: int = 1, overlapped: bool = False,
) -> float:  # fmt: skip
    """Seconds of `updates` batches of rows / updates rows, packed into micro-batches of `budget` tokens. overlapped:
    tensor parallelism's traffic is hidden."""
    data = gpus // (tensor * pipeline * context)
    packed = max(1, budget // length)
    job, work = micro_batch(name, packed, length, tensor, "none", trains)
    found = seconds(work, job, machine)
    if overlapped:
        found = dataclasses.replace(found, collectives=0.0)
    micro_batches = rows / updates / data * length / budget
    one = found.total * budget / (packed * length) / pipeline / context
    total = (micro_batches + (pipeline - 1) / chunks) * one
    if trains:
        own, copies = elements(job, job.models[0], 0) / pipeline, data * context
        link = machine.near if gpus <= machine.per_node else machine.far
        moved = own * 6 * (copies - 1) / copies  # gradients in fp32, weights in bf16
        total += moved / link.bandwidth + own * ADAM / copies / machine.bandwidth
    return updates * total


def openrlhf(name: str, actor: int, reference: int, engines: int, tensor: int, batch: int, row: tuple) -> list[Cell]:
    """Table 5's row of 1024 prompts. batch: table 3's micro-batch of a GPU; an engine decodes those of its share of the
    actor's GPUs at once, and each batch until its longest response ends."""

    def generate(p: Parameters) -> float:
        batches, slots = 1024 / (actor * batch), actor * batch / engines
        tokens = batches * slots * p.tokens / 2
        return decoding(name, p.machine("a800"), steps=batches * LONGEST, tokens=tokens, context=p.tokens * 3 / 4,
                        tensor=tensor)  # fmt: skip

    def score(p: Parameters) -> float:  # by the reference and the reward model, which have the fewest GPUs
        return zero(name, p, reference, micro_batches=1024 / reference / batch,
                    tokens=1024 * p.tokens, trains=False)  # fmt: skip

    def train(p: Parameters) -> float:  # actor and critic at the same time; 8 updates
        passes = zero(name, p, actor, micro_batches=1024 / actor / batch, tokens=1024 * p.tokens,
                      trains=True)  # fmt: skip
        return passes + 8 * weights(name) / actor / p.adam

    predictions = (generate, lambda p: 2 * weights(name) / p.sync, score, train)
    phases = ("generate", "sync", "score", "train")
    return [Cell("OpenRLHF", name, *rest) for rest in zip(phases, row, predictions, strict=True)]


def nemo(
    name: str, gpus: int, tensor: int, pipeline: int, engine: int, response: int, row: tuple, system="NeMo-RL 0.3"
) -> list[Cell]:
    """64 prompts x 32, 4 updates. engine: GPUs of a vLLM engine; response: mean tokens."""
    length = PROMPT + response

    def train(p: Parameters) -> float:
        return p.phase + megatron(name, p.machine("h100"), gpus, rows=2048, length=length, budget=4096, updates=4,
                                  trains=True, tensor=tensor, pipeline=pipeline)  # fmt: skip

    def generate(p: Parameters) -> float:
        tokens = 2048 / (gpus / engine) * response
        return decoding(name, p.machine("h100"), steps=GENERATED, tokens=tokens, context=PROMPT + response * 3 / 4,
                        tensor=engine)  # fmt: skip

    def score(p: Parameters) -> float:  # by the policy and by the reference
        return p.phase + 2 * megatron(name, p.machine("h100"), gpus, rows=2048, length=length, budget=16384,
                                      updates=1, trains=False, tensor=tensor, pipeline=pipeline)  # fmt: skip

    predictions = (train, lambda p: 2 * weights(name) / p.sync, generate, score)
    phases = ("train", "sync", "generate", "score")
    return [Cell(system, name, *rest) for rest in zip(phases, row, predictions, strict=True)]


def pretraining(name: str, gpus: int, seconds: float, **layout) -> Cell:
    def predict(p: Parameters) -> float:
        return megatron(name, p.machine("h100"), gpus, rows=128, length=8192, budget=8192, updates=1,
                        trains=True, overlapped=True, **layout)  # fmt: skip

    return Cell("NeMo", name, "pre-training", seconds, predict)


def cells() -> list[Cell]:
    """All that are fitted."""
    return [
        *openrlhf("Llama-2-7B", 4, 2, 4, 1, 16, (262.96, 4.32, 32.7, 171.13)),
        *openrlhf("Llama-2-13B", 8, 4, 8, 1, 8, (372.14, 10.03, 29.58, 197.18)),
        *openrlhf("CodeLlama-34B", 8, 4, 4, 2, 8, (720.50, 35.47, 326.00, 444.43)),
        *openrlhf("Llama-2-70B", 4, 4, 4, 4, 4, (2252.79, 111.65, 323.38, 1800.71)),
        *nemo("Llama-3.1-8B", 8, 1, 2, 1, 795, (28, 5, 58, 18)),
        *nemo("Llama-3.1-70B", 64, 4, 4, 4, 398, (28, 14, 84, 18)),
        pretraining("Llama-3.1-8B", 8, 12.27, context=2),
        pretraining("Llama-3.1-70B", 64, 14.66, tensor=4, pipeline=4, context=2, chunks=5),
    ]


def others() -> list[Cell]:
    """Published, and never fitted: a rerun of the same recipes at another site, and a later release's whole step."""
    whole = nemo("Llama-3.1-8B", 16, 1, 2, 1, 1060 - PROMPT, (1, 1, 1, 1))
    rerun = "NeMo-RL 0.3, rerun"
    return [
        *nemo("Llama-3.1-8B", 8, 1, 2, 1, 811, (27, 8, 56, 18), rerun),
        *nemo("Llama-3.1-70B", 64, 4, 4, 4, 396, (31, 26, 87, 20), rerun),
        Cell("NeMo-RL 0.4", "Llama-3.1-8B, 16 GPUs", "whole step", 97.7, lambda p: sum(c.predict(p) for c in whole)),
    ]
