"""The frozen weights of one model in another: a critic with adapters of its own on the actor's base."""

from __future__ import annotations

from megarlhf.models import lora, quantized
from megarlhf.models.gpt import GPT


def share(chunk: GPT, other: GPT) -> None:
    """Replace every frozen weight of a chunk by that of another of the same layout: the same parameters, whose memory
    exists once."""
    config = next((adapter.config for _, _, adapter in lora.adapters([chunk])), None)
    if config is not None and config.quantization == "nf4":
        quantized.share(chunk, other)
    theirs = dict(other.named_parameters())
    for place, module in chunk.named_modules():
        for key in module._parameters:
            name = f"{place}.{key}"
            if module._parameters[key] is not None and not lora.trains(name):
                module._parameters[key] = theirs[name]
