"""Film reviews from a small grammar, for the demo and the tests: texts whose sentiment is known exactly.

A review is an opening and three clauses about aspects of a film, each with an adjective. Most adjectives of a review
share its sentiment. All words are known, so `judge` gives the true sentiment, which a trained reward model can be
compared with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

POSITIVE = [
    "superb",
    "brilliant",
    "moving",
    "clever",
    "charming",
    "funny",
    "fresh",
    "gripping",
    "warm",
    "stunning",
    "honest",
    "elegant",
    "joyful",
    "inventive",
    "tender",
    "thrilling",
]
NEGATIVE = [
    "dull",
    "clumsy",
    "tedious",
    "shallow",
    "bland",
    "noisy",
    "stale",
    "lifeless",
    "cold",
    "awkward",
    "predictable",
    "confusing",
    "dreary",
    "lazy",
    "hollow",
    "grating",
]
ASPECTS = [
    "acting",
    "plot",
    "ending",
    "music",
    "dialogue",
    "camera",
    "story",
    "pacing",
    "humor",
    "cast",
    "script",
    "editing",
    "lighting",
    "opening",
    "romance",
    "mystery",
]
VERBS = ["was", "felt", "seemed", "remained", "turned", "became", "looked", "sounded"]
DEGREES = ["", "", "really ", "quite ", "rather ", "truly ", "always ", "often "]
OPENINGS = [
    f"{who} {saw} this {kind} {when} ."
    for who in ("we", "i", "my sister and i", "my friends")
    for saw in ("watched", "saw", "rented", "finally saw")
    for kind in ("film", "movie", "comedy", "drama", "thriller", "sequel")
    for when in ("yesterday", "last week", "on a plane", "at home", "in a full cinema")
]


@dataclass(frozen=True)
class Review:
    prompt: str  # the opening and the start of the first clause
    response: str  # the rest, beginning with a space


def reviews(count: int, seed: int) -> Iterator[Review]:
    """`count` reviews, half of them positive on average; a function of the seed."""
    random_ = random.Random(seed)
    for _ in range(count):
        prompt, aspect = _prompt(random_)
        yield Review(prompt, _response(random_, aspect, positive=random_.random() < 0.5))


def preferences(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """`count` triples (prompt, a response, a less positive response by the judge)."""
    random_ = random.Random(seed)
    while count:
        prompt, aspect = _prompt(random_)
        better, worse = (_response(random_, aspect, positive=positive) for positive in (True, False))
        if judge(prompt + better) > judge(prompt + worse):
            count -= 1
            yield prompt, better, worse


def _prompt(random_: random.Random) -> tuple[str, str]:
    aspect = random_.choice(ASPECTS)
    return f"{random_.choice(OPENINGS)} the {aspect}", aspect


def _response(random_: random.Random, aspect: str, positive: bool) -> str:
    others = random_.sample([other for other in ASPECTS if other != aspect], 2)
    clauses = []
    for subject in ("", *(f"the {other} " for other in others)):
        agrees = random_.random() < 0.85
        adjective = random_.choice(POSITIVE if positive == agrees else NEGATIVE)
        clauses.append(f"{subject}{random_.choice(VERBS)} {random_.choice(DEGREES)}{adjective}")
    return f" {', '.join(clauses)} ."


def judge(text: str) -> float:
    """The true sentiment of a text: the share of its adjectives that are positive, 0.5 without any."""
    found = adjectives(text)
    return sum(word in POSITIVE for word in found) / len(found) if found else 0.5


def adjectives(text: str) -> list[str]:
    """The grammar's adjectives in a text, in their order."""
    return [word for word in text.replace(",", " ").replace(".", " ").split() if word in POSITIVE or word in NEGATIVE]


def train_tokenizer(texts: list[str], path: str, vocab_size: int = 400, *, characters: bool = False) -> None:
    """A SentencePiece model of `texts` at `path`.model, with pad 0, unknown 1, BOS 2, EOS 3. `characters`: each is a
    token."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=path,
        vocab_size=vocab_size,
        model_type="char" if characters else "bpe",
        add_dummy_prefix=not characters,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
