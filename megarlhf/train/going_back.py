"""`--step N` (checkpoint.step): a run goes on from an earlier checkpoint. What it did after that is set aside in

    RUN/after_step_N/           checkpoints/, hf/ and the records (metrics.jsonl, ...) as they were

and nothing is removed: the user does that. This holds also for a run of which no step after N is left to do.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megarlhf import console, records
from megarlhf.checkpoint import steps
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.log import TABLES
from megarlhf.train import exporting
from megarlhf.train.settings import RunConfig

RECORDS = tuple(f"{name}.jsonl" for name in TABLES)
DONE = "went_back"  # the step to which a job has gone back, and the job
IDS = ("wandb.id", "mlflow.id")  # these services know no way back: the run goes on as another one there


def restarted() -> bool:
    """Whether Slurm or torchrun has restarted this job: it then resumes from its own checkpoints."""
    return any(os.environ.get(name, "0") != "0" for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def done(run: Path, step: int) -> bool:
    """Whether this job has gone back to `step` in an attempt before, and now goes on from its own checkpoints."""
    try:
        return restarted() and (run / DONE).read_text() == _mark(step)
    except OSError:
        return False


def _mark(step: int) -> str:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    return f"step {step} job {job}\n"


def applied(settings: RunConfig, resume_from: Path | None, topology: Topology) -> RunConfig:
    """Carry out checkpoint.step, from which `resume_from` follows. Returns the settings without it: the next start goes
    on from the latest checkpoint. Collective."""
    if settings.checkpoint.step is None:
        return settings
    run, step = Path(settings.run), settings.checkpoint.step
    if topology.rank == 0 and not done(run, step):
        try:
            said = go_back(run, resume_from)
        except OSError as error:
            raise UserError(
                f"checkpoint.step: {run}: what the run did after step {step} cannot be set aside "
                f"({error.filename or run}: {error.strerror or error}); make room, and start again: nothing is lost"
            )
        console.say(f"  {said}")
        records.replace(run / DONE, _mark(step))
    dist.barrier()
    return replace(settings, checkpoint=replace(settings.checkpoint, step=None))


def go_back(run: Path, step_directory: Path) -> str:
    """Make `step_directory` the latest checkpoint. Returns what was set aside, for the user. For one rank, which holds
    the lease on the run directory. A kill at any moment leaves every file in one of both places, and the same command
    goes on."""
    step = steps.number(step_directory)
    later = [path for path in steps.complete(run / "checkpoints") if steps.number(path) > step]
    told = max((records.last_step(run / name) for name in RECORDS), default=0)
    if not later and told <= step:
        return f"step {step} is the last that {run} has done: nothing is set aside"
    aside = _free(run, step)
    aside.mkdir()
    for name in (*RECORDS, *IDS):
        if (run / name).is_file():
            shutil.copy2(run / name, aside / name)
    for name in IDS:
        (run / name).unlink(missing_ok=True)
    steps.point(step_directory)
    for path in later:
        export = exporting.path_of(run, path)
        for source in (path, export):
            if source.is_dir():
                target = aside / source.parent.name / source.name
                target.parent.mkdir(exist_ok=True)
                os.replace(source, target)
    for name in RECORDS:  # a run that goes on would do this; one that is finished does not start its log
        records.keep_until(run / name, step)
    names = ", ".join(str(steps.number(path)) for path in later)
    what = f"the checkpoints of steps {names} and the records" if later else "the records"
    return f"going back to step {step}: {what} after it are in {aside}; remove that when you do not need it"


def _free(run: Path, step: int) -> Path:
    """A name that is not taken."""
    path, number = run / f"after_step_{step}", 1
    while path.exists():
        number += 1
        path = run / f"after_step_{step}.{number}"
    return path
