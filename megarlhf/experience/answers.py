"""What a text says: its final answer, its last number, its code; whether a pattern matches. For verifiers.py.

The patterns here take time proportional to the text. A user's pattern may backtrack without end on what a model writes:
it is given up after PATTERN_SECONDS of the processor's time, as if it did not match.
"""

from __future__ import annotations

import re
from fractions import Fraction

import regex

PATTERN_SECONDS = 0.2
LONGEST_NUMBER = 300  # characters, and the largest exponent of ten: larger ones are no numbers

MARKER = re.compile(r"####|\\f?box(?:ed)?\s*\{|(?i:answer)[*_]*(?:\s+(?i:is)\b[:=]?|\s*[:=])")
LINE = re.compile(r"[\s*:]*([^\n]*)")
SENTENCE_END = re.compile(r"[.!?]\s")
FENCE = regex.compile(r"^[ ]*+```[ ]*+(\w*+)[^\n]*+\n(.*?)(?:^[ ]*+```|\Z)", regex.MULTILINE | regex.DOTALL)
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = re.compile(
    r"(?=[-−$€£¥\\.0-9])(?P<sign>(?<![\w)\]}])[-−])?(?:(?:\\?\$|[€£¥])[ ]?(?P<inner>[-−])?)?"
    rf"(?:\\[dt]?frac\s?(?:\{{\s?(?P<up>[-−]?(?:{_PLAIN}))\s?\}}|(?P<upper>[0-9]))"
    rf"\s?(?:\{{\s?(?P<down>{_PLAIN})\s?\}}|(?P<lower>[0-9]))"
    rf"|(?:(?P<whole>[0-9]+)[ ](?=[0-9]+/))?(?P<top>{_PLAIN})(?:[ ]?/[ ]?(?P<bottom>{_PLAIN}))?)"
    r"(?:[eE](?P<e>[-+]?[0-9]+)|[ ]?(?:×|x|\*|\\times|\\cdot)[ ]?10[ ]?(?:\^|\*\*)[ ]?\{?(?P<power>[-−+]?[0-9]+)\}?)?"
)
# Around a number that is the whole answer. AROUND takes the text with 0 for the number.
_WORDS = r"(?:[^\W\d_]|[\s$€£¥%°+'.,:/]|\\[$%]|\\(?:text|mathrm|textbf)\s?\{[^{}\\^_\d]*\}|\^?\{?\\circ\}?)*+"
AROUND = regex.compile(rf"(?:\s*+[^\W\d_]\w*+\s*+=)?+{_WORDS}0{_WORDS}")
UNKNOWN = re.compile(
    r"(?<![^\W\d_])(?:0\s+[einπ]|[xyzπ]|(?i:pi|sqrt|root|hundred|thousand|million|billion|dozen))(?![^\W\d_]|\s*=)"
)


def final_answer(text: str, pattern: str | None = None) -> str | None:
    """The final answer in `text`, without the marks around it. None: there is none.

    With `pattern` it is the pattern's last match, of that group 1 where it has one. Otherwise it is what stands behind
    the last of these marks: `####` or `answer is` or `answer:` (up to the line's end, or the next line that is not
    empty), \\boxed{...}. In a text without any it is the last line.
    """
    if pattern is not None:
        match = _last_match(pattern, text)
        return None if match is None else tidy(match)
    marked = _marked(text)
    return marked or next((tidy(line) for line in reversed(text.splitlines()) if tidy(line)), None)


def final_number(text: str, pattern: str | None = None) -> Fraction | None:
    """The last number in the final answer (the first sentence behind its mark). Without `pattern`, and if there is none
    in it: the last number in `text`."""
    if pattern is not None:
        answer = final_answer(text, pattern)
        return None if answer is None else last_number(answer)
    number = last_number(SENTENCE_END.split(_marked(text) or "", 1)[0])
    return last_number(text) if number is None else number


def last_number(text: str) -> Fraction | None:
    """The last number: 1,234.50, -$3, 50%, 3/4, 1 1/2, \\frac{3}{4}, \\frac34, 1.5e-3, 2 x 10^3. Signs of currencies
    and per cent are dropped. A minus behind a letter, a digit or a bracket is a difference, no sign."""
    values = map(_value, reversed([*NUMBER.finditer(_thousands(text))]))
    return next((value for value in values if value is not None), None)


def is_one_number(text: str, pattern: str | None = None) -> bool:
    """Whether the final answer, as `final_number` reads it, is one number with nothing but words, units and the signs
    of currencies, per cent and degrees around it."""
    answer = final_answer(text, pattern) or ""
    if pattern is None and _marked(text):
        answer = SENTENCE_END.split(answer, 1)[0]
    rest, numbers = NUMBER.subn(" 0 ", _thousands(answer))
    return numbers == 1 and not UNKNOWN.search(rest) and AROUND.fullmatch(rest) is not None


def same(given: str, truth: str, ignore_case: bool) -> bool:
    return given.casefold() == truth.casefold() if ignore_case else given == truth


def tidy(text: str) -> str:
    """Each run of white space as one space; without white space, *, `, $ and one full stop around it."""
    text = " ".join(text.split()).strip(" *`$")
    return text.removesuffix(".").strip(" *`$")


def found(pattern: str, text: str, ignore_case: bool) -> bool:
    """Whether `pattern` matches anywhere in `text`; False also where that takes longer than PATTERN_SECONDS."""
    try:
        flags = regex.IGNORECASE if ignore_case else 0
        return regex.search(pattern, text, flags=flags, timeout=PATTERN_SECONDS) is not None
    except TimeoutError:
        return False


def code_of(response: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole response. A block's end may be
    missing."""
    blocks = [match.groups() for match in FENCE.finditer(response)]
    python = [content for language, content in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [content for _, content in blocks] or [response])[-1]


def _thousands(text: str) -> str:
    """Without LaTeX's separators of thousands."""
    return re.sub(r"\{,\}", ",", re.sub(r"\\[,!;: ]", "", text))


def _marked(text: str) -> str | None:
    text = text.rstrip()
    ends: dict[int, int] | None = None
    for match in reversed([*MARKER.finditer(text)]):
        if match[0].endswith("{"):
            ends = _closings(text) if ends is None else ends
            opening = match.end() - 1
            answer = text[opening + 1 : ends[opening]] if opening in ends else ""
        else:
            answer = LINE.match(text, match.end())[1]
        if tidy(answer):
            return tidy(answer)
    return None


def _closings(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed."""
    opened, ends = [], {}
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            ends[opened.pop()] = match.start()
    return ends


def _last_match(pattern: str, text: str) -> str | None:
    try:
        matches = [*regex.finditer(pattern, text, timeout=PATTERN_SECONDS)]
    except TimeoutError:
        return None
    if not matches:
        return None
    return (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) or ""


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > LONGEST_NUMBER:
        return None
    part = {name: (value or "").replace(",", "").replace("−", "-") for name, value in match.groupdict().items()}
    power = int(part["e"] or part["power"] or 0)
    bottom = Fraction(part["down"] or part["lower"] or part["bottom"] or 1)
    if abs(power) > LONGEST_NUMBER or not bottom:
        return None
    value = (Fraction(part["whole"] or 0) + Fraction(part["up"] or part["upper"] or part["top"]) / bottom) * Fraction(
        10
    ) ** power
    return -value if bool(part["sign"]) != bool(part["inner"]) else value
