"""Which step directory a run resumes from, and whether its configuration may: all checked before anything is
allocated."""

from __future__ import annotations

from pathlib import Path

from megarlhf import checkpoint, config, records
from megarlhf.checkpoint import LATEST, Checkpoints, checksums, steps
from megarlhf.config import UserError
from megarlhf.data.tokenizer import Tokenizer, load_tokenizer
from megarlhf.models import adapters, mixture
from megarlhf.models.adapters import Adapters
from megarlhf.models.spec import Architecture
from megarlhf.train import going_back
from megarlhf.train.settings import RUN_FILE, RunConfig, changes, values


def find(
    settings: RunConfig, architecture: Architecture, tokenizer: Tokenizer, source: Path | None, *, role: str
) -> tuple[Path | None, tuple[str, ...]]:
    """(The step directory, None for a new run; notes for the banner). `source`: the model directory that the run began
    with; `role`: the model in the run's checkpoints that has `architecture`.

    Refuses (UserError) a checkpoint that is damaged, or that the configuration does not fit.
    """
    found = latest(settings)
    if found is None:
        return None, ()
    checksums.verify_directory(found, small=True)
    notes = []
    if settings.checkpoint.step is None and not (found.parent / LATEST).exists():
        notes.append(f"{found.parent / LATEST} is missing; the newest complete step directory is taken")
    if Architecture.load(found / role) != architecture:
        raise UserError(f"{found}: holds another architecture than the configuration; give a new run directory")
    base = None
    if settings.model.lora is not None:
        base = Adapters(str(source.resolve()), settings.model.lora, checksums.weights_of(source))
    adapters.check_resumed(base, found / role)
    check_chat_template(tokenizer, found)
    check_trained_layers(settings, found)
    notes.append(f"resuming {settings.run} after step {checkpoint.read_state(found)['step']}")
    return found, (*notes, *(f"changed since then: {change}" for change in changes(settings, found)))


def latest(settings: RunConfig) -> Path | None:
    """The step directory to resume from; None for a new run. Refuses (UserError) a new run in a used directory."""
    run = Path(settings.run)
    again = going_back.restarted()
    if not settings.checkpoint.resume and not again:
        refuse_used(run)
        return None
    if settings.checkpoint.step is not None and not going_back.done(run, settings.checkpoint.step):
        return steps.given(run / "checkpoints", settings.checkpoint.step)
    found = Checkpoints(run, settings.checkpoint).latest()
    if found is None:
        refuse_without_checkpoints(run)
    return found


def refuse_used(run: Path) -> None:
    """Refuse (UserError) a used directory: a new run would mix with its files, or remove them step by step."""
    found = [path.name for path in steps.complete(run / "checkpoints")[-1:]]
    found += [name for name in ("metrics.jsonl", "samples.jsonl") if (run / name).is_file()]
    if found:
        raise UserError(
            f"checkpoint.resume: false, but {run} already holds a run ({', '.join(found)}); give another run "
            "directory, or resume=true to go on with this one"
        )


def refuse_without_checkpoints(run: Path) -> None:
    """Refuse (UserError) a run that must have saved, but has no checkpoint: it would restart and lose its metrics."""
    step = records.last_step(run / "metrics.jsonl")
    try:
        every = config.read(run / RUN_FILE, "the configuration", "")["checkpoint"]["every"]
        saved = step >= 2 * every  # a background write is complete before the next one begins
    except (UserError, KeyError, TypeError):
        return
    if saved:
        raise UserError(
            f"run: {run} has metrics up to step {step}, but no checkpoint; restore {run / 'checkpoints'} (is its file "
            "system mounted?), or give another run directory"
        )


def check_chat_template(tokenizer: Tokenizer, resume_from: Path) -> None:
    """Refuse (UserError) another chat template than that of the checkpoint: the run's data would change."""
    saved = resume_from / "tokenizer"
    if not saved.is_dir() or tokenizer.came_with(saved):
        return
    if load_tokenizer(saved).chat_template != tokenizer.chat_template:
        raise UserError(
            f"chat_template: is another one than that of the checkpoint, {saved}; give the old one, or a new run "
            "directory with this run as model.checkpoint"
        )


def check_trained_layers(settings: RunConfig, resume_from: Path) -> None:
    """Refuse (UserError) to train other layers than the run began with: the optimizer has the state of those."""
    saved = values(resume_from)
    before, now = saved.get("model.trained_layers"), settings.model.trained_layers
    if saved and before != now:
        raise UserError(
            f"model.trained_layers: is {now or 'not set'}, and {resume_from} was saved with {before or 'all'}, whose "
            "state its optimizer has; set that, or give a new run directory with this run as model.checkpoint"
        )
    now = mixture.trains_router(settings.model.experts, rl=settings.samples)
    before = saved.get("model.experts.train_router")
    if before is None:
        before = mixture.trains_router(mixture.ExpertsConfig(), rl=settings.samples)
    if saved and before != now:
        raise UserError(
            f"model.experts.train_router: is {str(now).lower()}, and {resume_from} was saved with "
            f"{str(before).lower()}: its optimizer has the state of other weights; set that, or give a new run "
            "directory with this run as model.checkpoint"
        )
