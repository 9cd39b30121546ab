"""Preferences: responses to the same prompt, some better than others.

Legend: N tokens of the whole data set, K responses to a prompt, M rows = K x prompts, stored flat as in `sft.Examples`;
G rows of the global batch, B = G / dp_size rows of this rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from megarlhf.batch import Comparisons
from megarlhf.config import UserError
from megarlhf.data import tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import Turns, encode, turns
from megarlhf.data.files import Files, Reports, RowsConfig, load_files, options_of
from megarlhf.data.jsonl import Lines, Places, Records
from megarlhf.data.loader import Loader, rows_of_step
from megarlhf.data.sft import Examples
from megarlhf.data.shapes import is_hh
from megarlhf.data.tables import Recipe, Table
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.stream import shares


@dataclass(frozen=True)
class PreferenceDataConfig(RowsConfig):
    """The data of preferences. Every line of a file is a JSON object of one of three kinds:

    {"prompt": ..., "chosen": ..., "rejected": ...[, "margin": ...]}: a pair; margin (default 0) is the least difference
        that their scores should have.
    {"prompt": ..., "responses": [...], "label": 2}: the index of the best of `num_responses`, from 0.
    {"prompt": ..., "responses": [...], "ranks": [2, 0, 1, 2]}: all of them ranked, one 0 for the best; equal ranks are
        ties.

    A response becomes BOS prompt response EOS, and its score is read at the last token. Prompts and responses may be
    lists of messages, which the chat template renders (data/conversations.py); a response that is a list goes on from
    the prompt or is the whole conversation. Without a prompt the responses are whole conversations, of messages or as
    Anthropic's HH writes them, and what they share at the beginning is the prompt. Other keys and blank lines are
    ignored. Rows longer than `max_length` tokens are cut at the end. A prompt is dropped if a better and a worse
    response are then equal.
    """

    num_responses: int = 2  # K: 2 for pairs, 4 for best-of-4
    add_eos: bool = True  # false: responses of a fixed length, which the policy will not end with EOS
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    responses_key: str = "responses"
    label_key: str = "label"
    ranks_key: str = "ranks"

    def __post_init__(self):
        super().__post_init__()
        if self.num_responses < 2:
            raise ValueError(f"num_responses: must be at least 2, not {self.num_responses}")


@dataclass(frozen=True, kw_only=True)
class Preferences(Examples):
    """Tokenized rows, the K of a prompt adjacent and the best first. `mask` is True at a row's last token, or at all
    tokens of its response."""

    num_responses: int  # K
    ranks: np.ndarray  # (M,) int64
    margins: np.ndarray  # (M,) float32: the pair's, in both of its rows

    @property
    def num_groups(self) -> int:
        """What is shuffled as one: prompts."""
        return len(self) // self.num_responses


@dataclass(frozen=True)
class PreferenceReport:
    """The report on a source's lines."""

    path: str
    num_lines: int  # without blank ones
    num_prompts: int
    num_responses: int
    num_tokens: int
    max_length: int
    truncated: Places
    dropped: Places
    crowded: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_prompts} prompts x {self.num_responses} responses, {self.num_tokens} tokens",
            self.truncated.said(f"cut to {self.max_length} tokens"),
            self.dropped.said("dropped (better and worse responses alike)"),
            self.crowded.said("dropped (the prompt leaves no room)"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


def load_preferences(
    given: Files,
    tokenizer: Tokenizer,
    config: PreferenceDataConfig,
    *,
    counted: Literal["last", "response"] = "last",
    cache: Cache | None = None,
) -> tuple[Preferences, PreferenceReport | Reports]:
    """The preferences of data files (`config.train` or `config.validation`) and the report on their lines. `counted`:
    what the mask marks, the last token, where a reward model's score is read, or the response with its EOS (of messages
    the assistant's turns). `cache`: where they are kept; None: in memory.

    Raises UserError if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed, and if
    nothing is left of it.
    """
    options = options_of(config) | {"counted": counted}
    recipe = Recipe("preferences", options, lambda records: _read(records, tokenizer, config, counted))
    return load_files(given, lambda path: _load(path, recipe, tokenizer, config, cache))


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: PreferenceDataConfig, cache: Cache | None
) -> tuple[Preferences, PreferenceReport]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    report = PreferenceReport(
        path=path,
        num_lines=found.counts["lines"],
        num_prompts=len(found["ranks"]) // config.num_responses,
        num_responses=config.num_responses,
        num_tokens=found.table.num_tokens,
        max_length=config.max_length,
        truncated=found.notes["truncated"],
        dropped=found.notes["dropped"],
        crowded=found.notes["crowded"],
        bad=found.notes["bad"],
    )
    if not report.num_prompts:
        raise UserError(f"{report.summary()}; no preference is left: give a file that has some, or raise max_length")
    preferences = Preferences(
        tokens=found["tokens"],
        mask=found["mask"],
        offsets=found.table.offsets(),
        num_responses=config.num_responses,
        ranks=found["ranks"],
        margins=found["margins"],
    )
    return preferences, report


def _read(
    records: Records, tokenizer: Tokenizer, config: PreferenceDataConfig, counted: Literal["last", "response"]
) -> Table:
    tokens, mask, lengths, ranks, margins = array("i"), bytearray(), array("i"), array("q"), array("f")
    truncated, dropped, crowded = [], [], []
    for line, (rows, row_ranks, margin) in records.read(lambda row: _comparison(row, tokenizer, config)):
        if counted == "response" and not all(any(marks[1 : config.max_length]) for _, marks in rows):
            crowded.append(line)
            continue
        cut = [ids[: config.max_length] for ids, _ in rows]
        pairs = [(i, j) for i in range(len(cut)) for j in range(i) if row_ranks[i] != row_ranks[j]]
        if any(cut[i] == cut[j] for i, j in pairs):
            dropped.append(line)
            continue
        if any(len(ids) > config.max_length for ids, _ in rows):
            truncated.append(line)
        for ids, (_, marks) in zip(cut, rows, strict=True):
            tokens.extend(ids)
            mask.extend([False, *marks[1 : len(ids)]] if counted == "response" else [False] * (len(ids) - 1) + [True])
            lengths.append(len(ids))
        ranks.extend(row_ranks)
        margins.extend([margin] * len(cut))
    columns = {
        "tokens": np.array(tokens, np.int32),
        "mask": np.array(mask, bool),
        "lengths": np.array(lengths, np.int32),
        "ranks": np.array(ranks, np.int64),
        "margins": np.array(margins, np.float32),
    }
    notes = {"truncated": truncated, "dropped": dropped, "crowded": crowded}
    return Table(columns, {}, {name: Lines.of(lines) for name, lines in notes.items()})


class PreferenceLoader(Loader):
    """This data-parallel rank's share of every global batch of preferences, as `Comparisons`: like `Loader`, but whole
    prompts are shuffled and distributed to ranks. Batches are counted in rows, K a prompt.

    Raises UserError if K * `dp_size` does not divide `global_batch`.
    """

    data: Preferences

    def __init__(self, data: Preferences, *, global_batch: int, dp_size: int = 1, **options):
        share = data.num_responses * dp_size
        if global_batch < 1 or global_batch % share:
            raise UserError(
                f"the global batch of {global_batch} rows cannot be shared evenly: prompts of {data.num_responses} "
                f"responses, {dp_size} data-parallel ranks; make it a multiple of {share}"
            )
        super().__init__(data, global_batch=global_batch, dp_size=dp_size, **options)

    def rows(self, step: int) -> np.ndarray:
        """(G,) indices of the rows of global batch `step`, those of a prompt together and in order."""
        size = self.data.num_responses
        prompts = rows_of_step(
            step, num_rows=self.data.num_groups, global_batch=self.global_batch // size, seed=self.seed,
            parts=self.data.parts,
        )  # fmt: skip
        return (prompts[:, None] * size + np.arange(size)).ravel()

    def epoch_batches(self) -> Iterator[Comparisons]:
        scale = self._nll_scale(np.arange(len(self.data)))  # of the whole set, whatever the batches
        for batch in super().epoch_batches():
            yield replace(batch, nll_scale=scale)

    def _nll_scale(self, rows: np.ndarray) -> float:
        best = rows[:: self.data.num_responses]
        return len(best) / self.data.num_counted(best)

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> Comparisons:
        sequences, mine = super()._batch(rows, real), rows[self._mine(rows)]
        return Comparisons(
            **vars(sequences) | {"together": self.data.num_responses},
            ranks=torch.from_numpy(self.data.ranks[mine]),
            margins=torch.from_numpy(self.data.margins[mine]),
            nll_scale=self._nll_scale(rows[real]),
        )

    def _mine(self, rows: np.ndarray) -> np.ndarray:
        size = self.data.num_responses
        prompts = shares(self.data.lengths_of(rows).reshape(-1, size).sum(1), self.dp_size)[self.dp_rank]
        return (prompts[:, None] * size + np.arange(size)).ravel()


def _comparison(
    row: dict[str, Any], tokenizer: Tokenizer, config: PreferenceDataConfig
) -> tuple[list[tuple[list[int], list[bool]]], list[int], float]:
    """(each response's row, their ranks, margin) of a line, the best first; ValueError says what is wrong with it. A
    row is (ids of prompt and response, True where the response's are)."""
    margin = 0.0
    if config.responses_key in row:
        responses = _responses(row, config)
        ranks = _ranks(row, config)
    else:
        responses = {key: turns(row, key) for key in (config.chosen_key, config.rejected_key)}
        ranks = [0, 1]
        if config.num_responses != 2:
            raise ValueError(f"a pair, where num_responses is {config.num_responses}")
        if config.margin_key in row:
            margin = _margin(row[config.margin_key], config.margin_key)
    whole = config.prompt_key not in row and all(isinstance(one, list) or is_hh(one) for one in responses.values())
    prompt = None if whole else turns(row, config.prompt_key)
    options = dict(add_bos=config.add_bos, add_eos=config.add_eos, chat=config.chat, key=config.prompt_key)
    rows = [(one.ids, one.mask) for one in encode(tokenizer, prompt, responses, **options)]
    if min(len(ids) for ids, _ in rows) < 2:
        raise ValueError("a single token, which has no score; give a prompt, or set add_bos or add_eos")
    order = sorted(range(len(rows)), key=lambda index: ranks[index])
    return [rows[index] for index in order], [ranks[index] for index in order], margin


def _responses(row: dict[str, Any], config: PreferenceDataConfig) -> dict[str, Turns]:
    """{name for messages: response}."""
    responses, size = row[config.responses_key], config.num_responses
    if not isinstance(responses, list) or len(responses) != size:
        found = len(responses) if isinstance(responses, list) else type(responses).__name__
        raise ValueError(f"'{config.responses_key}' must be a list of num_responses {size}, not {found}")
    named = {f"{config.responses_key}[{index}]": response for index, response in enumerate(responses)}
    return {name: turns(named, name) for name in named}


def _ranks(row: dict[str, Any], config: PreferenceDataConfig) -> list[int]:
    """The rank of each response, from 'ranks' or 'label'."""
    size = config.num_responses
    if config.ranks_key in row:
        ranks = row[config.ranks_key]
        whole = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < size for rank in ranks)
        if not whole or len(ranks) != size or ranks.count(0) != 1:
            raise ValueError(
                f"'{config.ranks_key}' must be {size} whole numbers below {size}, one of them 0 for the best"
            )
        return ranks
    label = row.get(config.label_key)
    if type(label) is not int or not 0 <= label < size:
        raise ValueError(f"'{config.label_key}' must be the best's number from 0 to {size - 1}, not {label!r}")
    return [int(index != label) for index in range(size)]


def _margin(margin: Any, key: str) -> float:
    if type(margin) not in (int, float) or not 0 <= margin <= 1e6:
        raise ValueError(f"'{key}' must be a number from 0 to 1e6, not {margin!r}")
    return float(margin)
