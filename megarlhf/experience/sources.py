"""Scores by a Python function, or by a server over HTTP (docs/reward-server.md).

Both are called with the texts of prompts and of responses, and with the prompts' records if they take them. They return
one answer for each response (a finite number, or [end, score] pairs of its steps), or raise UserError.
"""

from __future__ import annotations

import functools
import http.client
import importlib
import importlib.util
import inspect
import json
import operator
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megarlhf.config import UserError
from megarlhf.experience import http_client

FIRST_WAIT = 0.5  # seconds before the first retry; each wait is twice the one before
PATIENCE = 1200.0  # seconds for all requests of one batch; the other ranks wait longer (job.hang_minutes)
ANSWER_BYTES = 2**20  # of an answer, beside 100 for each response and 40 for each of its characters
LARGEST = 3.4e38  # what float32 can hold
PROTOCOL = 2  # of reward servers: with records

Record = dict[str, Any]  # a line of the prompts' file, every key
Steps = list[tuple[int, float]]  # (characters of the response up to the end of a step, its score), ends ascending
Answer = float | Steps  # a source's answer for a response


class FunctionScorer:
    """A Python function, named "module:function" or "path/to/file.py:function":

        function(prompts: list[str], responses: list[str]) -> list[Answer]
        function(prompts, responses, records: list[Record]) -> list[Answer]

    It gets records, if there are any, where it has a parameter `records`, a third positional one without a default, or
    **keywords. An array or a tensor of numbers will do as well. Raises UserError where it can be called in neither way.
    """

    def __init__(self, name: str):
        self.name, self.function = name, load_function(name)
        self.how, self.needs_records = records_parameter(self.function, name)
        self.takes_records = self.how is not None

    def __call__(self, prompts: list[str], responses: list[str], records: list[Record] | None = None) -> list[Answer]:
        if self.needs_records and records is None:
            raise UserError(f"function {self.name}: takes records, but there are none")
        how = self.how if records is not None else None
        positional, keywords = (
            [records] if how == "positional" else [],
            {"records": records} if how == "keyword" else {},
        )
        try:
            scores = self.function(list(prompts), list(responses), *positional, **keywords)
        except (Exception, SystemExit) as error:  # a rank that exits here would leave the others waiting
            _, *frames = traceback.extract_tb(error.__traceback__)  # without this one
            place = f" at {frames[0].filename}:{frames[0].lineno}" if frames else ""
            raise UserError(f"function {self.name}: failed{place} ({_describe(error)}); mend it and start again")
        return checked_answers(scores, responses, source=f"function {self.name}")


class _TooLargeError(UserError):
    """HTTP 413. Half of the request may pass."""


class RemoteScorer:
    """A server at `url` that scores texts. It gets records if its answer to GET /health has protocol 2. Temporary
    failures (no connection, no complete answer within `timeout` seconds, HTTP 408, 429 and 5xx) are retried up to
    `retries` times, with growing waits; other failures are errors at once."""

    def __init__(self, url: str, *, timeout: float, retries: int, batch_size: int):
        self.url = url.rstrip("/")
        self.timeout, self.retries, self.batch_size = timeout, retries, batch_size
        self.protocol = 1

    def check_health(self) -> None:
        """Raise UserError unless the server answers. Sets the newest protocol that both support."""
        answer = self._exchange("/health", None, time.monotonic() + PATIENCE)
        said = answer.get("protocol")
        self.protocol = min(said, PROTOCOL) if type(said) is int and said > 0 else 1  # else a key of the server's own

    @property
    def takes_records(self) -> bool:
        return self.protocol > 1

    def __call__(
        self,
        prompts: list[str],
        responses: list[str],
        records: list[Record] | None = None,
        deadline: float | None = None,
    ) -> list[Answer]:
        """`deadline`: of all requests, in time.monotonic(); default: PATIENCE from now."""
        deadline = time.monotonic() + PATIENCE if deadline is None else deadline
        scores: list[Answer] = []
        count = len(prompts)
        parts = [slice(at, min(at + self.batch_size, count)) for at in range(0, count, self.batch_size)][::-1]
        while parts:
            part = parts.pop()
            # A retry has the same id, so the server can answer it without computing again.
            body = {"id": uuid.uuid4().hex, "prompts": prompts[part], "responses": responses[part]}
            if self.takes_records and records is not None:
                body |= {"version": self.protocol, "records": records[part]}
            try:
                answer = self._exchange("/score", body, deadline)
            except _TooLargeError:
                middle = (part.start + part.stop) // 2
                if middle == part.start:
                    raise
                parts += [slice(middle, part.stop), slice(part.start, middle)]
                continue
            if "scores" not in answer:
                raise UserError(
                    f"{self.url}/score: the answer has no key 'scores' (found: {', '.join(answer) or 'none'}); see "
                    "docs/reward-server.md"
                )
            scores += checked_answers(answer["scores"], responses[part], source=f"{self.url}/score")
        return scores

    def _exchange(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        """The JSON object that the server answers: to a GET without `body`, else to a POST."""
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        limit = ANSWER_BYTES + sum(100 + 40 * len(response) for response in (body["responses"] if body else ()))
        started = time.monotonic()
        for attempt in range(self.retries + 1):
            timeout = max(min(self.timeout, deadline - time.monotonic()), 0.001)
            try:
                reply = http_client.exchange(url, data, timeout=timeout, limit=limit)
                if 200 <= reply.status < 300:
                    return _object(reply.content, url)
                reason = f"HTTP {reply.status}: {_said(reply)}"
                if 300 <= reply.status < 400:
                    raise UserError(
                        f"{url}: the server sends elsewhere ({reason}, {reply.location}), which is not followed; give "
                        "the final address as the source's url"
                    )
                if reply.status < 500 and reply.status not in (408, 429):
                    if reply.status == 413:
                        raise _TooLargeError(
                            f"{url}: the server refuses a request with one response ({reason}); raise the server's "
                            "limit, or take large values out of the prompts' lines"
                        )
                    raise UserError(f"{url}: the server refuses the request ({reason}); see docs/reward-server.md")
            except http_client.TooLongError:
                raise UserError(f"{url}: the answer has more than {limit} bytes; is this a reward server?")
            except TimeoutError:
                reason = f"no answer within {timeout:.3g} s"
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: invalid names
                if isinstance(error, UserError):
                    raise
                reason = _describe(error)
            wait = FIRST_WAIT * 2**attempt
            if attempt == self.retries or time.monotonic() + wait > deadline:
                break
            time.sleep(wait)
        raise UserError(
            f"{url}: {reason}, also after {attempt} retries in {time.monotonic() - started:.0f} s; look at the reward "
            "server, or raise the source's timeout or retries"
        )


@functools.cache
def load_function(name: str) -> Callable[[list[str], list[str]], Any]:
    """The function that "module:function" or "path/to/file.py:function" names; its module is run once.

    Raises UserError if there is no such module, file or function, or if importing it fails.
    """
    place, _, attribute = name.rpartition(":")
    is_file = place.endswith(".py")
    if not place or not attribute:
        raise UserError(f"function {name}: must have the form module:function or path/to/file.py:function")
    if is_file and not Path(place).is_file():
        raise UserError(f"function {name}: no file {place}; the path starts at the directory the program runs in")
    try:
        if is_file:
            spec = importlib.util.spec_from_file_location(str(Path(place).resolve()), place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses, for one, look their module up
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        remedy = "mend it" if is_file else "install it, set PYTHONPATH, or give path/to/file.py:function"
        raise UserError(f"function {name}: cannot import {place} ({_describe(error)}); {remedy}")
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"function {name}: {place} has no function '{attribute}'; correct the name")
    return function


def records_parameter(function: Callable[..., Any], name: str) -> tuple[Literal["positional", "keyword"] | None, bool]:
    """(How `function` takes records; None: it does not, whether it cannot be called without them). Raises UserError
    where it can be called neither with (prompts, responses) nor with (prompts, responses, records)."""
    kinds = inspect.Parameter
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        if {p.kind for p in signature.parameters.values()} <= {kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD}:
            signature = inspect.signature(function)  # a wrapper that passes on whatever it gets
    except (TypeError, ValueError):  # some built-in ones have none
        return None, False
    parameters = list(signature.parameters.values())
    places = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    how: Literal["positional", "keyword"] | None = None
    if any(p.name == "records" and p.kind is not kinds.POSITIONAL_ONLY for p in parameters if p not in places[:2]):
        how = "keyword"
    elif len(places) > 2 and places[2].default is kinds.empty:
        how = "positional"
    elif any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        how = "keyword"
    try:
        signature.bind([], [], *([[]] if how == "positional" else []), **({"records": []} if how == "keyword" else {}))
    except TypeError:
        raise UserError(
            f"function {name}: has the parameters {signature}, but is called with (prompts, responses) or (prompts, "
            "responses, records); change its parameters"
        )
    try:
        signature.bind([], [])
    except TypeError:
        return how, True
    return how, False


def checked_answers(answers: Any, responses: list[str], *, source: str) -> list[Answer]:
    """`answers` as floats and steps; UserError, beginning with `source`, unless they are one for each response."""
    answers = answers.tolist() if hasattr(answers, "tolist") else answers  # numpy, torch
    if not isinstance(answers, (list, tuple)):
        raise UserError(f"{source}: returned {type(answers).__name__}, not a list with one number for each response")
    if len(answers) != len(responses):
        raise UserError(
            f"{source}: returned {len(answers)} scores for {len(responses)} responses; it must return one for each"
        )
    found: list[Answer] = []
    for index, (answer, response) in enumerate(zip(answers, responses, strict=True)):
        where = f"{source}: score {index + 1} of {len(answers)}"
        if isinstance(answer, (list, tuple)):
            found.append(_steps(answer, response, where))
            continue
        number = _number(answer)
        if number is None:
            raise UserError(
                f"{where} is {_shown(answer)[:40]!r}, not a finite number (response {response[:60]!r}); it must return "
                "a number for every text"
            )
        found.append(number)
    return found


def _steps(pairs: list[Any] | tuple[Any, ...], response: str, where: str) -> Steps:
    found: Steps = []
    for place, pair in enumerate(pairs):
        try:
            end, score = pair if isinstance(pair, (list, tuple)) else ()
            end, score = -1 if isinstance(end, bool) else operator.index(end), _number(score)
        except (TypeError, ValueError):
            end, score = -1, None
        if score is None or not (found[-1][0] if found else 0) < end <= len(response):
            raise UserError(
                f"{where}: step {place + 1} is {_shown(pair)[:60]!r}, not [end, score] with a finite score and an end "
                f"behind the one before and within the {len(response)} characters of the response {response[:60]!r}; "
                "count characters from the response's beginning"
            )
        found.append((end, score))
    return found


def _number(value: Any) -> float | None:
    """`value` as a float in the range of float32, else None."""
    try:
        number = float("nan" if isinstance(value, (str, bytes)) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def _shown(value: Any) -> str:
    try:
        return str(value)
    except ValueError:
        return "a number of thousands of digits"


def _object(content: bytes, url: str) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise UserError(
            f"{url}: the answer is not a JSON object ({content[:60]!r}); is this a reward server? See "
            "docs/reward-server.md"
        )
    return answer


def _said(reply: http_client.Reply) -> str:
    """The server's reason for a failure: the key 'error' of its answer, or the beginning of the answer."""
    try:
        return str(json.loads(reply.content)["error"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return reply.content[:60].decode(errors="replace").strip() or reply.reason


def _describe(error: Any) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
