"""Prompts and answers -> token ids, and which of them count. Both are texts or lists of messages; every data set reads
them through this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarlhf.config import nearest
from megarlhf.data import shapes
from megarlhf.data.jsonl import string
from megarlhf.data.tokenizer import Message, Tokenizer

Turns = str | list[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Encoded:
    """A prompt with one answer."""

    prompt: list[int]  # ids, with BOS; as the prompt alone is encoded before an answer is sampled
    answer: list[int]  # ids, with EOS
    counts: list[bool]  # of the answer's ids: what the assistant says, with the token that ends its turn

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def mask(self) -> list[bool]:
        """Of `ids`."""
        return [False] * len(self.prompt) + self.counts


def turns(row: dict[str, Any], key: str) -> Turns:
    """row[key]: a text, or messages if it is a list. ValueError says what is wrong with it."""
    return messages(row[key], key) if isinstance(row.get(key), list) else string(row, key)


def messages(given: Any, key: str) -> list[Message]:
    """`given` if it is a list of messages; else ValueError. The assistant's content must not be empty."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"'{key}' must be a list of messages")
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"'{key}': message {number} must have a role and a content")
        try:
            role, content = string(message, "role"), string(message, "content")
        except ValueError as error:
            raise ValueError(f"'{key}': message {number}: {error}")
        if role not in ROLES:
            raise ValueError(f"'{key}': message {number}: unknown role '{role[:40]}'; {nearest(role, ROLES)}")
        if role == "assistant" and not content.strip():
            raise ValueError(f"'{key}': message {number}: the assistant's content is empty")
    return given


def check_prompt(prompt: list[Message], key: str) -> None:
    """ValueError unless an answer can follow these messages: the assistant speaks next."""
    last = prompt[-1]
    if last["role"] == "assistant":
        raise ValueError(f"'{key}' ends with the assistant's message, where the assistant is to answer; remove it")
    if not last["content"].strip():
        raise ValueError(f"'{key}': message {len(prompt)}: the content is empty")


def encode_prompt(tokenizer: Tokenizer, prompt: Turns, *, add_bos: bool, key: str = "prompt") -> list[int]:
    """The ids before an answer. A text: BOS (if `add_bos` and the tokenizer has one) and the text. Messages: as the
    chat template writes them, with the beginning of the assistant's turn. ValueError says what is wrong."""
    if not isinstance(prompt, str):
        check_prompt(prompt, key)
        return tokenizer.chat_prompt(prompt)
    bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    return bos + tokenizer.encode(prompt)


def encode(
    tokenizer: Tokenizer,
    prompt: Turns | None,
    answers: dict[str, Turns],
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    chat: bool = False,
    key: str = "prompt",
) -> list[Encoded]:
    """One prompt with each of its `answers` ({name for messages: answer}). `key`: the prompt's name for messages.

    Texts: BOS prompt answer EOS; the answer counts. BOS and EOS depend on `add_bos` and `add_eos`.

    Messages, if the prompt or an answer is a list, and with `chat`: the chat template writes them, with its own BOS and
    end-of-turn tokens. A text is then a user's message as a prompt, an assistant's as an answer. A list of messages as
    an answer continues the prompt, or is the whole conversation. What all answers share at the beginning is the prompt;
    the assistant's turns after it count. Whatever a template writes behind the last turn's EOS is cut off, because a
    policy stops there; without `add_eos` EOS is, too.

    Without a prompt (None) the answers are whole conversations: messages, or texts as in Anthropic's HH.

    Raises ValueError (without a place: the caller knows the line) for conversations that do not fit together, empty
    answers and what the chat template refuses; UserError if there is none.
    """
    for name, answer in answers.items():
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise ValueError(f"'{name}' is empty")
    if chat and prompt is None:
        answers = {
            name: shapes.hh_messages(one, name) if isinstance(one, str) else one for name, one in answers.items()
        }
    if chat or any(isinstance(given, list) for given in (prompt, *answers.values())):
        shared, wholes = _shared(prompt, answers, key)
        return [_chat(tokenizer, whole, shared, add_eos) for whole in wholes]
    if prompt is None:
        prompt, pieces = shapes.hh(answers)
    else:
        pieces = [[(answer, True)] for answer in answers.values()]
    return [_text(tokenizer, prompt, parts, add_bos, add_eos) for parts in pieces]


def continuation(tokenizer: Tokenizer, prompt: str, before: list[int], response: str) -> list[int]:
    """The ids of `response` after `prompt`, whose ids `before` must not change: generation encodes the prompt alone.
    Both are encoded together if that keeps `before`, because SentencePiece puts a space before a separate text; the
    response is encoded alone if a token would cross the boundary."""
    together = tokenizer.encode(prompt + response)
    return together[len(before) :] if together[: len(before)] == before else tokenizer.encode(response)


def _text(tokenizer: Tokenizer, prompt: str, pieces: list[tuple[str, bool]], add_bos: bool, add_eos: bool) -> Encoded:
    """`pieces` of an answer: (text, whether it counts)."""
    before = tokenizer.encode(prompt)
    text, ids, counts = prompt, list(before), []
    for piece, counted in pieces:
        more = continuation(tokenizer, text, ids, piece)
        text, ids, counts = text + piece, ids + more, counts + [counted] * len(more)
    answer = ids[len(before) :]
    if add_eos:
        answer, counts = [*answer, tokenizer.eos_id], [*counts, True]
    bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    return Encoded(bos + before, answer, counts)


def _chat(tokenizer: Tokenizer, whole: list[Message], shared: int, add_eos: bool) -> Encoded:
    """The conversation `whole`, of which the first `shared` messages are the prompt."""
    before = tokenizer.chat_prompt(whole[:shared])
    ids, mask = tokenizer.chat(whole, after=shared)
    if not any(mask):
        raise ValueError("the chat template marks no token of the answer as the assistant's")
    end = len(mask) - mask[::-1].index(True)
    if ids[end : end + 1] == [tokenizer.eos_id]:  # not within the template's {% generation %} block
        end += 1
    if not add_eos and ids[end - 1] == tokenizer.eos_id:
        end -= 1
    return Encoded(before, ids[len(before) : end], mask[len(before) : end])


def _shared(prompt: Turns | None, answers: dict[str, Turns], key: str) -> tuple[int, list[list[Message]]]:
    """(number of messages at the beginning that are the prompt, the whole conversations)."""
    wholes, least = [], 1
    for name, answer in answers.items():
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        given = _given(prompt, turns, key)
        if given is None:
            raise ValueError(
                f"'{name}' neither begins with the messages of '{key}' nor goes on with an assistant's message"
            )
        whole = turns if turns[: len(given)] == given else [*given, *turns]
        if whole[-1]["role"] != "assistant":
            raise ValueError(f"'{name}' ends with a message of the role {whole[-1]['role']}, not the assistant's")
        wholes.append(whole)
        least = max(least, len(given))
    if any(whole[0]["role"] == "assistant" for whole in wholes):
        raise ValueError("the assistant speaks first; begin the conversation with a user or system message")
    shared = least
    if len(wholes) > 1 or prompt is None:
        while all(whole[shared:] and whole[: shared + 1] == wholes[0][: shared + 1] for whole in wholes):
            shared += 1
    # Back to where the assistant speaks in all of them.
    while shared > least and not all(whole[shared:] and whole[shared]["role"] == "assistant" for whole in wholes):
        shared -= 1
    if any(whole[:shared] != wholes[0][:shared] for whole in wholes):
        raise ValueError(f"{_names(answers)} are of different conversations: their beginnings differ")
    if not all(whole[shared:] and whole[shared]["role"] == "assistant" for whole in wholes):
        raise ValueError(f"{_names(answers)}: the assistant does not speak directly after what they share")
    check_prompt(wholes[0][:shared], key)
    return shared, wholes


def _given(prompt: Turns | None, turns: list[Message], key: str) -> list[Message] | None:
    """The messages of the prompt as they begin the conversation with the answer `turns`; [] without a prompt. None: the
    two do not fit together."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        before = 0
        while before < len(turns) and turns[before]["role"] in ("system", "developer"):
            before += 1
        opening = turns[before] if before < len(turns) else turns[0]
        if opening["role"] == "user" and opening["content"].strip() == prompt.strip():
            return turns[: before + 1]
        prompt = [{"role": "user", "content": prompt}]
    check_prompt(prompt, key)
    return prompt if turns[: len(prompt)] == prompt or turns[0]["role"] == "assistant" else None


def _names(answers: dict[str, Turns]) -> str:
    return " and ".join(f"'{name}'" for name in answers)
