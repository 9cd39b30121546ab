"""Prompts: read, tokenized, cut to a static length, padded at the left, and distributed to the ranks. The
complete lines stay on the host, or in the cache, as records; batches carry their ids.

Legend: K prompts of the data set, G of a global batch, B = G / dp_size of this rank, P columns.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from megarlhf.batch import Prompts
from megarlhf.config import UserError
from megarlhf.data import tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import Turns, check_prompt, messages, turns
from megarlhf.data.files import Files, Part, Reports, check_files, load_files, options_of
from megarlhf.data.jsonl import Lines, Places, Records, dumped
from megarlhf.data.loader import rows_of_step
from megarlhf.data.stored import release
from megarlhf.data.tables import Blobs, Chain, Recipe, Rows, Table, bytes_of, text_of
from megarlhf.data.tokenizer import Tokenizer, token_id


@dataclass(frozen=True)
class PromptsConfig:
    """The data of prompts: files with {"prompt": ...} or {"messages": [...]} on every line. The other keys (an answer,
    tests) reach the reward functions and servers. Blank lines are ignored.

    Messages, which `prompt` may be, too, are rendered with the tokenizer's chat template and its generation prompt. A
    conversation that is longer than `length` is dropped, not cut: its end is where the assistant's turn begins, and its
    beginning is the template's."""

    path: Files  # a file, a pattern (data/*.jsonl), a datasets directory, or a list, each a name or {path, weight}
    length: int = 64  # P: tokens of a prompt, special ones included (detail G2)
    # What becomes of a longer prompt: it loses its beginning (start) or its end (end, detail G2), or is dropped.
    truncate: Literal["start", "end", "drop"] = "start"
    start_text: str | None = None  # a prompt begins after the first of these (detail P3: "."); without one: dropped
    end_text: str | None = None  # and ends with the last of these that fits (detail P3: "."); without one: dropped
    add_bos: bool = True  # if the tokenizer has a BOS; never cut away
    chat: bool = False  # a prompt that is a text is a user's message, in the chat template
    max_bad_fraction: float = 0.0  # a larger share of malformed or empty lines stops the program; 0: any does
    prompt_key: str = "prompt"
    messages_key: str = "messages"  # of lines without prompt_key

    def __post_init__(self):
        check_files(self.path, "path")
        if self.length < 2:
            raise ValueError(f"length: must be at least 2, not {self.length}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction: must be between 0 and 1, not {self.max_bad_fraction}")


# Limits of what a line has beside its prompt. A record within them fits in a request to the reference server with its
# default limits (train/serve_reward.py), although JSON may write a character of 2 bytes in 6.
RECORD_BYTES, RECORD_VALUES, RECORD_DEPTH = 2**21, 2**17 - 8, 15


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts of at most P tokens, with their texts and the other keys of their lines."""

    tokens: Sequence[np.ndarray]  # K of (length,), of integers
    texts: Sequence[str]  # of a conversation: its tokens' text, without a leading BOS
    others: Sequence[bytes]  # the other keys of each line, as a JSON object
    prompt_key: str = "prompt"
    messages_key: str = "messages"  # of lines without `prompt_key`
    whole: Sequence[bool] | None = None  # (K,) of which prompts `others` has every key: conversations; None: of none
    parts: tuple[Part, ...] = ()  # the files, in order, if they have weights

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_groups(self) -> int:
        """What is shuffled as one: prompts."""
        return len(self)

    @classmethod
    def join(cls, sets: Sequence[PromptSet], parts: tuple[Part, ...]) -> PromptSet:
        """The prompts of `sets` one after the other."""
        return cls(
            tokens=Chain([data.tokens for data in sets]),
            texts=Chain([data.texts for data in sets]),
            others=Chain([data.others for data in sets]),
            prompt_key=sets[0].prompt_key,
            messages_key=sets[0].messages_key,
            whole=Chain([[False] * len(data) if data.whole is None else data.whole for data in sets]),
            parts=parts,
        )

    def records(self, prompt_ids: Iterable[int]) -> list[dict[str, Any]]:
        """The lines of these prompts, every key. New objects, which the caller may change."""
        return [self._record(row) for row in prompt_ids]

    def _record(self, row: int) -> dict[str, Any]:
        other = json.loads(self.others[row])
        return other if self.whole is not None and self.whole[row] else {self.prompt_key: self.texts[row], **other}

    def rows(self, rows: np.ndarray, sequence_ids: np.ndarray, *, length: int, pad_id: int) -> Prompts:
        """The prompts `rows` as a left-padded batch, (B, P)."""
        tokens = np.full((len(rows), length), pad_id, np.int64)
        valid = np.zeros((len(rows), length), bool)
        for target, row in enumerate(rows):
            ids = self.tokens[row]
            tokens[target, length - len(ids) :] = ids
            valid[target, length - len(ids) :] = True
        return Prompts(
            tokens=torch.from_numpy(tokens),
            valid=torch.from_numpy(valid),
            sequence_ids=torch.from_numpy(np.asarray(sequence_ids, np.int64)),
            prompt_ids=torch.from_numpy(np.asarray(rows, np.int64)),
        )


@dataclass(frozen=True)
class PromptReport:
    """The report on a source's lines."""

    path: str
    num_lines: int  # without blank ones
    num_prompts: int
    num_tokens: int
    length: int
    cut: str  # where: "at the start" or "at the end"
    truncated: Places
    dropped: Places
    long: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_prompts} prompts, {self.num_tokens} tokens",
            self.truncated.said(f"cut {self.cut} to {self.length} tokens"),
            self.dropped.said("dropped (no start_text or end_text)"),
            self.long.said(f"dropped (more than {self.length} tokens)"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


class RecordCheck(Protocol):
    """Raises ValueError for a record that cannot be used."""

    key: str  # checks of one key refuse the same records

    def __call__(self, record: dict[str, Any]) -> None: ...


def load_prompts(
    tokenizer: Tokenizer,
    config: PromptsConfig,
    *,
    keep_records: bool = True,
    check_record: RecordCheck | None = None,
    cache: Cache | None = None,
) -> tuple[PromptSet, PromptReport | Reports]:
    """The prompts of the files and the report on their lines. Without `keep_records` the other keys are not read, and
    records have none. A line is malformed if `check_record` raises ValueError for it. `cache`: where the prompts are
    kept; None: in memory.

    Raises UserError (file:line) if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed
    or empty, and if nothing is left of it.
    """
    options = options_of(config) | {"keep_records": keep_records, "check": check_record and check_record.key}
    recipe = Recipe("prompts", options, lambda records: _read(records, tokenizer, config, keep_records, check_record))
    return load_files(config.path, lambda path: _load(path, recipe, tokenizer, config, cache))


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: PromptsConfig, cache: Cache | None
) -> tuple[PromptSet, PromptReport]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    report = PromptReport(
        path=path,
        num_lines=found.counts["lines"],
        num_prompts=len(found["lengths"]),
        num_tokens=found.table.num_tokens,
        length=config.length,
        cut=f"at the {config.truncate}",
        truncated=found.notes["truncated"],
        dropped=found.notes["dropped"],
        long=found.notes["long"],
        bad=found.notes["bad"],
    )
    if not report.num_prompts:
        raise UserError(f"{report.summary()}; no prompt is left: give a file that has some, or raise length")
    prompts = PromptSet(
        tokens=Rows(found["tokens"], found["lengths"]),
        texts=Rows(found["texts"], found["texts_lengths"], text_of),
        others=Rows(found["others"], found["others_lengths"], bytes_of),
        prompt_key=config.prompt_key,
        messages_key=config.messages_key,
        whole=found["whole"],
    )
    return prompts, report


def _read(
    records: Records,
    tokenizer: Tokenizer,
    config: PromptsConfig,
    keep_records: bool,
    check_record: RecordCheck | None,
) -> Table:
    bos = [tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []
    room = config.length - len(bos)
    end = token_id(tokenizer, config.end_text, "end_text") if config.end_text is not None else None
    tokens, lengths, texts, others, whole = array("i"), array("i"), Blobs(), Blobs(), bytearray()
    truncated, dropped, long = [], [], []

    def convert(row: dict[str, Any]) -> tuple[str | list[int], bytes]:
        """The prompt as a text, or as the ids of a conversation."""
        prompt, other = _parts(row, config, keep_records)
        if check_record is not None:
            check_record(row)
        return prompt if isinstance(prompt, str) else tokenizer.chat_prompt(prompt), other

    for line, (prompt, other) in records.read(convert):
        if isinstance(prompt, str):
            body = text = prompt
            if config.start_text is not None:
                _, found, body = text.partition(config.start_text)
                if not found or not body.strip():
                    dropped.append(line)
                    continue
            ids = tokenizer.encode(body)
            if len(ids) > room:
                if config.truncate == "drop":
                    long.append(line)
                    continue
                truncated.append(line)
                ids = ids[:room] if config.truncate == "end" else ids[-room:]
            if end is not None:
                if end not in ids:
                    dropped.append(line)
                    continue
                ids = ids[: len(ids) - ids[::-1].index(end)]
            ids = bos + ids
        else:
            ids = prompt
            if len(ids) > config.length:
                long.append(line)
                continue
            text = tokenizer.decode(ids[ids[:1] == [tokenizer.bos_id] :])
        tokens.extend(ids)
        lengths.append(len(ids))
        texts.append(text.encode())
        others.append(other)
        whole.append(keep_records and not isinstance(prompt, str))
    columns = {
        "tokens": np.array(tokens, np.int32),
        "lengths": np.array(lengths, np.int32),
        **texts.columns("texts"),
        **others.columns("others"),
        "whole": np.array(whole, bool),
    }
    notes = {"truncated": truncated, "dropped": dropped, "long": long}
    return Table(columns, {}, {name: Lines.of(lines) for name, lines in notes.items()})


def _parts(row: dict[str, Any], config: PromptsConfig, keep_records: bool) -> tuple[Turns, bytes]:
    """The prompt of a line, and its other keys as JSON; of a conversation every key."""
    key = config.prompt_key
    if key not in row and config.messages_key in row:
        key = config.messages_key
        prompt = messages(row[key], key)
    else:
        prompt = turns(row, key)
    if isinstance(prompt, str) and not prompt.strip():
        raise ValueError(f"'{key}' is empty")
    if config.chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        rest, named = {name: value for name, value in row.items() if name != key}, f"the keys beside '{key}' "
    else:
        check_prompt(prompt, key)
        for name in ("start_text", "end_text"):
            if getattr(config, name) is not None:
                raise UserError(f"{name} cuts texts, and this prompt is a conversation; remove {name}")
        rest, named = row, "the keys of the line "
    if not keep_records:
        return prompt, b"{}"
    if (values := _count(rest, RECORD_DEPTH)) > RECORD_VALUES:
        raise ValueError(
            f"{named}have {values} values, more than {RECORD_VALUES}; put large values in files of their own and give "
            "their names"
        )
    other = dumped(rest)
    if len(other) > RECORD_BYTES:
        raise ValueError(
            f"{named}take {len(other)} bytes, more than {RECORD_BYTES}; put large values in files of their own and "
            "give their names"
        )
    return prompt, other


def _count(value: Any, depth: int) -> int:
    """How many values and keys `value` has, itself included. ValueError: more than `depth` lists and objects within
    each other."""
    if not isinstance(value, (dict, list)):
        return 1
    if not depth:
        raise ValueError(f"the line has more than {RECORD_DEPTH} lists and objects within each other")
    inner, keys = (value.values(), len(value)) if isinstance(value, dict) else (value, 0)
    return 1 + keys + sum(_count(one, depth - 1) for one in inner)


class PromptLoader:
    """This data-parallel rank's share of every global batch of prompts: a pure function of (data, seed, step).

    Rank r holds the prompts [r B, (r + 1) B) of the global batch. The sequence id of prompt i of batch `step` is
    step * G + i, so its samples do not depend on its rank. `pad_id`: see `Sampler`.

    Raises UserError if `dp_size` does not divide `global_batch`.
    """

    def __init__(
        self,
        data: PromptSet,
        *,
        length: int,
        global_batch: int,
        pad_id: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ):
        if global_batch % dp_size:
            raise UserError(
                f"the global batch of {global_batch} prompts cannot be shared evenly by {dp_size} data-parallel ranks; "
                f"make it a multiple of {dp_size}"
            )
        self.data, self.length, self.pad_id = data, length, pad_id
        self.global_batch, self.seed = global_batch, seed
        share = global_batch // dp_size
        self.mine = slice(dp_rank * share, (dp_rank + 1) * share)

    def batch(self, step: int) -> Prompts:
        """The prompts of `step` (from 0), (B, P)."""
        rows = rows_of_step(
            step, num_rows=len(self.data), global_batch=self.global_batch, seed=self.seed, parts=self.data.parts
        )
        sequence_ids = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        batch = self.data.rows(rows[self.mine], sequence_ids[self.mine], length=self.length, pad_id=self.pad_id)
        release()
        return batch
