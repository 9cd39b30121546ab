"""The online loop: sample, score, learn (`megarlhf ppo`). `train` is the page that tells the story."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megarlhf import metrics
from megarlhf.algorithms import ppo
from megarlhf.algorithms.kl import kl_estimate, next_kl_coef
from megarlhf.algorithms.ppo import PPOConfig
from megarlhf.algorithms.supervised import ptx_loss
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import backend, slurm, watchdog
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.prompts import PromptLoader
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.log import Log
from megarlhf.metrics import Metric

if TYPE_CHECKING:
    from megarlhf.batch import Experience, Rollout, Scores, Signals
    from megarlhf.engine import Engine, Part
    from megarlhf.experience.reward import Scorer
    from megarlhf.experience.sampler import Sampler


@dataclass(frozen=True)
class GuardConfig:
    """What is not learned from. A batch that breaks a rule changes no weights and is written to the run directory."""

    max_kl: float = 100.0  # nats a response, mean of the batch
    patience: int = 3  # so many such batches in a row stop the run

    def __post_init__(self):
        if self.max_kl <= 0 or self.patience < 1:
            raise ValueError("max_kl: max_kl and patience must be positive")


@dataclass
class Players:
    """Who takes part in a step."""

    actor: Engine
    critic: Engine | None  # None: the values come from a head on the actor's trunk
    reference: Engine
    sampler: Sampler
    scorer: Scorer
    prompts: PromptLoader
    tokenizer: Tokenizer
    ptx: Loader | None = None  # text whose likelihood is kept up
    average: Engine | None = None  # follows the actor


@dataclass
class Progress:
    """What changes from step to step beside weights and optimizers; saved with every checkpoint."""

    step: int = 0  # steps done: the data cursor, and the key of all random choices
    kl_coef: float = 0.0
    refused: int = 0  # batches in a row that were not learned from


def train(
    players: Players,
    progress: Progress,
    *,
    settings: Any,
    checkpoints: Checkpoints,
    log: Log,
    write_files: Callable[[Path], None],
) -> None:
    """From progress.step to training.steps: a step samples a batch, scores it and learns from it."""
    from megarlhf.experience import gate
    from megarlhf.experience import rollout as rollouts

    actor, critic, reference = players.actor, players.critic, players.reference
    topology, training, algorithm = actor.topology, settings.training, settings.ppo
    temperature = settings.sampler.temperature  # of all log-probs too (detail P1)
    job = slurm.Job(settings.job, Path(settings.run), progress.step)
    while progress.step < training.steps:
        step, checked = progress.step, {}
        clock = Clock(step + 1)
        clock.enter("sample")
        rollout = players.sampler.sample(players.prompts.batch(step))  # 1. act
        clock.enter("score")
        scores = players.scorer.score(rollout)  # 2. reward
        clock.enter("evaluate")
        signals = rollouts.evaluate(  # 3. log-probs and values
            rollout, actor=actor, reference=reference, critic=critic, temperature=temperature,
            exact_kl=algorithm.kl.estimator == "exact",
        )  # fmt: skip
        clock.enter("gate")
        if settings.gate.due(step):
            at_start = step == 0 and settings.reference.checkpoint is None
            checked = gate.check(
                rollout, signals, actor=actor, at_start=at_start, temperature=temperature, config=settings.gate
            )
        clock.enter("learn")
        experience = ppo.make_experience(  # 4. credit
            rollout, scores, signals, kl_coef=progress.kl_coef, config=algorithm
        )
        means = objective(rollout, scores, signals, progress.kl_coef, algorithm, actor)
        if refusal := refused(means, settings.guard):
            refuse(refusal, rollout, experience, players, progress, settings, log)
        else:
            progress.refused = 0
            parts = []
            for minibatch in rollouts.minibatches(  # 5. learn
                experience,
                epochs=training.epochs,
                count=training.minibatches,
                seed=settings.seed,
                step=step,
                topology=topology,
            ):
                whitened = ppo.whiten_minibatch(minibatch, config=algorithm, group=topology.data_group)
                parts.append(learn(players, whitened, settings))
            means |= metrics.add(parts)
        clock.stop()
        values = {name: metric.value for name, metric in means.items()} | checked | clock.seconds
        values["objective/kl_coef"] = progress.kl_coef
        values["tokens_per_second"] = training.batch_size * rollout.tokens.shape[1] / values["time/step"]
        progress.kl_coef = next_kl_coef(  # 6. adapt
            progress.kl_coef, values["objective/kl"], algorithm.kl, batch_size=training.batch_size
        )
        progress.step += 1
        last = progress.step == training.steps
        if progress.step % settings.log.every == 0 or last:
            shown = {"score": f"{values['objective/scores']:+.3f}", "kl": f"{values['objective/kl']:.2f}"}
            log.step(progress.step, values, shown)
        if step % settings.log.samples_every == 0 or last:
            record_samples(rollout, scores, signals, players, settings, progress.step, log)
        checkpoints.poll()
        leave = job.leave(checkpoints.seconds)
        if progress.step % settings.checkpoint.every == 0 or last or leave:
            models = {"actor": actor, "critic": critic, "average": players.average}
            models = {role: engine for role, engine in models.items() if engine is not None}
            checkpoints.save(progress.step, models, {"progress": dataclasses.asdict(progress)}, write_files)
        if leave:
            break
    checkpoints.finish()
    job.close(progress.step, training.steps)


def learn(players: Players, minibatch: Experience, settings: Any) -> dict[str, Metric]:
    """One update of the policy and of the critic, in one backward where they share a trunk."""
    actor, critic, algorithm = players.actor, players.critic, settings.ppo
    options = dict(temperature=settings.sampler.temperature, with_entropy=True)
    loss = ppo.policy_loss if critic is not None else ppo.joint_loss
    more = pretraining(players, minibatch, settings.ptx.coef) if players.ptx is not None else []
    means = actor.step(minibatch, partial(loss, config=algorithm), *more, **options)
    if players.average is not None:
        players.average.follow(actor, settings.average)
    if critic is None:
        return means
    value = critic.step(minibatch, partial(ppo.value_loss, config=algorithm))
    rename = {name: f"ppo/val/{name}" for name in ("grad_norm", "lr", "skipped")}
    return means | {rename.get(name, name): metric for name, metric in value.items()}


def pretraining(players: Players, minibatch: Experience, coef: float) -> list[Part]:
    """The next batch of text as a further part of the policy's update; a function of the number of updates."""
    actor = players.actor
    batch = players.ptx.batch(actor.steps)
    counts = torch.tensor([minibatch.mask.sum(), batch.mask.sum()], dtype=torch.float64, device=backend.device())
    dist.all_reduce(counts, group=actor.topology.data_group)
    return [(batch, partial(ptx_loss, scale=coef * (counts[0] / counts[1]).item()), {})]


def objective(
    rollout: Rollout, scores: Scores, signals: Signals, kl_coef: float, config: PPOConfig, actor: Engine
) -> dict[str, Metric]:
    """What the global batch says about the policy, on every rank alike."""
    values = ppo.objective(rollout, scores, signals, kl_coef=kl_coef, config=config)
    gap = torch.where(rollout.mask, (rollout.logprobs - signals.logprobs).abs(), 0).sum()
    values["sampler/gap"] = (gap, rollout.mask.sum())
    values["objective/accepted"] = (scores.accepted.sum(), torch.ones_like(scores.scores).sum())
    local = {name: metric.map(float) for name, metric in metrics.of_loss(values).items()}
    return metrics.all_reduce(local, actor.topology.data_group, backend.device())


def refused(means: dict[str, Metric], config: GuardConfig) -> str | None:
    """Why a batch must not be learned from, if so; the same on every rank."""
    bad = [name for name, metric in means.items() if not math.isfinite(metric.value)]
    if bad:
        return f"{', '.join(bad)} is not finite"
    kl = means["objective/kl"].value
    return f"objective/kl is {kl:.1f}, beyond guard.max_kl {config.max_kl:g}" if kl > config.max_kl else None


def refuse(
    why: str, rollout: Rollout, experience: Experience, players: Players, progress: Progress, settings: Any, log: Log
) -> None:
    """Write the batch down for replay instead of learning from it; stop the run where that goes on."""
    progress.refused += 1
    topology = players.actor.topology
    directory = Path(settings.run) / "refused"
    if topology.tensor_rank == 0 and topology.first_stage:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"why": why, "rollout": vars(rollout), "experience": vars(experience)},
            directory / f"step_{progress.step:08d}_rank_{topology.data_rank}.pt",
        )
    log.say(f"step {progress.step}: not learned from, {why}; the batch is in {directory}")
    if progress.refused >= settings.guard.patience:
        raise UserError(
            f"step {progress.step}: {progress.refused} batches in a row could not be learned from, the last because "
            f"{why}; they are in {directory}; resume from an earlier checkpoint with a lower optimizer.lr or a higher "
            "ppo.kl.coef"
        )


def record_samples(
    rollout: Rollout, scores: Scores, signals: Signals, players: Players, settings: Any, step: int, log: Log
) -> None:
    """The first responses of the batch with their scores, to samples.jsonl, TensorBoard and W&B."""
    if not log.enabled:
        return
    from megarlhf.experience.reward import texts

    kl = torch.where(rollout.mask, kl_estimate(signals.logprobs, signals.ref_logprobs), 0).sum(1)
    queries, responses = texts(rollout.select(slice(settings.log.samples)), players.tokenizer)
    rows = [
        {"query": query, "response": response, "score": score, "kl": nats}
        for query, response, score, nats in zip(queries, responses, scores.scores.tolist(), kl.tolist(), strict=False)
    ]
    log.table("samples", rows, step)


class Clock:
    """Seconds of each phase of a step. The watchdog hears of the phases too."""

    def __init__(self, step: int):
        self.step, self.name, self.since = step, "", time.perf_counter()
        self.seconds = {"time/step": 0.0}

    def enter(self, name: str) -> None:
        self.stop()
        watchdog.phase(name, self.step)
        self.name = f"time/{name}"

    def stop(self) -> None:
        backend.synchronize()
        now = time.perf_counter()
        if self.name:
            self.seconds[self.name] = now - self.since
            self.seconds["time/step"] += now - self.since
        self.name, self.since = "", now
