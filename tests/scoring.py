"""What the tests of scoring share: rollouts, a tokenizer, and servers as processes, good and bad ones.

`python -m tests.scoring` is the bad one. It prints its port; the first part of a URL's path says how it goes wrong.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.runs import CLI, start


def row_ids(rows: int) -> dict:
    """The ids of a rollout of `rows` prompts, each sampled once."""
    import torch

    return {name: torch.arange(rows) for name in ("sequence_ids", "prompt_ids", "group_ids")}


def make_rollout(rows: int = 8, prompt: int = 10, response: int = 6, *, stop: bool = False, pad: int = 0, vocab=300):
    """Left-padded prompts and responses of ids from 10 on; with `stop` the responses end at different places. `pad`
    more columns of padding at the left change nothing else."""
    import torch

    from megarlhf.batch import Rollout

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, vocab, (rows, prompt + response), generator=generator)
    column = torch.arange(prompt + response)
    sizes = torch.randint(1, prompt + 1, (rows, 1), generator=generator)
    ends = torch.randint(1, response + 1, (rows, 1), generator=generator) if stop else response
    real = (column >= prompt - sizes) & (column < prompt + ends)
    tokens = torch.where(real, tokens, 9999)  # what stands in padding is never read
    left = torch.nn.functional.pad
    return Rollout(
        tokens=left(tokens, (pad, 0), value=9999),
        mask=real[:, prompt:],
        segments=left(real.long(), (pad, 0)),
        prompt_len=prompt + pad,
        **row_ids(rows),
        logprobs=torch.zeros(rows, response),
    )


def train_tokenizer(prefix: Path) -> str:
    """A SentencePiece tokenizer of 300 tokens; BOS 1, EOS 2. The path of its model."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sea is slow .", "a film that moves. a plot that never ends ."] * 4),
        model_prefix=str(prefix), model_type="bpe", vocab_size=300, byte_fallback=True, pad_id=3, minloglevel=2,
        num_threads=1,
    )  # fmt: skip
    return f"{prefix}.model"


@contextlib.contextmanager
def reward_server(directory: Path, **settings):
    """A `megarlhf serve-reward` process: (its URL, the process)."""
    config = directory / "serve.yaml"
    config.write_text(json.dumps({"port": 0, **settings}))
    process = start(sys.executable, *CLI, "serve-reward", "--config", str(config))
    try:
        said = ""
        while not (found := re.search(r"http://\S+", said)):
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


def no_namespaces() -> str | None:
    """Why this machine has no sandbox, as found without the sandbox's code. None: it has one."""
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "said = libc.unshare(0x10000000 | 0x20000) or libc.mount(None, b'/', None, 1 << 18 | 16384, None)\n"
        "said = said or libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)\n"
        "raise SystemExit(said and os.strerror(ctypes.get_errno()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return f"no user namespaces here: {done.stderr.strip()}" if done.returncode else None


@contextlib.contextmanager
def bad_server():
    """The URL of a server process that goes wrong."""
    process = start(sys.executable, "-m", "tests.scoring")
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


seen: Counter[str] = Counter()


class _Bad(BaseHTTPRequestHandler):
    def do_GET(self):
        seen[self.path] += 1
        said = {"/odd/health": {"protocol": "two"}, "/newer/health": {"protocol": 7}}.get(self.path, {})
        self._reply(200 if self.path != "/sick/health" else 503, json.dumps(said | {"status": "ok"}).encode())

    def do_POST(self):
        seen[self.path] += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [float(len(text)) for text in request["responses"]]
        how = self.path.split("/")[1]
        if how in ("trickle", "trickle-body", "endless"):
            return self._never_ends(how)
        if how == "elsewhere":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/score")
            self.end_headers()
            return None
        if how == "slow":
            time.sleep(5)
        if (how == "flaky" and seen[self.path] <= 2) or how == "failing":
            return self._reply(500, b'{"error": "out of memory"}')
        if how == "hangs-up":
            return self.connection.close()
        if how == "strict":
            return self._reply(400, b"only English here")
        if how == "full":
            return self._reply(413, b'{"error": "too much"}')
        if how == "limited":  # more than two texts are too many
            return self._reply(200 if len(scores) <= 2 else 413, json.dumps({"scores": scores}).encode())
        answers = {
            "short": {"scores": scores[1:]},
            "long": {"scores": [*scores, 1.0]},
            "nan": {"scores": [*scores[1:], float("nan")]},
            "null": {"scores": [*scores[1:], None]},
            "text": {"scores": [*scores[1:], "4.2"]},
            "nokey": {"rewards": scores},
            "list": scores,
            "keys": {"scores": [len(request)]},
            "newer": {"scores": [len(request)]},
        }
        content = json.dumps(answers.get(how, {"scores": scores})).encode()
        self._reply(200, b"<html>It works!</html>" if how == "html" else content)

    def _never_ends(self, how: str) -> None:
        with contextlib.suppress(OSError):
            if how != "trickle":
                self.send_response(200)
                self.end_headers()
            while True:
                self.wfile.write(b" " * (2**16 if how == "endless" else 1))
                time.sleep(0 if how == "endless" else 0.05)

    def _reply(self, status: int, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_request(self, *_):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bad)
    print(server.server_address[1], flush=True)
    server.serve_forever()
