"""`megarlhf preflight`: find the mistakes that would end a run in its first minutes, on a login node, before the job.

It runs the checks of the program itself (its `check`), and checks what the program opens later: every model directory
is complete and has the tensors of its architecture, the run directory can be written, and its disk has room for the
checkpoints. It needs no GPU and no process group. cluster/job_checks.py checks the rest at the job's start.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarlhf import checkpoint, config
from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.models.locate import find_model
from megarlhf.models.spec import FILE, VOCABULARY, Architecture
from megarlhf.train import presets
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
) -> None:
    """Print passed checks to standard output and mistakes to standard error; SystemExit(2) if there is a mistake.

    `programs`: those that train, by name; `program`: the file's program, by default the one with most of its keys;
    `verify`: read every checkpoint whole, for its checksums.
    """
    for flag, number in (("--nodes", nodes), ("--gpus-per-node", per_node)):
        if number < 1:
            raise UserError(f"{flag}: must be at least 1, not {number}")
    if "rounds" in config.top_level(path, overrides):
        raise UserError(
            f"{path}: is a chain of megarlhf rounds; 'megarlhf rounds --config {path} plan=true' checks it and starts "
            "nothing"
        )
    if program is None:
        counts = matches(path, programs, overrides)
        program = max(counts, key=lambda name: counts[name])
    settings = programs[program].load(path, overrides)
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
    plan = attempt("configuration, data, tokenizer, layout", lambda: programs[program].check(settings, world_size))
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
    sys.stdout.flush()
    if mistakes:
        raise SystemExit(2)


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
            yield name, "reward" if name.startswith(("critic.", "scoring.")) else "actor", value
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
    """Names and shapes as in a checkpoint: megatron stacks the layers."""
    out = {}
    for name, shape in architecture.shapes().items():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if number == "0":
                out[f"decoder.layers.{rest}"] = (architecture.num_layers, *shape)
        else:
            out[name] = shape
    return out


def check_disk(settings: RunConfig, architecture: Architecture) -> str:
    """Room for one checkpoint more than are kept: the oldest is removed after the newest is complete. The best one
    (evaluation.best) is kept beside the newest."""
    weight = 2 if settings.model.dtype == "bf16" else 4
    critic = getattr(settings, "critic", None)
    models = 2 if critic is not None and critic.kind == "separate" else 1
    # beside the weights, the optimizer's fp32 weights and its two moments
    each = models * architecture.num_parameters * (weight + 12)
    if getattr(settings, "average", None) is not None:
        each += architecture.num_parameters * 4  # in fp32
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
