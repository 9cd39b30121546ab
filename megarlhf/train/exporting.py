"""`checkpoint.export_hf`: each checkpoint also as a directory for transformers, written by all ranks while the run goes
on.

    RUN/hf/step_00000100/       appears under this name only when complete; goes when its checkpoint goes

It is converted from the checkpoint's files, tensor by tensor (convert/): so it does not depend on the layout, no rank
holds more than two tensors, and a run that resumes writes the export that a kill has prevented.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf.checkpoint import steps
from megarlhf.cluster import lease, watchdog
from megarlhf.config import UserError
from megarlhf.convert import registry
from megarlhf.convert.convert import Options, megatron2hf
from megarlhf.convert.workers import Workers
from megarlhf.models.spec import Architecture

DIRECTORY = "hf"
REMOVING = ".removing"
PAUSE = 1.0  # seconds between the messages of ranks that are at work


def check(architecture: Architecture, role: str) -> None:
    """Refuse (UserError) a model that no family of transformers describes, before anything is allocated."""
    registry.write_config(architecture, "checkpoint.export_hf")
    if role == "reward" and registry.FAMILIES[architecture.family].classifier is None:
        raise UserError(
            "checkpoint.export_hf: transformers has no class for reward models of the family "
            f"'{architecture.family}'; set it to false"
        )


def path_of(run: Path, step_directory: Path) -> Path:
    return run / DIRECTORY / step_directory.name


class Ranks(Workers):
    """The ranks of this job as the converter's processes.

    An action may take much longer than the watchdog waits, on all ranks or on one for which the others wait. So it runs
    in a thread, while the ranks tell each other how far they are. All enter the same new phase when one of them has
    progressed. If none does, they are taken for hung, as they should be: then the disk does not answer.
    """

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._comm = self
        self.step: int | None = None  # whose export it is
        self.parts = 0  # that this rank's actions have done
        self.known = 0  # that all ranks' have, as all know

    def together(self, action: Callable[[], Any]) -> list[Any]:
        pool = ThreadPoolExecutor(1)
        try:
            future, everyone = pool.submit(action), False
            while not everyone:
                wait([future], PAUSE)
                told = self.allgather((self.parts, future.done()))
                parts, everyone = sum(parts for parts, _ in told), all(done for _, done in told)
                if parts != self.known:
                    watchdog.phase("export", self.step)
                self.known = parts
        finally:
            pool.shutdown(wait=False)
        return super().together(future.result)

    def progressed(self) -> None:
        self.parts += 1

    def allgather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def abort(self) -> None:
        """The watchdog ends the others."""


class Exporter:
    """Exports the model `role` of a run's checkpoints. Calls are collective. `say`: tells the user."""

    def __init__(self, run: Path, role: str, say: Callable[[str], None]):
        self.run, self.role, self.say, self.ranks = run, role, say, Ranks()

    def begin(self, resumed: Path | None) -> None:
        """Remove what a kill has left, and export the checkpoint from which the run resumes, if that is missing."""
        self.ranks.first(self._sweep)
        if resumed is not None and self.ranks.first(path_of(self.run, resumed).is_dir) is False:
            self(resumed)

    def __call__(self, step_directory: Path) -> None:
        """Export. A failure is said and does not end the run: the checkpoint is whole, and can be exported later."""
        self.ranks.step = steps.number(step_directory)
        watchdog.phase("export", self.ranks.step)
        target = path_of(self.run, step_directory)
        try:
            self.ranks.first(lambda: _remove(target))  # of the same step, before the run resumed from an earlier one
            made = megatron2hf(step_directory, target, Options(role=self.role), self.ranks, undamaged=True)
            self.ranks.first(self._retire)
        except UserError as error:  # on all ranks alike
            lease.verify()  # but for a lost run directory, which ends the run: the first rank alone has noticed
            self.say(
                f"checkpoint.export_hf: {target} was not written ({error}); the run goes on; later: megarlhf convert "
                f"megatron2hf {step_directory} DIRECTORY --role {self.role}"
            )
            return
        self.say(f"exported {target} for transformers ({made.nbytes / 1e9:.3g} GB in {made.seconds:.1f} s)")

    def _sweep(self) -> None:
        for pattern in (".step_*.partial", f".step_*{REMOVING}"):
            for path in (self.run / DIRECTORY).glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _retire(self) -> None:
        """Remove the exports whose checkpoints are gone (checkpoint.keep)."""
        for path in (self.run / DIRECTORY).glob("step_*"):
            if not (self.run / "checkpoints" / path.name).is_dir():
                _remove(path)


def _remove(path: Path) -> None:
    """A kill meanwhile leaves a hidden name."""
    if path.is_dir():
        aside = path.with_name(f".{path.name}{REMOVING}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
