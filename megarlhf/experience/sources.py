"""Scores from outside: a Python function, or a server over HTTP (docs/reward-server.md).

Both are called with the texts of prompts and of responses and give one finite number for each pair, or raise UserError.
"""

from __future__ import annotations

import functools
import http.client
import importlib
import importlib.util
import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarlhf.config import UserError
from megarlhf.experience import http_client

FIRST_WAIT = 0.5  # seconds before the first retry; each wait is twice the one before
PATIENCE = 1200.0  # seconds for all requests of one batch; the other ranks wait longer (job.hang_minutes)
ANSWER_BYTES = 2**20  # of an answer, beside 100 for each score
LARGEST = 3.4e38  # what float32 can hold


class FunctionScorer:
    """A Python function `function(prompts: list[str], responses: list[str]) -> list[float]`, named "module:function" or
    "path/to/file.py:function". An array or a tensor of numbers will do as well."""

    def __init__(self, name: str):
        self.name, self.function = name, load_function(name)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        try:
            scores = self.function(list(prompts), list(responses))
        except (Exception, SystemExit) as error:  # a rank that ends without a word would leave the others waiting
            _, *frames = traceback.extract_tb(error.__traceback__)  # without this one
            place = f" at {frames[0].filename}:{frames[0].lineno}" if frames else ""
            raise UserError(f"function {self.name}: failed{place} ({_describe(error)}); mend it and start again")
        return finite_scores(scores, responses, source=f"function {self.name}")


class RemoteScorer:
    """A server at `url` that scores texts. What may pass (no connection, no whole answer within `timeout` seconds, HTTP
    408, 429 and 5xx) is tried again up to `retries` times, with growing waits; everything else is an error at once."""

    def __init__(self, url: str, *, timeout: float, retries: int, batch_size: int):
        self.url = url.rstrip("/")
        self.timeout, self.retries, self.batch_size = timeout, retries, batch_size

    def check_health(self) -> None:
        """Raise UserError unless the server says that it is well."""
        self._exchange("/health", None, time.monotonic() + PATIENCE)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        deadline = time.monotonic() + PATIENCE
        scores: list[float] = []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            # A retry has the same id, so the server can answer it without computing again.
            body = {"id": uuid.uuid4().hex, "prompts": prompts[part], "responses": responses[part]}
            answer = self._exchange("/score", body, deadline)
            if "scores" not in answer:
                raise UserError(
                    f"{self.url}/score: the answer has no key 'scores' (found: {', '.join(answer) or 'none'}); see "
                    "docs/reward-server.md"
                )
            scores += finite_scores(answer["scores"], responses[part], source=f"{self.url}/score")
        return scores

    def _exchange(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        """The JSON object with which the server answers: a GET without `body`, else a POST."""
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        limit = ANSWER_BYTES + 100 * len(body["responses"] if body else ())
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
                    raise UserError(f"{url}: the server refuses the request ({reason}); see docs/reward-server.md")
            except http_client.TooLongError:
                raise UserError(f"{url}: the answer has more than {limit} bytes; is this a reward server?")
            except TimeoutError:
                reason = f"no answer within {timeout:.3g} s"
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: names that are none
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


def finite_scores(scores: Any, responses: list[str], *, source: str) -> list[float]:
    """`scores` as floats; UserError, beginning with `source`, unless they are one finite number for each response."""
    scores = scores.tolist() if hasattr(scores, "tolist") else scores  # numpy, torch
    if not isinstance(scores, (list, tuple)):
        raise UserError(f"{source}: returned {type(scores).__name__}, not a list with one number for each response")
    if len(scores) != len(responses):
        raise UserError(
            f"{source}: returned {len(scores)} scores for {len(responses)} responses; it must return one for each"
        )
    numbers = []
    for index, score in enumerate(scores):
        try:
            number = float("nan" if isinstance(score, str) else score)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = float("nan")
        if not abs(number) <= LARGEST:
            raise UserError(
                f"{source}: score {index + 1} of {len(scores)} is {str(score)[:40]!r}, not a finite number (response "
                f"{responses[index][:60]!r}); it must return a number for every text"
            )
        numbers.append(number)
    return numbers


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
    """What the server says of its failure: the key 'error' of its answer, or how that begins."""
    try:
        return str(json.loads(reply.content)["error"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return reply.content[:60].decode(errors="replace").strip() or reply.reason


def _describe(error: Any) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
