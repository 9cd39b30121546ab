"""Supervised examples from JSONL: read, tokenized, checked and optionally packed into rows.

Legend: N tokens of the whole data set, K rows. Stored flat: row k is [offsets[k], offsets[k + 1]).
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megarlhf.config import UserError
from megarlhf.data.jsonl import Records, places, string
from megarlhf.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class SFTDataConfig:
    """The data of supervised examples. Every line of a file is a JSON object of one of three kinds:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}: the tokenizer's chat
        template renders it, with its own BOS and end-of-turn tokens; the loss is on the assistant's turns.
    {"prompt": ..., "response": ...}: BOS prompt response EOS; the loss is on the response and EOS.
    {"text": ...}: BOS text EOS; the loss is on everything.

    Other keys and blank lines are ignored. Rows longer than `max_length` tokens are cut at the end, EOS included, so
    that the model does not learn to stop in mid-sentence. An example without a token with a loss is dropped.
    """

    train: str
    validation: str | None = None
    max_length: int = 1024  # tokens, special ones included
    packing: bool = False  # several examples in a row; they do not see each other
    loss_on: Literal["response", "all"] = "response"  # all: on prompts and on the other roles too
    add_bos: bool = True  # if the tokenizer has a BOS; not for chat templates
    max_bad_fraction: float = 0.01  # a larger share of malformed lines stops the program; 0: any does
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    text_key: str = "text"

    def __post_init__(self):
        if self.max_length < 2:
            raise ValueError(
                f"max_length: must be at least 2 (the first token is never predicted), not {self.max_length}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction: must be between 0 and 1, not {self.max_bad_fraction}")


@dataclass(frozen=True)
class Examples:
    """Tokenized rows. `mask` marks the tokens to be predicted; never a row's or a segment's first, which has no
    context."""

    tokens: np.ndarray  # (N,) int32
    mask: np.ndarray  # (N,) bool
    offsets: np.ndarray  # (K + 1,) int64
    segments: np.ndarray | None = None  # (N,) int32: packed rows count their examples from 1

    def __post_init__(self):
        assert len(self.tokens) == len(self.mask) == self.offsets[-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(K,) tokens in each row."""
        return np.diff(self.offsets)

    @functools.cached_property
    def num_counted(self) -> np.ndarray:
        """(K,) tokens of the mask in each row."""
        return np.add.reduceat(self.mask, self.offsets[:-1], dtype=np.int64)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, mask, segments) of one row, without padding."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.mask[part], None if self.segments is None else self.segments[part]


@dataclass(frozen=True)
class Report:
    """The report on a file's lines. `truncated` and `dropped` hold line numbers, `bad` (line number, reason)."""

    path: str
    num_lines: int  # without blank ones
    num_examples: int
    num_rows: int  # fewer than examples when packed
    num_tokens: int
    num_loss_tokens: int
    max_length: int
    truncated: tuple[int, ...]
    dropped: tuple[int, ...]
    bad: tuple[tuple[int, str], ...]

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_examples} examples, {self.num_tokens} tokens, {self.num_loss_tokens} with a loss",
            f"packed into {self.num_rows} rows" if self.num_rows != self.num_examples else "",
            places(self.path, f"cut to {self.max_length} tokens", [(line, "") for line in self.truncated]),
            places(self.path, "dropped (the prompt leaves no room)", [(line, "") for line in self.dropped]),
            places(self.path, "malformed and skipped", list(self.bad)),
        ]
        return "; ".join(part for part in parts if part)


def load_sft(path: str, tokenizer: Tokenizer, config: SFTDataConfig) -> tuple[Examples, Report]:
    """The examples of one JSONL file (`config.train` or `config.validation`) and the report on its lines.

    Raises UserError if the file cannot be read, if more than `max_bad_fraction` of its lines are malformed, if nothing
    is left, and for conversations without a chat template.
    """
    tokens, mask, offsets = array("i"), bytearray(), array("q", [0])
    truncated, dropped = [], []
    records = Records(path, max_bad_fraction=config.max_bad_fraction)
    for line, (ids, counts) in records.read(lambda row: _example(row, tokenizer, config)):
        counts[0] = False
        if not any(counts[: config.max_length]):
            dropped.append(line)
            continue
        if len(ids) > config.max_length:
            truncated.append(line)
        tokens.extend(ids[: config.max_length])
        mask.extend(counts[: config.max_length])
        offsets.append(len(tokens))
    examples = Examples(np.array(tokens, np.int32), np.array(mask, bool), np.array(offsets, np.int64))
    rows = pack(examples, config.max_length) if config.packing and len(examples) else examples
    report = Report(
        path=path,
        num_lines=records.num_lines,
        num_examples=len(examples),
        num_rows=len(rows),
        num_tokens=len(tokens),
        num_loss_tokens=int(examples.mask.sum()),
        max_length=config.max_length,
        truncated=tuple(truncated),
        dropped=tuple(dropped),
        bad=tuple(records.bad),
    )
    if not len(examples):
        raise UserError(f"{report.summary()}; no example is left: give a file that has some, or raise max_length")
    return rows, report


def pack(examples: Examples, max_length: int) -> Examples:
    """Pack whole examples into rows of at most `max_length` tokens: each, in order, into the first row with room for
    it."""
    lengths = examples.lengths
    assert lengths.max() <= max_length
    space = np.full(len(examples), max_length)
    members: list[list[int]] = []
    for index, length in enumerate(lengths):
        row = int(np.argmax(space[: len(members) + 1] >= length))
        if row == len(members):
            members.append([])
        members[row].append(index)
        space[row] -= length
    order = [index for row in members for index in row]
    numbers = [number for row in members for number in range(1, len(row) + 1)]
    pieces = [examples.row(index) for index in order]
    return Examples(
        tokens=np.concatenate([piece[0] for piece in pieces]),
        mask=np.concatenate([piece[1] for piece in pieces]),
        offsets=np.cumsum([0, *(lengths[row].sum() for row in members)]),
        segments=np.repeat(np.array(numbers, np.int32), lengths[order]),
    )


def _example(row: dict[str, Any], tokenizer: Tokenizer, config: SFTDataConfig) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a line; ValueError says what is wrong with it."""
    everything = config.loss_on == "all"
    if config.messages_key in row:
        ids, mask = tokenizer.chat(_messages(row[config.messages_key], config.messages_key))
        if not any(mask):
            raise ValueError("no assistant message to learn from")
        return ids, [True] * len(ids) if everything else mask
    bos = [tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []
    if config.prompt_key in row or config.response_key in row:
        prompt, response = string(row, config.prompt_key), string(row, config.response_key)
        if not response.strip():
            raise ValueError(f"'{config.response_key}' is empty")
        before = tokenizer.encode(prompt)
        answer = [*continuation(tokenizer, prompt, before, response), tokenizer.eos_id]
        before = bos + before
        return before + answer, [everything] * len(before) + [True] * len(answer)
    if config.text_key in row:
        text = string(row, config.text_key)
        if not text.strip():
            raise ValueError(f"'{config.text_key}' is empty")
        ids = [*bos, *tokenizer.encode(text), tokenizer.eos_id]
        return ids, [True] * len(ids)
    wanted = f"'{config.messages_key}', '{config.response_key}' or '{config.text_key}'"
    raise ValueError(f"none of the keys {wanted} (found: {', '.join(row)})")


def continuation(tokenizer: Tokenizer, prompt: str, before: list[int], response: str) -> list[int]:
    """The ids of `response` after `prompt`, whose ids `before` must not change: generation encodes the prompt alone.
    Both are encoded together if that keeps `before`, because SentencePiece puts a space before a separate text; the
    response is encoded alone if a token would cross the boundary."""
    together = tokenizer.encode(prompt + response)
    return together[len(before) :] if together[: len(before)] == before else tokenizer.encode(response)


def _messages(messages: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'{key}' must be a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"'{key}': message {number} must have a role and a content")
        try:
            role, content = string(message, "role"), string(message, "content")
        except ValueError as error:
            raise ValueError(f"'{key}': message {number}: {error}")
        if role == "assistant" and not content.strip():
            raise ValueError(f"'{key}': message {number}: the assistant's content is empty")
    return messages
