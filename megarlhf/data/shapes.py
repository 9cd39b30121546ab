"""Lines of public data sets -> the keys that the data sets of this program read. Pure functions of a line."""

from __future__ import annotations

from typing import Any

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def hh(conversations: dict[str, str]) -> tuple[str, list[list[tuple[str, bool]]]]:
    """Whole conversations as texts, in the form of Anthropic's HH (https://github.com/anthropics/hh-rlhf: "\\n\\nHuman:
    ...\\n\\nAssistant: ..."; {name for messages: text}) -> (the prompt, each answer's pieces). The prompt ends with the
    last "\\n\\nAssistant:" that all share. A piece is (text, whether it counts): later turns of the human do not.

    Raises ValueError for other texts.
    """
    names, texts = " and ".join(f"'{name}'" for name in conversations), [*conversations.values()]
    shared = next((i for i, chars in enumerate(zip(*texts, strict=False)) if len({*chars}) > 1), min(map(len, texts)))
    turn = texts[0].rfind(ASSISTANT, 0, shared)
    if turn < 0:
        raise ValueError(f"{names} share no beginning that ends with {ASSISTANT!r}")
    prompt = texts[0][: turn + len(ASSISTANT)]
    answers = [_pieces(text[len(prompt) :]) for text in texts]
    for name, pieces in zip(conversations, answers, strict=True):
        said = [text for text, counts in pieces if counts]
        if len(said) * 2 - 1 != len(pieces) or not all(text.strip() for text in said):
            raise ValueError(f"'{name}': an answer of the assistant is empty or missing")
    return prompt, answers


def is_hh(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(HUMAN)


def _pieces(answer: str) -> list[tuple[str, bool]]:
    """An answer cut at the human's turns. A piece that does not count is from "\\n\\nHuman:" to the next
    "\\n\\nAssistant:"."""
    pieces, at = [], 0
    while (start := answer.find(HUMAN, at)) >= 0:
        end = answer.find(ASSISTANT, start)
        end = len(answer) if end < 0 else end + len(ASSISTANT)
        pieces += [(answer[at:start], True), (answer[start:end], False)]
        at = end
    return [*pieces, (answer[at:], True)] if at < len(answer) or not pieces else pieces
