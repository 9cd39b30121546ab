"""What the programs that compare a policy with a frozen reference share (`megarlhf dpo`, `kto`): the reference's log-
probs, computed in the run or cached (reference_cache.py). A cache is made of the reference's weights, by their
checksums, and of the tokens of the data. Online programs share the check that a resumed run has the same reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch.distributed as dist

from megarlhf.algorithms.interface import OfflineAlgorithm
from megarlhf.batch import Sequences
from megarlhf.checkpoint import checksums
from megarlhf.cluster.parallel import Topology
from megarlhf.config import PathName, UserError
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.data.tables import Joined, pieces
from megarlhf.models import adapters
from megarlhf.models.hydra import Hydra
from megarlhf.optim import OptimizerConfig
from megarlhf.train import data_set, setup
from megarlhf.train.program import Prepared
from megarlhf.train.reference_cache import FILE, FORMAT, Cached, check_cache, read_json, together, write_cache
from megarlhf.train.settings import OfflineRunConfig
from megarlhf.train.setup import Start

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model that the policy is compared with."""

    # hydra: a frozen copy of the layers that train, on the policy's own trunk; needs model.trained_layers
    kind: Literal["separate", "hydra"] = "separate"
    checkpoint: PathName | None = None  # default: model.checkpoint, where the policy starts
    cache: PathName | None = None  # directory of its log-probs, made if it does not exist; default: computed in the run
    on_host: bool = False  # weights in host memory, on the device only while they are needed

    def __post_init__(self):
        if self.on_host and self.cache is not None:
            raise ValueError("on_host: with a cache the run has no reference model; remove on_host or cache")
        if self.kind == "hydra" and self.cache is not None:
            raise ValueError("cache: with a cache the run has no reference model; remove kind or cache")
        if self.kind == "hydra" and self.checkpoint is not None:
            raise ValueError("checkpoint: a hydra reference is the policy's own start; remove checkpoint or kind")


@dataclass(frozen=True, kw_only=True)
class ReferencedRunConfig(OfflineRunConfig):
    """The sections of programs that compare a policy with a reference."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"))

    def __post_init__(self):
        super().__post_init__()
        lora = self.model.lora
        if self.reference.cache is not None and lora is not None and lora.quantization != "none":
            raise ValueError(
                f"reference.cache: would hold the log-probs of the unquantized model, but the policy starts in "
                f"{lora.quantization} (model.lora.quantization); remove one of the two"
            )


@dataclass(frozen=True)
class Reference:
    """Where the reference comes from."""

    source: Path | None  # model directory; None: the same random weights as the policy's
    weights: str | None  # hash of the weights; None: not known, since the model has no checksums
    content: dict[str, Any]  # what a cache is made of
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(data_set.Plan):
    algorithm: OfflineAlgorithm
    reference: Reference | None  # None: the loss has none


# ------------------------------------------------------------------------------------------------ before the start


def check(
    settings: ReferencedRunConfig,
    start: Start,
    algorithm: OfflineAlgorithm,
    data: tuple[Examples, Examples | None],
    total_steps: int,
    *,
    loss: str,
) -> Reference | None:
    """Refuse (UserError) a reference or a cache that cannot be used, on every rank alike. `loss`: the name of the loss
    for messages."""
    config = settings.reference
    if algorithm.referenced is None:
        if config != ReferenceConfig():
            raise UserError(f"reference: the loss {loss} has no reference; remove this section, or change the loss")
        return None
    if settings.model.dropout:
        raise UserError(
            "model.dropout: must be 0: it would change the policy's log-probs and not the reference's; use "
            "optimizer.weight_decay or fewer steps against overfitting"
        )
    settings.model.check_hydra(config.kind)
    setup.check_lora_compared(settings)
    lora = settings.model.lora
    if lora is not None and None not in (lora.checkpoint, config.cache):
        raise UserError(
            "reference.cache: the reference has the adapters of model.lora.checkpoint, and a cache is of whole models; "
            "remove it, or give these adapters as model.checkpoint"
        )
    source, notes = start.source, []
    if config.checkpoint is not None:
        source, note = setup.find_fitting(
            start, config.checkpoint, "reference.checkpoint", role="actor", model="reference model"
        )
        notes.append(note)
    weights = weights_of(source, settings.seed)
    content = {
        "format": FORMAT,
        "reference": weights,
        "dtype": settings.model.dtype,
        "max_length": settings.data.max_length,
        "training": content_of(data[0], complete=algorithm.mixes_rows),
        "validation": content_of(data[1], complete=algorithm.mixes_rows),
        # which rows are compared with which others depends on the order of the data
        "order": None,
    }
    if algorithm.mixes_rows:
        repeats = [[part.num_groups, part.weight] for part in data[0].parts]
        content["order"] = [settings.seed, settings.training.global_batch_size, total_steps, repeats]
    if start.resume_from is not None:
        key = "model.checkpoint" if config.checkpoint is None else "reference.checkpoint"
        notes.append(check_resumed(start.resume_from, source, weights, key))
    if config.cache is not None:
        if source is None or weights is None:
            raise UserError(
                "reference.cache: is found by the checksums of the reference, and "
                + (f"{source} has no {checksums.FILE}; convert it again" if source else "random weights have none")
                + ", or remove reference.cache"
            )
        setup.check_writable(config.cache, "reference.cache")
        if Path(config.cache).exists():
            check_cache(Path(config.cache), content)
    return Reference(source, weights, content, tuple(filter(None, notes)))


def content_of(data: Examples | None, *, complete: bool) -> str | None:
    """A hash of the tokens and masks of a data set. `complete`: of all its arrays, since others decide which rows are
    put together."""
    if data is None:
        return None
    names = ("tokens", "mask", "offsets")
    if complete:
        arrays = np.ndarray, Joined
        names = tuple(found.name for found in fields(data) if isinstance(getattr(data, found.name), arrays))
    digest = hashlib.sha256()
    for name in names:
        values = getattr(data, name)
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        for piece in pieces(values):
            digest.update(np.ascontiguousarray(piece))
    return digest.hexdigest()


def weights_of(source: Path | None, seed: int) -> str | None:
    """What tells a reference's weights: their hash; of random ones (`source` None) the seed. None: not known, since the
    model has no checksums."""
    return f"random, seed {seed}" if source is None else checksums.weights_of(source)


def record(step_directory: Path, source: Path | None, weights: str | None) -> None:
    """Write what `check_resumed` reads."""
    where = None if source is None else str(source.resolve())
    (step_directory / FILE).write_text(json.dumps({"weights": weights, "source": where}) + "\n")


def check_resumed(step_directory: Path, source: Path | None, weights: str | None, key: str) -> str | None:
    """Refuse (UserError) to go on with another reference than the run began with. Returns a note if that is not known:
    a model without checksums may have moved, so its path alone does not tell. `key`: what gives the reference."""
    path = step_directory / FILE
    if not path.is_file():
        return None
    before = read_json(path, "use another step directory")
    if before.get("weights") is None:
        began = before.get("source")
        return (
            f"the reference that this run began with ({began or 'its path was not recorded'}) had no {checksums.FILE}, "
            f"so whether {source or 'the random weights'} is the same is not checked"
        )
    if before["weights"] != weights:
        why = "is not" if weights is not None else f"has no {checksums.FILE}, so it is not known to be"
        raise UserError(
            f"{key}: {source or 'the model with random weights'} {why} the reference that this run began with "
            f"({path}); give that model again, or a new run directory"
        )
    return None


# ------------------------------------------------------------------------------------------------ in the run


def prepare(
    settings: ReferencedRunConfig,
    plan: Plan,
    topology: Topology,
    *,
    make_loader: Callable[..., Loader],
    banner: dict[str, str],
) -> Prepared:
    """Build and load the policy and its reference. Collective."""
    from megarlhf.models import lora

    reference, models, lines = plan.reference, {}, dict(banner)
    hydra = settings.reference.kind == "hydra"
    given = settings.reference.checkpoint or settings.reference.cache
    bare = settings.model.lora is not None and given is None  # the policy without its adapters
    own = reference is not None and (hydra or bare)  # it is of the policy's own weights
    if reference is not None:
        if not own:  # built before the policy, so that making its cache has the memory of the policy's optimizer
            loaders = data_set.loaders(settings, plan, topology, make_loader)
            models["reference"] = frozen(settings, plan, topology, *loaders)
        where = str(reference.source or f"random weights (seed {settings.seed})")
        lines["reference"] = where + (f", cached in {settings.reference.cache}" if settings.reference.cache else "")

    def branch_off(actor: Engine) -> None:
        if hydra:
            models["reference"] = Hydra(actor, settings.model.trained_layers)
        else:
            models["reference"] = lora.Reference(actor, started=settings.model.lora.checkpoint is not None)
        if settings.reference.on_host:
            models["reference"].keep_on_host("weights")

    def write_reference(directory: Path) -> None:
        if reference is not None:
            record(directory, reference.source, reference.weights)

    actor = data_set.trained(settings, plan, topology, "actor", started=branch_off if own else None)
    if hydra and plan.start.resume_from is not None:
        models["reference"].check_trunk(plan.start.resume_from)
    models = {"actor": actor, **models}
    return data_set.prepared(
        settings, plan, topology, plan.algorithm, models, make_loader,
        banner=lines, notes=() if reference is None else reference.notes, write_more=write_reference,
    )  # fmt: skip


def frozen(
    settings: ReferencedRunConfig, plan: Plan, topology: Topology, training: Loader, validation: Loader | None
) -> Engine | Cached:
    """The reference, or its cached outputs. It has no optimizer, and starts from its own weights in resumed runs too.
    Collective."""
    from megarlhf.models.build import build

    start, total, cache = plan.start, plan.total_steps, settings.reference.cache
    if cache is not None:
        there = [False]

        def look() -> None:
            there[0] = Path(cache).exists()
            if there[0]:
                check_cache(Path(cache), plan.reference.content)  # another job may have made it since the start

        together(Path(cache), look if topology.rank == 0 else None)
        dist.broadcast_object_list(there, src=0)
        if there[0]:
            return Cached.read(Path(cache), topology)
    options = setup.model_options(settings, trains=False, total_steps=total)
    options["awaits_checkpoint"] = plan.reference.source is not None
    engine = build("reference", start.architecture, topology, **options)
    if plan.reference.source is not None:
        adapters.load(engine, plan.reference.source)
    if settings.reference.on_host:
        engine.keep_on_host("weights")
    if cache is None:
        return engine
    write_cache(Path(cache), engine, plan.reference.content, batches(plan, training, validation))
    return Cached.read(Path(cache), topology)


def batches(plan: Plan, training: Loader, validation: Loader | None) -> Iterator[Sequences]:
    """Everything that the reference reads in the run, this rank's part: the whole data, or the minibatches of each step
    if what is read depends on them."""
    mixed = plan.algorithm.mixes_rows
    parts = [map(training.batch, range(plan.total_steps)) if mixed else training.epoch_batches()]
    if validation is not None:
        parts.append(validation.epoch_batches())
    for batch in chain(*parts):
        yield from plan.algorithm.referenced(batch)
