"""`megarlhf serve-reward`: scores over HTTP from a Python function or a reward model, in one process
(docs/reward-server.md)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf import config, console
from megarlhf.cluster import launch
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import PathName, UserError
from megarlhf.experience.sources import PROTOCOL, Answer, FunctionScorer, Record
from megarlhf.train import http_server
from megarlhf.train.settings import MicroBatchConfig

REMEMBERED = 256  # cached answers, for requests that are sent again
REMEMBERED_SCORES = 2**17  # most numbers in the cached answers
MOST_RESPONSES = 2**14  # of a request
MOST_KEYS = 64  # of a request
MOST_VALUES = 2**17  # in the records and unknown keys of a request, the keys of objects counted too
DEEPEST = 16  # nested lists and objects in one of these; data/prompts.py keeps a record within both limits
SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class ServeRewardConfig(MicroBatchConfig):
    """Give `checkpoint` or `function`; the micro-batch and the fields from `tokenizer` on are for a checkpoint.

    There is no encryption and no password: listen on addresses that only the cluster reaches.
    """

    checkpoint: PathName | None = None  # a reward model: a run, a checkpoint or a model directory
    function: PathName | None = None  # module:function or path/to/file.py:function
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0: all of this machine's addresses
    port: int = 8000  # 0: any free one
    max_request_mb: int = 8  # MiB of a request; larger ones are refused (413)
    tokenizer: PathName | None = None  # default: the one that came with the checkpoint
    dtype: Literal["bf16", "fp32"] = "bf16"
    max_length: int = 1024  # tokens; longer texts are refused
    add_bos: bool = True  # these two as when the reward model was trained
    add_eos: bool = True

    def __post_init__(self):
        super().__post_init__()
        if (self.checkpoint is None) == (self.function is None):
            raise ValueError("checkpoint: give either checkpoint or function, not both and not neither")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port: must be in [0, 65535], not {self.port}")
        if not self.host:
            raise ValueError("host: is empty; give an address, 0.0.0.0 for all of this machine's")
        for name in ("max_length", "max_request_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


class RefusedError(Exception):
    """A request that would fail again: HTTP 400 with this message."""


class TooLargeError(RefusedError):
    """HTTP 413: a part of the request may pass."""


Score = Callable[[list[str], list[str], list[Record] | None], list[Answer]]


configurations = (ServeRewardConfig,)


def main(path: str, overrides: list[str]) -> None:
    settings = config.load(ServeRewardConfig, path, overrides)
    score = FunctionScorer(settings.function) if settings.function is not None else model_scorer(settings)
    name = settings.function or settings.checkpoint
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"port: cannot listen on {settings.host}:{settings.port} ({reason}); use another")
    host, port = listener.getsockname()[:2]
    console.say(f"  serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}")
    health = {"status": "ok", "serves": name, "protocol": PROTOCOL}
    requests = AnsweredRequests(score, needs_records=isinstance(score, FunctionScorer) and score.needs_records)
    server = http_server.Server(health, requests, max_body=settings.max_request_mb * 2**20)
    asyncio.run(server.run(listener))


def model_scorer(settings: ServeRewardConfig) -> Score:
    """A function that scores texts with the reward model, in this process alone. It ignores records."""
    import torch

    from megarlhf.algorithms.reward import final_scores
    from megarlhf.batch import Sequences
    from megarlhf.cluster import backend, parallel
    from megarlhf.data.conversations import continuation
    from megarlhf.data.tokenizer import check_vocabulary, load_tokenizer
    from megarlhf.models import adapters
    from megarlhf.models.locate import find_model, find_tokenizer
    from megarlhf.models.spec import Architecture, check_length
    from megarlhf.train import scoring

    rendezvous = launch.resolve()
    if rendezvous.world_size > 1:
        raise UserError(
            f"serve-reward runs in one process, not in {rendezvous.world_size}; start it without a launcher"
        )
    directory = find_model(settings.checkpoint, "reward")
    adapters.check(directory)
    architecture = Architecture.load(directory)
    tokenizer_path = settings.tokenizer or find_tokenizer(settings.checkpoint)
    if tokenizer_path is None:
        raise UserError("tokenizer: the reward model comes without one; give a directory or a .model file")
    tokenizer = load_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer, architecture.vocab_size)
    if architecture.position_embedding == "learned":  # rotary models read what a policy may have sampled
        check_length(architecture, settings.max_length, "max_length")
    tokens, notes = settings.budget(settings.max_length, section="")
    for note in notes:
        console.say(f"  {note}")
    backend.install()
    backend.join(rendezvous, backend.open_store(rendezvous))
    engine = scoring.load_reward_model(
        settings.checkpoint,
        topology=parallel.start(ParallelConfig()),
        micro_batch_tokens=tokens,
        dtype=settings.dtype,
    )
    bos = [tokenizer.bos_id] if settings.add_bos and tokenizer.bos_id is not None else []
    eos = [tokenizer.eos_id] if settings.add_eos else []

    def encode(prompt: str, response: str) -> list[int]:
        before = tokenizer.encode(prompt)
        ids = [*bos, *before, *continuation(tokenizer, prompt, before, response), *eos]
        if not 2 <= len(ids) <= settings.max_length:
            raise RefusedError(
                f"{len(ids)} tokens, where 2 to max_length {settings.max_length} can be scored: the response "
                f"{response[:60]!r}"
            )
        return ids

    def score(prompts: list[str], responses: list[str], records: list[Record] | None = None) -> list[Answer]:
        rows = [encode(*pair) for pair in zip(prompts, responses, strict=True)]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(length) < lengths[:, None]
        mask = real[:, 1:]  # final_scores reads the last
        outputs = engine.forward(Sequences(tokens=tokens, mask=mask, segments=real.long()))
        return final_scores(outputs["scores"], mask.to(outputs["scores"].device)).tolist()

    return score


class AnsweredRequests:
    """Bodies of POST /score -> answers. Called in one thread: models and users' functions need not be thread-safe."""

    def __init__(self, score: Score, *, needs_records: bool):
        self.score, self.needs_records = score, needs_records
        self.answers: dict[str, list[Answer]] = {}  # by request id, the oldest first

    def __call__(self, body: bytes | bytearray) -> tuple[int, dict[str, Any]]:
        try:
            *texts, records = _request(body)
            scores = self._answer(*texts, records)
            if records is None:  # version 1 knows numbers alone
                scores = [sum(score for _, score in said) if isinstance(said, list) else said for said in scores]
            return 200, {"scores": scores}
        except RefusedError as error:
            return 413 if isinstance(error, TooLargeError) else 400, {"error": str(error)}
        except Exception as error:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            console.say(f"  {message}")
            return 500, {"error": message}

    def _answer(
        self, request: str, prompts: list[str], responses: list[str], records: list[Record] | None
    ) -> list[Answer]:
        """Scores; cached ones for a request that was computed before, which a client sends again after its timeout."""
        if records is None and self.needs_records:
            raise RefusedError("the function takes records; send them, with version 2")
        if request not in self.answers:
            self.answers[request] = self.score(prompts, responses, records)
            while len(self.answers) > 1 and (
                len(self.answers) > REMEMBERED or sum(map(_size, self.answers.values())) > REMEMBERED_SCORES
            ):
                del self.answers[next(iter(self.answers))]
        return self.answers[request]


def _size(answers: list[Answer]) -> int:
    return sum(len(answer) if isinstance(answer, list) else 1 for answer in answers)


def _request(body: bytes | bytearray) -> tuple[str, list[str], list[str], list[Record] | None]:
    """(id, prompts, responses, records) of a request's body; without records in version 1."""
    try:
        request = _parse(body.decode())
        name, *lists = request["id"], request["prompts"], request["responses"]
    except (ValueError, KeyError):
        raise RefusedError("the body must be a JSON object with the keys id, prompts and responses")
    if (
        not isinstance(name, str)
        or not all(isinstance(values, list) for values in lists)
        or not 0 < len(lists[0]) == len(lists[1])
    ):
        raise RefusedError(
            "id must be a string, prompts and responses lists of strings, as many of one as of the other"
        )
    try:
        for text in (*lists[0], *lists[1]):
            text.encode()
    except UnicodeEncodeError:  # JSON can contain "\ud800"; tokenizers cannot encode it
        raise RefusedError("a text has half a surrogate pair")
    if len(name) > 200:
        raise RefusedError("id may have 200 characters")
    version, records = request.get("version", 1), None
    if type(version) is not int or not 1 <= version <= PROTOCOL:
        raise RefusedError(f"version must be a whole number from 1 to {PROTOCOL}")
    if version > 1:
        records = request.get("records")
        if (
            not isinstance(records, list)
            or len(records) != len(lists[1])
            or not all(isinstance(record, dict) for record in records)
        ):
            raise RefusedError("records must be a list of objects, one for each response")
    return name, *lists, records


def _finite(text: str) -> float:
    """The number `text`, for a JSON decoder. Python's own reads Infinity and NaN, which JSON does not have."""
    if not math.isfinite(float(text)):
        raise RefusedError(f"{text[:40]} is no finite number")
    return float(text)


def _parse(text: str) -> dict[str, Any]:
    """The JSON object `text`; `prompts` and `responses` are lists of strings.

    Elements are parsed and counted one by one, because a small body makes large objects: 8 MiB of `{},` take 226 MB.
    Raises ValueError for any other text, RefusedError for too many elements or too much nesting.
    """
    decode, spaces = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).raw_decode, SPACE.match
    count = 0

    def sequence(start: int, end: str, most: int, refusal: str, element: Callable[[int], int]) -> int:
        """The index after `end`. `start`: the index after the opening bracket; `element`: index -> index after it."""
        at = spaces(text, start).end()
        if text[at : at + 1] == end:
            return at + 1
        for _ in range(most):
            at = spaces(text, element(spaces(text, at).end())).end()
            if text[at : at + 1] == end:
                return at + 1
            if text[at : at + 1] != ",":
                raise ValueError
            at += 1
        raise TooLargeError(refusal)

    def scalar(at: int, opening: str) -> tuple[Any, int]:
        if text[at : at + 1] not in opening or at == len(text):
            raise ValueError
        return decode(text, at)

    def key(at: int) -> tuple[str, int]:
        """A key of an object and the index of its value."""
        name, at = scalar(at, '"')
        at = spaces(text, at).end()
        if text[at : at + 1] != ":":
            raise ValueError
        return name, spaces(text, at + 1).end()

    def anything(at: int, depth: int = 0) -> tuple[Any, int]:
        nonlocal count
        count += 1
        if count > MOST_VALUES:
            raise TooLargeError(
                f"records and other keys may have {MOST_VALUES} values in all; send fewer texts at once"
            )
        opening = text[at : at + 1]
        if opening not in ("{", "["):
            return scalar(at, '"-0123456789tfn')
        if depth == DEEPEST:
            raise RefusedError(f"a value has more than {DEEPEST} lists and objects within each other")
        found: Any = {} if opening == "{" else []

        def element(at: int) -> int:
            nonlocal count
            if opening == "{":
                count += 1
                name, at = key(at)
                found[name], at = anything(at, depth + 1)
            else:
                value, at = anything(at, depth + 1)
                found.append(value)
            return at

        return found, sequence(at + 1, "}" if opening == "{" else "]", MOST_VALUES, "", element)

    found: dict[str, Any] = {}

    def member(at: int) -> int:
        name, at = key(at)
        if name in found:  # each of its lists could have as many responses
            raise RefusedError(f"the key {name[:40]!r} is there twice")
        if name not in ("prompts", "responses") or text[at : at + 1] != "[":
            found[name], at = anything(at)
            return at
        found[name] = values = []

        def value(at: int) -> int:
            string, at = scalar(at, '"')
            values.append(string)
            return at

        return sequence(at + 1, "]", MOST_RESPONSES, f"a request may have {MOST_RESPONSES} responses", value)

    at = spaces(text, 0).end()
    if text[at : at + 1] != "{":
        raise ValueError
    at = sequence(at + 1, "}", MOST_KEYS, f"a request may have {MOST_KEYS} keys", member)
    if spaces(text, at).end() != len(text):
        raise ValueError
    return found
