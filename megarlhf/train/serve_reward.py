"""`megarlhf serve-reward`: scores over HTTP from a Python function or a reward model, in one process
(docs/reward-server.md)."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from megarlhf import config
from megarlhf.cluster import launch
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.experience.sources import FunctionScorer

REMEMBERED = 256  # answers kept for requests that come again


@dataclass(frozen=True)
class ServeRewardConfig:
    """Give `checkpoint` or `function`; the fields from `tokenizer` on are for a checkpoint. There is no encryption and
    no password: listen on addresses that only the cluster reaches."""

    checkpoint: str | None = None  # a reward model: a run, a checkpoint or a model directory
    function: str | None = None  # module:function or path/to/file.py:function
    host: str = "127.0.0.1"  # the address to listen on; 0.0.0.0 for all of this machine's
    port: int = 8000  # 0: any free one
    tokenizer: str | None = None  # default: the one that came with the checkpoint
    dtype: Literal["bf16", "fp32"] = "bf16"
    micro_batch_size: int = 8  # texts computed at once
    max_length: int = 1024  # tokens; longer texts are refused
    add_bos: bool = True  # these two as when the reward model was trained
    add_eos: bool = True

    def __post_init__(self):
        if (self.checkpoint is None) == (self.function is None):
            raise ValueError("checkpoint: give either checkpoint or function, not both and not neither")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port: must be in [0, 65535], not {self.port}")
        for name in ("micro_batch_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


class RefusedError(Exception):
    """A request that would fail again: HTTP 400 with this message."""


Score = Callable[[list[str], list[str]], list[float]]


def main(path: str, overrides: list[str]) -> None:
    settings = config.load(ServeRewardConfig, path, overrides)
    score = FunctionScorer(settings.function) if settings.function is not None else model_scorer(settings)
    name = settings.function or settings.checkpoint
    try:
        server = RewardServer((settings.host, settings.port), Handler)
    except OSError as error:
        raise UserError(f"port: cannot listen on {settings.host}:{settings.port} ({error.strerror}); use another")
    server.score, server.name = score, name
    with server:
        host, port = server.server_address[:2]
        print(f"  serving {name} at http://{host}:{port}", file=sys.stderr, flush=True)
        server.serve_forever()


def model_scorer(settings: ServeRewardConfig) -> Score:
    """A function of texts that scores them with the reward model, alone in this process."""
    import torch

    from megarlhf.algorithms.reward import final_scores
    from megarlhf.batch import Sequences
    from megarlhf.cluster import backend, parallel
    from megarlhf.data.sft import continuation
    from megarlhf.data.tokenizer import check_vocabulary, load_tokenizer
    from megarlhf.models.locate import find_model, find_tokenizer
    from megarlhf.models.spec import Architecture, check_length
    from megarlhf.train import scoring

    rendezvous = launch.resolve()
    if rendezvous.world_size > 1:
        raise UserError(
            f"serve-reward runs in one process, not in {rendezvous.world_size}; start it without a launcher"
        )
    architecture = Architecture.load(find_model(settings.checkpoint, "reward"))
    tokenizer_path = settings.tokenizer or find_tokenizer(settings.checkpoint)
    if tokenizer_path is None:
        raise UserError("tokenizer: the reward model comes without one; give a directory or a .model file")
    tokenizer = load_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer, architecture.vocab_size)
    check_length(architecture, settings.max_length, "max_length")
    backend.install()
    backend.join(rendezvous, backend.open_store(rendezvous))
    engine = scoring.load_reward_model(
        settings.checkpoint,
        topology=parallel.start(ParallelConfig()),
        micro_batch_size=settings.micro_batch_size,
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

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        rows = [encode(*pair) for pair in zip(prompts, responses, strict=True)]
        count, length = len(rows), max(map(len, rows))
        rows += rows[:1] * (-count % settings.micro_batch_size)
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(1, length) < lengths[:, None]  # final_scores reads the last
        outputs = engine.forward(Sequences(tokens=tokens, mask=mask))
        return final_scores(outputs["scores"], mask.to(outputs["scores"].device))[:count].tolist()

    return score


class RewardServer(ThreadingHTTPServer):
    """Threads for the connections, one computation at a time: neither models nor users' functions expect more."""

    request_queue_size = 128  # every model copy of a run may connect at the same moment
    score: Score
    name: str

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.computing = threading.Lock()
        self.answers: dict[str, list[float]] = {}  # by request id, the oldest first

    def answer(self, request: str, prompts: list[str], responses: list[str]) -> list[float]:
        """Scores, from memory for a request that was computed before: its client did not wait long enough."""
        with self.computing:
            if request not in self.answers:
                self.answers[request] = self.score(prompts, responses)
                if len(self.answers) > REMEMBERED:
                    del self.answers[next(iter(self.answers))]
            return self.answers[request]


class Handler(BaseHTTPRequestHandler):
    """GET /health and POST /score, JSON both ways."""

    protocol_version = "HTTP/1.1"
    timeout = 600  # seconds until a silent connection is closed
    server: RewardServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok", "serves": self.server.name})
        else:
            self._reply(404, {"error": f"there is no {self.path}; use GET /health and POST /score"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/score":
            self._reply(404, {"error": f"there is no {self.path}; use GET /health and POST /score"})
            return
        try:
            self._reply(200, {"scores": self.server.answer(*_request(body))})
        except RefusedError as error:
            self._reply(400, {"error": str(error)})
        except Exception as error:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            print(f"  {message}", file=sys.stderr, flush=True)
            self._reply(500, {"error": message})

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client waits no more
            self.close_connection = True

    def log_request(self, *_: Any) -> None:
        """Not a line for every request."""


def _request(body: bytes) -> tuple[str, list[str], list[str]]:
    """(id, prompts, responses) of a request's body."""
    try:
        request = json.loads(body)
        found = request["id"], request["prompts"], request["responses"]
    except (ValueError, KeyError, TypeError):
        raise RefusedError("the body must be a JSON object with the keys id, prompts and responses")
    name, *lists = found
    texts = all(isinstance(values, list) and all(isinstance(text, str) for text in values) for values in lists)
    if not isinstance(name, str) or not texts or not 0 < len(lists[0]) == len(lists[1]):
        raise RefusedError(
            "id must be a string, prompts and responses lists of strings, as many of one as of the other"
        )
    return found
