"""Ratings: single responses, each marked good or bad.

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
from megarlhf.data import tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import encode, turns
from megarlhf.data.files import Files, Part, Reports, RowsConfig, load_files, options_of, paths
from megarlhf.data.jsonl import Lines, Places, Records
from megarlhf.data.loader import Loader, padded
from megarlhf.data.sft import Examples
from megarlhf.data.tables import Columns, Recipe, Table
from megarlhf.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class RatingDataConfig(RowsConfig):
    """The data of ratings. Every line of a file is a JSON object:

    {"prompt": ..., "response": ..., "label": true}: true marks a good response, false a bad one.

    A row becomes BOS prompt response EOS. Prompt and response may be lists of messages, as in `PreferenceDataConfig`;
    of messages the assistant's turns behind the prompt count. Other keys and blank lines are ignored. Rows longer than
    `max_length` tokens are cut at the end; a row whose prompt leaves no room for the response is dropped.
    """

    add_eos: bool = True
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    response_key: str = "response"  # TRL's data sets have "completion"
    label_key: str = "label"


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
    """The report on a source's lines."""

    path: str
    num_lines: int  # without blank ones
    num_good: int
    num_bad: int
    num_tokens: int
    max_length: int
    truncated: Places
    crowded: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_good} good and {self.num_bad} bad responses, {self.num_tokens} tokens",
            self.truncated.said(f"cut to {self.max_length} tokens"),
            self.crowded.said("dropped (the prompt leaves no room)"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


def load_ratings(
    given: Files, tokenizer: Tokenizer, config: RatingDataConfig, *, both: bool = False, cache: Cache | None = None
) -> tuple[RatedExamples, RatingReport | Reports]:
    """The ratings of data files (`config.train` or `config.validation`) and the report on their lines. `cache`: where
    they are kept; None: in memory.

    Raises UserError if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed, if nothing is
    left of it, and with `both` if all responses that are left are good, or all are bad.
    """
    recipe = Recipe("ratings", options_of(config), lambda records: _read(records, tokenizer, config), _numbered)
    ratings, report = load_files(given, lambda path: _load(path, recipe, tokenizer, config, cache))
    if both and ratings.labels.all() == ratings.labels.any():
        one, other = ("good", "bad") if ratings.labels.all() else ("bad", "good")
        raise UserError(
            f"{', '.join(paths(given))}: all {len(ratings)} responses are {one} ('{config.label_key}'), and there is "
            f"nothing to tell them from; add {other} ones, or learn good ones with megarlhf sft"
        )
    return ratings, report


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: RatingDataConfig, cache: Cache | None
) -> tuple[RatedExamples, RatingReport]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    labels = found["labels"]
    good = int(np.count_nonzero(labels))
    report = RatingReport(
        path=path,
        num_lines=found.counts["lines"],
        num_good=good,
        num_bad=len(labels) - good,
        num_tokens=found.table.num_tokens,
        max_length=config.max_length,
        truncated=found.notes["truncated"],
        crowded=found.notes["crowded"],
        bad=found.notes["bad"],
    )
    if not len(labels):
        raise UserError(f"{report.summary()}; no rating is left: give a file that has some, or raise max_length")
    ratings = RatedExamples(
        tokens=found["tokens"],
        mask=found["mask"],
        offsets=found.table.offsets(),
        labels=labels,
        prompts=found["prompts"],
        starts=found["starts"],
        max_length=config.max_length,
    )
    return ratings, report


def _read(records: Records, tokenizer: Tokenizer, config: RatingDataConfig) -> Table:
    tokens, mask, lengths = array("i"), bytearray(), array("i")
    labels, prompts, starts = bytearray(), bytearray(), array("q")
    truncated, crowded = [], []
    for line, (ids, marks, start, label) in records.read(lambda row: _rating(row, tokenizer, config)):
        cut, counts = ids[: config.max_length], [False, *marks[1 : config.max_length]]
        if not any(counts):
            crowded.append(line)
            continue
        if len(ids) > config.max_length:
            truncated.append(line)
        tokens.extend(cut)
        mask.extend(counts)
        lengths.append(len(cut))
        labels.append(label)
        prompts.extend(_digest(cut[:start]))
        starts.append(start)
    columns = {
        "tokens": np.array(tokens, np.int32),
        "mask": np.array(mask, bool),
        "lengths": np.array(lengths, np.int32),
        "labels": np.array(labels, bool),
        "prompts": np.frombuffer(bytes(prompts), "V16"),
        "starts": np.array(starts, np.int64),
    }
    return Table(columns, {}, {"truncated": Lines.of(truncated), "crowded": Lines.of(crowded)})


def _numbered(table: Table) -> Columns:
    """With a number in the place of each prompt's digest, in the order in which they come first."""
    digests = np.frombuffer(np.ascontiguousarray(table.columns["prompts"]).tobytes(), ">u8").reshape(-1, 2)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal ones the first comes first
    new = np.ones(len(order), bool)
    new[1:] = (digests[order][1:] != digests[order][:-1]).any(1)
    firsts = order[new]  # of each digest
    rank = np.empty(len(firsts), np.int64)
    rank[np.argsort(firsts, kind="stable")] = np.arange(len(firsts))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = rank[np.cumsum(new) - 1]
    return table.columns | {"prompts": numbers}


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
