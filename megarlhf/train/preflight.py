"""`megarlhf preflight`: find the mistakes that would end a run in its first minutes, on a login node, before the job.

It runs the checks of the program itself (its `check`), and checks what the program opens later: every model directory
is complete and has the tensors of its architecture, the run directory can be written, and its disk has room for the
checkpoints. It needs no GPU and no process group. cluster/job_checks.py checks the rest at the job's start.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarlhf import checkpoint, config
from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.convert.torch_dist import stored_as
from megarlhf.models.adapters import Adapters
from megarlhf.models.locate import find_model
from megarlhf.models.spec import FILE, VOCABULARY, Architecture
from megarlhf.plan import hardware, memory
from megarlhf.plan.job import Job
from megarlhf.plan.time import Machine
from megarlhf.train import planned, presets, setup
from megarlhf.train.memory import largest
from megarlhf.train.program import Program
from megarlhf.train.settings import RunConfig
from megarlhf.train.setup import check_writable, existing


def main(
    path: str,
    overrides: list[str],
    *,
    programs: dict[str, Program],
    program: str | None,
    nodes: int,
    per_node: int,
    verify: bool = False,
    gpu: str | None = None,
    table: str | None = None,
) -> None:
    """Print passed checks to standard output and mistakes to standard error; SystemExit(2) if there is a mistake.

    `programs`: those that train, by name; `program`: the file's program, by default the one with most of its keys;
    `verify`: read every checkpoint whole, for its checksums; `gpu`: the kind of GPU, whose memory must hold a rank, in
    the built-in table or the file `table`.
    """
    for flag, number in (("--nodes", nodes), ("--gpus-per-node", per_node)):
        if number < 1:
            raise UserError(f"{flag}: must be at least 1, not {number}")
    program = chosen(path, programs, overrides, program)
    settings = programs[program].load(path, overrides)
    machine = hardware.chosen(gpu, table)
    world_size = nodes * per_node
    print(f"preflight: a configuration for 'megarlhf {program}' on {nodes} x {per_node} = {world_size} ranks")
    mistakes = []

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            result = work()
        except UserError as error:
            if str(error) not in mistakes:  # one mistake may be met twice
                mistakes.append(str(error))
                print(f"megarlhf: error: {error}", file=sys.stderr)
            return None
        print(f"  ok: {name}" + (f": {result}" if isinstance(result, str) else ""))
        return result

    attempt("tensor parallelism stays within a node", lambda: check_nodes(settings, per_node))
    with tempfile.TemporaryDirectory() as scratch:
        reading = settings
        if settings.data_cache is None and not os.path.isdir(setup.own_cache(settings)):
            reading = dataclasses.replace(settings, data_cache=scratch)  # the run directory is not made here
        plan = attempt("configuration, data, tokenizer, layout", lambda: programs[program].check(reading, world_size))
    for name, role, given in model_paths(settings):
        attempt(f"{name} {given}", lambda given=given, role=role: check_model(find_model(given, role)))
        if verify:
            attempt(
                f"checksums of {name}",
                lambda given=given, role=role: checksums.verify_directory(find_model(given, role)),
            )
    if plan is not None and plan.start.resume_from is not None:
        for file in sorted(plan.start.resume_from.glob(f"*/{FILE}")):
            attempt(f"resume from {file.parent}", lambda file=file: check_model(file.parent))
        if verify:
            attempt("checksums of what is resumed", lambda: checksums.verify_directory(plan.start.resume_from))
    attempt(f"run directory {settings.run}", lambda: check_writable(settings.run))
    if plan is not None:
        attempt("disk for checkpoints", lambda: check_disk(settings, plan.start.architecture))
        attempt("memory of a rank", lambda: check_memory(planned.job_of(settings, world_size, device="cuda"), machine))
    sys.stdout.flush()
    if mistakes:
        raise SystemExit(2)


def chosen(path: str, programs: dict[str, Program], overrides: list[str], program: str | None) -> str:
    """`program`, by default the one whose configuration has most keys of a file. Refuses (UserError) a chain of
    several."""
    if "rounds" in config.top_level(path, overrides):
        raise UserError(
            f"{path}: is a chain of megarlhf rounds; 'megarlhf rounds --config {path} plan=true' checks it and starts "
            "nothing"
        )
    counts = matches(path, programs, overrides)
    return program or max(counts, key=lambda name: counts[name])


def matches(path: str, programs: dict[str, Program], overrides: Sequence[str] = ()) -> dict[str, int]:
    """The number of keys of a file with overrides, down to the second level, that each program's configuration has."""
    try:
        tree = config.read(Path(path), "the configuration", "give an existing YAML file")
        given = config.top_level(path, overrides)
        keys = {(key, None) for key in given}
        if "preset" in given and given["preset"].value in [*presets.REINFORCE]:  # which may stand for its section
            keys.add(("reinforce", None))
    except UserError:
        tree, keys = {}, set()  # config.load says what is wrong
    keys |= {(key, sub) for key, value in tree.items() if isinstance(value, dict) for sub in value}
    return {
        name: max(len(keys & _keys(configuration)) for configuration in program.configurations)
        for name, program in programs.items()
    }


def belongs_to(path: str, program: str, programs: dict[str, Program]) -> str:
    """A note if the configuration has more keys of another one of `programs` than of `program`; else ""."""
    counts = matches(path, programs)
    best = max(counts, key=lambda name: counts[name])
    if counts[best] <= counts.get(program, 0):
        return ""
    return f"; the file looks like a configuration for 'megarlhf {best}'"


def _keys(cls: type) -> set[tuple[str, str | None]]:
    found: set[tuple[str, str | None]] = set()
    hints = typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        kinds = (hints[name], *typing.get_args(hints[name]))
        sections = [part for part in kinds if dataclasses.is_dataclass(part)]
        found.add((name, None))
        found |= {(name, field.name) for section in sections for field in dataclasses.fields(section)}
    return found


def check_memory(job: Job, machine: Machine | None) -> str:
    """Refuse (UserError) a job whose fullest rank a GPU cannot hold: one of this `machine`, or the largest device there
    is."""
    capacity, owner = (largest(), "the largest device") if machine is None else (machine.memory, machine.name)
    held = memory.fullest(memory.with_slots(job, capacity))
    if (why := memory.refusal(held, capacity, owner)) is not None:
        raise UserError(
            f"parallel: {why}, with rows of the full {job.shape.length} tokens; 'megarlhf plan' says what would fit"
        )
    return f"{held.peak / 1e9:,.1f} GB in {held.fullest}, predicted"


def check_nodes(settings: RunConfig, per_node: int) -> None:
    tensor = settings.parallel.tensor
    if per_node % tensor:
        raise UserError(
            f"parallel.tensor: groups of {tensor} ranks do not fit evenly into nodes of {per_node}, so every layer "
            f"would wait for the network; use a size that divides {per_node}"
        )


def model_paths(settings: RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, role in a checkpoint, path) of every model that the configuration names."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{prefix}{field.name}"
        if field.name == "checkpoint" and isinstance(value, str):
            # critics start from reward models; scoring uses them
            role = "reward" if name.startswith(("critic.", "scoring.")) else "actor"
            if name != "model.lora.checkpoint":  # the check of the configuration reads it
                yield name, role, value
        elif dataclasses.is_dataclass(value):
            yield from model_paths(value, f"{name}.")
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from model_paths(item, f"{name}[{i}].")


def check_model(directory: Path) -> str:
    """A model directory is complete and holds the tensors that its architecture.yaml promises; its size in words.

    The output layer is optional: a critic or a reward model has none.
    """
    architecture = Architecture.load(directory)
    found = checkpoint.inspect(directory)
    if (own := Adapters.of(directory)) is not None:
        number = own.lora.num_parameters(architecture)
        return f"{number / 1e6:,.1f}M parameters of adapters on {check_model(own.find_base(directory))}"
    for name, shape in stacked(architecture).items():
        if name not in found:
            if name != "output_layer.weight":
                raise UserError(f"{directory}: has no tensor {name}, which {FILE} asks for; convert the model again")
            continue
        rows = 1 if name in VOCABULARY else 0  # padded for the layout that wrote it
        if found[name][rows:] != shape[rows:] or found[name][0] < shape[0]:
            raise UserError(
                f"{directory}: {name} has the shape {list(found[name])}, but {FILE} asks for {list(shape)}; one of the "
                "two belongs to another model"
            )
    return f"{architecture.num_parameters / 1e6:,.1f}M parameters"


def stacked(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes as in a checkpoint: megatron stacks the layers, and experts behind them."""
    out, sizes = {}, (architecture.num_layers, architecture.num_experts or 0)
    for name, shape in architecture.shapes().items():
        key, place = stored_as(name)
        if not any(place):  # the first of a stack
            out[key] = (*sizes[: len(place)], *shape)
    return out


def check_disk(settings: RunConfig, architecture: Architecture) -> str:
    """Room for one checkpoint more than are kept: the oldest is removed after the newest is complete. The best one
    (evaluation.best) is kept beside the newest."""
    weight = 2 if settings.model.dtype == "bf16" else 4
    critic = getattr(settings, "critic", None)
    models = 2 if critic is not None and critic.kind != "shared" else 1
    lora = settings.model.lora
    number = architecture.num_parameters if lora is None else lora.num_parameters(architecture)
    # beside the weights, the optimizer's fp32 weights and its two moments
    each = models * number * (weight + 12)
    if getattr(settings, "average", None) is not None:
        each += number * 4  # in fp32
    if getattr(settings, "ilql", None) is not None:  # two Q heads with their optimizer states, and slow copies in fp32
        each += 2 * architecture.vocab_size * architecture.hidden_size * (weight + 12 + 4)
    run = Path(settings.run)
    there = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    evaluation = getattr(settings, "evaluation", None)
    keep = settings.checkpoint.keep + (evaluation is not None and evaluation.best is not None)
    needed = max(0, each * (keep + 1) - there)
    free = shutil.disk_usage(existing(run)).free
    if needed > free:
        raise UserError(
            f"run: {run} needs {_bytes(needed)} for {keep} + 1 checkpoints of {_bytes(each)}, but "
            f"its disk has {_bytes(free)} free; make room, lower checkpoint.keep or give another directory"
        )
    return f"{keep} + 1 checkpoints of {_bytes(each)}, {_bytes(free)} free"


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
