"""Where a model stands: paths of models, checkpoints and runs resolved to one model directory.

model directory        architecture.yaml and megatron's torch_dist files
checkpoint directory   actor/ (and critic/, reward/, ...), each a model directory; tokenizer/
run directory          checkpoints/latest, a text file that names the step directory beside it, a checkpoint
RUN/best               the best checkpoint of a run that evaluates on held-out prompts (evaluation.best); no file has
                       this name
"""

from __future__ import annotations

from pathlib import Path

from megarlhf.checkpoint import inspect, steps
from megarlhf.config import UserError
from megarlhf.models.spec import FILE

BEST = "best"


def find_model(path: str | Path, role: str = "actor") -> Path:
    """The model directory that `path` names: `path` itself, whatever its role, or that of `role` in a checkpoint or a
    run."""
    path = _named(Path(path))
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; give a model, a checkpoint or a run directory")
    if (path / FILE).is_file():
        return path
    checkpoint = _checkpoint(path)
    if (checkpoint / role / FILE).is_file():
        return checkpoint / role
    roles = sorted(file.parent.name for file in checkpoint.glob(f"*/{FILE}"))
    if roles:
        raise UserError(f"{checkpoint}: holds no '{role}' model; present: {', '.join(roles)}")
    if (path / "config.json").is_file():
        raise UserError(
            f"{path}: a Hugging Face model, not one of megarlhf; convert it with "
            f"'megarlhf convert hf2megatron {path} TARGET' and give TARGET"
        )
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path}: adapters of peft; convert them with 'megarlhf convert peft2megatron {path} TARGET --base "
            "MODEL' and give TARGET"
        )
    raise UserError(
        f"{path}: neither a model ({FILE}), nor a checkpoint ({role}/{FILE}), nor a run (checkpoints/latest); "
        "give one of these"
    )


def find_tokenizer(path: str | Path) -> Path | None:
    """The tokenizer that belongs to the model, checkpoint or run `path`; None if it came without one."""
    path = _named(Path(path))
    checkpoint = path.parent if (path / FILE).is_file() else _checkpoint(path)
    tokenizer = checkpoint / "tokenizer"
    return tokenizer if tokenizer.is_dir() else None


def has_q_heads(directory: Path) -> bool:
    """Whether the model directory is of an ILQL model. Raises UserError if it is damaged."""
    return "q_heads.first" in inspect(directory)


def _named(path: Path) -> Path:
    """`path`, or what RUN/best stands for."""
    checkpoints = path.parent / "checkpoints"
    if path.name != BEST or path.exists() or not checkpoints.is_dir():
        return path
    if found := steps.best(checkpoints):
        return found
    raise UserError(
        f"{path}: this run has no best checkpoint, since evaluation.best is not set or no evaluation was better than "
        "the one before the first step; give the run directory, or the model that it started from"
    )


def _checkpoint(path: Path) -> Path:
    """The checkpoint directory of `path`: the latest one if it is a run, as a resumed run finds it; else `path`."""
    step = steps.pointed(path / "checkpoints")
    return step if step is not None and step.is_dir() else steps.latest(path / "checkpoints") or path
