"""Evaluation within the online loop: its records, the best step so far, and the end of a run that gets no better.
experience/held_out.py has the computation."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from megarlhf.batch import Rollout, Scores
from megarlhf.config import UserError, nearest
from megarlhf.data.files import paths, real_paths, weighted
from megarlhf.data.prompts import PromptSet, load_prompts
from megarlhf.experience.held_out import EvaluationConfig, pass_at, prompts_at_once, respond
from megarlhf.experience.sampler import SamplerConfig
from megarlhf.experience.scorer import Scorer
from megarlhf.log import Log
from megarlhf.models.spec import check_length
from megarlhf.train import memory, scoring
from megarlhf.train.clock import Clock
from megarlhf.train.rl_config import OnlineRunConfig
from megarlhf.train.samples import rows_of
from megarlhf.train.setup import Start

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class Best:
    """The best evaluation so far; saved with a run's progress."""

    metric: str = ""  # by which it is the best
    step: int = 0  # steps done then; 0: none is better than the one before the first step, or there was none
    value: float | None = None
    since: int = 0  # evaluations since then, none of which was better

    def extended(self, metric: str, step: int, value: float) -> Best:
        """With one evaluation more. What is not finite is not better."""
        before = self if self.metric == metric else Best(metric)
        if math.isfinite(value) and (before.value is None or value > before.value):
            return Best(metric, step, value)
        return replace(before, since=before.since + (before.value is not None))


def stopped(config: EvaluationConfig | None, best: Best) -> str | None:
    """Why a run trains no further; None if it does."""
    if config is None or config.patience is None or best.metric != config.best or best.since < config.patience:
        return None
    return f"{best.since} evaluations in a row had no better {best.metric} than {best.value:.4f} after step {best.step}"


def check(
    settings: OnlineRunConfig, start: Start, world_size: int, training: PromptSet
) -> tuple[PromptSet | None, list[str]]:
    """The held-out prompts (None: no evaluation) and notes for the banner; `training`: the prompts of training. Refuses
    (UserError) an evaluation that cannot work, before anything is allocated."""
    config = settings.evaluation
    if config is None:
        return None, []
    given, draws = config.prompts, samplers(config, settings.sampler)
    names = settings.scoring.names
    if config.source is not None and config.source not in names:
        raise UserError(f"evaluation.source: there is no source '{config.source}'; {nearest(config.source, names)}")
    if config.source is None and any(source.normalize for source in settings.scoring.sources):
        raise UserError(
            "evaluation.source: the score of a source with normalize: true is relative to a mean that moves with the "
            f"policy; name the source whose own number is to be compared: {', '.join(names)}"
        )
    if weighted(given.path):
        raise UserError("evaluation.prompts.path: every held-out prompt is answered once; remove the weights")
    for path in real_paths(given.path):
        if any(same_file(path, other) for other in real_paths(settings.prompts.path)):
            raise UserError(
                f"evaluation.prompts.path: {path} is the file of the training prompts; give a file of prompts that are "
                "held out"
            )
    response_length = draws[0].response_length
    length = given.length + response_length
    check_length(start.architecture, length, "evaluation.prompts.length + evaluation.response_length")
    records = scoring.RecordCheck(settings.scoring)
    prompts, report = load_prompts(start.tokenizer, given, check_record=records, cache=start.cache)
    share = -(-len(prompts) // settings.parallel.data(world_size))
    for draw in draws:
        samples, stages = draw.samples_per_prompt, settings.parallel.pipeline
        slots = min(draw.least_slots, -(-share * samples // stages)) * stages
        most = scoring.most_rows(settings.scoring, settings.job.hang_minutes)
        memory.check_sizes(
            start.architecture, settings.parallel, dtype=settings.model.dtype, length=length,
            rows=prompts_at_once(slots, samples, most) * samples, micro_batch_tokens=settings.micro_batch_tokens,
            sampled=slots,
        )  # fmt: skip
        # `respond` scores no more at once than the watchdog has patience for, but always one prompt's.
        scoring.check_patience(settings.scoring, samples, settings.job.hang_minutes)
    if (given.length, response_length) != (settings.prompts.length, settings.sampler.response_length):
        scoring.check_sources(
            settings.scoring, start.tokenizer, settings.parallel, vocab_size=start.architecture.vocab_size,
            prompt_length=given.length, response_length=response_length,
        )  # fmt: skip
    notes, texts = [f"held out: {report.summary()}"], {*prompts.texts}
    known = {text for text in training.texts if text in texts}
    if common := sum(text in known for text in prompts.texts):
        notes.append(
            f"{common} of {len(prompts)} held-out prompts are prompts of training, too: {', '.join(paths(given.path))}"
        )
    return prompts, notes


def same_file(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):  # one is missing, say: to be reported when it is read
        return False


def samplers(config: EvaluationConfig, usual: SamplerConfig) -> list[SamplerConfig]:
    """Of the responses that are wanted: greedy ones first, then samples."""
    greedy = [config.decoded(usual)] if config.greedy else []
    return greedy + ([config.sampled(usual)] if config.samples else [])


class Evaluation:
    """Evaluates the actor on held-out prompts, or never does (`prompts` None)."""

    def __init__(
        self, settings: OnlineRunConfig, prompts: PromptSet | None, actor: Engine, scorer: Scorer, *, eos_id: int | None
    ):
        self.settings, self.prompts, self.actor, self.scorer, self.eos_id = settings, prompts, actor, scorer, eos_id

    def after(self, step: int, best: Best, log: Log) -> Best:
        """If one is due after `step` steps, evaluate and record it. The best so far, of which `best` was the one
        before. Collective."""
        config = self.settings.evaluation
        if self.prompts is None or (step % config.every and step != self.settings.training.steps):
            return best
        clock, rows = Clock(step), []
        clock.enter("evaluation")
        values: dict[str, float] = {}

        def keep(rollout: Rollout, scores: Scores) -> None:
            """Rows of the first greedy responses; the watchdog hears of each part."""
            clock.enter("evaluation")
            wanted = self.settings.log.samples - len(rows)
            if log.enabled and wanted > 0:
                shown = rollout.select(slice(wanted)), scores.select(slice(wanted))
                rows.extend(rows_of(*shown, self.scorer, self.prompts.records, config.prompts.prompt_key))

        for draw in samplers(config, self.settings.sampler):
            found = respond(
                self.actor, self.scorer, self.prompts, draw, length=config.prompts.length, source=config.source,
                seed=self.settings.seed, eos_id=self.eos_id,
                most_rows=scoring.most_rows(self.settings.scoring, self.settings.job.hang_minutes),
                on_batch=keep if draw.greedy else lambda *_: clock.enter("evaluation"),
            )  # fmt: skip
            values |= measured(found, config, greedy=draw.greedy)
            if draw.greedy:
                log.distribution("held_out/score", found[:, 0, 0].tolist(), step)
        clock.stop()
        if config.best is not None:
            best = best.extended(config.best, step, values[config.best])
            values["evaluation/best_step"] = best.step
        log.record(step, values | {"time/evaluation": clock.seconds["time/evaluation"]})
        log.table("held_out", rows, step)
        shown = ", ".join(f"{name.removeprefix('evaluation/')} {value:.4g}" for name, value in values.items())
        log.say(f"step {step}: held-out {shown}")
        if why := self.stopped(best):
            log.say(f"step {step}: training stops, since {why} (evaluation.patience)")
        return best

    def stopped(self, best: Best) -> str | None:
        return stopped(self.settings.evaluation, best)


def measured(found: Tensor, config: EvaluationConfig, *, greedy: bool) -> dict[str, float]:
    """The metrics of responses, (K, n, 2) scores and lengths. Every prompt counts the same, in the order of the file,
    so that sums are rounded alike in every layout."""
    scores, lengths = found.unbind(2)
    right = (scores >= config.threshold).sum(1).tolist()
    if not greedy:
        return {f"evaluation/pass@{k}": fmean(pass_at(k, c, config.samples) for c in right) for k in config.ks}
    return {
        "evaluation/greedy": fmean(right),
        "evaluation/score": fmean(scores[:, 0].tolist()),
        "evaluation/response_length": fmean(lengths[:, 0].tolist()),
    }
