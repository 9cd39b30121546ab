"""The texts of a rollout that functions and servers score, and the columns of their steps."""

from __future__ import annotations

from bisect import bisect_left

from megarlhf.batch import Rollout
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
    text, found = tokenizer.continuation(prompt, response), []
    for end, score in answer:

        def complete(count: int, end: int = end) -> bool:
            return tokenizer.continuation(prompt, response[:count])[:end] == text[:end]

        first = found[-1][0] if found else 0
        found.append((bisect_left(range(len(response)), True, first, key=lambda c: complete(c + 1)), score))
    return found
