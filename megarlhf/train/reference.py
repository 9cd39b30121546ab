"""What the programs that compare a policy with a frozen reference share (`megarlhf dpo`, `kto`): the reference's log-
probs, computed in the run or cached (reference_cache.py). A cache is made of the reference's weights, by their
checksums, and of the tokens of the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.algorithms.interface import OfflineAlgorithm
from megarlhf.batch import Sequences
from megarlhf.checkpoint import checksums
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.data.tokenizer import check_same
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig
from megarlhf.train import offline, setup
from megarlhf.train.program import Prepared
from megarlhf.train.reference_cache import FILE, FORMAT, Cached, check_cache, read_json, together, write_cache
from megarlhf.train.settings import OfflineRunConfig
from megarlhf.train.setup import Start

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen model that the policy is compared with."""

    checkpoint: str | None = None  # default: model.checkpoint, where the policy starts
    cache: str | None = None  # directory of its log-probs, made if it does not exist; default: computed in the run


@dataclass(frozen=True, kw_only=True)
class ReferencedRunConfig(OfflineRunConfig):
    """The sections of programs that compare a policy with a reference."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"))


@dataclass(frozen=True)
class Reference:
    """Where the reference comes from."""

    source: Path | None  # model directory; None: the same random weights as the policy's
    weights: str | None  # hash of the weights; None: not known, since the model has no checksums
    content: dict[str, Any]  # what a cache is made of
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    training: Examples
    validation: Examples | None
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
    source = find_model(config.checkpoint) if config.checkpoint is not None else start.source
    if config.checkpoint is not None and Architecture.load(source) != start.architecture:
        raise UserError(
            f"reference.checkpoint: {config.checkpoint} has another architecture than the policy; give one of the same"
        )
    notes = []
    if config.checkpoint is not None:
        tokenizer = find_tokenizer(config.checkpoint)
        notes.append(
            check_same(start.tokenizer, f"reference.checkpoint: {config.checkpoint}", tokenizer, "reference model")
        )
    weights = f"random, seed {settings.seed}" if source is None else weights_of(source)
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
        notes.append(check_resumed(start.resume_from, source, weights))
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


def weights_of(directory: Path) -> str | None:
    """A hash of a model's weights, from its checksums; None if it has none."""
    found = checksums.find(directory)
    if found is None:
        return None
    root, files = found
    inside = directory.resolve()
    own = {
        str((root / name).relative_to(inside)): value.sha256
        for name, value in files.items()
        if inside in (root / name).parents
    }
    return hashlib.sha256(json.dumps(sorted(own.items())).encode()).hexdigest()


def content_of(data: Examples | None, *, complete: bool) -> str | None:
    """A hash of the tokens and masks of a data set. `complete`: of all its arrays, since others decide which rows are
    put together."""
    if data is None:
        return None
    names = ("tokens", "mask", "offsets")
    if complete:
        names = tuple(found.name for found in fields(data) if isinstance(getattr(data, found.name), np.ndarray))
    digest = hashlib.sha256()
    for name in names:
        values = getattr(data, name)
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values))
    return digest.hexdigest()


def check_resumed(step_directory: Path, source: Path | None, weights: str | None) -> str | None:
    """Refuse (UserError) to go on with another reference than the run began with. Returns a note if that is not known:
    a model without checksums may have moved, so its path alone does not tell."""
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
            f"reference.checkpoint: {source or 'the random weights'} {why} the reference that this run began with "
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
    from megarlhf.models.build import build

    start, total, reference = plan.start, plan.total_steps, plan.reference
    options = setup.loader_options(settings, start, topology)
    training = make_loader(plan.training, **options)
    validation = None if plan.validation is None else make_loader(plan.validation, **options)
    others: dict[str, Engine | Cached] = {}
    if reference is not None:
        others["reference"] = frozen(settings, plan, topology, training, validation)
    actor = build(
        "actor", start.architecture, topology, **setup.model_options(settings, trains=True, total_steps=total)
    )
    if start.resume_from is not None:
        checkpoint.load(actor, start.resume_from / "actor", weights_only=False)
    elif start.source is not None:
        checkpoint.load(actor, start.source, weights_only=True)

    def loop(checkpoints, log, write_files):
        def write(directory: Path) -> None:
            write_files(directory)
            if reference is not None:
                source = None if reference.source is None else str(reference.source.resolve())
                (directory / FILE).write_text(json.dumps({"weights": reference.weights, "source": source}) + "\n")

        offline.train(
            plan.algorithm, {"actor": actor, **others}, training, validation,
            checkpoints=checkpoints, log=log, settings=settings, write_files=write,
        )  # fmt: skip

    lines = dict(banner)
    if reference is not None:
        where = str(reference.source or f"random weights (seed {settings.seed})")
        lines["reference"] = where + (f", cached in {settings.reference.cache}" if settings.reference.cache else "")
    lines["steps"] = f"{total} of {settings.training.global_batch_size} rows"
    return Prepared({"actor": actor}, actor.steps, loop, lines, () if reference is None else reference.notes)


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
        checkpoint.load(engine, plan.reference.source, weights_only=True)
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
