"""A hydra reference: a policy that trains its top layers keeps a frozen copy of these, its branch. Both heads grow from
one trunk, which never changes, so one pass of the trunk serves policy and reference (trlX, "hydra" models).

A branch has weights alone: the chunk's modules compute with them while they are swapped in. So the reference's numbers
are bit for bit those of a model of its own.

With pipeline stages every chunk has the branch of its own layers. Where the branch has more layers than the last chunk,
the hidden states of both travel from stage to stage, one behind the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarlhf.batch import Sequences
from megarlhf.checkpoint.loading import raise_together
from megarlhf.cluster.offload import Hosted, Named, digests

if TYPE_CHECKING:
    from megarlhf.engine import Engine, Outputs
    from megarlhf.models.gpt import GPT
    from megarlhf.stream import Spans, Stream

OWN_HEADS = ("value_head.", "q_heads.")  # a reference has none


class Branch:
    """The present weights of one chunk that train, frozen. `layers`: how many train from the top of the model."""

    def __init__(self, chunk: GPT, layers: int):
        self.chunk = chunk
        lowest = chunk.architecture.num_layers - layers  # of the branch, counted over all stages
        self.start = sum(layer.layer_number - 1 < lowest for layer in chunk.decoder.layers)  # within this chunk
        parallel = chunk.topology.parallel
        # whether hidden states of both travel: the branch begins below the last chunk
        self.wide = layers > chunk.architecture.num_layers // (parallel.pipeline * parallel.chunks)
        self.kept = [
            (name, parameter, parameter.detach().clone())
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not name.startswith(OWN_HEADS)
        ]

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The chunk computes with the frozen weights meanwhile."""
        own = [parameter.data for _, parameter, _ in self.kept]
        for _, parameter, frozen in self.kept:
            parameter.data = frozen
        try:
            yield
        finally:
            for (_, parameter, _), data in zip(self.kept, own, strict=True):
                parameter.data = data

    def forward(self, stream: Stream, spans: Spans, *, temperature: float, with_kl: bool) -> Tensor | Outputs:
        """`GPT.forward` of policy and reference: on the last stage the policy's outputs with "ref_logprobs" and, with
        `with_kl`, the exact "kl". No gradients."""
        assert not torch.is_grad_enabled()
        chunk, layers = self.chunk, list(self.chunk.decoder.layers)
        hidden = chunk.entered(stream.tokens, stream.positions)
        rotary = chunk.rotary(stream.positions, stream.max_length)
        own = other = hidden
        if self.wide and not chunk.pre_process:
            own, other = hidden.chunk(2)
        if self.start:
            own = other = chunk.through(layers[: self.start], own, rotary, spans)
        top = layers[self.start :]
        with self.swapped():
            reference = other
            if top or chunk.post_process:
                reference = chunk.normed(chunk.through(top, other, rotary, spans))
            outputs, ref_weight, states = {}, None, None
            if chunk.post_process:
                options = chunk.word_options(temperature)
                ref_weight = chunk.head_weight().detach()
                found = chunk.output_layer(reference, stream, weight=ref_weight, **options)
                outputs["ref_logprobs"] = found["logprobs"]
                if with_kl:
                    states = stream.aligned(chunk.output_layer.states(reference, stream))
        if not top and not chunk.post_process:
            return torch.cat([own, own]) if self.wide else own
        policy = chunk.normed(chunk.through(top, own, rotary, spans))
        if not chunk.post_process:
            return torch.cat([policy, reference])
        return outputs | chunk.heads(
            policy, stream, temperature=temperature, ref_states=states, ref_weight=ref_weight if with_kl else None
        )


class Hydra(Hosted):
    """The reference of `engine`, with the part of `Engine` that a reference needs. It is the policy as it is now."""

    role = "reference"

    def __init__(self, engine: Engine, layers: int):
        super().__init__()
        engine.sync_params()
        self.engine, self.topology = engine, engine.topology
        for module in engine.modules:
            module.branch = Branch(module, layers)
        self.trunk = self._trunk()

    def _trunk(self) -> Tensor:
        parameters = (parameter for module in self.engine.modules for parameter in module.parameters())
        return digests(parameter for parameter in parameters if not parameter.requires_grad)

    def check_trunk(self, directory: Path) -> None:
        """Refuse (UserError) a trunk that another model's branch would grow from: the engine has loaded `directory`
        since. Collective."""
        raise_together(
            None
            if torch.equal(self.trunk, self._trunk())
            else f"model.checkpoint: its layers that do not train are not those of {directory}, on which the hydra "
            "reference grows; give the model that this run began with"
        )

    def forward(self, batch: Sequences, **options: Any) -> Outputs:
        """As `Engine.forward`: the reference alone."""
        self.engine.sync_params()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.present())
            for module in self.engine.modules:
                stack.enter_context(module.branch.swapped())
            return self.engine.forward(batch, **options)

    def beside(self, batch: Sequences, **options: Any) -> Outputs:
        """The policy's outputs, and "ref_logprobs" of the reference, from one pass of the trunk. Takes `temperature`;
        `with_kl` adds "kl"."""
        self.engine.sync_params()
        with self.present():
            return self.engine.forward(batch, branched=True, **options)

    def head_weight(self) -> Tensor:
        """As `Engine.head_weight`. Call it within `present`."""
        with self.engine.modules[-1].branch.swapped():
            return self.engine.head_weight()

    @property
    def parts(self) -> dict[str, Callable[[], Named]]:
        return {"weights": self._frozen}

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for i, module in enumerate(self.engine.modules):
            for name, _, frozen in module.branch.kept:
                yield f"{i}.{name}", frozen
