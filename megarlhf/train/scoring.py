"""Reward models of a program: checked against the policy, loaded, and given to a `Scorer`."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megarlhf import config as configuration
from megarlhf.cluster.parallel import ParallelConfig, Topology
from megarlhf.config import UserError
from megarlhf.data.steps import check_separator
from megarlhf.data.tokenizer import Tokenizer, check_same, token_id
from megarlhf.experience import sandbox, verifiers
from megarlhf.experience.answers import PATTERN_SECONDS
from megarlhf.experience.scorer import Scorer, ScoringConfig, SourceConfig
from megarlhf.experience.sources import PATIENCE, FunctionScorer, Record
from megarlhf.experience.verifiers import Verifier
from megarlhf.models import adapters
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture, check_layout
from megarlhf.train.settings import RUN_FILE

if TYPE_CHECKING:
    from megarlhf.engine import Engine


def check_sources(
    config: ScoringConfig,
    tokenizer: Tokenizer,
    parallel: ParallelConfig,
    *,
    vocab_size: int,
    prompt_length: int,
    response_length: int,
) -> list[str]:
    """Refuse (UserError) sources that cannot score this policy's responses, before anything is allocated.

    `tokenizer` and `vocab_size` are the policy's. Reward functions are imported, and a sandbox is tried; reward servers
    are contacted when the Scorer is built. Returns notes for the banner.
    """
    notes = []
    if config.truncate_token is not None:
        token_id(tokenizer, config.truncate_token, "truncate_token")
        if config.truncate_after >= response_length:
            raise UserError(
                f"truncate_after: {config.truncate_after} lies behind the last of {response_length} response tokens, "
                "so every response would get the penalty; lower it or sample longer responses"
            )
    for source in config.sources:
        if source.function is not None:
            FunctionScorer(source.function)
        if source.verify == "code":
            sandbox.check(Verifier(source).limits)
        if source.step_token is not None:
            token_id(tokenizer, source.step_token, "step_token")
        if source.steps is not None:
            check_separator(tokenizer, source.separator, "separator")
            notes += trained_otherwise(source)
        length = prompt_length + response_length
        if source.placeholder is not None:
            token_id(tokenizer, source.placeholder, "placeholder")
            length += response_length  # a placeholder after each token at most
        if source.checkpoint is not None:
            note = check_reward_model(source.checkpoint, tokenizer, parallel, vocab_size=vocab_size, length=length)
            notes += [note] if note else []
    return notes


def trained_otherwise(source: SourceConfig) -> list[str]:
    """A note for each key of a source with `steps` that differs from the configuration in the checkpoint."""
    path = find_model(source.checkpoint, "reward").parent / RUN_FILE
    if not path.is_file():
        return [f"{source.checkpoint}: came without {RUN_FILE}, so its separator and placeholder are not checked"]
    data = configuration.read(path, "the configuration", "use another checkpoint").get("data")
    data = data if isinstance(data, dict) else {}
    if "separator" not in data:
        return [f"{source.checkpoint}: is no checkpoint of megarlhf prm, so its scores may be no logits of steps"]
    return [
        f"{source.checkpoint}: {key} is {getattr(source, key)!r}, but it was trained with {data.get(key)!r}"
        for key in ("separator", "placeholder")
        if data.get(key) != getattr(source, key)
    ]


class RecordCheck:
    """Raises ValueError for a record without what a verifier compares with."""

    def __init__(self, config: ScoringConfig):
        self._verifiers = [Verifier(source) for source in config.sources if source.verify is not None]
        code = Path(verifiers.__file__).read_bytes() if self._verifiers else b""
        settings = [configuration.dump(verifier.config) for verifier in self._verifiers]
        self.key = hashlib.sha256("\n".join(settings).encode() + code).hexdigest()

    def __call__(self, record: Record) -> None:
        for verifier in self._verifiers:
            verifier.check(record)


def check_patience(config: ScoringConfig, rows: int, hang_minutes: float) -> None:
    """Refuse (UserError) a watchdog that would end a run in which servers or verifiers take all their time for `rows`
    responses at once."""
    if any(source.url for source in config.sources) and 60 * hang_minutes <= PATIENCE:
        raise UserError(
            f"job.hang_minutes: {hang_minutes:g} would end the run while a reward server is still within the "
            f"{PATIENCE / 60:g} minutes that it may take for a batch, retries included; give {PATIENCE / 60 + 5:g} or "
            "more"
        )
    seconds = longest_judging(config, rows)
    if seconds >= 60 * hang_minutes:
        raise UserError(
            f"job.hang_minutes: {hang_minutes:g} would end the run while responses are verified: {rows} responses may "
            f"take {seconds / 60:.3g} minutes on this rank's CPUs ({sandbox.workers()}) if each takes all its time; "
            "give more minutes, fewer responses or a lower sandbox.seconds"
        )


def most_rows(config: ScoringConfig, hang_minutes: float) -> int:
    """Responses that verifiers judge on this rank in less time than the watchdog gives a phase, whatever they take."""
    return bisect.bisect_left(range(2**20), 60 * hang_minutes, key=lambda rows: longest_judging(config, rows)) - 1


def longest_judging(config: ScoringConfig, rows: int) -> float:
    """Seconds for `rows` responses if each takes all the time that verifiers allow."""
    seconds = 0.0
    for verifier in (Verifier(source) for source in config.sources if source.verify is not None):
        if verifier.kind == "code":
            seconds += math.ceil(rows / sandbox.workers()) * verifier.limits.seconds
        elif verifier.kind == "regex" or verifier.pattern is not None:
            seconds += rows * PATTERN_SECONDS
    return seconds


def check_reward_model(
    path: str, tokenizer: Tokenizer, parallel: ParallelConfig, *, vocab_size: int, length: int
) -> str | None:
    """Refuse (UserError) a reward model that cannot read rows of `length` ids that a policy with this tokenizer and
    vocabulary sampled. Returns a note if something could not be checked."""
    directory = find_model(path, "reward")
    adapters.check(directory)
    architecture = Architecture.load(directory)
    check_layout(architecture, parallel)
    if architecture.vocab_size < vocab_size:
        raise UserError(
            f"{path}: the reward model's vocabulary has {architecture.vocab_size} entries, the policy's {vocab_size}; "
            "use a reward model trained from the same base model"
        )
    if length > architecture.longest_row:
        raise UserError(
            f"{path}: the reward model has {architecture.longest_row} positions, but prompts and responses "
            f"need {length}; shorten one of them"
        )
    return check_same(tokenizer, path, find_tokenizer(path), "reward model")


def build_scorer(
    config: ScoringConfig,
    topology: Topology,
    tokenizer: Tokenizer,
    *,
    micro_batch_tokens: int,
    dtype: Literal["fp32", "bf16"],
    records: Callable[[list[int]], list[Record]],
) -> Scorer:
    """The Scorer of a checked configuration, its reward models loaded in the policy's layout. `records`: of prompt ids
    (`PromptSet.records`). Collective."""
    load = partial(
        load_reward_model, topology=topology, micro_batch_tokens=micro_batch_tokens, dtype=dtype,
        on_host=config.on_host,
    )  # fmt: skip
    return Scorer(config, topology, tokenizer, load_model=load, records=records)


def load_reward_model(
    path: str,
    *,
    topology: Topology,
    micro_batch_tokens: int,
    dtype: Literal["fp32", "bf16"],
    on_host: bool = False,
) -> Engine:
    """The reward model of a run, checkpoint or model directory, for scoring alone. Collective."""
    engine = adapters.built(
        "reward", find_model(path, "reward"), topology, micro_batch_tokens=micro_batch_tokens, dtype=dtype
    )
    if on_host:
        engine.keep_on_host("weights")
    return engine
