"""Scores of responses: reward models, Python functions, reward servers and verifiers behind one call, with truncation
and a fixed score for responses without the token (detail P5), read at the last token that counts (detail R1) or at
every step.

A source's numbers are clipped, then normalised, then weighted, and added to those of the others.

Legend: B rows of this data-parallel rank, P prompt columns, R response columns, K sources.
"""

from __future__ import annotations

import dataclasses
import re
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms.process_reward import response_score
from megarlhf.algorithms.reward import final_scores
from megarlhf.batch import Rollout, Scores
from megarlhf.cluster.parallel import Topology
from megarlhf.config import PathName, UserError
from megarlhf.data.tokenizer import Tokenizer, token_id
from megarlhf.experience import sources
from megarlhf.experience.running import Moments
from megarlhf.experience.sources import FunctionScorer, Record, RemoteScorer
from megarlhf.experience.texts import Placed, decoded, place, step_ends, token_ids, with_placeholders
from megarlhf.experience.verifiers import Verifier, VerifyConfig
from megarlhf.metrics import Metric, Variance

if TYPE_CHECKING:
    from megarlhf.engine import Engine

# Of one source: its numbers, (B, 1 + R) float32, and where it gave any, bool; 0 elsewhere. Column 0 is for the whole
# response, column 1 + j for token j.
Numbers = tuple[Tensor, Tensor]
NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class SourceConfig(VerifyConfig):
    """A source of scores: give one of `checkpoint`, `function`, `url` and `verify`. All but the first get the texts of
    prompts without BOS and of the scored parts of responses without EOS, and the prompts' records. Functions and
    servers answer with a number for a response, or with [end, score] pairs for its steps (docs/reward-server.md);
    verifiers with 1 or 0 (docs/rewards.md)."""

    checkpoint: PathName | None = None  # a reward model: a run, a checkpoint or a model directory
    # module:function or path/to/file.py:function; called on one rank of each model copy
    function: PathName | None = None
    url: str | None = None  # http://host:port of a reward server (docs/reward-server.md)
    name: str | None = None  # in metrics, samples and the report; default: of the directory, function, host or verifier
    weight: float = 1.0
    clip: tuple[float, ...] | None = None  # [low, high] of each of the source's numbers, before anything else
    normalize: bool = False  # then subtract their running mean and divide by their running standard deviation
    step_token: str | None = None  # checkpoint: score at each of these tokens, not at the last
    # checkpoint: a process reward model, of `megarlhf prm`. each: the probability that a step is right is the score of
    # its last token; min, product and last: the response's score is that of its steps' probabilities
    steps: Literal["each", "min", "product", "last"] | None = None
    separator: str = "\n"  # steps: between two steps of a response, as in the data of its training
    placeholder: str | None = None  # steps: the token after each step at which it scores, if it was trained with one
    timeout: float = 60.0  # url: seconds for one request
    retries: int = 5  # url: of a request that got no answer, or HTTP 408, 429 or 5xx
    batch_size: int = 64  # url: responses a request

    def __post_init__(self):
        if [self.checkpoint, self.function, self.url, self.verify].count(None) != 3:
            raise ValueError("checkpoint: give exactly one of checkpoint, function, url and verify")
        if self.timeout <= 0:
            raise ValueError(f"timeout: must be positive, not {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: must not be negative, not {self.retries}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, not {self.batch_size}")
        if self.url is not None and not _is_url(self.url):
            raise ValueError(f"url: '{self.url}' is no address of a server; write it as http://host:port")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(f"name: '{self.name}' must be of letters, digits and . _ + -")
        if self.clip is not None and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            raise ValueError(f"clip: must be [low, high] with low < high, not {list(self.clip)}")
        if self.step_token is not None and self.checkpoint is None:
            raise ValueError("step_token: is for a checkpoint; functions and servers answer with [end, score] pairs")
        if self.steps is not None and (self.checkpoint is None or self.step_token is not None):
            raise ValueError("steps: is for a checkpoint of megarlhf prm, without step_token; remove one of them")
        if self.steps is None and (self.separator != "\n" or self.placeholder is not None):
            raise ValueError("separator: separator and placeholder are of process reward models; give steps, too")
        if not self.separator:
            raise ValueError("separator: is empty; give the text between two steps")
        self.check_options()


@dataclass(frozen=True)
class ScoringConfig:
    """How responses are scored. With several sources the score is the weighted sum of theirs."""

    sources: tuple[SourceConfig, ...]
    truncate_token: str | None = None  # scoring cuts responses after the first of these; tokenized as after a word: "."
    truncate_after: int = 0  # only tokens at this column of the response (from 0) or later count
    penalty: float = -1.0  # the score of a response without it
    on_host: bool = False  # reward models' weights in host memory, on the device only while they score

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources: is empty; give at least one with a checkpoint, a function, a url or verify")
        if self.truncate_after < 0:
            raise ValueError(f"truncate_after: must not be negative, not {self.truncate_after}")
        given = [source.name for source in self.sources if source.name is not None]
        for name in given:
            if given.count(name) > 1:
                raise ValueError(f"sources: two of them have the name '{name}'; give each its own")

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each source, all different: the given one, or one derived from where its scores come from."""
        taken = {source.name for source in self.sources}
        names = []
        for source in self.sources:
            name = plain = source.name or _derived(source)
            number = 1
            while source.name is None and name in taken:
                number += 1
                name = f"{plain}-{number}"
            taken.add(name)
            names.append(name)
        return tuple(names)


class Scorer:
    """Scores rollouts. Building it is collective: it first checks the health of reward servers, then loads reward
    models.

    load_model: the engine of a source's `checkpoint`. records: prompt ids -> their records, new objects. Raises
    UserError, on every rank, if a reward server does not answer.
    """

    def __init__(
        self,
        config: ScoringConfig,
        topology: Topology,
        tokenizer: Tokenizer,
        *,
        load_model: Callable[[str], Engine],
        records: Callable[[list[int]], list[Record]],
    ):
        self.config, self.topology, self.tokenizer, self.records = config, topology, tokenizer, records
        self.names = config.names
        self.token = None
        if config.truncate_token is not None:
            self.token = token_id(tokenizer, config.truncate_token, "truncate_token")
        numbered = list(enumerate(config.sources))
        servers_first = sorted(numbered, key=lambda pair: pair[1].url is None)
        self.outside = {k: _outside(source) for k, source in servers_first if source.checkpoint is None}
        self._on_one_rank(self._check_health)
        self.models = {k: load_model(source.checkpoint) for k, source in numbered if source.checkpoint is not None}
        self.steps = {
            k: token_id(tokenizer, source.step_token, "step_token")
            for k, source in numbered
            if source.step_token is not None
        }
        self.placeholders = {
            k: token_id(tokenizer, source.placeholder, "placeholder")
            for k, source in numbered
            if source.placeholder is not None
        }
        self.moments = {k: Moments() for k, source in numbered if source.normalize}

    def score(self, rollout: Rollout, *, held_out: Callable[[list[int]], list[Record]] | None = None) -> Scores:
        """The scores of this data-parallel rank's rows, the same on every rank of its model copy. Collective.

        held_out: the records of prompts that are not trained on; then the running moments stay as they are. Truncation
        does not change the rollout. Raises UserError, the same on every rank, for errors of functions, reward servers
        and sandboxes.
        """
        read, accepted = rollout, torch.ones_like(rollout.mask[:, 0])
        if self.token is not None:
            read, accepted = truncate(rollout, token=self.token, after=self.config.truncate_after)
        scores = torch.zeros(len(rollout), device=rollout.tokens.device)
        token_scores = torch.zeros_like(read.mask, dtype=torch.float32)
        by_source = scores.new_zeros(len(rollout), len(self.names))
        numbers = {k: self._read(k, model, read) for k, model in self.models.items()}
        answers = self._on_one_rank(lambda: self._ask(read, held_out))
        numbers |= {k: _tensors(answer, read.mask) for k, answer in zip(self.outside, answers, strict=True)}
        for k, (values, given) in numbers.items():
            by_source[:, k] = values.sum(1)
            values = self._adjusted(k, values, given, moving=held_out is None)
            scores += values[:, 0]
            token_scores += values[:, 1:]
        return Scores(
            scores=torch.where(accepted, scores, self.config.penalty),
            mask=read.mask,
            accepted=accepted,
            token_scores=torch.where(accepted[:, None], token_scores, 0),
            by_source=by_source,
            weights=tuple(source.weight for source in self.config.sources),
        )

    def metrics(self, scores: Scores) -> dict[str, tuple[Tensor, Tensor] | Metric]:
        """scores/NAME/mean and scores/NAME/var of this rank's rows for each source: its own numbers, also of responses
        that got the penalty, before clip, normalisation and weight; of a response's steps their sum. What is not
        finite and was replaced by the penalty is left out: it is no reason to refuse the batch."""
        found: dict[str, tuple[Tensor, Tensor] | Metric] = {}
        for name, column in zip(self.names, scores.by_source.double().unbind(1), strict=True):
            column = column[scores.accepted | column.isfinite()]
            total, count = column.sum(), torch.ones_like(column).sum()
            found[f"scores/{name}/mean"] = (total, count)
            found[f"scores/{name}/var"] = Variance(total, (column**2).sum(), count)
        return found

    @property
    def state(self) -> dict[str, float]:
        """The state of normalisation: NAME/count, NAME/mean and NAME/squares (the sum of squared differences from the
        mean) of all numbers that a normalised source has given, the same on every rank. Saved with a run's progress."""
        return {
            f"{self.names[k]}/{part}": float(value)
            for k, moments in self.moments.items()
            for part, value in vars(moments).items()
        }

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a `state`. A source that was not normalised when it was saved starts at count 0."""
        for k in self.moments:
            parts = {part: state.get(f"{self.names[k]}/{part}") for part in vars(Moments())}
            self.moments[k] = Moments() if None in parts.values() else Moments(**parts)

    def _read(self, k: int, model: Engine, read: Rollout) -> Numbers:
        if self.config.sources[k].steps is not None:
            return self._judged(k, model, read)
        scores = model.forward(read)["scores"]
        whole, columns = torch.ones_like(read.mask[:, :1]), torch.zeros_like(read.mask)
        if k in self.steps:
            whole, columns = ~whole, read.mask & (read.tokens[:, read.prompt_len :] == self.steps[k])
        given = torch.cat([whole, columns], 1)
        return torch.where(given, torch.cat([final_scores(scores, read.mask)[:, None], scores], 1), 0), given

    def _judged(self, k: int, model: Engine, read: Rollout) -> Numbers:
        """The probabilities of a process reward model for the steps, or what they say of the response."""
        source, count = self.config.sources[k], len(read)
        ends = step_ends(read, self.tokenizer, source.separator)
        if k in self.placeholders:
            rows, places = with_placeholders(read, ends, self.placeholders[k])
            chances = torch.zeros_like(ends, dtype=torch.float32)
            chances[ends] = model.forward(rows)["scores"].sigmoid()[places]
        else:
            chances = model.forward(dataclasses.replace(read, mask=ends))["scores"].sigmoid()
        if source.steps == "each":
            given = torch.cat([ends.new_zeros(count, 1), ends], 1)
            return torch.where(given, torch.cat([chances.new_zeros(count, 1), chances], 1), 0), given
        whole = response_score(chances, ends, source.steps)[:, None]
        given = torch.cat([ends.new_ones(count, 1), torch.zeros_like(ends)], 1)
        return torch.cat([whole, torch.zeros_like(chances)], 1), given

    def _adjusted(self, k: int, values: Tensor, given: Tensor, *, moving: bool) -> Tensor:
        """The numbers of source k clipped, normalised and weighted; `moving`: its moments with them. Collective."""
        source = self.config.sources[k]
        if source.clip is not None:
            values = values.clamp(*source.clip)
        if source.normalize:
            if moving:
                self.moments[k] = self.moments[k].extended(values[given].double(), self.topology.data_group)
            values = self.moments[k].normalised(values)
        return torch.where(given, source.weight * values, 0)

    def _ask(self, read: Rollout, held_out: Callable[[list[int]], list[Record]] | None = None) -> list[list[Placed]]:
        """The answers of each function, server and verifier, with steps at response columns."""
        ids, prompt_ids = token_ids(read, self.tokenizer), read.prompt_ids.tolist()
        prompts, responses = decoded(ids, self.tokenizer)
        deadline, answers = time.monotonic() + sources.PATIENCE, []  # one for all servers; the others have none
        for source in self.outside.values():
            options = {"deadline": deadline} if isinstance(source, RemoteScorer) else {}
            records = (held_out or self.records)(prompt_ids) if source.takes_records else None
            answers.append(source(prompts, responses, records, **options))
        return [
            [place(said, *row, self.tokenizer) for said, row in zip(answer, ids, strict=True)] for answer in answers
        ]

    def _check_health(self) -> list:
        for source in self.outside.values():
            if isinstance(source, RemoteScorer):
                source.check_health()
        return []

    def _on_one_rank(self, compute: Callable[[], list]) -> list:
        """The result of `compute` on one rank of each model copy, on all ranks of that copy. If it raises UserError on
        any copy, every rank raises the same one, so that no rank waits for the others."""
        if not self.outside:
            return []
        topology, answer, error = self.topology, [], None
        if topology.tensor_rank == 0 and topology.first_stage:
            try:
                answer = compute()
            except UserError as failure:
                error = str(failure)
        errors = [None] * topology.data_size
        dist.all_gather_object(errors, error, group=topology.data_group)
        box = [(answer, next(filter(None, errors), None))]
        for group in (topology.pipeline_group, topology.tensor_group):
            if dist.get_world_size(group) > 1:
                dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        answer, error = box[0]
        if error is not None:
            raise UserError(error)
        return answer


def truncate(rollout: Rollout, *, token: int, after: int) -> tuple[Rollout, Tensor]:
    """(the rollout as the reward model reads it, (B,) bool: whether the token occurs).

    Everything after the first `token` at response column `after` or later becomes padding (detail P5,
    lm-human-preferences lm_tasks.py). A response without one stays whole.
    """
    first = rollout.prompt_len
    columns = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)
    ends = (rollout.tokens[:, first:] == token) & (columns >= after) & rollout.mask
    mask = rollout.mask & (ends.cumsum(1) - ends.long() == 0)
    segments = rollout.segments.clone()
    segments[:, first:] *= mask
    return dataclasses.replace(rollout, mask=mask, segments=segments), ends.any(1)


def _tensors(answers: list[Placed], mask: Tensor) -> Numbers:
    """Answers of a function or server, on the device of `mask`. Steps that end in the same token are added."""
    values = torch.zeros(len(mask), 1 + mask.shape[1])
    given = torch.zeros_like(values, dtype=torch.bool)
    for row, answer in enumerate(answers):
        for column, score in answer if isinstance(answer, list) else [(-1, answer)]:
            values[row, 1 + column] += score
            given[row, 1 + column] = True
    return values.to(mask.device), given.to(mask.device)


def _derived(source: SourceConfig) -> str:
    """A name for a source without a given one."""
    if source.checkpoint is not None:
        name = Path(source.checkpoint).absolute().name
    elif source.function is not None:
        name = source.function.rpartition(":")[2]
    elif source.verify is not None:
        name = source.verify
    else:
        name = urllib.parse.urlsplit(source.url).hostname
    return "-".join(NAME.findall(name)) or "source"


def _outside(source: SourceConfig) -> FunctionScorer | RemoteScorer | Verifier:
    if source.verify is not None:
        return Verifier(source)
    if source.function is not None:
        return FunctionScorer(source.function)
    return RemoteScorer(source.url, timeout=source.timeout, retries=source.retries, batch_size=source.batch_size)


def _is_url(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        plain = url.isascii() and url.isprintable() and " " not in url and not parts.query and not parts.fragment
        return (
            plain
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and (parts.username is None)
        )
    except ValueError:  # of the port
        return False
