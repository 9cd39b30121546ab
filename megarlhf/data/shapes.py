"""Lines of public data sets -> the keys that the data sets of this program read. Pure functions of a line."""

from __future__ import annotations

import re
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


def hh_messages(text: str, name: str) -> list[dict[str, str]]:
    """A conversation in the form of HH -> messages of the user and the assistant, without the spaces around them.
    Raises ValueError for an empty turn; `name`: the text's, for the message."""
    found = []
    for number, part in enumerate(re.split(r"\n\n(Human|Assistant):", text)[1:]):
        if number % 2 == 0:
            found.append({"role": "user" if part == "Human" else "assistant", "content": ""})
        elif not part.strip():
            raise ValueError(f"'{name}': message {len(found)} is empty")
        else:
            found[-1]["content"] = part.strip()
    return found


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


def prm800k(row: dict[str, Any], *, neutral: bool | float | None = True) -> dict[str, Any]:
    """A line of PRM800K (https://github.com/openai/prm800k) -> {"prompt": the problem, "steps": [text], "labels":
    [True, False, `neutral` or None]}: the solution that the labeler followed. The rating 1 is True, -1 False, 0
    `neutral`; None is a step without a rating.

    A step is the chosen completion, or what the labeler wrote, which counts as right. Where there is neither (the
    labeler stopped at the first error), the first completion, the one of the solution that was labelled, is the last
    step. Lightman et al. 2023 (arXiv 2305.20050) let neutral steps count as right in their best scores of solutions.

    Raises ValueError for a line of another shape, and for one without a step.
    """
    try:
        problem, given = row["question"]["problem"], row["label"]["steps"]
        steps, labels = [], []
        for step in given:
            completions, chosen, human = step["completions"] or [], step["chosen_completion"], step["human_completion"]
            if chosen is not None:
                one = completions[_index(chosen, len(completions))]
                text, rating = one["text"], one["rating"]
            elif human is not None:
                text, rating = human["text"] if isinstance(human, dict) else human, 1
            elif completions:
                text, rating = completions[0]["text"], completions[0]["rating"]
            else:
                break
            steps.append(text)
            labels.append({1: True, 0: neutral, -1: False, None: None}[rating])
            if chosen is None and human is None:
                break
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a line of PRM800K ({type(error).__name__}: {error})")
    if not isinstance(problem, str) or not all(isinstance(text, str) for text in steps):
        raise ValueError("not a line of PRM800K: the problem and the steps must be strings")
    if not steps:
        raise ValueError("a solution without a step")
    return {"prompt": problem, "steps": steps, "labels": labels}


def prm800k_finished(row: dict[str, Any]) -> bool:
    """Whether the labeler judged the solution to its end or to its first error, and did not give up before (the line's
    finish_reason is give_up or bad_problem)."""
    return row["label"].get("finish_reason") not in ("give_up", "bad_problem")


def is_prm800k(row: dict[str, Any]) -> bool:
    return isinstance(row.get("question"), dict) and isinstance(row.get("label"), dict) and "steps" in row["label"]


def _index(chosen: Any, size: int) -> int:
    if type(chosen) is not int or not 0 <= chosen < size:
        raise IndexError(f"chosen_completion {chosen!r} of {size}")
    return chosen
