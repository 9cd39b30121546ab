"""The offline loop: iterate over a data set (`megarlhf sft`, `reward`, `prm`, `dpo`, `kto`, `ilql`).
algorithms/interface.py defines algorithms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megarlhf import metrics
from megarlhf.algorithms.interface import OfflineAlgorithm, Outputs
from megarlhf.batch import Sequences
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import slurm, watchdog
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.log import Log
from megarlhf.train.meter import Meter, offline_flops
from megarlhf.train.meter import shown as costs
from megarlhf.train.profiling import Profile
from megarlhf.train.settings import OfflineRunConfig

if TYPE_CHECKING:
    from megarlhf.engine import Engine


class Forward(Protocol):
    """A model that is not trained here."""

    def forward(self, batch: Sequences) -> Outputs:
        """As `Engine.forward`."""


def train(
    algorithm: OfflineAlgorithm,
    models: dict[str, Engine | Forward],
    training: Loader,
    validation: Loader | None,
    *,
    checkpoints: Checkpoints,
    log: Log,
    settings: OfflineRunConfig,
    write_files: Callable[[Path], None],
    adjust: Callable[[int, Log], None] = lambda step, log: None,
) -> None:
    """From engine.steps to engine.total_steps, one update a step. A batch is a function of the step, so the step is the
    data cursor. `models`: the trained one comes first; the others, such as a reference or its cached outputs, are only
    run forward.
    `adjust(step, log)`: called before the first step and before each checkpoint; collective."""
    role, engine = next(iter(models.items()))
    total = engine.total_steps
    job = slurm.Job(settings.job, Path(settings.run), engine.steps)
    meter = Meter(offline_flops(settings, engine.modules[0].architecture))
    profile = Profile(settings.run, settings.log.profile)
    if engine.steps == 0:
        adjust(0, log)
        if validation is not None:
            evaluate(algorithm, models, validation, log)
    while engine.steps < total:
        watchdog.phase("step", engine.steps + 1)
        profile.begin(engine.steps + 1)
        started = time.perf_counter()
        means = engine.step(prepared(algorithm, models, training.batch(engine.steps)), algorithm.loss)
        algorithm.after_update(engine)
        step = engine.steps
        values = metrics.values(means)
        bad = [name for name, value in values.items() if not math.isfinite(value) and name != "grad_norm"]
        if bad:  # grad_norm is not checked: the engine skips the update
            names = ", ".join(bad)
            checkpoints.finish()  # all ranks come here
            raise UserError(
                f"step {step}: {names} is not finite; the last good checkpoint is {checkpoints.latest()}; lower "
                "optimizer.lr or look at the data of this step"
            )
        seconds = time.perf_counter() - started
        tokens = training.num_tokens(step - 1)
        profile.end(step, last=step == total)
        if step % settings.log.every == 0 or step == total:
            values |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds, **meter.values(tokens, seconds)}
            shown = {"loss": f"{values['loss']:.4f}", "tokens/s": f"{tokens / seconds:,.0f}"}
            log.step(step, values, shown | {"seconds": f"{seconds:.2f}"} | costs(values))
        checkpoints.poll()
        if validation is not None and (step % settings.training.evaluate_every == 0 or step == total):
            evaluate(algorithm, models, validation, log)
        leave = job.leave(checkpoints.seconds)
        if step % settings.checkpoint.every == 0 or step == total or leave:
            adjust(step, log)
            cursor = {"consumed_examples": step * training.global_batch, "seed": settings.seed, "total_steps": total}
            checkpoints.save(step, {role: engine}, cursor, write_files)
        if leave:
            break
    checkpoints.finish()
    profile.end(engine.steps, last=True)  # if the job leaves within the profiled steps
    job.close(engine.steps, total)


def prepared(algorithm: OfflineAlgorithm, models: dict[str, Engine | Forward], rows: Sequences) -> Sequences:
    """This rank's rows as the loss reads them."""
    group = next(iter(models.values())).topology.data_group
    return algorithm.prepare(rows, {name: model.forward for name, model in models.items()}, group)


def evaluate(
    algorithm: OfflineAlgorithm, models: dict[str, Engine | Forward], validation: Loader, log: Log
) -> dict[str, float]:
    """The means of the loss over the whole held-out set, recorded under `validation/`."""
    engine, parts = next(iter(models.values())), []
    for batch in validation.epoch_batches():
        watchdog.phase("evaluate", engine.steps)
        parts.append(engine.evaluate(prepared(algorithm, models, batch), algorithm.loss))
    values = metrics.values(metrics.add(parts))
    values |= algorithm.derived(values)
    log.record(engine.steps, {f"validation/{name}": value for name, value in values.items()})
    shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    log.say(f"step {engine.steps}: held-out {shown}")
    return values
