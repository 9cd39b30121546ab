"""`megarlhf ppo`: a policy that scores higher, near its reference. Configuration, checks and players; the loop is in
online.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megarlhf import checkpoint, config
from megarlhf.algorithms.ppo import OPENAI_2019, PPOConfig
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import backend, launch, preflight
from megarlhf.cluster.parallel import ParallelConfig, Topology
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.prompts import PromptLoader, PromptsConfig, PromptSet, load_prompts
from megarlhf.data.sft import Examples, SFTDataConfig, load_sft
from megarlhf.experience import rollout, sampler, sources
from megarlhf.experience.gate import GateConfig
from megarlhf.experience.reward import ScoringConfig
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.log import Log
from megarlhf.models.locate import find_model
from megarlhf.models.spec import Architecture, ModelConfig
from megarlhf.optim import OptimizerConfig
from megarlhf.train import audit, memory, online, scoring, setup, work
from megarlhf.train.online import GuardConfig, Players, Progress
from megarlhf.train.setup import Start
from megarlhf.train.state import LogConfig

# The 2019 original (lm-human-preferences, launch.py's sentiment task), as far as it is not about files and layouts.
PRESETS = {
    "default": {},
    "openai_2019": {
        "prompts": {"length": 64, "start_text": ".", "end_text": "."},
        "sampler": {"response_length": 24, "temperature": 0.7, "stop_at_eos": False},
        "scoring": {"truncate_token": ".", "truncate_after": 16, "penalty": -1.0},
        "ppo": config.to_dict(OPENAI_2019),
        "critic": {"kind": "shared"},
        "training": {"batch_size": 512, "minibatches": 1, "epochs": 4},
        "optimizer": {"name": "tf_adam", "lr": 1e-5, "schedule": "linear", "betas": [0.9, 0.999], "eps": 1e-5,
                      "clip_grad": 0.0},
    },
}  # fmt: skip


@dataclass(frozen=True)
class CriticConfig:
    """Who estimates values."""

    kind: Literal["separate", "shared"] = "separate"  # shared: a head on the actor's trunk, one backward, as in 2019
    checkpoint: str | None = (
        None  # separate: a reward model to start from; default: the actor's trunk, a zero head (P2)
    )
    # separate: default the actor's, as a whole or key by key
    optimizer: OptimizerConfig | None = field(default=None, metadata=config.like("optimizer"))

    def __post_init__(self):
        if self.kind == "shared" and (self.checkpoint or self.optimizer):
            raise ValueError("kind: a shared critic has neither a checkpoint nor an optimizer of its own; remove them")


@dataclass(frozen=True)
class ReferenceConfig:
    """Whom the policy is held near."""

    checkpoint: str | None = None  # default: the actor's own start
    on_host: bool = False  # weights in host memory, on the device only while they are needed


@dataclass(frozen=True)
class PTXConfig:
    """Text whose likelihood is kept up while the policy learns (PPO-ptx)."""

    data: SFTDataConfig  # max_length: at most prompts.length + sampler.response_length
    coef: float = 1.0
    batch_size: int = 64  # rows an update

    def __post_init__(self):
        if self.coef <= 0:
            raise ValueError(f"coef: must be positive, not {self.coef}; leave the section out to turn it off")


@dataclass(frozen=True)
class PPOTrainingConfig:
    """Sizes and lengths. A step samples and learns from one batch of responses (detail P7)."""

    steps: int = 100
    batch_size: int = 512  # responses a step
    minibatches: int = 1  # updates an epoch
    epochs: int = 4
    micro_batch_size: int = 8  # rows a rank computes at once

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.epochs * self.minibatches


@dataclass(frozen=True)
class PPORunConfig:
    """One section for each thing it configures; `preset` gives what the file leaves out."""

    run: str  # directory of this run: checkpoints, metrics, samples, the resolved configuration
    model: ModelConfig  # checkpoint: the SFT model
    prompts: PromptsConfig
    scoring: ScoringConfig
    preset: Literal["default", "openai_2019"] = "default"
    tokenizer: str | None = None  # default: the one that came with model.checkpoint
    seed: int = 0  # of new heads, the order of the data and the sampled responses
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ptx: PTXConfig | None = None
    average: float | None = None  # decay per update of an averaged (EMA) actor, saved beside the actor as `average`
    training: PPOTrainingConfig = field(default_factory=PPOTrainingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="linear"))  # to 0 (detail G5)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self):
        config.check_seed(self.seed)


@dataclass(frozen=True)
class Plan:
    """A checked configuration: everything that can be had without a process group."""

    start: Start
    prompts: PromptSet
    ptx: Examples | None
    notes: tuple[str, ...]


def main(path: str, overrides: list[str]) -> None:
    settings = config.load(PPORunConfig, path, overrides, presets=PRESETS)
    rendezvous = launch.resolve()
    plan = check(settings, rendezvous.world_size)
    setup.execute(run, settings, plan, rendezvous, total_steps=settings.training.steps)


def check(settings: PPORunConfig, world_size: int) -> Plan:
    """Refuse (UserError) whatever cannot work, on every rank alike, before anything is allocated."""
    sizes, training, samples = settings.parallel, settings.training, settings.sampler.samples_per_prompt
    data_size = sizes.data(world_size)
    share = training.minibatches * training.micro_batch_size * data_size
    if training.batch_size % share:
        raise UserError(
            f"training.batch_size: {training.batch_size} is not a multiple of minibatches {training.minibatches} x "
            f"micro_batch_size {training.micro_batch_size} x {data_size} data-parallel ranks = {share}; change one"
        )
    if training.batch_size // data_size % samples:
        raise UserError(
            f"sampler.samples_per_prompt: {samples} does not divide the {training.batch_size // data_size} responses "
            "of a data-parallel rank; change it or training.batch_size"
        )
    sizes.check_micro_batches("training.batch_size", training.batch_size // share)
    settings.optimizer.check(training.updates)
    if settings.critic.optimizer is not None:
        settings.critic.optimizer.check(training.updates, "critic.optimizer")
    if settings.model.dropout:
        raise UserError("model.dropout: must be 0 for PPO, in sampling and in training (detail P4)")
    length = settings.prompts.length + settings.sampler.response_length
    sizes.check_length("prompts.length", length)
    if settings.ppo.score_position == "last" and settings.sampler.stop_at_eos:
        raise UserError(
            "ppo.score_position: 'last' is the last token of the fixed length, but sampler.stop_at_eos ends responses "
            "before; use last_valid, or stop_at_eos: false"
        )
    draw = settings.sampler
    if settings.ppo.kl.estimator == "exact" and (draw.greedy or draw.top_k or draw.top_p < 1):
        raise UserError(
            "ppo.kl.estimator: exact is the KL of the whole vocabulary, but sampler.top_k, top_p or greedy leave out "
            "tokens; use k1, or sample from all tokens"
        )
    if any(source.url for source in settings.scoring.sources) and 60 * settings.job.hang_minutes <= sources.PATIENCE:
        raise UserError(
            f"job.hang_minutes: {settings.job.hang_minutes:g} would end the run while a reward server is still within "
            f"the {sources.PATIENCE / 60:g} minutes that it may take for a batch, retries included; give "
            f"{sources.PATIENCE / 60 + 5:g} or more"
        )
    start = setup.find(settings, length=length, key="prompts.length + sampler.response_length", role="actor")
    if start.resume_from is not None:
        read_progress(start.resume_from)
    memory.check(
        start.architecture, sizes, dtype=settings.model.dtype, length=length, rows=training.batch_size // data_size,
        micro_batch=training.micro_batch_size,
        sampled=min(settings.sampler.micro_batch_size, training.batch_size // data_size),
    )  # fmt: skip
    sampler.check(
        settings.sampler,
        start.architecture,
        prompt_length=settings.prompts.length,
        eos_id=start.tokenizer.eos_id,
        pad_id=start.architecture.vocab_size,
    )
    for name, path, role in (
        ("reference.checkpoint", settings.reference.checkpoint, "actor"),
        ("critic.checkpoint", settings.critic.checkpoint, "reward"),
    ):
        if path is not None and Architecture.load(find_model(path, role)) != start.architecture:
            raise UserError(f"{name}: {path} has another architecture than model.checkpoint; give one of the same")
    notes = scoring.check(
        settings.scoring,
        start.tokenizer,
        sizes,
        vocab_size=start.architecture.vocab_size,
        prompt_length=settings.prompts.length,
        response_length=settings.sampler.response_length,
    )
    prompts, report = load_prompts(start.tokenizer, settings.prompts)
    notes, ptx = [*notes, report.summary()], None
    if settings.average is not None and not 0 < settings.average < 1:
        raise UserError(f"average: must be between 0 and 1, not {settings.average}")
    if settings.ptx is not None:
        rows = training.micro_batch_size * data_size
        if settings.ptx.batch_size % rows:
            raise UserError(
                f"ptx.batch_size: {settings.ptx.batch_size} is not a multiple of micro_batch_size "
                f"{training.micro_batch_size} x {data_size} data-parallel ranks = {rows}; change one of them"
            )
        sizes.check_micro_batches("ptx.batch_size", settings.ptx.batch_size // rows)
        if settings.ptx.data.max_length > length:
            raise UserError(
                f"ptx.data.max_length: {settings.ptx.data.max_length} is more than a prompt and a response of {length} "
                "tokens, which share an update with it; lower it"
            )
        ptx, report = load_sft(settings.ptx.data.train, start.tokenizer, settings.ptx.data)
        notes.append(report.summary())
    return Plan(start, prompts, ptx, tuple(notes))


def read_progress(step_directory: Path) -> Progress:
    """The loop's state in a step directory. Raises UserError where it is not what the loop has saved."""
    state = checkpoint.read_state(step_directory)
    saved, where = state.get("progress"), str(step_directory / checkpoint.STATE)
    if not isinstance(saved, dict) or "kl_coef" not in saved or saved.get("step") != state["step"]:
        raise UserError(f"{where}: its 'progress' is not that of a PPO run, or damaged; use another step directory")
    return config.from_dict(Progress, saved, where)


def run(settings: PPORunConfig, plan: Plan, topology: Topology) -> None:
    """Build, load, train. Collective."""
    with backend.loading():
        players, progress = assemble(settings, plan, topology)
    start, training = plan.start, settings.training
    lines = {
        "steps": f"{training.steps} of {training.batch_size} responses, {training.epochs} epochs of "
        f"{training.minibatches} updates",
    }
    setup.announce(settings, start, topology, lines, [*plan.notes, *audit.table(settings)])
    directory = Path(settings.run)
    if topology.rank == 0:
        audit.save(settings, directory / "audit.json")
        rate = preflight.matmul_rate() * topology.world_size
        work.save(work.ppo_step(settings, start.architecture, topology.data_size), rate, directory / "work.json")
    saved = {"actor": players.actor, "critic": players.critic, "average": players.average}
    roles = tuple(role for role, engine in saved.items() if engine is not None)
    with Log(
        directory, enabled=topology.rank == 0, start=progress.step, total=training.steps, unit="step",
        wandb=settings.log.wandb,
    ) as log:  # fmt: skip
        online.train(
            players,
            progress,
            settings=settings,
            checkpoints=Checkpoints(directory, settings.checkpoint),
            log=log,
            write_files=setup.files_writer(settings, start, roles, log),
        )


def assemble(settings: PPORunConfig, plan: Plan, topology: Topology) -> tuple[Players, Progress]:
    """The models, built and loaded, with the sampler and the scorer. Collective."""
    from megarlhf.models.build import build

    start, updates, shared = plan.start, settings.training.updates, settings.critic.kind == "shared"
    trains = setup.model_options(settings, trains=True, total_steps=updates)
    frozen = setup.model_options(settings, trains=False, total_steps=updates)
    role = "actor_critic" if shared else "actor"
    actor = build(role, start.architecture, topology, **trains)
    reference = build("reference", start.architecture, topology, **frozen)
    critic = None
    if not shared:
        own = {"optimizer": settings.critic.optimizer} if settings.critic.optimizer else {}
        critic = build("critic", start.architecture, topology, **(trains | own))
    progress = Progress(kl_coef=settings.ppo.kl.coef)
    new_head = ("value_head.",)
    origin = find_model(settings.reference.checkpoint) if settings.reference.checkpoint else start.source
    if origin is not None:
        checkpoint.load(reference, origin, weights_only=True)
    if start.resume_from is not None:
        checkpoint.load(actor, start.resume_from / "actor", weights_only=False)
        if critic is not None:
            checkpoint.load(critic, start.resume_from / "critic", weights_only=False)
        progress = read_progress(start.resume_from)
    elif start.source is not None:
        checkpoint.load(actor, start.source, weights_only=True, fresh=new_head if shared else ())
        if settings.critic.checkpoint is not None:
            checkpoint.load(critic, find_model(settings.critic.checkpoint, "reward"), weights_only=True)
        elif critic is not None:
            checkpoint.load(critic, start.source, weights_only=True, fresh=new_head)
    if settings.reference.on_host:
        rollout.keep_on_host(reference)

    average = None
    if settings.average is not None:
        average = build(role, start.architecture, topology, **(frozen | {"dtype": "fp32"}))
        if start.resume_from is not None:
            checkpoint.load(average, start.resume_from / "average", weights_only=True)
        else:
            average.follow(actor, 0.0)
    rows = min(settings.sampler.micro_batch_size, settings.training.batch_size // topology.data_size)
    policy_sampler = Sampler(
        actor, replace(settings.sampler, micro_batch_size=rows), prompt_length=settings.prompts.length,
        seed=settings.seed, eos_id=start.tokenizer.eos_id,
    )  # fmt: skip
    players = Players(
        actor=actor,
        critic=critic,
        reference=reference,
        sampler=policy_sampler,
        scorer=scoring.build_scorer(
            settings.scoring, topology, start.tokenizer, micro_batch_size=settings.training.micro_batch_size,
            dtype=settings.model.dtype,
        ),
        prompts=PromptLoader(
            plan.prompts,
            length=settings.prompts.length,
            global_batch=settings.training.batch_size // settings.sampler.samples_per_prompt,
            pad_id=policy_sampler.pad_id,
            dp_rank=topology.data_rank,
            dp_size=topology.data_size,
            seed=settings.seed,
        ),
        tokenizer=start.tokenizer,
        ptx=None if plan.ptx is None else Loader(
            plan.ptx,
            global_batch=settings.ptx.batch_size,
            dp_rank=topology.data_rank,
            dp_size=topology.data_size,
            seed=settings.seed,
            pad_id=start.tokenizer.pad_id,
            pad_multiple=settings.prompts.length + settings.sampler.response_length,  # an update has one row length
        ),
        average=average,
    )  # fmt: skip
    return players, progress
