"""Scores that are verified, not judged: 1 if a response is right by its prompt's record, else 0 (docs/rewards.md)."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import regex

from megarlhf.experience.answers import code_of, final_answer, final_number, found, is_one_number, same
from megarlhf.experience.sandbox import SandboxConfig, judge

Kind = Literal["exact", "number", "regex", "code"]
KEYS = {"exact": "answer", "number": "answer", "regex": "pattern", "code": "tests"}  # the defaults of answer_key
OPTIONS = {  # which kinds have each option
    "answer_key": ("exact", "number", "regex", "code"), "pattern": ("exact", "number", "regex"),
    "tolerance": ("number",), "ignore_case": ("exact", "regex"), "sandbox": ("code",),
}  # fmt: skip


@dataclass(frozen=True)
class VerifyConfig:
    """The options of a source that verifies (`scorer.SourceConfig` has them)."""

    verify: Kind | None = None  # how a response is compared with its prompt's record (docs/rewards.md)
    answer_key: str | None = None  # the record's key; default: answer; of regex pattern, of code tests
    pattern: str | None = None  # exact, number: finds the final answer; regex: one for all prompts, not the record's
    tolerance: float = 0.0  # number: |given - true| may be this times max(1, |true|)
    ignore_case: bool = False  # exact, regex
    sandbox: SandboxConfig | None = None  # code: its limits

    def check_options(self) -> None:
        """ValueError for options that do not go together."""
        for key, kinds in OPTIONS.items():
            if getattr(self, key) not in (None, False, 0.0) and self.verify not in kinds:
                raise ValueError(f"{key}: is for verify: {' or '.join(kinds)}; remove it")
        if self.pattern is not None:
            if wrong := _wrong_pattern(self.pattern):
                raise ValueError(f"pattern: {wrong}")
            if self.verify == "regex" and self.answer_key is not None:
                raise ValueError("answer_key: is not read where pattern is the same for all prompts; remove one")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance: must not be negative, not {self.tolerance}")


class Verifier:
    """A source of the scores 1 and 0, with the call of the other sources (sources.py)."""

    takes_records = True

    def __init__(self, config: VerifyConfig):
        assert config.verify is not None
        self.kind, self.config = config.verify, config
        self.key, self.pattern = config.answer_key or KEYS[config.verify], config.pattern
        self.limits = config.sandbox or SandboxConfig()

    def __call__(self, prompts: list[str], responses: list[str], records: list[dict[str, Any]]) -> list[Any]:
        """Raises UserError if a sandbox cannot be built."""
        if self.kind == "code":
            tests = [_tests(record[self.key]) for record in records]
            return list(map(float, judge([*zip(map(code_of, responses), tests, strict=True)], self.limits)))
        return [float(self.is_right(*pair)) for pair in zip(responses, records, strict=True)]

    def is_right(self, response: str, record: dict[str, Any]) -> bool:
        if self.kind == "regex":
            return found(self.pattern or record[self.key], response, self.config.ignore_case)
        truth = str(record[self.key])
        if self.kind == "number":
            given, true = final_number(response, self.pattern), self._true_number(truth)
            tolerance = Fraction(self.config.tolerance)
            return given is not None and abs(given - true) <= tolerance * max(1, abs(true))
        answer = final_answer(response, self.pattern)
        return answer is not None and same(answer, self._true_answer(truth), self.config.ignore_case)

    def check(self, record: dict[str, Any]) -> None:
        """ValueError unless `record` has what this verifier needs."""
        if self.kind == "regex" and self.pattern is not None:
            return
        if self.key not in record:
            keys = ", ".join(record)[:60]
            raise ValueError(f"no key '{self.key}' for verify: {self.kind} (found: {keys}); add it or set answer_key")
        value, wrong = record[self.key], None
        if self.kind == "code":
            wrong = _wrong_tests(value)
        elif self.kind == "regex":
            wrong = _wrong_pattern(value) if isinstance(value, str) else "is no regular expression"
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            wrong = f"is no text or number but {type(value).__name__}"
        elif self.kind == "number" and self._true_number(str(value)) is None:
            wrong = f"has no number ({str(value)[-40:]!r})"
        elif self.kind == "number" and not self._true_is_one_number(str(value)):
            wrong = f"is not one number ({self._true_answer(str(value))[-60:]!r}), and a part of it is no answer"
        elif not self._true_answer(str(value)):
            wrong = "is empty"
        if wrong:
            raise ValueError(f"'{self.key}' {wrong}; verify: {self.kind} reads it, mend it or set answer_key")

    def _true_answer(self, truth: str) -> str:
        return (self.pattern and final_answer(truth, self.pattern)) or final_answer(truth) or ""

    def _true_number(self, truth: str) -> Fraction | None:
        number = final_number(truth, self.pattern) if self.pattern else None
        return final_number(truth) if number is None else number

    def _true_is_one_number(self, truth: str) -> bool:
        read_by_pattern = self.pattern is not None and final_number(truth, self.pattern) is not None
        return is_one_number(truth, self.pattern if read_by_pattern else None)


def _tests(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _wrong_pattern(pattern: str) -> str | None:
    if not pattern:
        return "is empty"
    try:
        regex.compile(pattern)
    except regex.error as error:
        return f"{pattern[:60]!r} is no regular expression ({error})"
    return None


def _wrong_tests(value: Any) -> str | None:
    if not (isinstance(value, (str, list)) and all(isinstance(test, str) for test in _tests(value))):
        return "is no string or list of strings"
    does_something, defined = False, []
    for test in _tests(value):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = ast.parse(test).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"is not Python ({error})"
        does_something |= any(map(_does_something, body))
        defined += [statement.name for statement in body if isinstance(statement, ast.FunctionDef)]
    if does_something:
        return None
    missing = f"; add a last line that calls {defined[-1]}, such as {defined[-1]}(name)" if defined else ""
    return f"tests nothing: outside functions and classes it has no assert and no call{missing}"


def _does_something(statement: ast.stmt) -> bool:
    """Whether it can fail: an assert, a raise or a call for its own sake, outside bodies of functions and classes."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    if isinstance(statement, (ast.Assert, ast.Raise)):
        return True
    if isinstance(statement, ast.Expr):
        return any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return any(_does_something(node) for node in _inner(statement))


def _inner(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements directly in a compound one, also those of its handlers and cases."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            yield from node.body
