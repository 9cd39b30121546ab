"""What responses are worth: reward models, Python functions and remote scorers behind one call, with truncation and a
fixed score for what cannot be truncated (detail P5), read at the last token that counts (detail R1).

Legend: B rows of this data-parallel rank, P prompt columns, R response columns.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algorithms.reward import final_scores
from megarlhf.batch import Rollout, Scores
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.tokenizer import Tokenizer, token_id
from megarlhf.experience.sources import FunctionScorer, RemoteScorer

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True)
class SourceConfig:
    """Where scores come from: give one of `checkpoint`, `function` and `url`. Functions and servers get texts: what
    is scored of a response, without the BOS before a prompt and the EOS behind a response."""

    checkpoint: str | None = None  # a reward model: a run, a checkpoint or a model directory
    function: str | None = None  # module:function or path/to/file.py:function; called on one rank of each model copy
    url: str | None = None  # http://host:port of a reward server (docs/reward-server.md)
    weight: float = 1.0
    timeout: float = 60.0  # url: seconds for one request
    retries: int = 5  # url: of a request that got no answer, or HTTP 408, 429 or 5xx
    batch_size: int = 64  # url: responses a request

    def __post_init__(self):
        if [self.checkpoint, self.function, self.url].count(None) != 2:
            raise ValueError("checkpoint: give exactly one of checkpoint, function and url")
        if self.timeout <= 0:
            raise ValueError(f"timeout: must be positive, not {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: must not be negative, not {self.retries}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, not {self.batch_size}")
        if self.url is not None and not _is_url(self.url):
            raise ValueError(f"url: '{self.url}' is no address of a server; write it as http://host:port")


@dataclass(frozen=True)
class ScoringConfig:
    """How responses are scored. With several sources the score is the weighted sum of theirs."""

    sources: tuple[SourceConfig, ...]
    truncate_token: str | None = None  # all after the first of these is not scored; as it stands behind a word: "."
    truncate_after: int = 0  # that is, the first at this place of the response (from 0) or later
    penalty: float = -1.0  # the score of a response without it

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources: is empty; give at least one with a checkpoint, a function or a url")
        if self.truncate_after < 0:
            raise ValueError(f"truncate_after: must not be negative, not {self.truncate_after}")


class Scorer:
    """Scores rollouts. Building it is collective: reward models are loaded, and remote scorers asked for their health,
    first of all.

    load_model: the engine of a source's `checkpoint`. Raises UserError, on every rank, for a dead remote scorer.
    """

    def __init__(
        self, config: ScoringConfig, topology: Topology, tokenizer: Tokenizer, *, load_model: Callable[[str], Engine]
    ):
        self.config, self.topology, self.tokenizer = config, topology, tokenizer
        self.token = None
        if config.truncate_token is not None:
            self.token = token_id(tokenizer, config.truncate_token, "truncate_token")
        self.outside = [(_outside(source), source.weight) for source in config.sources if source.checkpoint is None]
        self._on_one_rank(self._check_health)
        self.models = [
            (load_model(source.checkpoint), source.weight) for source in config.sources if source.checkpoint is not None
        ]

    def score(self, rollout: Rollout) -> Scores:
        """The scores of this data-parallel rank's rows, the same on every rank of its model copy. Collective.

        Truncation is for the scoring alone: the rollout stays as it is. Raises UserError, the same on every rank, for
        what functions and remote scorers do wrong.
        """
        read, accepted = rollout, torch.ones_like(rollout.mask[:, 0])
        if self.token is not None:
            read, accepted = truncate(rollout, token=self.token, after=self.config.truncate_after)
        scores = torch.zeros(len(rollout), device=rollout.tokens.device)
        for model, weight in self.models:
            scores += weight * final_scores(model.forward(read)["scores"], read.mask)
        answers = self._on_one_rank(lambda: self._ask(read))
        for (_, weight), answer in zip(self.outside, answers, strict=True):
            scores += weight * torch.tensor(answer, device=scores.device)
        return Scores(scores=torch.where(accepted, scores, self.config.penalty), mask=read.mask, accepted=accepted)

    def _ask(self, read: Rollout) -> list[list[float]]:
        prompts, responses = texts(read, self.tokenizer)
        return [source(prompts, responses) for source, _ in self.outside]

    def _check_health(self) -> list:
        for source, _ in self.outside:
            if isinstance(source, RemoteScorer):
                source.check_health()
        return []

    def _on_one_rank(self, compute: Callable[[], list]) -> list:
        """What `compute` returns on one rank of each model copy, on all ranks of that copy. Where it raises UserError
        on any copy, every rank raises the same one: none is left waiting for the others."""
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

    Everything behind the first `token` at response column `after` or later becomes padding (detail P5,
    lm-human-preferences lm_tasks.py). A response without one stays whole.
    """
    first = rollout.prompt_len
    columns = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)
    ends = (rollout.tokens[:, first:] == token) & (columns >= after) & rollout.mask
    mask = rollout.mask & (ends.cumsum(1) - ends.long() == 0)
    segments = rollout.segments.clone()
    segments[:, first:] *= mask
    return dataclasses.replace(rollout, mask=mask, segments=segments), ends.any(1)


def texts(rollout: Rollout, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The prompts, without a BOS in front, and what counts of the responses, without an EOS at the end.

    prompt + response is the whole text (`Tokenizer.continuation`).
    """
    first, prompts, responses = rollout.prompt_len, [], []
    for tokens, segments, mask in zip(rollout.tokens.cpu(), rollout.segments.cpu(), rollout.mask.cpu(), strict=True):
        prompt = tokens[:first][segments[:first] > 0].tolist()
        response = tokens[first:][mask].tolist()
        prompt = prompt[prompt[:1] == [tokenizer.bos_id] :]
        response = response[:-1] if response[-1] == tokenizer.eos_id else response
        prompts.append(tokenizer.decode(prompt))
        responses.append(tokenizer.continuation(prompt, response))
    return prompts, responses


def _outside(source: SourceConfig) -> FunctionScorer | RemoteScorer:
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
