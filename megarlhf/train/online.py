"""The online loop: sample, score, learn (`megarlhf ppo`, `megarlhf rl`). `train` is the loop; algorithms/interface.py
defines algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from megarlhf import metrics
from megarlhf.algorithms.interface import OnlineAlgorithm, State
from megarlhf.batch import Batch, Experience
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import backend, slurm
from megarlhf.log import Log
from megarlhf.metrics import Metric
from megarlhf.train import guard
from megarlhf.train.actions import Actions, Models, Progress
from megarlhf.train.clock import Clock
from megarlhf.train.meter import Meter, online_flops
from megarlhf.train.meter import shown as costs
from megarlhf.train.profiling import Profile
from megarlhf.train.rl_config import OnlineRunConfig
from megarlhf.train.samples import record_samples, record_scores


def train(
    algorithm: OnlineAlgorithm,
    models: Models,
    progress: Progress,
    *,
    settings: OnlineRunConfig,
    checkpoints: Checkpoints,
    log: Log,
    write_files: Callable[[Path], None],
) -> None:
    """From progress.step to training.steps: a step samples a batch, scores it and learns from it."""
    from megarlhf.experience import gate

    actor, training, directory = models.actor, settings.training, Path(settings.run)
    temperature = settings.sampler.temperature  # of all log-probs too (detail P1)
    job = slurm.Job(settings.job, directory, progress.step)
    evaluation = models.evaluation
    meter = Meter(online_flops(settings, actor.modules[0].architecture))
    profile = Profile(settings.run, settings.log.profile)
    if progress.step == 0:
        progress.best = evaluation.after(0, progress.best, log)
    while progress.step < training.steps and not evaluation.stopped(progress.best):
        step, checked = progress.step, {}
        profile.begin(step + 1)
        clock = Clock(step + 1)
        act = Actions(models, progress, clock, temperature=temperature, signals=algorithm.signals)
        batch = algorithm.collect(act)  # 1. sample, score, evaluate
        clock.enter("gate")
        if settings.gate.due(step):
            at_start = step == 0 and settings.reference.checkpoint is None
            checked = gate.run_gate(
                batch.rollout, batch.signals, actor=actor, at_start=at_start, temperature=temperature,
                config=settings.gate, offloaded=models.offloaded,
            )  # fmt: skip
        clock.enter("learn")
        experience = algorithm.make_experience(batch, progress.state, act.group)  # 2. credit
        means = measure(algorithm, batch, progress.state, models)
        if why := guard.refusal(means, settings.guard):
            progress.refused += 1
            guard.save(why, batch, experience, directory / "refused", actor.topology, step)
            log.say(f"step {step}: not learned from, {why}; the batch is in {directory / 'refused'}")
            if progress.refused >= settings.guard.patience:
                raise guard.stop(why, progress.refused, directory / "refused", step)
        else:
            progress.refused = 0
            means |= learn(algorithm, models, act, experience, settings)  # 3. learn
            algorithm.after_batch(act)
        clock.stop()
        values = metrics.values(means) | checked | clock.seconds
        values |= {f"objective/{name}": number for name, number in progress.state.items()}
        values["tokens_per_second"] = training.batch_size * values["sampler/tokens"] / values["time/step"]
        progress.state = algorithm.adapt(progress.state, values, training.batch_size)  # 4. adapt
        progress.step += 1
        progress.best = evaluation.after(progress.step, progress.best, log)  # 5. held-out prompts
        last = progress.step == training.steps or evaluation.stopped(progress.best) is not None
        profile.end(progress.step, last=last)
        if progress.step % settings.log.every == 0 or last:
            seconds, tokens = values["time/step"], training.batch_size * values["sampler/tokens"]
            values |= meter.values(tokens, seconds)
            shown = {"score": f"{values['objective/scores']:+.3f}", "kl": f"{values['objective/kl']:.2f}"}
            log.step(progress.step, values, shown | {"seconds": f"{seconds:.2f}"} | costs(values))
        if step % settings.log.samples_every == 0 or last:
            prompt_key, count = settings.prompts.prompt_key, settings.log.samples
            record_samples(batch, models.scorer, prompt_key, count, progress.step, log)
            record_scores(batch.scores, models.scorer.names, models.actor.topology, progress.step, log)
        checkpoints.poll()
        leave = job.leave(checkpoints.seconds)
        best = progress.best.step
        if progress.step == best or progress.step % settings.checkpoint.every == 0 or last or leave:
            state = {"progress": dataclasses.asdict(progress), "best": best}
            checkpoints.save(progress.step, models.saved, state, write_files)
        if leave:
            break
    checkpoints.finish()
    profile.end(progress.step, last=True)  # if the job leaves within the profiled steps
    job.close(progress.step, progress.step if evaluation.stopped(progress.best) else training.steps)


def learn(
    algorithm: OnlineAlgorithm, models: Models, act: Actions, experience: Experience, settings: OnlineRunConfig
) -> dict[str, Metric]:
    """The updates of a step: each minibatch once through every model that learns."""
    from megarlhf.experience.rollout import minibatches

    training, topology, parts = settings.training, models.actor.topology, []
    for minibatch in minibatches(
        experience, epochs=training.epochs, count=training.minibatches, seed=settings.seed, step=act.step,
        topology=topology,
    ):  # fmt: skip
        minibatch, means = algorithm.minibatch(minibatch, topology.data_group), {}
        for model, update in algorithm.updates(act.step).items():
            rows, more, options = models.inputs(model, update, minibatch, settings.sampler.temperature)
            found = models.saved[model].step(rows, update.loss, *more, **options)
            own = {name: f"{update.prefix}{name}" for name in ("grad_norm", "lr", "skipped")}
            means |= {own.get(name, name): metric for name, metric in found.items()}
            if model == "actor":
                algorithm.after_update(act)
        parts.append(means)
    return metrics.add(parts)


def measure(algorithm: OnlineAlgorithm, batch: Batch, state: State, models: Models) -> dict[str, Metric]:
    """Metrics of the policy on the global batch, the same on every rank."""
    rollout, scores = batch.rollout, batch.scores
    values = algorithm.objective(batch, state) | models.scorer.metrics(scores)
    gap = torch.where(rollout.mask, (rollout.logprobs - batch.signals.logprobs).abs(), 0).sum()
    values["sampler/gap"] = (gap, rollout.mask.sum())
    values["sampler/tokens"] = ((rollout.segments > 0).sum(), torch.ones_like(scores.scores).sum())  # of a row
    values["objective/accepted"] = (scores.accepted.sum(), torch.ones_like(scores.scores).sum())
    local = {name: metric.map(float) for name, metric in metrics.of_loss(values).items()}
    return metrics.all_reduce(local, models.actor.topology.data_group, backend.device())
