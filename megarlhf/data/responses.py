"""Responses that exist already: read, tokenized or taken as the ids that were sampled, and made into
rollouts. The keys of a line are in docs/own-samples.md.

Legend: M responses of the file, N their tokens with those of their prompts; B rows of a batch.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megarlhf.batch import Rollout
from megarlhf.config import UserError
from megarlhf.data import sources, tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import encode, encode_prompt, turns
from megarlhf.data.jsonl import Records, dumped, string
from megarlhf.data.prompts import RecordCheck
from megarlhf.data.tables import Blobs, Recipe, Rows, Table, bytes_of
from megarlhf.data.tokenizer import Tokenizer

# What a line says about its response. All other keys belong to its prompt.
OF_THE_RESPONSE = ("prompt_id", "prompt_tokens", "tokens", "logprob", "ended", "score", "scores")


@dataclass(frozen=True)
class Reading:
    """How lines are read."""

    tokens: bool = True  # take a line's ids where it has them; False: encode the texts
    add_bos: bool = True  # these two for texts: BOS prompt response EOS
    add_eos: bool = True
    chat: bool = False  # texts are messages of the chat template
    prompt_key: str = "prompt"
    response_key: str = "response"


@dataclass(frozen=True)
class Responses:
    """Row m is tokens[offsets[m] : offsets[m + 1]], of which the first sizes[m] are the prompt's."""

    tokens: np.ndarray  # (N,) int32
    offsets: np.ndarray  # (M + 1,) int64
    sizes: np.ndarray  # (M,) int64
    places: Sequence[str]  # M of "file:line"
    others: Sequence[bytes]  # records of prompts as JSON; empty where no source takes records
    prompts: np.ndarray  # (M,) int64: each row's place in `others`
    scored: int  # lines that have a score already
    changed: int  # lines whose texts are not those of their tokens

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def longest(self) -> tuple[int, int]:
        """(tokens of the longest row, of the longest response)."""
        lengths = np.diff(self.offsets)
        return int(lengths.max()), int((lengths - self.sizes).max())

    def records(self, rows: Iterable[int]) -> list[dict[str, Any]]:
        """The records of the prompts of these rows. New objects, which the caller may change."""
        return [json.loads(self.others[int(self.prompts[row])]) for row in rows]

    def rollout(self, rows: np.ndarray, pad_id: int) -> Rollout:
        """The rows as a rollout: prompts padded at the left, responses at the right. Prompt and group ids are the rows,
        log-probs 0."""
        parts = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        sizes = self.sizes[rows]
        first, width = int(sizes.max()), int(max(len(part) - size for part, size in zip(parts, sizes, strict=True)))
        tokens = np.full((len(rows), first + width), pad_id, np.int64)
        real = np.zeros(tokens.shape, bool)
        for target, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            span = slice(first - size, first - size + len(part))
            tokens[target, span] = part
            real[target, span] = True
        ids = torch.from_numpy(np.asarray(rows, np.int64))
        return Rollout(
            tokens=torch.from_numpy(tokens),
            mask=torch.from_numpy(real[:, first:].copy()),
            segments=torch.from_numpy(real.astype(np.int64)),
            prompt_len=first,
            sequence_ids=ids,
            prompt_ids=ids,
            group_ids=ids,
            logprobs=torch.zeros(len(rows), width),
        )


class _Placed(Sequence[str]):
    """Where lines are, for messages."""

    def __init__(self, table: Table, name: str):
        self._lines, self._starts, self._source = table.columns["lines"], table.starts, sources.find(name)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> str:
        return self._source.place(int(self._lines[row]), self._starts)


def load_responses(
    path: str,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    keep_records: bool,
    check_record: RecordCheck | None = None,
    cache: Cache | None = None,
) -> Responses:
    """The responses of a source. Raises UserError (file:line) if it cannot be read or is empty, for a malformed line,
    and where `check_record` raises ValueError. `cache`: where they are kept; None: in memory."""
    options = asdict(reading) | {"keep_records": keep_records, "check": check_record and check_record.key}
    recipe = Recipe(
        "responses", options, lambda records: _read(records, tokenizer, reading, keep_records, check_record)
    )
    found = tables.load(path, recipe, tokenizer, cache, None)
    if not len(found["sizes"]):
        raise UserError(f"{path}: has no line; give a file with responses")
    return Responses(
        tokens=found["tokens"],
        offsets=found.table.offsets(),
        sizes=found["sizes"],
        places=_Placed(found.table, path),
        others=Rows(found["others"], found["others_lengths"], bytes_of),
        prompts=np.cumsum(found["new"], dtype=np.int64) - 1,
        scored=found.counts["scored"],
        changed=found.counts["changed"],
    )


def _read(
    records: Records, tokenizer: Tokenizer, reading: Reading, keep_records: bool, check_record: RecordCheck | None
) -> Table:
    tokens, lengths, sizes, lines = array("i"), array("q"), array("q"), array("q")
    others, new, last, scored, changed = Blobs(), bytearray(), None, 0, 0

    def convert(row: dict[str, Any]) -> tuple[list[int], list[int], bytes, bool, bool]:
        before, response, same = _ids(row, tokenizer, reading)
        record = record_of(row, reading)
        if check_record is not None:
            check_record(record)
        text = dumped(row)
        kept = b""
        if keep_records:
            kept = text if record == row else dumped(record)
        return before, response, kept, same, "score" in row

    for line, (before, response, record, same, has_score) in records.read(convert):
        tokens.extend(before + response)
        lengths.append(len(before) + len(response))
        sizes.append(len(before))
        lines.append(line)
        new.append(record != last)  # the record of a prompt once
        if new[-1]:
            others.append(record)
        last = record
        changed += not same
        scored += has_score
    columns = {
        "tokens": np.array(tokens, np.int32),
        "lengths": np.array(lengths, np.int64),
        "sizes": np.array(sizes, np.int64),
        "lines": np.array(lines, np.int64),
        "new": np.array(new, bool),
        **others.columns("others"),
    }
    return Table(columns, {"scored": scored, "changed": changed}, {})


def record_of(row: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The record of a line's prompt, as the online loop has it: the line's key `record`, which `megarlhf generate`
    writes, or its keys that are not about the response."""
    prompt = {reading.prompt_key: row[reading.prompt_key]}
    if isinstance(row.get("record"), dict):
        return prompt | row["record"]
    return prompt | {key: value for key, value in row.items() if key not in (*OF_THE_RESPONSE, reading.response_key)}


def _ids(row: dict[str, Any], tokenizer: Tokenizer, reading: Reading) -> tuple[list[int], list[int], bool]:
    """(ids of the prompt, of the response, whether they decode to the texts). ValueError says what is wrong."""
    prompt, text = turns(row, reading.prompt_key), string(row, reading.response_key)
    given = {name: row[name] for name in ("prompt_tokens", "tokens") if reading.tokens and row.get(name) is not None}
    for name, ids in given.items():
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise ValueError(f"'{name}' must be a list of ids")
        if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise ValueError(
                f"'{name}' has the id {max(ids) if min(ids) >= 0 else min(ids)}, which the tokenizer {tokenizer.path} "
                "does not have; give the policy's tokenizer, or tokens=false to read the texts"
            )
    if "tokens" in given:
        before = given.get("prompt_tokens")
        if before is None:
            turn = [{"role": "user", "content": prompt}] if reading.chat and isinstance(prompt, str) else prompt
            before = encode_prompt(tokenizer, turn, add_bos=reading.add_bos, key=reading.prompt_key)
        if not before:
            raise ValueError(f"'{reading.prompt_key}' is empty")
        response = given["tokens"]
        shown = response[:-1] if response[-1] == tokenizer.eos_id else response
        if text not in (tokenizer.continuation(before, shown), tokenizer.continuation(before, response)):
            raise ValueError(
                f"'tokens' are not those of '{reading.response_key}' to the tokenizer {tokenizer.path}; give the "
                "policy's tokenizer, or tokens=false to read the texts"
            )
        return before, response, True
    options = dict(add_bos=reading.add_bos, add_eos=reading.add_eos, chat=reading.chat, key=reading.prompt_key)
    (found,) = encode(tokenizer, prompt, {reading.response_key: text}, **options)
    if not found.prompt:
        raise ValueError(f"'{reading.prompt_key}' is empty")
    shown = found.answer[:-1] if found.answer[-1] == tokenizer.eos_id else found.answer
    bare = found.prompt[int(found.prompt[0] == tokenizer.bos_id) :]
    same = tokenizer.continuation(found.prompt, shown) == text
    if isinstance(prompt, str) and not reading.chat:
        same = same and tokenizer.decode(bare) == prompt
    return found.prompt, found.answer, same
