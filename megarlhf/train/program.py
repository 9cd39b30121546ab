"""One skeleton for all programs: read the configuration, check it, start the cluster, build, announce, run the loop.

A program is one `Program`: configuration, checks and `run`. Programs that train have `training(prepare)` as `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megarlhf import console
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import backend, launch
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.parallel import Topology
from megarlhf.log import Log
from megarlhf.train import ending, exporting, profiling, setup

if TYPE_CHECKING:
    from megarlhf.engine import Engine

C = TypeVar("C")  # a program's configuration
P = TypeVar("P")  # its plan: a checked configuration, and all that can be prepared without a process group
WriteFiles = Callable[[Path], None]  # adds a step directory's files beside the models


@dataclass(frozen=True)
class Program(Generic[C, P]):
    """A command of `megarlhf`."""

    configurations: tuple[type, ...]  # the classes that `load` may return
    load: Callable[[str | None, list[str]], C]  # (file, overrides)
    check: Callable[[C, int], P]  # (configuration, number of ranks); refuses what cannot work before anything starts
    run: Callable[[C, P, Topology], None]  # collective
    execute: Callable[[Callable[[C, P, Topology], None], C, P, Rendezvous], None] = setup.execute  # starts the cluster

    def main(self, path: str | None, overrides: list[str]) -> None:
        settings = self.load(path, overrides)
        rendezvous = launch.resolve()
        plan = self.check(settings, rendezvous.world_size)
        self.execute(self.run, settings, plan, rendezvous)


@dataclass(frozen=True)
class Prepared:
    """Models that are built and loaded, and the loop over them."""

    models: dict[str, Engine]  # that are saved, by role
    step: int  # steps done
    loop: Callable[[Checkpoints, Log, WriteFiles], None]
    banner: dict[str, str] = field(default_factory=dict)  # lines of this program
    notes: tuple[str, ...] = ()
    write_more: WriteFiles = lambda step_directory: None  # this program's own files


def training(prepare: Callable[[C, P, Topology], Prepared]) -> Callable[[C, P, Topology], None]:
    """The `run` of a program that trains."""

    def run(settings: Any, plan: Any, topology: Topology) -> None:
        with profiling.memory_snapshot(settings.run, settings.log.memory_snapshot):
            train(settings, plan, topology)

    def train(settings: Any, plan: Any, topology: Topology) -> None:
        with backend.loading():
            prepared = prepare(settings, plan, topology)
        setup.announce(settings, plan.start, topology, prepared.banner, [*plan.notes, *prepared.notes])
        directory = Path(settings.run)
        with Log(
            directory, enabled=topology.rank == 0, start=prepared.step, total=plan.total_steps, unit="step",
            trackers=settings.log.trackers,
        ) as log:  # fmt: skip
            write_common = setup.files_writer(settings, plan.start, prepared.models, log)

            def write_files(step_directory: Path) -> None:
                write_common(step_directory)
                prepared.write_more(step_directory)

            role, after = next(iter(prepared.models)), {}
            if settings.checkpoint.export_hf:
                after["after"] = exporter = exporting.Exporter(directory, role, log.say)
                exporter.begin(plan.start.resume_from)
            prepared.loop(Checkpoints(directory, settings.checkpoint, say=log.say, **after), log, write_files)
        if topology.rank == 0:
            lora = settings.model.lora is not None
            console.say(ending.summary(directory, role, total=plan.total_steps, lora=lora))

    return run
