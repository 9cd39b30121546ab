"""What `megarlhf plan` says of examples/configs/, as comments in these files."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

from megarlhf import config
from megarlhf.cli import TRAINING, find
from megarlhf.models.spec import Architecture
from megarlhf.plan import choice, hardware, memory, phases, sampling
from megarlhf.plan.job import Job
from megarlhf.plan.time import Machine
from megarlhf.train import planned, preflight, rounds

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "examples" / "configs"
FIRST = "# Predicted by `megarlhf plan` and written here by `python -m tools.documents`:"
LAST = "# (end of the prediction)"
LLAMAS = {  # of Llama 2 and Llama 3.1
    "7b": Architecture("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "70b": Architecture("llama", 80, 8192, 28672, 64, 8, 32000, 4096),
    "405b": Architecture("llama", 126, 16384, 53248, 128, 8, 128256, 131072),
}
RANKS = {"ppo_7b_top": 2, "ppo_lora_7b": 8, "iterative_dpo_7b": 8}  # where no job script has the file's name


def comments() -> dict[str, str]:
    """{path in the repository: text} of the configurations that have such a comment."""
    return {str(path.relative_to(ROOT)): commented(path) for path in sorted(CONFIGS.glob("*_7*b*.yaml"))}


def commented(path: Path) -> str:
    """The file with its prediction."""
    before, first, rest = path.read_text().partition(FIRST + "\n")
    _, last, after = rest.partition(LAST + "\n")
    assert first and last, f"{path} has no lines '{FIRST}' and '{LAST}'"
    machine = hardware.load("h100")
    lines = prediction(planned_job(path, machine), machine)
    return before + first + "".join(f"# {line}".rstrip() + "\n" for line in lines) + last + after


def planned_job(path: Path, machine: Machine) -> Job:
    """What a file trains, a chain in its last stage, on the ranks that it is for, with the slots that fit."""
    size = next(size for size in reversed(LLAMAS) if f"_{size}" in path.stem)
    program, settings = _load(path)
    found = planned.job_of(
        settings, ranks_of(path.stem), device="cuda", program=program, find=lambda path, role: LLAMAS[size]
    )
    return memory.with_slots(found, machine.memory)


def _load(path: Path) -> tuple[str, Any]:
    if "rounds" in config.read(path, "", ""):
        stage = rounds.stages(config.load(rounds.RoundsConfig, path, ["rounds=1"]), str(path))[-1]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(config.dump_values(stage.values))
            file.flush()
            return stage.program, find(stage.program).load(file.name, [])
    counts = preflight.matches(str(path), {name: find(name) for name in TRAINING})
    program = max(counts, key=lambda name: counts[name])
    return program, find(program).load(str(path), [])


def ranks_of(stem: str) -> int:
    """The GPUs of the job script with a configuration's name."""
    if stem in RANKS:
        return RANKS[stem]
    script = (ROOT / "examples" / "slurm" / f"{stem}.sh").read_text()
    return math.prod(int(number) for number in re.findall(r"^#SBATCH --n(?:odes|tasks-per-node)=(\d+)", script, re.M))


def prediction(job: Job, machine: Machine) -> list[str]:
    """GB of the fullest rank by kind, and seconds, of each phase."""
    held, seconds = memory.fullest(job), phases.phase_seconds(job, machine)
    kinds = [kind for kind in memory.KINDS if any(found.get(kind, 0) >= 5e7 for found in held.phases.values())]
    rows = [("GB", *kinds, "together", "seconds")]
    for phase, found in held.phases.items():
        time = f"{seconds[phase].total:.1f}" if phase in seconds else ""
        rows.append((phase, *(f"{found.get(kind, 0) / 1e9:.1f}" for kind in kinds), f"{held.total(phase) / 1e9:.1f}",
                     time))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        f"  {row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    billions = job.models[0].architecture.num_parameters / 1e9
    lines = [
        f"a Llama of {billions:.1f} billion parameters on {job.world_size} x {machine.name}: {choice.name(job)}, full "
        f"rows of {job.shape.length} tokens",
        *table,
        f"with {held.context / 1e9:.1f} of the process {held.peak / 1e9:.1f} GB of {machine.memory / 1e9:.0f}; "
        f"{sum(phase.total for phase in seconds.values()):.0f} s a step, give or take {machine.spread:.0%}",
    ]  # fmt: skip
    if job.online:
        lines.append(f"{sampling.slots(job)} slots of the sampler a stage; keys and values of a slot: "
                     f"{memory.cache_bytes(job, job.models[0]) / 1e9:.3f} GB")  # fmt: skip
    return lines
