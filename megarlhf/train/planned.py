"""The configuration of a program that trains -> `plan.job.Job`, what the cost model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from megarlhf import console
from megarlhf.algorithms.preference import preference
from megarlhf.config import UserError
from megarlhf.convert import huggingface, registry
from megarlhf.models import mixture
from megarlhf.models.adapters import Adapters
from megarlhf.models.locate import find_model
from megarlhf.models.model_config import LoraConfig, ModelConfig
from megarlhf.models.spec import FILE, Architecture
from megarlhf.plan import calibrate, phases
from megarlhf.plan.job import Device, Job, Model, Shape
from megarlhf.train.prm import ProcessRewardConfig
from megarlhf.train.reward import RewardConfig
from megarlhf.train.rl_config import OnlineRunConfig
from megarlhf.train.settings import OfflineRunConfig, RunConfig

Find = Callable[[str, str], Architecture]  # (path, role in its checkpoint) -> the architecture there


def load(path: str, role: str) -> Architecture:
    """The architecture of a model on disk. Raises UserError."""
    return Architecture.load(find_model(path, role))


def described(path: str, role: str) -> Architecture:
    """As `load`, or of a Hugging Face model that is not converted: its directory, or its config.json alone."""
    source = Path(path)
    file = source if source.name == huggingface.CONFIG else source / huggingface.CONFIG
    if file.is_file() and not (file.parent / FILE).is_file():
        return registry.read_config(huggingface.read_json(file), str(file))
    try:
        return load(path, role)
    except UserError as error:
        raise UserError(f"{error}; for a plan a Hugging Face model's config.json is enough, as the path of the file")


def job_of(settings: RunConfig, world_size: int, *, device: Device, program: str = "", find: Find = load) -> Job:
    """What the program computes on so many ranks. `find` gives the architectures of checkpoints, which it reads from
    disk by default. Raises UserError for a layout that the ranks do not have."""
    settings.parallel.data(world_size)
    given = settings.model
    architecture = given.architecture or find(given.checkpoint, "actor")
    online = isinstance(settings, OnlineRunConfig)
    models = _online(settings, architecture, find) if online else _offline(settings, architecture)
    return Job(
        program or (settings.algorithm if online else ""), models, shape_of(settings), settings.parallel, world_size,
        given.dtype, given.recompute, online, device,
    )  # fmt: skip


def seconds(settings: OnlineRunConfig, world_size: int, *, rate: float, slots: int) -> dict[str, float]:
    """{phase: predicted seconds} of a step on this machine, for `megarlhf report`. rate: FLOP/s of a rank in large
    matrix products; slots: of the sampler, a stage. It is rough: the run should not wait for measurements. On a GPU
    collectives and messages are not in it, because the links are not known. {} if it cannot be computed: people read
    it, and the run does not need it."""
    try:
        return _seconds(settings, world_size, rate, slots)
    except Exception as error:
        console.say(f"no prediction of the phases' seconds ({type(error).__name__}: {error}); the run goes on")
        return {}


def _seconds(settings: OnlineRunConfig, world_size: int, rate: float, slots: int) -> dict[str, float]:
    machine = calibrate.roughly(rate, world_size)
    job = job_of(settings, world_size, device=machine.device)
    job = dataclasses.replace(job, shape=dataclasses.replace(job.shape, slots=slots))
    found = phases.phase_seconds(job, machine)
    if machine.device == "cuda":
        return {phase: part.computing + part.bubble for phase, part in found.items()}
    return {phase: part.total for phase, part in found.items()}


def shape_of(settings: RunConfig) -> Shape:
    """Rows at full length."""
    tokens, training = settings.micro_batch_tokens, settings.training
    if isinstance(settings, OnlineRunConfig):
        return Shape(
            training.batch_size, settings.longest_row, settings.sampler.response_length, tokens,
            settings.sampler.samples_per_prompt, settings.sampler.micro_batch_size, training.epochs,
            training.minibatches, () if settings.ptx is None else (("ptx.batch_size", settings.ptx.batch_size),),
        )  # fmt: skip
    assert isinstance(settings, OfflineRunConfig)
    length = settings.longest_row
    counted = 1 if _scores(settings) else max(1, length - 1)
    # Programs that compare the responses to a prompt keep them on one rank (data_set.find).
    together = getattr(settings.data, "num_responses", 1)
    normalization = getattr(settings, "normalization", None)
    shared = () if normalization is None else (("normalization.samples", normalization.samples),)
    return Shape(training.global_batch_size, length, counted, tokens, together, shared=shared)


def _online(settings: OnlineRunConfig, architecture: Architecture, find: Find) -> tuple[Model, ...]:
    trains = {"trains": True, "trained_layers": settings.model.trained_layers, "lora": settings.model.lora,
              "trains_router": mixture.trains_router(settings.model.experts, rl=True)}  # fmt: skip
    kind, hosts = settings.critic_kind, settings.optimizer.state_on_host
    mlp = kind is not None and settings.critic.head == "mlp"
    models = [
        Model("actor", architecture, "logprobs+values" if kind == "shared" else "logprobs", optimizer_on_host=hosts,
              replays=settings.replay_experts and architecture.num_experts is not None,
              mlp_values=mlp and kind == "shared", **trains)
    ]  # fmt: skip
    if kind in ("separate", "adapters"):
        own = settings.critic.optimizer
        models.append(
            Model("critic", architecture, "values", weights_on_host=settings.critic.on_host,
                  optimizer_on_host=hosts if own is None else own.state_on_host, borrows=kind == "adapters",
                  mlp_values=mlp, **trains)
        )  # fmt: skip
    reference = settings.reference
    bare = settings.model.lora is not None and reference.checkpoint is None  # the actor without its adapters
    hydra = reference.kind == "hydra"  # the layers that train, on the actor's trunk
    models.append(
        Model("reference", architecture, "logprobs", weights_on_host=reference.on_host, borrows=bare or hydra,
              trained_layers=settings.model.trained_layers if hydra else None, lora=_started(settings.model, bare))
    )  # fmt: skip
    if settings.average is not None:
        models.append(Model("average", architecture, "logprobs", lora=settings.model.lora, dtype="fp32"))
    judges = [source.checkpoint for source in settings.scoring.sources if source.checkpoint is not None]
    return (*models, *(
        Model(f"reward {number}", find(path, "reward"), "scores", weights_on_host=settings.scoring.on_host,
              lora=_apart(path))
        for number, path in enumerate(judges)
    ))  # fmt: skip


def _offline(settings: OfflineRunConfig, architecture: Architecture) -> tuple[Model, ...]:
    head = "scores" if _scores(settings) else "logprobs+values+q" if hasattr(settings, "ilql") else "logprobs"
    model = settings.model
    trained = Model(
        "reward" if head == "scores" else "actor", architecture, head, True, model.trained_layers, model.lora,
        optimizer_on_host=settings.optimizer.state_on_host,
        trains_router=mixture.trains_router(model.experts, rl=False),
    )  # fmt: skip
    reference = getattr(settings, "reference", None)
    if reference is None or getattr(reference, "cache", None):
        return (trained,)
    if hasattr(settings, "dpo") and not preference(settings.dpo).referenced:
        return (trained,)
    bare = model.lora is not None and reference.checkpoint is None
    hydra = getattr(reference, "kind", None) == "hydra"
    return trained, Model(
        "reference", architecture, "logprobs", weights_on_host=reference.on_host, borrows=bare or hydra,
        trained_layers=model.trained_layers if hydra else None, lora=_started(model, bare),
    )  # fmt: skip


def _started(model: ModelConfig, bare: bool) -> LoraConfig | None:
    """The adapters of a reference that is the actor's base: those that the actor starts from, or none."""
    return model.lora if bare and model.lora.checkpoint is not None else None


def _apart(path: str) -> LoraConfig | None:
    """The adapters of a reward model, which scores with them apart from its base."""
    try:
        found = Adapters.of(find_model(path, "reward"))
    except UserError:  # a Hugging Face model, or one that the caller's `find` knows
        return None
    return found and found.lora


def _scores(settings: OfflineRunConfig) -> bool:
    """Whether the model gives scores instead of log-probs: reward models, of whole responses and of steps."""
    return isinstance(settings, RewardConfig | ProcessRewardConfig)
