"""Real ranks for tests: worker processes that import torch and megatron once and then serve many tests.

`Ranks.run(world_size, function, *args)` runs a top-level function on `world_size` gloo ranks, each in a process of its
own with a fresh default process group, and returns the list of what each rank returned. An exception on any rank fails
the call with that rank's traceback; a rank that does not answer within `timeout` seconds fails it too, and the workers
are replaced so that the next test starts clean. Use it through the `ranks` fixture of `conftest.py`:

    def check(tp):                       # top level in the test module, so that it can be named across processes
        ...
        return loss

    def test_tp(ranks):
        one, = ranks.run(1, check, 1)
        two = ranks.run(2, check, 2)
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}  # fmt: skip
ECHOES = "Connection closed by peer", "Connection reset by peer", "has ended in the middle of a collective"


def _send(stream, value) -> None:
    payload = pickle.dumps(value)
    stream.write(struct.pack("<q", len(payload)) + payload)
    stream.flush()


def _receive(stream):
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<q", header)[0]))


class Worker:
    """One child process; `call` and `result` talk to it over its stdin and stdout."""

    def __init__(self):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.stderr, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )  # fmt: skip

    def call(self, *message) -> None:
        _send(self.process.stdin, message)

    def result(self, timeout: float):
        """("ok", value) or ("error", traceback); a dead or late worker is an error too."""
        box: list = []
        reader = threading.Thread(target=lambda: box.append(self._read()), daemon=True)
        reader.start()
        reader.join(timeout)
        return box[0] if box else ("lost", f"no answer within {timeout:.0f} s")

    def _read(self):
        try:
            return _receive(self.process.stdout)
        except EOFError:
            self.stderr.seek(0)
            tail = self.stderr.read().decode(errors="replace")[-3000:]
            return "lost", f"the rank's process ended with status {self.process.wait()}\n{tail}"

    def is_worn(self) -> bool:
        """gloo's groups keep a polling thread each after they are destroyed; with hundreds, a worker is slow."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return tasks.is_dir() and len(list(tasks.iterdir())) > 300

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Ranks:
    def __init__(self):
        self.workers: list[Worker] = []

    def run(self, world_size: int, function, *args, timeout: float = 180) -> list:
        while len(self.workers) < world_size:
            self.workers.append(Worker())
        workers = self.workers[:world_size]
        with tempfile.TemporaryDirectory(prefix="megarlhf-ranks-") as directory:
            name = (function.__module__, function.__qualname__)
            for rank, worker in enumerate(workers):
                worker.call(rank, world_size, os.path.join(directory, "store"), name, args)
            answers = [worker.result(timeout if rank == 0 else 90) for rank, worker in enumerate(workers)]
        if any(kind != "ok" for kind, _ in answers):
            self.close()  # the others may hang in a collective
        # A rank that raised says more than its peers, which merely lost the connection.
        for wanted in ("error", "lost"):
            for rank, (kind, value) in enumerate(answers):
                if kind == wanted and not (any(echo in value for echo in ECHOES) and wanted == "error"):
                    raise AssertionError(f"rank {rank} of {world_size}:\n{value}")
        for rank, (kind, value) in enumerate(answers):
            if kind != "ok":
                raise AssertionError(f"rank {rank} of {world_size}:\n{value}")
        for worker in [worker for worker in workers if worker.is_worn()]:
            worker.kill()
            self.workers.remove(worker)
        return [value for _, value in answers]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []


def _serve() -> None:
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the code under test must not mix with the answers
    import torch

    torch.set_num_threads(1)
    from megarlhf.cluster import backend

    backend.install()
    import torch.distributed as dist

    from megarlhf.cluster import parallel

    while True:
        try:
            rank, world_size, store, (module, name), args = _receive(inbox)
        except EOFError:
            os._exit(0)
        try:
            store = dist.FileStore(store, world_size)
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = ("ok", function(*args))
            dist.barrier()
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            _send(outbox, answer)
        except Exception:
            _send(outbox, ("error", traceback.format_exc()))
        if answer[0] != "ok":
            os._exit(1)
        parallel.stop()
        dist.destroy_process_group()


if __name__ == "__main__":
    _serve()
