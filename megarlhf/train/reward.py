"""`megarlhf reward`: a reward model from preferences, the offline loop on comparisons.

It starts from an SFT model with a new scalar head (detail R2). Before and after training its scores are normalised to a
given mean and deviation over responses that the SFT model samples (detail R3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megarlhf import checkpoint, config
from megarlhf.algorithms import reward
from megarlhf.algorithms.masked import last_valid
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import launch
from megarlhf.cluster.parallel import ParallelConfig, Topology
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError
from megarlhf.data.preferences import PreferenceDataConfig, PreferenceLoader, Preferences, load_preferences
from megarlhf.data.prompts import PromptLoader, PromptsConfig, PromptSet, load_prompts
from megarlhf.experience import sampler
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.log import Log
from megarlhf.models.spec import ModelConfig, check_length
from megarlhf.optim import OptimizerConfig
from megarlhf.train import memory, offline, setup
from megarlhf.train.setup import Start
from megarlhf.train.state import LogConfig, TrainingConfig

if TYPE_CHECKING:
    from megarlhf.batch import Rollout
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class NormalizationConfig:
    """Scores get this mean and deviation over responses sampled from the initial policy (detail R3)."""

    prompts: PromptsConfig
    samples: int = 256
    mean: float = 0.0
    std: float = 1.0
    response_length: int = 24
    stop_at_eos: bool = True
    temperature: float = 1.0

    def __post_init__(self):
        if self.samples < 2:
            raise ValueError(f"samples: must be at least 2, not {self.samples}")
        if self.std <= 0:
            raise ValueError(f"std: must be positive, not {self.std}")
        self.sampler(1)  # which checks its part

    def sampler(self, micro_batch_size: int) -> SamplerConfig:
        """How the responses are sampled."""
        return SamplerConfig(
            response_length=self.response_length,
            stop_at_eos=self.stop_at_eos,
            temperature=self.temperature,
            micro_batch_size=micro_batch_size,
        )


@dataclass(frozen=True)
class RewardConfig:
    """One section for each thing it configures."""

    run: str  # directory of this run: checkpoints, metrics, the resolved configuration
    model: ModelConfig  # checkpoint: the SFT model
    data: PreferenceDataConfig
    loss: Literal["pairwise", "log_exp", "best_of"] = "pairwise"
    normalization: NormalizationConfig | None = None
    tokenizer: str | None = None  # default: the one that came with model.checkpoint
    seed: int = 0  # of the head, the order of the data and the sampled responses
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="linear"))  # to 0 (detail G5)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self):
        config.check_seed(self.seed)


@dataclass(frozen=True)
class Plan:
    """A checked configuration: everything that can be had without a process group."""

    start: Start
    training: Preferences
    validation: Preferences | None
    prompts: PromptSet | None
    total_steps: int
    notes: tuple[str, ...]


def main(path: str, overrides: list[str]) -> None:
    settings = config.load(RewardConfig, path, overrides)
    rendezvous = launch.resolve()
    plan = check(settings, rendezvous.world_size)
    setup.execute(run, settings, plan, rendezvous, total_steps=plan.total_steps)


def check(settings: RewardConfig, world_size: int) -> Plan:
    """Refuse (UserError) whatever cannot work, on every rank alike, before anything is allocated."""
    size, micro = settings.data.num_responses, settings.training.micro_batch_size
    settings.training.check(settings.parallel, world_size)
    if micro % size:
        raise UserError(
            f"training.micro_batch_size: {micro} rows cannot hold whole prompts of data.num_responses {size}; make it "
            f"a multiple of {size}"
        )
    if settings.loss == "pairwise" and size != 2:
        raise UserError(
            f"loss: pairwise compares 2 responses, but data.num_responses is {size}; use log_exp or best_of"
        )
    start = setup.find(settings, length=settings.data.max_length, role="reward")
    setup.check_memory(settings, start.architecture, world_size)
    training, report = load_preferences(settings.data.train, start.tokenizer, settings.data)
    notes, validation, prompts = [report.summary()], None, None
    if settings.data.validation is not None:
        validation, report = load_preferences(settings.data.validation, start.tokenizer, settings.data)
        notes.append(report.summary())
    if settings.normalization is None:
        notes.append("scores are not normalised (detail R3): the section normalization is not set")
    else:
        samples, data_size = settings.normalization.samples, settings.parallel.data(world_size)
        if samples % data_size:
            raise UserError(
                f"normalization.samples: {samples} cannot be shared evenly by {data_size} data-parallel ranks; make it "
                f"a multiple of {data_size}"
            )
        if start.source is None:
            raise UserError("normalization: samples from the SFT model, so it needs model.checkpoint; give one")
        length = settings.normalization.prompts.length + settings.normalization.response_length
        check_length(start.architecture, length, "normalization: prompts.length + response_length")
        memory.check(
            start.architecture, settings.parallel, dtype=settings.model.dtype, length=length, micro_batch=micro,
            rows=samples // settings.parallel.data(world_size), sampled=micro,
        )  # fmt: skip
        settings.parallel.check_length("normalization.prompts.length", length)
        sampler.check(
            settings.normalization.sampler(micro),
            start.architecture,
            prompt_length=settings.normalization.prompts.length,
            eos_id=start.tokenizer.eos_id,
            pad_id=start.architecture.vocab_size,
        )
        prompts, report = load_prompts(start.tokenizer, settings.normalization.prompts)
        notes.append(report.summary())
    total = settings.training.total_steps(len(training))
    settings.optimizer.check(total)
    return Plan(start, training, validation, prompts, total, tuple(notes))


def run(settings: RewardConfig, plan: Plan, topology: Topology) -> None:
    """Build, load, normalise, train, normalise. Collective."""
    from megarlhf.models.build import build

    start, total = plan.start, plan.total_steps
    samples = sample(settings, plan, topology) if settings.normalization is not None else None
    engine = build(
        "reward", start.architecture, topology, **setup.model_options(settings, trains=True, total_steps=total)
    )
    if start.resume_from is not None:
        checkpoint.load(engine, start.resume_from / "reward", weights_only=False)
    elif start.source is not None:
        checkpoint.load(engine, start.source, weights_only=True, fresh=("value_head.",))

    def loader(preferences: Preferences) -> PreferenceLoader:
        return PreferenceLoader(
            preferences,
            global_batch=settings.training.global_batch_size,
            dp_rank=topology.data_rank,
            dp_size=topology.data_size,
            seed=settings.seed,
            pad_id=start.tokenizer.pad_id,
            pad_multiple=setup.pad_multiple(settings.parallel),
        )

    loss = {
        "pairwise": reward.pairwise_loss,
        "log_exp": partial(reward.log_exp_loss, num_responses=settings.data.num_responses),
        "best_of": partial(reward.best_of_loss, num_responses=settings.data.num_responses),
    }[settings.loss]
    steps = {"steps": f"{total} of {settings.training.global_batch_size} rows"}
    setup.announce(settings, start, topology, steps, list(plan.notes))
    directory = Path(settings.run)
    with Log(
        directory, enabled=topology.rank == 0, start=engine.steps, total=total, unit="step", wandb=settings.log.wandb
    ) as log:

        def normalise_at(step: int) -> None:
            if samples is not None and step in (0, total):
                gain, bias = normalise(engine, samples, settings.normalization)
                log.record(step, {"normalization/gain": gain, "normalization/bias": bias})
                log.say(
                    f"step {step}: scores normalised over {settings.normalization.samples} samples, gain {gain:.4g}"
                )

        if engine.steps == 0:
            normalise_at(0)
        offline.train(
            engine,
            "reward",
            loss,
            loader(plan.training),
            loader(plan.validation) if plan.validation is not None else None,
            checkpoints=Checkpoints(directory, settings.checkpoint),
            log=log,
            settings=settings,
            write_files=setup.files_writer(settings, start, ("reward",), log),
            before_save=normalise_at,
        )


def sample(settings: RewardConfig, plan: Plan, topology: Topology) -> Rollout:
    """This data-parallel rank's share of the responses that scores are normalised over, from the SFT model, which is
    gone afterwards."""
    from megarlhf.models.build import build

    normalization, start = settings.normalization, plan.start
    options = setup.model_options(settings, trains=False, total_steps=1)
    policy = build("reference", start.architecture, topology, **options)
    checkpoint.load(policy, start.source, weights_only=True)
    policy_sampler = Sampler(
        policy,
        normalization.sampler(settings.training.micro_batch_size),
        prompt_length=normalization.prompts.length,
        seed=settings.seed,
        eos_id=start.tokenizer.eos_id,
    )
    prompts = PromptLoader(
        plan.prompts,
        length=normalization.prompts.length,
        global_batch=normalization.samples,
        pad_id=policy_sampler.pad_id,
        dp_rank=topology.data_rank,
        dp_size=topology.data_size,
        seed=settings.seed,
    )
    return policy_sampler.sample(prompts.batch(0))


def normalise(engine: Engine, samples: Rollout, target: NormalizationConfig) -> tuple[float, float]:
    """Set the head's gain and bias so that the scores of `samples` have the target's mean and deviation; returns the
    two. Collective."""
    outputs = engine.forward(samples)
    scores = reward.final_scores(outputs["scores"], last_valid(samples.mask))
    gain, bias = reward.normalisation(
        scores, target_mean=target.mean, target_std=target.std, group=engine.topology.data_group
    )
    for module in engine.modules:
        if hasattr(module, "value_head"):  # the last stage; the scores already have the gain and bias so far
            head = module.value_head
            head.reward_gain.mul_(gain)
            head.reward_bias.mul_(gain).add_(bias)
    return gain, bias
