"""Strangers at the watchdog's port, and processes that were stopped: real ranks over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megarlhf.cluster import channel
from megarlhf.cluster.channel import Channel, Lines
from megarlhf.config import UserError
from tests.e2e.runs import start
from tests.ranks import ROOT

SECRET = secrets.token_hex(32)
LONG = 120  # seconds to wait for what takes as long as the machine is busy


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def running(directory: Path, *ranks: int, world_size: int, hang: float = 30, **environment: str) -> Iterator[list]:
    """`ranks` of a run as processes; they are killed at the end."""
    (directory / "hang").write_text(str(hang))
    processes = [
        start(sys.executable, "-m", "tests.unit.watched", str(rank), str(world_size), str(directory),
              environment=environment)
        for rank in ranks
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(process: subprocess.Popen) -> tuple[int, str]:
    _, err = process.communicate(timeout=LONG)
    return process.returncode, err


class Rank:
    """A rank of the test's own, which knows the secret, and keeps what it has sent."""

    def __init__(self, address: tuple[str, int], rank: int, secret: str = SECRET):
        self.socket = socket.create_connection(address, timeout=LONG)
        self.lines, self.sent = Lines(channel.LINE), b""
        theirs, mine = self.line(), channel.nonce()
        self.channel = Channel(secret.encode(), "rank", theirs, mine)
        self.write(mine + b"\n")
        self.rank = rank
        self.say(rank=rank)

    def line(self) -> bytes:
        """b"" at the end of the connection."""
        while True:
            data = self.socket.recv(65536)
            for line in self.lines.feed(data):
                return line
            if not data:
                return b""

    def write(self, data: bytes) -> None:
        self.sent += data
        self.socket.sendall(data)

    def say(self, **message) -> None:
        self.write(self.channel.pack(message))

    def beat(self, rank: int | None = None) -> None:
        self.say(beat=self.values(self.rank if rank is None else rank))

    @staticmethod
    def values(rank: int) -> dict:
        return dict(rank=rank, node="n", pid=1, phase="step", step=1, count=1, stack=["a.py:1 f"])

    def is_refused(self) -> bool:
        self.socket.settimeout(20)
        try:
            while self.line():
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


def peak(process: subprocess.Popen) -> int:
    """The most memory that it has had so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1])


def listening(process: subprocess.Popen) -> set[str]:
    """Addresses, in hexadecimal, on which the process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def write_on(connection: socket.socket, chunk: bytes, total: int) -> int:
    """Bytes written until the other end had enough."""
    written = 0
    with contextlib.suppress(OSError):
        while written < total:
            connection.sendall(chunk)
            written += len(chunk)
    return written


def test_strangers_at_the_watchdogs_port(tmp_path):
    """Garbage, lines of 1 GiB, 1,000 idle connections, replayed and forged beats: the run goes on, no larger, and ends
    as it would have; what a rank itself says counts, and a status of 0 with an error is no status."""
    with running(tmp_path, 0, 1, world_size=3, MEGARLHF_SECRET=SECRET) as (rank0, rank1):
        store = dist.FileStore(str(tmp_path / "store"), -1)
        host, port, wanted = store.get("megarlhf/watchdog").decode().split()
        address = (host, int(port))
        assert wanted == channel.fingerprint(SECRET.encode())
        assert listening(rank0) == {"0100007F"}  # 127.0.0.1: its own address alone

        idle = []  # before all ranks are here: they must not keep the last one out

        def crowd() -> None:
            while len(idle) < 1000:
                idle.append(socket.create_connection(address, timeout=LONG))

        crowd()
        broken = Rank(address, 2)  # its connection breaks before its first beat: it may come again
        broken.socket.shutdown(socket.SHUT_WR)
        assert broken.line() == b""
        rank2 = Rank(address, 2)
        rank2.beat()
        until(lambda: (tmp_path / "here0").exists() and (tmp_path / "here1").exists())
        before = peak(rank0)

        old = json.dumps({"error": "x", "status": 0, "of_peer": False}).encode() + b"\n"
        beat = dict(rank=1, node="n", pid=1, phase="p", step=1, count=9, stack=[])
        for data in (
            os.urandom(65536), b"\n" * 10000, b"\0" * 600, old, json.dumps({"beat": beat}).encode() + b"\n",
            b"[" * 100_000 + b"\n", b"0" * 64 + b"\n" + old, b"0" * 64 + b"\n" + b"f" * 64 + b" " + old,
            b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
        ):  # fmt: skip
            with socket.create_connection(address, timeout=LONG) as stranger, contextlib.suppress(OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
        for _ in range(3):
            with socket.create_connection(address, timeout=LONG) as stranger:
                assert write_on(stranger, b"a" * 2**20, 2**30) < 2**26  # what the kernel's buffers take
        with socket.create_connection(address, timeout=LONG) as stranger:  # what rank 2 has sent, once more
            stranger.sendall(rank2.sent)
            assert stranger.recv(65536).endswith(b"\n")  # a nonce; then nothing
            assert stranger.recv(65536) == b""
        assert Rank(address, 1, secret=secrets.token_hex(32)).is_refused()
        for taken in (1, 2, 3, -1, True):  # of those who know the secret, none comes twice, or as nobody
            assert Rank(address, taken).is_refused()
        idle.clear()
        crowd()

        assert peak(rank0) - before < 50e6
        assert rank0.poll() is None and rank1.poll() is None
        rank2.beat()
        rank2.write(b"".join(map(rank2.channel.pack, ({"bye": True}, {"beat": Rank.values(2)}))))  # in one packet
        (tmp_path / "finish").touch()
        for process in (rank0, rank1):
            assert ends(process) == (0, "")


def test_what_a_rank_says(tmp_path):
    """An error with status 0 does not end a job as completed, nor does another rank's beat count. A file system that
    does not answer, a standard error that nobody reads, or a mistake in the watchdog do not delay the end."""
    with contextlib.ExitStack() as stack:
        runs = []
        for name in ("status", "beat", "unread"):
            (tmp_path / name).mkdir()
            hung = tmp_path / name / "requeue"
            os.mkfifo(hung)  # to write there is to wait for a reader who never comes
            processes = stack.enter_context(
                running(tmp_path / name, 0, world_size=2, MEGARLHF_SECRET=SECRET, MEGARLHF_REQUEUE=str(hung))
            )
            runs.append((tmp_path / name, *processes))
        hub = "Hub('127.0.0.1', 'n', 2, b's', None, '', timeout=9, interval=1)"  # without a job configuration
        mistaken = start(sys.executable, "-c", f"from megarlhf.cluster.hub import Hub; {hub}.join()")
        stack.callback(mistaken.kill)
        for directory, rank0 in runs:
            store = dist.FileStore(str(directory / "store"), -1)
            host, port, _ = store.get("megarlhf/watchdog").decode().split()
            rank1 = Rank((host, int(port)), 1)
            rank1.beat()
            until((directory / "here0").exists)
            if directory.name == "unread":
                pipe = os.open(f"/proc/{rank0.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(pipe, b" ")
                os.close(pipe)
                rank1.say(error="x", status=1, of_peer=False)
                assert rank0.wait(LONG) == 1
                continue
            if directory.name == "status":
                rank1.say(error="x", status=0, of_peer=False)
            else:
                rank1.beat(rank=0)
            status, err = ends(rank0)
            assert status == 1 and "megarlhf: rank 1 on n (pid 1, phase 'step' of step 1) ended" in err, err
            assert "Traceback" not in err
            assert "whether the job is requeued is not recorded: the file system does not answer" in err
        status, err = ends(mistaken)
        assert status == 1 and "megarlhf: the watchdog failed\nTraceback" in err, err


def established(address: str, port: int) -> int:
    """Connections at this end."""
    end = f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1] == end and row[3] == "01" for row in rows)


def test_a_term_before_all_have_come_asks_for_no_other_attempt(tmp_path):
    """Though it reaches rank 0 before rank 1, which loses rank 0."""
    request = tmp_path / "requeue"
    with running(tmp_path, 0, 1, world_size=3, MEGARLHF_SECRET=SECRET, MEGARLHF_REQUEUE=str(request)) as (rank0, rank1):
        host, port, _ = dist.FileStore(str(tmp_path / "store"), -1).get("megarlhf/watchdog").decode().split()
        until(lambda: established(host, int(port)) == 2)
        rank0.terminate()
        rank0.wait(LONG)
        time.sleep(0.7)
        rank1.terminate()
        status, err = ends(rank1)
        assert status == -signal.SIGTERM and not request.exists(), err


def test_time_in_which_all_were_stopped_does_not_count(tmp_path):
    """`scontrol suspend` for longer than hang_minutes. A rank that is stopped while the others go on is named. The
    secret is in a file that nobody else can read, and that goes when all have come."""
    with running(tmp_path, 0, 1, world_size=2, hang=0.05) as processes:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        _, _, wanted = store.get("megarlhf/watchdog").decode().split()
        with contextlib.suppress(FileNotFoundError):  # rank 1 was quick
            assert (tmp_path / f".watchdog-{wanted}").stat().st_mode & 0o777 == 0o600
        until(lambda: (tmp_path / "here0").exists() and (tmp_path / "here1").exists())
        assert not list(tmp_path.glob(".watchdog-*"))
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(6)  # hang_minutes is 3 seconds
        for process in processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(2)
        assert [process.poll() for process in processes] == [None, None]
        processes[1].send_signal(signal.SIGSTOP)
        status, err = ends(processes[0])
        assert status == 1 and "rank 1 lags: silent for " in err, err
        assert "rank 0" not in err.partition("LAGS")[0]


def test_a_line_is_bounded_and_a_message_is_its_writers(tmp_path, monkeypatch):
    lines = Lines(4)
    assert list(lines.feed(b"ab\ncd")) == [b"ab"] and list(lines.feed(b"ef\n")) == [b"cdef"]
    for data in (b"abcde", b"abcde\n"):
        with pytest.raises(ValueError, match="more than 4 bytes"):
            list(Lines(4).feed(data))
    nonces = channel.nonce(), channel.nonce()

    def hub(secret: bytes = b"secret", nonces: tuple[bytes, bytes] = nonces) -> Channel:
        return Channel(secret, "hub", *nonces)

    first = Channel(b"secret", "rank", *nonces).pack({"a": 1})[:-1]
    twice = hub()
    assert twice.unpack(first) == hub().unpack(first) == {"a": 1}
    for reader, line in (
        (twice, first), (hub(), first + b" "), (hub(), b""), (hub(), hub().pack({"a": 1})[:-1]),
        (hub(b"another"), first), (hub(nonces=(channel.nonce(), nonces[1])), first),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="without proof"):
            reader.unpack(line)
    (tmp_path / ".watchdog-old").mkdir()  # no debris of ours
    os.utime(tmp_path / ".watchdog-old", (0, 0))
    monkeypatch.delenv("MEGARLHF_SECRET", raising=False)
    assert len(channel.make_secret(tmp_path, 2)) == 64
    monkeypatch.setenv("MEGARLHF_SECRET", "short")
    with pytest.raises(UserError, match="has 5 characters; give it 32 or more"):
        channel.make_secret(tmp_path, 2)
    monkeypatch.setenv("MEGARLHF_SECRET", SECRET)
    with pytest.raises(UserError, match="is not the one of rank 0"):
        channel.read_secret(tmp_path, channel.fingerprint(b"another"))


def test_ranks_that_have_not_come_are_named_while_the_others_wait(tmp_path):
    """After a while, again when it has doubled, and when the job ends."""
    code = (
        "import pathlib; from megarlhf.cluster import hub; hub.FIRST_NOTE = 0.4\n"
        f"job, directory = hub.JobConfig(join_minutes=0.05), pathlib.Path({str(tmp_path)!r})\n"
        "hub.Hub('127.0.0.1', 'n', 3, b's', job, directory, timeout=9, interval=0.1).join()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    )  # fmt: skip
    assert done.returncode == 2
    *notes, last = filter(None, done.stderr.splitlines())
    assert 1 <= len(notes) <= 3, done.stderr
    for note in notes:
        assert note.startswith("megarlhf: ranks 0-2 of 3 have not come after 0.0"), note
        assert note.endswith(" minutes; waiting for them until 0.05 (job.join_minutes)"), note
    assert last.startswith("megarlhf: error: ranks 0-2 did not come within 0.05 minutes; look for")
