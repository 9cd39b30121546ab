"""A Python reward function as users write one: the true sentiment of the review."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import reviews


def score(prompts, responses):
    return [2 * reviews.judge(prompt + response) - 1 for prompt, response in zip(prompts, responses, strict=True)]


def nan(prompts, responses):
    return [float("nan")] * len(prompts)


def huge(prompts, responses):
    return [1e30] * len(prompts)


def answers(prompts, responses, records):
    """How near the response's length is to the number that the prompt's record gives."""
    return [-abs(len(text) - float(record["answer"])) for text, record in zip(responses, records, strict=True)]


def steps(prompts, responses):
    """A score for every third character."""
    return [[[end, ord(text[end - 1]) % 11 - 4] for end in range(1, len(text) + 1, 3)] for text in responses]


def parity(prompts, responses):
    """1.0 if the response has an even number of characters, so that many groups have equal scores."""
    return [float(len(text) % 2 == 0) for text in responses]


def matched(prompts, responses, records):
    """1.0 if the response has as many vowels, modulo 3, as the prompt's record asks for; each record must be that of
    its prompt."""
    for prompt, record in zip(prompts, records, strict=True):
        assert prompt and record["prompt"].startswith(prompt), (prompt, record)
    vowels = [sum(text.count(letter) for letter in "aeiou") % 3 for text in responses]
    return [float(count == record["answer"]) for count, record in zip(vowels, records, strict=True)]
