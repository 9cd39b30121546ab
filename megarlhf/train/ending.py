"""The last lines of a run: what was saved, and the commands that use it."""

from __future__ import annotations

import shlex
from pathlib import Path

from megarlhf.checkpoint import steps
from megarlhf.config import UserError
from megarlhf.models.locate import BEST
from megarlhf.train import exporting


def summary(run: Path, role: str, *, total: int, lora: bool) -> str:
    """For the user, one line each. `role`: the model that was trained; `lora`: its checkpoints hold adapters alone."""
    saved = steps.latest(run / "checkpoints")
    if saved is None:
        return f"megarlhf: {run}: nothing is saved"
    done = steps.number(saved)
    lines = [f"megarlhf: {run}: {done} of {total} steps are done; saved: {saved}"]
    if (best := _best(run)) is not None:
        lines.append(f"  best: {best}, which is {run / BEST}")
    if (export := exporting.path_of(run, saved)).is_dir():
        lines.append(f"  for transformers: {export}")
    name = shlex.quote(str(run))
    model = shlex.quote(str(run / BEST)) if best is not None else name
    lines += [f"  next: {command}" for command in commands(name, model, role, lora=lora)]
    return "\n".join(lines)


def commands(run: str, model: str, role: str, *, lora: bool) -> list[str]:
    """What to do with a run; `model`: the run, or its best checkpoint."""
    found = [f"megarlhf report {run}"]
    if role == "reward":
        found.append(f'megarlhf ppo --config ppo.yaml "scoring.sources=[{{checkpoint: {model}}}]"')
    else:
        found.append(f"megarlhf generate --checkpoint {model} --prompts prompts.jsonl --out responses.jsonl")
    found.append(f"megarlhf convert megatron2hf {model} DIRECTORY" + (" --role reward" if role == "reward" else ""))
    if lora:
        found.append(f"megarlhf convert megatron2peft {model} DIRECTORY")
    return found


def _best(run: Path) -> Path | None:
    try:
        return steps.best(run / "checkpoints")
    except UserError:
        return None
