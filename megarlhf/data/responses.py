"""Responses that exist already, from JSONL: read, tokenized or taken as the ids that were sampled, and made into
rollouts. The keys of a line are in docs/own-samples.md.

Legend: M responses of the file, N their tokens with those of their prompts; B rows of a batch.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarlhf.batch import Rollout
from megarlhf.config import UserError
from megarlhf.data.conversations import encode, encode_prompt, turns
from megarlhf.data.jsonl import Records, string
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
    lines: np.ndarray  # (M,) int64: line numbers in the file
    others: list[bytes]  # each prompt's record as JSON; empty where no source takes records
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
        return [json.loads(self.others[row]) for row in rows]

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


def load_responses(
    path: str,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    keep_records: bool,
    check_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Responses:
    """The responses of a file. Raises UserError (file:line) if it cannot be read or is empty, for a malformed line, and
    where `check_record` raises ValueError."""
    tokens, offsets, sizes, lines = array("i"), array("q", [0]), array("q"), array("q")
    others: list[bytes] = []
    records, scored, changed = Records(path, max_bad_fraction=None), 0, 0

    def convert(row: dict[str, Any]) -> tuple[list[int], list[int], bytes, bool, bool]:
        before, response, same = _ids(row, tokenizer, reading)
        record = record_of(row, reading)
        check_record(record)
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise ValueError("a number is NaN or infinite, which JSON does not have; write null")
        kept = b""
        if keep_records:
            kept = (text if record == row else json.dumps(record, ensure_ascii=False)).encode(errors="surrogatepass")
        return before, response, kept, same, "score" in row

    for line, (before, response, record, same, has_score) in records.read(convert):
        tokens.extend(before + response)
        offsets.append(len(tokens))
        sizes.append(len(before))
        lines.append(line)
        if keep_records:
            others.append(others[-1] if others and others[-1] == record else record)  # one object a prompt
        changed += not same
        scored += has_score
    if not sizes:
        raise UserError(f"{path}: has no line; give a file with responses")
    return Responses(
        tokens=np.array(tokens, np.int32), offsets=np.array(offsets, np.int64), sizes=np.array(sizes, np.int64),
        lines=np.array(lines, np.int64), others=others, scored=scored, changed=changed,
    )  # fmt: skip


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
