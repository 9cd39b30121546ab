"""Model directories that hold adapters alone (lora.py): what names the model they are for, and how models start from
them.

    adapter.yaml     base: that model's directory; weights: the hash of its weights; lora: the adapters' configuration

The base may itself be adapters on a base. A run that trains from such a directory gets one set of weights: the adapters
are merged into their base. A run that only samples or scores keeps them apart, as in their training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarlhf import checkpoint
from megarlhf import config as configuration
from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.kernels import nf4
from megarlhf.models.model_config import HEADS, LoraConfig
from megarlhf.models.spec import Architecture

if TYPE_CHECKING:
    from megarlhf.cluster.parallel import Topology
    from megarlhf.engine import Engine

FILE = "adapter.yaml"


@dataclass(frozen=True)
class Adapters:
    """What stands beside the adapters in a model directory."""

    base: str  # an absolute path
    lora: LoraConfig
    weights: str | None = None  # of the base (checksums.weights_of); None: the base had no checksums

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(configuration.dump(self))

    @classmethod
    def of(cls, directory: Path) -> Adapters | None:
        """What a model directory says of its adapters; None for one that holds a whole model."""
        path = directory / FILE
        return configuration.load(cls, path) if path.is_file() else None

    def find_base(self, directory: Path) -> Path:
        """The base of the adapters in `directory`. Raises UserError if it is not there, or is another model than the
        adapters were trained on."""
        base, where = Path(self.base), directory / FILE
        if not (base / "architecture.yaml").is_file():
            raise UserError(
                f"{where}: the model that these adapters are for, {base}, is not there; restore it, or write its new "
                "place there as base"
            )
        found = checksums.weights_of(base)
        if self.weights is not None and found != self.weights:
            why = f"has no {checksums.FILE}, so it is not known to be" if found is None else "has other weights than"
            raise UserError(f"{where}: {base} {why} the model that these adapters are for; restore that one")
        return base


def check(directory: Path) -> None:
    """Refuse (UserError) adapters whose base is not there or another one, down to the last base."""
    found = Adapters.of(directory)
    if found is not None:
        check(found.find_base(directory))


def check_targets(config: LoraConfig, architecture: Architecture) -> None:
    """Refuse (UserError) targets that the model does not have."""
    if not architecture.gated_mlp and "gate_proj" in config.targets:
        raise UserError(
            f"model.lora.targets: gate_proj, but the MLP of this model ({architecture.family}) has no gate; remove it"
        )


def check_blocks(architecture: Architecture, tensor: int) -> None:
    """Refuse (UserError) sizes whose rows, or parts of rows, are no whole blocks."""
    for what, size in (
        ("hidden_size", architecture.hidden_size),
        (f"attention channels / parallel.tensor {tensor}",
         architecture.num_attention_heads * architecture.kv_channels // tensor),
        (f"ffn_hidden_size / parallel.tensor {tensor}", architecture.ffn_hidden_size // tensor),
    ):  # fmt: skip
        if size % nf4.BLOCK:
            raise UserError(
                f"model.lora.quantization: nf4 has blocks of {nf4.BLOCK} weights along a row, and {what} is {size}; "
                "use a smaller parallel.tensor or no quantization"
            )


def check_given(path: Path, config: LoraConfig, source: Path) -> None:
    """Refuse (UserError) adapters to start from (`config.checkpoint`, in the model directory `path`) that do not fit
    the configuration, or are for another model than `source`."""
    key, found = "model.lora.checkpoint", Adapters.of(path)
    if found is None:
        raise UserError(f"{key}: {path} holds a whole model and no adapters; give it as model.checkpoint")
    if not found.lora.same_shape(config, Architecture.load(path)):
        ours = ", ".join(f"{name} {getattr(found.lora, name)}" for name in ("rank", "alpha", "rslora", "quantization"))
        raise UserError(
            f"{key}: {path} has adapters with {ours} on {', '.join(found.lora.targets)}; give model.lora these values"
        )
    weights = checksums.weights_of(source)
    if None not in (weights, found.weights) and weights != found.weights:
        raise UserError(f"{key}: {path} is for {found.base}, which is another model than model.checkpoint, {source}")


def check_resumed(base: Adapters | None, directory: Path) -> None:
    """Refuse (UserError) to resume with adapters that are others than in `directory`, or on another base."""
    saved, key = Adapters.of(directory), "give the old values, or a new run directory"
    if (base is None) != (saved is None):
        held = "all weights" if saved is None else "adapters"
        raise UserError(f"model.lora: {directory} holds {held}, so it cannot be resumed with this configuration; {key}")
    if base is None:
        return
    if not saved.lora.same_shape(base.lora, Architecture.load(directory)):
        raise UserError(f"model.lora: {directory} has adapters of another rank, scale or targets; {key}")
    if saved.lora.checkpoint != base.lora.checkpoint:
        raise UserError(
            f"model.lora.checkpoint: {base.lora.checkpoint}, but {directory} began with {saved.lora.checkpoint}; {key}"
        )
    if saved.weights != base.weights:
        raise UserError(
            f"model.checkpoint: {base.base} has other weights than the model that the adapters in {directory} are for; "
            "restore that one, or give a new run directory"
        )


def built(role: Any, directory: Path, topology: Topology, **options: Any) -> Engine:
    """The model in a directory, for sampling or scoring alone, with its adapters apart. `options` as of
    `models.build.build`. Collective."""
    from megarlhf.models.build import build

    found = Adapters.of(directory)
    engine = build(
        role, Architecture.load(directory), topology, awaits_checkpoint=True, adapters=found and found.lora, **options
    )
    if found is not None:
        load(engine, found.find_base(directory), fresh=HEADS)
    checkpoint.load(engine, directory, weights_only=True)
    return engine


def load(engine: Engine, directory: Path, *, fresh: tuple[str, ...] = (), last: bool = True) -> None:
    """Read the model in `directory` into an engine's weights, but not into the engine's own adapters, if it has any.
    Adapters in `directory` are merged into their base. Weights whose names begin with one of `fresh` are not read.
    Then the weights are quantized if the engine's adapters ask for it, unless this is not the `last` model of a chain.
    Collective."""
    from megarlhf.models import lora, quantized

    found = Adapters.of(directory)
    if found is None:
        checkpoint.load(engine, directory, weights_only=True, fresh=fresh, only=lambda name: not lora.is_adapter(name))
    else:
        load(engine, found.find_base(directory), fresh=HEADS, last=False)
        if found.lora.quantization == "nf4":
            quantized.round_weights(engine.modules)  # these the adapters were trained on
        with lora.replaced(engine.modules, found.lora):
            checkpoint.load(engine, directory, weights_only=True, fresh=fresh, only=lora.trains)
            lora.merge(engine.modules)
        engine.reload_main_weights()
    own = next((adapter.config for _, _, adapter in lora.adapters(engine.modules)), None)
    if own is not None and last:
        engine.base = Adapters(str(directory.resolve()), own, checksums.weights_of(directory))
        if own.quantization == "nf4":
            quantized.quantize(engine.modules)


def take(engine: Engine, directory: Path) -> None:
    """Read the adapters in a model directory into the engine's own. Collective."""
    from megarlhf.models import lora

    checkpoint.load(engine, directory, weights_only=True, only=lora.is_adapter)
