"""The texts of a rollout that functions and servers score, and the columns of their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.batch import Rollout, Sequences
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience.sources import Answer

Placed = float | list[tuple[int, float]]  # an `Answer` with response columns instead of ends


def token_ids(rollout: Rollout, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """For each row the ids of the prompt, without a leading BOS, and those of the response that count, without a final
    EOS."""
    first, found = rollout.prompt_len, []
    for tokens, segments, mask in zip(rollout.tokens.cpu(), rollout.segments.cpu(), rollout.mask.cpu(), strict=True):
        prompt = tokens[:first][segments[:first] > 0].tolist()
        response = tokens[first:][mask].tolist()
        prompt = prompt[prompt[:1] == [tokenizer.bos_id] :]
        found.append((prompt, response[:-1] if response[-1] == tokenizer.eos_id else response))
    return found


def texts(rollout: Rollout, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The texts of `token_ids`: prompt + response is the whole text (`Tokenizer.continuation`)."""
    return decoded(token_ids(rollout, tokenizer), tokenizer)


def decoded(ids: list[tuple[list[int], list[int]]], tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    return (
        [tokenizer.decode(prompt) for prompt, _ in ids],
        [tokenizer.continuation(prompt, response) for prompt, response in ids],
    )


def place(answer: Answer, prompt: list[int], response: list[int], tokenizer: Tokenizer) -> Placed:
    """The steps of an answer at the response's columns: each score at the token that completes the step's last
    character. (A character of several bytes may be spread over several tokens.) `response`: ids, column 0 first."""
    if not isinstance(answer, list):
        return answer
    ids, before = [*prompt, *response], tokenizer.decode(prompt)
    text = tokenizer.decode(ids)
    if not text.startswith(before):  # they share a character: see `Tokenizer.continuation`
        ids, prompt, before, text = response, [], "", tokenizer.decode(response)
    text = text[len(before) :]
    # One pass: ids[:read] are text[:done]. The ids from `start` on, which were `before` at `read`, are decoded again
    # with each new one: a tokenizer leaves out the space in front of the first, and may show no character of a run of
    # bytes while the last of them is incomplete.
    found: list[tuple[int, float]] = []
    start, read, done = 0, len(prompt), 0
    for count in range(read + 1, len(ids) + 1):
        window = tokenizer.decode(ids[start:count])
        part = window[len(before) :] if window.startswith(before) else ""
        same = next((j for j, char in enumerate(part) if text[done + j : done + j + 1] != char), len(part))
        while len(found) < len(answer) and (answer[len(found)][0] <= done + same or count == len(ids)):
            found.append((count - 1 - len(prompt), answer[len(found)][1]))
        if len(found) == len(answer):
            break
        if part and same == len(part) and not part.endswith("\ufffd"):
            start, read, done = read, count, done + same
            before = tokenizer.decode(ids[start:read])
    return found


def step_ends(rollout: Rollout, tokenizer: Tokenizer, separator: str) -> Tensor:
    """(B, R) bool: the last tokens of the responses' steps, at least one a row.

    A step is the text up to a `separator` and with it, but without the spaces at its end, which tokenizers merge with
    the next step; or the rest of the response without EOS, also if the response was cut off. White space alone is no
    step. A step's last token is the one that completes its last character. A response without a step has one, which
    ends at its last counted token.
    """
    ends = torch.zeros_like(rollout.mask, device="cpu")
    rows, counts = token_ids(rollout, tokenizer), rollout.mask.sum(1).tolist()
    for row, (prompt, response) in enumerate(rows):
        found = [(end, 0.0) for end in _ends(tokenizer.continuation(prompt, response), separator)]
        columns = [column for column, _ in place(found, prompt, response, tokenizer)] if found else [counts[row] - 1]
        ends[row, columns] = True
    return ends.to(rollout.mask.device)


def _ends(text: str, separator: str) -> list[int]:
    """The number of characters up to the end of each step of `text`."""
    found, done, kept = [], 0, len(separator.rstrip(" "))
    while done < len(text):
        at = text.find(separator, done)
        step = text[done:] if at < 0 else text[done:at]
        if step.strip():
            found.append(len(text) if at < 0 else at + kept)
        done = len(text) if at < 0 else at + len(separator)
    return found


def with_placeholders(rollout: Rollout, ends: Tensor, token: int) -> tuple[Sequences, Tensor]:
    """(the rows with `token` after each of the tokens `ends` (B, R), padded at the right, of which the placeholders
    count; (B, R') bool: their columns). Their row-major order is that of `ends`."""
    first, rows = rollout.prompt_len, []
    for tokens, segments, marks in zip(rollout.tokens.cpu(), rollout.segments.cpu(), ends.cpu(), strict=True):
        after = torch.nn.functional.pad(marks, (first, 0))
        real = segments > 0
        times = (1 + after.long())[real]  # each token, and the placeholder after it
        ids = tokens[real].repeat_interleave(times)
        added = torch.zeros_like(ids, dtype=torch.bool)
        added[times.cumsum(0)[after[real]] - 1] = True
        rows.append((torch.where(added, token, ids), added))
    length = max(len(ids) for ids, _ in rows)
    tokens, mask, segments = (
        torch.zeros(len(rows), length, dtype=kind) for kind in (torch.long, torch.bool, torch.long)
    )
    for row, (ids, added) in enumerate(rows):
        tokens[row, : len(ids)], mask[row, : len(ids)], segments[row, : len(ids)] = ids, added, 1
    whole = Sequences(tokens, mask[:, 1:], segments).to(rollout.mask.device)
    return whole, whole.mask
