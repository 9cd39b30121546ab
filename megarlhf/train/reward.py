"""`megarlhf reward`: a reward model from preferences, the offline loop on comparisons.

It starts from an SFT model with a new scalar head (detail R2). Before and after training its scores are normalised to a
given mean and deviation over responses that the SFT model samples (detail R3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from megarlhf import config
from megarlhf.algorithms.masked import last_valid
from megarlhf.algorithms.reward import LossName, final_scores, normalisation, reward_model
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.preferences import PreferenceDataConfig, PreferenceLoader, load_preferences
from megarlhf.data.prompts import PromptLoader, PromptsConfig, PromptSet, load_prompts
from megarlhf.experience import sampler
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models import adapters
from megarlhf.models.spec import check_length
from megarlhf.optim import OptimizerConfig
from megarlhf.train import data_set, memory, setup
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.settings import OfflineRunConfig

if TYPE_CHECKING:
    from megarlhf.batch import Rollout
    from megarlhf.engine import Engine
    from megarlhf.log import Log


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
        self.sampler(1)  # checks the sampling options

    def sampler(self, slots: int) -> SamplerConfig:
        """How the responses are sampled."""
        return SamplerConfig(
            response_length=self.response_length,
            stop_at_eos=self.stop_at_eos,
            temperature=self.temperature,
            micro_batch_size=slots,
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(OfflineRunConfig):
    """One section for each thing it configures. model.checkpoint: the SFT model."""

    data: PreferenceDataConfig
    loss: LossName = "pairwise"
    normalization: NormalizationConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="linear"))  # detail G5


@dataclass(frozen=True, kw_only=True)
class Plan(data_set.Plan):
    prompts: PromptSet | None  # of the normalisation


def check(settings: RewardConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    size = settings.data.num_responses
    if settings.loss == "pairwise" and size != 2:
        raise UserError(
            f"loss: pairwise compares 2 responses, but data.num_responses is {size}; use log_exp or best_of"
        )
    start = data_set.find(settings, world_size, role="reward", together=size)
    load = partial(load_preferences, tokenizer=start.tokenizer, config=settings.data, cache=start.cache)
    pairs, validation, notes = data_set.read(settings.data, load)
    prompts = None
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
        memory.check_sizes(
            start.architecture, settings.parallel, dtype=settings.model.dtype, length=length, rows=samples // data_size,
            micro_batch_tokens=settings.micro_batch_tokens, sampled=slots(settings, data_size),
        )  # fmt: skip
        sampler.check_sampling(
            settings.normalization.sampler(slots(settings, data_size)),
            start.architecture,
            prompt_length=settings.normalization.prompts.length,
            eos_id=start.tokenizer.eos_id,
            pad_id=start.architecture.vocab_size,
        )
        prompts, report = load_prompts(
            start.tokenizer, settings.normalization.prompts, keep_records=False, cache=start.cache
        )
        notes.append(report.summary())
    total = data_set.total_steps(settings, pairs)
    return Plan(
        start=start, total_steps=total, notes=tuple(notes), training=pairs, validation=validation, prompts=prompts
    )


def slots(settings: RewardConfig, data_size: int) -> int:
    """How many responses for the normalisation each stage samples at once: their caches have the tokens of a
    micro-batch."""
    normalization = settings.normalization
    share = -(-normalization.samples // (data_size * settings.parallel.pipeline))
    length = normalization.prompts.length + normalization.response_length
    return min(max(1, settings.micro_batch_tokens // length), max(1, share))


def prepare(settings: RewardConfig, plan: Plan, topology: Topology) -> Prepared:
    """Sample the responses for the normalisation, build and load. Collective."""
    samples = sample(settings, plan, topology) if settings.normalization is not None else None
    engine = data_set.trained(settings, plan, topology, "reward", fresh=("value_head.",))

    def normalise_ends(step: int, log: Log) -> None:
        if samples is None or step not in (0, plan.total_steps):
            return
        gain, bias = normalise(engine, samples, settings.normalization)
        log.record(step, {"normalization/gain": gain, "normalization/bias": bias})
        log.say(f"step {step}: scores normalised over {settings.normalization.samples} samples, gain {gain:.4g}")

    algorithm = reward_model(settings.loss, num_responses=settings.data.num_responses)
    return data_set.prepared(
        settings, plan, topology, algorithm, {"reward": engine}, PreferenceLoader, adjust=normalise_ends
    )


def sample(settings: RewardConfig, plan: Plan, topology: Topology) -> Rollout:
    """This data-parallel rank's share of the responses for the normalisation, sampled from the SFT model, which is
    freed afterwards."""
    from megarlhf.models.build import build

    normalization, start = settings.normalization, plan.start
    options = setup.model_options(settings, trains=False, total_steps=1)
    policy = build("reference", start.architecture, topology, **options)
    adapters.load(policy, start.source)
    policy_sampler = Sampler(
        policy,
        normalization.sampler(slots(settings, topology.data_size)),
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
    scores = final_scores(outputs["scores"], last_valid(samples.mask))
    gain, bias = normalisation(scores, target_mean=target.mean, target_std=target.std, group=engine.topology.data_group)
    for module in engine.modules:
        if hasattr(module, "value_head"):  # the last stage; the scores include the present gain and bias
            head = module.value_head
            head.reward_gain.mul_(gain)
            head.reward_bias.mul_(gain).add_(bias)
    return gain, bias


PROGRAM = Program((RewardConfig,), partial(config.load, RewardConfig), check, training(prepare))
