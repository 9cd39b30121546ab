"""Supervised examples: read, tokenized, checked and optionally packed into rows.

Legend: N tokens of the whole data set, K rows. Stored flat: row k is [offsets[k], offsets[k + 1]).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np

from megarlhf.config import UserError
from megarlhf.data import packing, tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import encode, encode_prompt, messages, turns
from megarlhf.data.files import Files, Part, Reports, RowsConfig, load_files, options_of
from megarlhf.data.jsonl import Lines, Places, Records, string
from megarlhf.data.tables import Columns, Joined, Recipe, Table
from megarlhf.data.tokenizer import Tokenizer

E = TypeVar("E", bound="Examples")


@dataclass(frozen=True)
class SFTDataConfig(RowsConfig):
    """The data of supervised examples. Every line of a file is a JSON object of one of three kinds:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}: the tokenizer's chat
        template renders it, with its own BOS and end-of-turn tokens; the loss is on the assistant's turns.
    {"prompt": ..., "response": ...}: BOS prompt response EOS; the loss is on the response and EOS. Either may be a
        list of messages; then the chat template renders both, and the loss is on the assistant's turns of the response.
    {"text": ...}: BOS text EOS; the loss is on everything.

    Other keys and blank lines are ignored. Rows longer than `max_length` tokens are cut at the end, EOS included, so
    that the model does not learn to stop in mid-sentence. An example without a token with a loss is dropped.
    """

    packing: bool = False  # several examples in a row; they do not see each other
    loss_on: Literal["response", "all"] = "response"  # all: on prompts and on the other roles too
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    response_key: str = "response"
    messages_key: str = "messages"
    text_key: str = "text"


@dataclass(frozen=True)
class Examples:
    """Tokenized rows. `mask` marks the tokens to be predicted; never a row's or a segment's first, which has no
    context."""

    tokens: np.ndarray | Joined  # (N,) int32
    mask: np.ndarray | Joined  # (N,) bool
    offsets: np.ndarray  # (K + 1,) int64
    segments: np.ndarray | Joined | None = None  # (N,) int32: packed rows count their examples from 1
    parts: tuple[Part, ...] = ()  # the files, in order, if they have weights

    def __post_init__(self):
        assert len(self.tokens) == len(self.mask) == self.offsets[-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(K,) tokens in each row."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Tokens in each of `rows`."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def num_counted(self, rows: np.ndarray) -> int:
        """Tokens of the mask in `rows`."""
        ends = zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True)
        return sum(int(np.count_nonzero(self.mask[start:end])) for start, end in ends)

    @property
    def num_groups(self) -> int:
        """What is shuffled as one: rows."""
        return len(self)

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        if not self.parts:
            return len(self)
        return sum(part.size for part in self.parts) * (len(self) // self.num_groups)

    @classmethod
    def join(cls: type[E], sets: Sequence[E], parts: tuple[Part, ...]) -> E:
        """The rows of `sets` one after the other. A field that is no array has one value in all of them; one with an
        item for each token is not copied."""
        values = {field.name: [getattr(data, field.name) for data in sets] for field in fields(cls)}
        joined = {name: each[0] for name, each in values.items()}
        for name, each in values.items():
            if isinstance(each[0], np.ndarray):
                of_tokens = all(len(one) == len(data.tokens) for one, data in zip(each, sets, strict=True))
                joined[name] = Joined(each) if of_tokens else np.concatenate(each)
        offsets = np.concatenate([[0], *(data.lengths for data in sets)]).cumsum()
        return cls(**joined | {"offsets": offsets, "parts": parts})

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, mask, segments) of one row, without padding."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.mask[part], None if self.segments is None else self.segments[part]


@dataclass(frozen=True)
class Report:
    """The report on a source's lines."""

    path: str
    num_lines: int  # without blank ones
    num_examples: int
    num_rows: int  # fewer than examples when packed
    num_tokens: int
    num_loss_tokens: int
    max_length: int
    truncated: Places
    dropped: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_examples} examples, {self.num_tokens} tokens, {self.num_loss_tokens} with a loss",
            f"packed into {self.num_rows} rows" if self.num_rows != self.num_examples else "",
            self.truncated.said(f"cut to {self.max_length} tokens"),
            self.dropped.said("dropped (the prompt leaves no room)"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


def load_sft(
    given: Files, tokenizer: Tokenizer, config: SFTDataConfig, *, cache: Cache | None = None
) -> tuple[Examples, Report | Reports]:
    """The examples of data files (`config.train` or `config.validation`) and the report on their lines. Each source is
    packed by itself. `cache`: where they are kept; None: in memory.

    Raises UserError if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed, if nothing is
    left of it, and for conversations without a chat template.
    """
    recipe = Recipe(
        "sft",
        options_of(config),
        lambda records: _read(records, tokenizer, config),
        (lambda table: packed(table.columns, config.max_length)) if config.packing else None,
    )
    return load_files(given, lambda path: _load(path, recipe, tokenizer, config, cache))


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: SFTDataConfig, cache: Cache | None
) -> tuple[Examples, Report]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    offsets = found.table.offsets()
    report = Report(
        path=path,
        num_lines=found.counts["lines"],
        num_examples=found.counts["examples"],
        num_rows=len(offsets) - 1,
        num_tokens=found.table.num_tokens,
        num_loss_tokens=found.counts["loss_tokens"],
        max_length=config.max_length,
        truncated=found.notes["truncated"],
        dropped=found.notes["dropped"],
        bad=found.notes["bad"],
    )
    if not report.num_examples:
        raise UserError(f"{report.summary()}; no example is left: give a file that has some, or raise max_length")
    segments = found["segments"] if config.packing else None
    return Examples(found["tokens"], found["mask"], offsets, segments), report


def _read(records: Records, tokenizer: Tokenizer, config: SFTDataConfig) -> Table:
    tokens, mask, lengths = array("i"), bytearray(), array("i")
    truncated, dropped = [], []
    for line, (ids, counts) in records.read(lambda row: _example(row, tokenizer, config)):
        counts[0] = False
        if not any(counts[: config.max_length]):
            dropped.append(line)
            continue
        if len(ids) > config.max_length:
            truncated.append(line)
        tokens.extend(ids[: config.max_length])
        mask.extend(counts[: config.max_length])
        lengths.append(min(len(ids), config.max_length))
    return Table(
        {"tokens": np.array(tokens, np.int32), "mask": np.array(mask, bool), "lengths": np.array(lengths, np.int32)},
        {"examples": len(lengths), "loss_tokens": sum(mask)},
        {"truncated": Lines.of(truncated), "dropped": Lines.of(dropped)},
    )


def packed(columns: dict[str, np.ndarray], max_length: int) -> Columns:
    """Pack whole examples (`tokens`, `mask`, `lengths`) into rows of at most `max_length` tokens: each, in order, into
    the first row with room for it."""
    lengths = columns["lengths"].astype(np.int64)
    order, counts = packing.first_fit(lengths, max_length)
    starts = np.cumsum(lengths) - lengths
    return {
        "tokens": packing.gathered(columns["tokens"], starts, lengths, order),
        "mask": packing.gathered(columns["mask"], starts, lengths, order),
        "segments": packing.segments(counts, lengths[order]),
        "lengths": np.add.reduceat(lengths[order], np.cumsum(counts) - counts) if len(order) else lengths,
    }


def _example(row: dict[str, Any], tokenizer: Tokenizer, config: SFTDataConfig) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a line; ValueError says what is wrong with it."""
    everything = config.loss_on == "all"
    if config.messages_key in row:
        ids, mask = tokenizer.chat(messages(row[config.messages_key], config.messages_key))
        if not any(mask):
            raise ValueError("no assistant message to learn from")
        return ids, [True] * len(ids) if everything else mask
    if config.prompt_key in row or config.response_key in row:
        prompt, answers = turns(row, config.prompt_key), {config.response_key: turns(row, config.response_key)}
        (one,) = encode(tokenizer, prompt, answers, add_bos=config.add_bos, chat=config.chat, key=config.prompt_key)
        return one.ids, [True] * len(one.ids) if everything else one.mask
    if config.text_key in row:
        text = string(row, config.text_key)
        if not text.strip():
            raise ValueError(f"'{config.text_key}' is empty")
        ids = [*encode_prompt(tokenizer, text, add_bos=config.add_bos), tokenizer.eos_id]
        return ids, [True] * len(ids)
    wanted = f"'{config.messages_key}', '{config.response_key}' or '{config.text_key}'"
    raise ValueError(f"none of the keys {wanted} (found: {', '.join(row)})")
