"""verify --logits: compares the model of transformers with that of megarlhf on the same tokens.

This is the only part of the converter that imports megatron and opens a process group (of one process).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf import checkpoint
from megarlhf.batch import Sequences
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.convert import certificate
from megarlhf.convert.exports import find_exported
from megarlhf.models.spec import Architecture, check_layout

ROWS, LENGTH = 2, 24
TOLERANCE = 1e-4  # in fp32


def compare(source: Path, target: Path) -> str:
    """Raise UserError unless the log-probs (of a reward model: the scores) of `source` and `target` agree."""
    known = certificate.load(target)
    if known["command"] not in ("hf2megatron", "megatron2hf"):
        raise UserError(f"{target}: transformers cannot run its source; convert it on with megatron2hf and verify that")
    forward = known["command"] == "hf2megatron"
    theirs, ours = (source, target / known["model"]) if forward else (target, source)
    model, role = find_exported(ours, known["model"] if forward else known["options"]["role"])
    scalar = role in ("reward", "critic")
    architecture = Architecture.load(model)
    check_layout(architecture, ParallelConfig())
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, architecture.longest_row)
    tokens = torch.randint(0, architecture.vocab_size, (ROWS, length), generator=generator)
    expected = their_scores(theirs, tokens) if scalar else their_logprobs(theirs, tokens)
    got = our_outputs(model, architecture, tokens, scalar)
    worst = (expected - got).abs().max().item()
    what = "scores" if scalar else "log-probs"
    if not worst <= TOLERANCE:
        raise UserError(
            f"{target}: its {what} differ from the source's by up to {worst:.3g} on {ROWS} x {length} tokens; "
            "do not use the conversion"
        )
    return f"{target}: {what} of transformers and megarlhf agree to {worst:.1e} on {ROWS} x {length} tokens"


@torch.no_grad()
def their_logprobs(directory: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", torch_dtype=torch.float32)
    logprobs = model.eval()(tokens).logits[:, :-1].double().log_softmax(-1)
    return logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def their_scores(directory: Path, tokens: Tensor) -> Tensor:
    """At every position: transformers gives the score of a row's last token, so each prefix is a row."""
    from transformers import AutoModelForSequenceClassification

    from megarlhf.convert import huggingface
    from megarlhf.convert.sources import OFFSET

    offset = huggingface.read_json(directory / huggingface.CONFIG).get(OFFSET, 0.0)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", torch_dtype=torch.float32
    ).eval()
    ends = range(2, tokens.shape[1] + 1)
    scores = [[model(row[None, :end]).logits.double().item() + offset for end in ends] for row in tokens]
    return torch.tensor(scores)


def our_outputs(directory: Path, architecture: Architecture, tokens: Tensor, scalar: bool) -> Tensor:
    with alone() as topology:
        return outputs(topology, directory, architecture, tokens, scalar)


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """The topology of a process group of this process only."""
    from megarlhf.cluster import backend

    backend.install()
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield parallel.start(ParallelConfig())
    finally:
        parallel.stop()
        dist.destroy_process_group()


def outputs(topology: Any, directory: Path, architecture: Architecture, tokens: Tensor, scalar: bool) -> Tensor:
    """Log-probs of `tokens` (B, S) -> (B, S - 1), or scores, of the model in `directory`, in fp32."""
    from megarlhf.models.build import build

    role = "reward" if scalar else "reference"
    engine = build(role, architecture, topology, micro_batch_tokens=tokens.numel(), dtype="fp32")
    checkpoint.load(engine, directory, weights_only=True)
    everything = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    return engine.forward(Sequences(tokens=tokens, mask=everything))["scores" if scalar else "logprobs"].cpu()
