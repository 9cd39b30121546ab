"""Ratings from JSONL: single responses, each marked good or bad.

Legend: K rows, stored flat as in `sft.Examples`; G rows of the global batch, B = G / dp_size rows of this rank.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megarlhf.algorithms.kto import derangement
from megarlhf.batch import Ratings
from megarlhf.config import UserError
from megarlhf.data.conversations import encode, turns
from megarlhf.data.files import Files, Part, Reports, check_files, load_files, paths
from megarlhf.data.jsonl import Records, places
from megarlhf.data.loader import Loader, padded
from megarlhf.data.sft import Examples
from megarlhf.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class RatingDataConfig:
    """The data of ratings. Every line of a file is a JSON object:

    {"prompt": ..., "response": ..., "label": true}: true marks a good response, false a bad one.

    A row becomes BOS prompt response EOS. Prompt and response may be lists of messages, as in `PreferenceDataConfig`;
    of messages the assistant's turns behind the prompt count. Other keys and blank lines are ignored. Rows longer than
    `max_length` tokens are cut at the end; a row whose prompt leaves no room for the response is dropped.
    """

    train: Files  # a file, or a list of files, each a name or {path, weight}
    validation: str | None = None
    max_length: int = 1024  # tokens, special ones included
    add_bos: bool = True  # if the tokenizer has a BOS
    add_eos: bool = True
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    max_bad_fraction: float = 0.01  # a larger share of malformed lines stops the program; 0: any does
    prompt_key: str = "prompt"
    response_key: str = "response"  # TRL's data sets have "completion"
    label_key: str = "label"

    def __post_init__(self):
        check_files(self.train, "train")
        if self.max_length < 2:
            raise ValueError(f"max_length: must be at least 2, not {self.max_length}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction: must be between 0 and 1, not {self.max_bad_fraction}")


@dataclass(frozen=True, kw_only=True)
class RatedExamples(Examples):
    """Tokenized rows. `mask` is True at the tokens of a row's response."""

    labels: np.ndarray  # (K,) bool: good
    prompts: np.ndarray  # (K,) int64: equal for equal prompts
    starts: np.ndarray  # (K,) int64: tokens of the prompt
    max_length: int

    @property
    def class_sizes(self) -> tuple[float, float]:
        """(good, bad) responses of an epoch on average, with the weights of the files."""
        repeats = np.ones(len(self))
        if self.parts:
            repeats = np.concatenate([np.full(part.num_groups, part.weight) for part in self.parts])
        return float(repeats[self.labels].sum()), float(repeats[~self.labels].sum())

    @classmethod
    def join(cls, sets: Sequence[RatedExamples], parts: tuple[Part, ...]) -> RatedExamples:
        """As `Examples.join`; prompts of different files are different prompts."""
        first = np.cumsum([0, *(data.prompts.max() + 1 for data in sets)])
        own = [replace(data, prompts=data.prompts + n) for data, n in zip(sets, first[:-1], strict=True)]
        return super().join(own, parts)


@dataclass(frozen=True)
class RatingReport:
    """The report on a file's lines. `truncated` and `crowded` hold line numbers, `bad` (line number, reason)."""

    path: str
    num_lines: int  # without blank ones
    num_good: int
    num_bad: int
    num_tokens: int
    max_length: int
    truncated: tuple[int, ...]
    crowded: tuple[int, ...]
    bad: tuple[tuple[int, str], ...]

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_good} good and {self.num_bad} bad responses, {self.num_tokens} tokens",
            places(self.path, f"cut to {self.max_length} tokens", [(line, "") for line in self.truncated]),
            places(self.path, "dropped (the prompt leaves no room)", [(line, "") for line in self.crowded]),
            places(self.path, "malformed and skipped", list(self.bad)),
        ]
        return "; ".join(part for part in parts if part)


def load_ratings(
    given: Files, tokenizer: Tokenizer, config: RatingDataConfig, *, both: bool = False
) -> tuple[RatedExamples, RatingReport | Reports]:
    """The ratings of JSONL files (`config.train` or `config.validation`) and the report on their lines.

    Raises UserError if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed, if nothing is
    left of it, and with `both` if all responses that are left are good, or all are bad.
    """
    ratings, report = load_files(given, lambda path: _load(path, tokenizer, config))
    if both and ratings.labels.all() == ratings.labels.any():
        one, other = ("good", "bad") if ratings.labels.all() else ("bad", "good")
        raise UserError(
            f"{', '.join(paths(given))}: all {len(ratings)} responses are {one} ('{config.label_key}'), and there is "
            f"nothing to tell them from; add {other} ones, or learn good ones with megarlhf sft"
        )
    return ratings, report


def _load(path: str, tokenizer: Tokenizer, config: RatingDataConfig) -> tuple[RatedExamples, RatingReport]:
    tokens, mask, offsets = array("i"), bytearray(), array("q", [0])
    labels, prompts, starts = bytearray(), array("q"), array("q")
    truncated, crowded, known = [], [], {}
    records = Records(path, max_bad_fraction=config.max_bad_fraction)
    for line, (ids, marks, start, label) in records.read(lambda row: _rating(row, tokenizer, config)):
        cut, counts = ids[: config.max_length], [False, *marks[1 : config.max_length]]
        if not any(counts):
            crowded.append(line)
            continue
        if len(ids) > config.max_length:
            truncated.append(line)
        tokens.extend(cut)
        mask.extend(counts)
        offsets.append(len(tokens))
        labels.append(label)
        prompts.append(known.setdefault(_digest(cut[:start]), len(known)))
        starts.append(start)
    report = RatingReport(
        path=path,
        num_lines=records.num_lines,
        num_good=sum(labels),
        num_bad=len(labels) - sum(labels),
        num_tokens=len(tokens),
        max_length=config.max_length,
        truncated=tuple(truncated),
        crowded=tuple(crowded),
        bad=tuple(records.bad),
    )
    if not labels:
        raise UserError(f"{report.summary()}; no rating is left: give a file that has some, or raise max_length")
    ratings = RatedExamples(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, bool),
        offsets=np.array(offsets, np.int64),
        labels=np.array(labels, bool),
        prompts=np.array(prompts, np.int64),
        starts=np.array(starts, np.int64),
        max_length=config.max_length,
    )
    return ratings, report


def _digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=16).digest()


class RatingLoader(Loader):
    """This data-parallel rank's share of every global batch of ratings, as `Ratings`: like `Loader`, with each row's
    prompt before the response of another row of the global batch (`algorithms.kto.derangement`). The data set is on
    every rank, so no rows are exchanged."""

    data: RatedExamples

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> Ratings:
        mine, places = self._mine(rows), np.flatnonzero(real)
        others = dict.fromkeys(range(len(rows)))
        if (partner := derangement(self.data.prompts[rows[real]])) is not None:
            others |= dict(zip(places.tolist(), rows[places[partner]], strict=True))
        pairs = [self._mismatched(rows[place], others[place]) for place in mine.tolist()]
        tokens, mask, segments = padded(pairs, self.pad_id)
        return Ratings(
            **vars(super()._batch(rows, real)),
            labels=torch.from_numpy(self.data.labels[rows[mine]]),
            mismatched_tokens=tokens,
            mismatched_mask=mask,
            mismatched_segments=segments,
        )

    def _mismatched(self, row: int, other: int | None) -> tuple[np.ndarray, np.ndarray, None]:
        """(tokens, mask, None): the prompt of `row` before the response of `other`. A prompt that is too long for it
        loses its beginning. Without another row, the prompt alone."""
        prompt = self.data.row(row)[0][: self.data.starts[row]]
        response, marks = (np.zeros(0, dtype) for dtype in (np.int32, bool))
        if other is not None:
            tokens, mask, _ = self.data.row(other)
            response, marks = (part[self.data.starts[other] :] for part in (tokens, mask))
        prompt = prompt[-(self.data.max_length - len(response)) :]
        return np.concatenate([prompt, response]), np.concatenate([np.zeros(len(prompt), bool), marks]), None


def _rating(
    row: dict[str, Any], tokenizer: Tokenizer, config: RatingDataConfig
) -> tuple[list[int], list[bool], int, bool]:
    """(ids of prompt and response, which of them count, the prompt's number of ids, label) of a line; ValueError says
    what is wrong with it."""
    prompt, response = turns(row, config.prompt_key), turns(row, config.response_key)
    if config.label_key not in row:
        raise ValueError(f"no key '{config.label_key}' (found: {', '.join(row)})")
    label = row[config.label_key]
    if not isinstance(label, bool):
        raise ValueError(f"'{config.label_key}' must be true or false, not {label!r}")
    options = dict(add_bos=config.add_bos, add_eos=config.add_eos, chat=config.chat, key=config.prompt_key)
    (found,) = encode(tokenizer, prompt, {config.response_key: response}, **options)
    if len(found.ids) < 2:
        raise ValueError("a single token, which has no log-prob; give a prompt, or set add_bos or add_eos")
    # the first token of all has no log-prob, so it is never the response's
    return found.ids, found.mask, max(1, len(found.prompt)), label
