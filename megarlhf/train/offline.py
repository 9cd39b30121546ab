"""The offline loop: iterate over a data set (`megarlhf sft`, `megarlhf reward`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarlhf import metrics
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import slurm, watchdog
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.log import Log

if TYPE_CHECKING:
    from megarlhf.engine import Engine, Loss

Derived = Callable[[dict[str, float]], dict[str, float]]


def train(
    engine: Engine,
    role: str,
    loss: Loss,
    training: Loader,
    validation: Loader | None,
    *,
    checkpoints: Checkpoints,
    log: Log,
    settings: Any,
    write_files: Callable[[Path], None],
    derived: Derived = lambda values: {},
    before_save: Callable[[int], None] = lambda step: None,
) -> None:
    """From engine.steps to engine.total_steps, one update a step. A batch is a function of the step, so the step is the
    data cursor. `derived`: held-out numbers made of held-out means. `before_save(step)`: collective, what a program
    does to the model when a checkpoint is due."""
    total = engine.total_steps
    job = slurm.Job(settings.job, Path(settings.run), engine.steps)
    if validation is not None and engine.steps == 0:
        evaluate(engine, loss, validation, log, derived)
    while engine.steps < total:
        watchdog.phase("step", engine.steps + 1)
        started = time.perf_counter()
        means = engine.step(training.batch(engine.steps), loss)
        step = engine.steps
        values = {name: mean.value for name, mean in means.items()}
        bad = [name for name, value in values.items() if not math.isfinite(value) and name != "grad_norm"]
        if bad:  # gradients alone are the engine's affair: it skips the update
            names = ", ".join(bad)
            checkpoints.finish()  # all ranks come here
            raise UserError(
                f"step {step}: {names} is not finite; the last good checkpoint is {checkpoints.latest()}; lower "
                "optimizer.lr or look at the data of this step"
            )
        seconds = time.perf_counter() - started
        rate = training.num_tokens(step - 1) / seconds
        if step % settings.log.every == 0 or step == total:
            shown = {"loss": f"{values['loss']:.4f}", "tokens/s": f"{rate:,.0f}"}
            log.step(step, {**values, "step_seconds": seconds, "tokens_per_second": rate}, shown)
        checkpoints.poll()
        if validation is not None and (step % settings.training.evaluate_every == 0 or step == total):
            evaluate(engine, loss, validation, log, derived)
        leave = job.leave(checkpoints.seconds)
        if step % settings.checkpoint.every == 0 or step == total or leave:
            before_save(step)
            cursor = {"consumed_examples": step * training.global_batch, "seed": settings.seed, "total_steps": total}
            checkpoints.save(step, {role: engine}, cursor, write_files)
        if leave:
            break
    checkpoints.finish()
    job.close(engine.steps, total)


def evaluate(engine: Engine, loss: Loss, validation: Loader, log: Log, derived: Derived) -> dict[str, float]:
    """The means of `loss` over the whole held-out set, recorded under `validation/`."""
    parts = []
    for batch in validation.epoch_batches():
        watchdog.phase("evaluate", engine.steps)
        parts.append(engine.evaluate(batch, loss))
    values = {name: mean.value for name, mean in metrics.add(parts).items()}
    values |= derived(values)
    log.record(engine.steps, {f"validation/{name}": value for name, value in values.items()})
    shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    log.say(f"step {engine.steps}: held-out {shown}")
    return values
