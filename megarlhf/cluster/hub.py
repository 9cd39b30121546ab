"""Rank 0's side of the watchdog: it receives the messages of every rank and decides when the job must end.

One thread does all of it. It listens on rank 0's own address alone. Until a connection has proved that it knows the
job's secret (channel.py), it gets a few seconds and a short line. Such connections cannot crowd out the ranks: when
there are too many, the oldest is closed. A rank connects once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarlhf import console
from megarlhf.cluster import channel, lease, probe, slurm
from megarlhf.cluster.channel import Channel, Lines
from megarlhf.cluster.diagnosis import Seen, diagnosis, name_ranks, parse_beat
from megarlhf.cluster.slurm import JobConfig

GRACE = 2.0  # seconds that rank 0 waits for a better explanation than "I lost a peer"
ERROR, FAILURE = 2, 1  # exit statuses: the user's mistake, anything else
FIRST_WORD = 10.0  # seconds in which a connection proves that it is a rank
FIRST_NOTE = 60.0  # seconds until the log names the ranks that have not come; again when the time has doubled
PROBE_SECONDS = 5.0  # for a node to answer, when connections between nodes are checked
_SPARE = 64  # connections without proof, beyond one a rank


class RunningClock:
    """Seconds for which this process has been running: the monotonic clock without the time in which the process was
    stopped (`scontrol suspend`). Exact if it is read every `tick` seconds."""

    def __init__(self, tick: float):
        self.tick = tick
        self.seconds = 0.0
        self._last = time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self.tick)
        self._last = now
        return self.seconds


@dataclasses.dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    since: float
    nonce: bytes
    lines: Lines = dataclasses.field(default_factory=Lines)
    channel: Channel | None = None  # None: its nonce has not come
    rank: int | None = None  # None: it has no proof yet


class Hub(threading.Thread):
    def __init__(
        self, address: str, node: str, world_size: int, secret: bytes, job: JobConfig, directory: Path,
        *, timeout: float, interval: float,
    ):  # fmt: skip
        """`address`: to listen on. `directory`: where requeues are recorded. `timeout`: seconds without progress after
        which the job hangs. `interval`: seconds between the beats of a rank."""
        super().__init__(name="watchdog hub", daemon=True)
        self.node, self.secret, self.job, self.directory = node, secret, job, directory
        self.timeout, self.interval = timeout, interval
        self.clock = RunningClock(interval)
        self.seen = {rank: Seen(None, 0.0, 0.0) for rank in range(world_size)}
        self.ranks: dict[int, _Peer] = {}
        self.strangers: dict[_Peer, None] = {}  # the oldest first
        self.most_strangers = world_size + _SPARE
        self.errors: list[tuple[int, str, int, bool]] = []  # rank, message, status, of a peer
        self.gone: list[tuple[int, str | None]] = []  # rank, and what the network says if not the rank's own machine
        self.trouble: float | None = None  # when the first of them came
        self.next_note = FIRST_NOTE
        self.places: dict[int, probe.Place] = {}
        self.unreached: dict[int, list[str]] = {}
        self.closing = threading.Event()
        _allow_files(2 * world_size + 256)
        self.listener = probe.listener(address)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.listener.setblocking(False)
        self.woken, self.waker = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.start()

    def close(self) -> None:
        """A regular end of rank 0. The other ranks, which end now too, must not report it as lost."""
        self.closing.set()
        self.waker.send(b".")
        self.join(10)

    def run(self) -> None:
        try:
            while not self.closing.is_set():
                self.pump(self.interval if self.trouble is None else GRACE / 4)
                if note := self.note(self.clock.seconds):
                    say(note)
                verdict = self.verdict(self.clock.seconds)
                if verdict is not None and not self.closing.is_set():
                    self.end(*verdict)
        except Exception:  # an error here must not leave the job without its watchdog
            try:
                self.end(f"megarlhf: the watchdog failed\n{traceback.format_exc()}", FAILURE, None, None)
            finally:
                os._exit(FAILURE)
        for peer in list(self.ranks.values()):
            self.tell(peer, bye=True)
        self.listener.close()

    # ---------------------------------------------------------------------------------------------- connections

    def pump(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Serve the connections: once, waiting at most `seconds`, or until `until` holds or `seconds` have passed."""
        deadline = self.clock.read() + seconds
        while True:
            for key, _ in self.selector.select(max(0.0, min(deadline - self.clock.seconds, self.interval))):
                if key.fileobj is self.listener:
                    self.accept()
                elif key.data is not None:
                    self.read(key.data)
            now = self.clock.read()
            for peer in [peer for peer in self.strangers if now - peer.since > FIRST_WORD]:
                self.drop(peer)
            if until() or now >= deadline:
                return

    def accept(self) -> None:
        for _ in range(self.most_strangers):
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no more files: the oldest connection without proof is closed
                time.sleep(0.05)
                connection = None
            if connection is None or len(self.strangers) >= self.most_strangers:
                if self.strangers:
                    self.drop(next(iter(self.strangers)))
                if connection is None:
                    return
            connection.setblocking(False)
            peer = _Peer(connection, self.clock.seconds, channel.nonce())
            self.strangers[peer] = None
            self.selector.register(connection, selectors.EVENT_READ, peer)
            self.send(peer, peer.nonce + b"\n")

    def read(self, peer: _Peer) -> None:
        """Read from one connection. Close it at the first invalid message."""
        try:
            data = peer.socket.recv(65536)
            for line in peer.lines.feed(data):
                if peer.channel is None:
                    peer.channel = Channel(self.secret, "hub", peer.nonce, line)
                elif peer.rank is None:
                    self.admit(peer, peer.channel.unpack(line))
                elif peer.rank not in self.seen:  # it has said bye
                    break
                else:
                    self.hear(peer, peer.channel.unpack(line))
            if not data:
                self.drop(peer)
        except (BlockingIOError, InterruptedError):
            pass
        except (ValueError, RecursionError):
            self.drop(peer)
        except OSError as error:
            self.drop(peer, channel.no_way(error))

    def admit(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        if type(rank) is not int or rank not in self.seen or self.seen[rank].beat or rank in self.ranks:
            raise ValueError("no such rank, or it is here")
        channel.notice_death(peer.socket)
        peer.rank, peer.lines.limit = rank, channel.LINE
        self.ranks[rank] = peer
        del self.strangers[peer]

    def drop(self, peer: _Peer, reason: str | None = None) -> None:
        self.strangers.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None and self.ranks.get(peer.rank) is peer:
            del self.ranks[peer.rank]
            # Without a beat so far it may come again; with bye it is no loss.
            if peer.rank in self.seen and self.seen[peer.rank].beat:
                self.gone.append((peer.rank, reason))
                self.note_trouble()

    def tell(self, peer: _Peer, **message: Any) -> None:
        self.send(peer, peer.channel.pack(message))

    def send(self, peer: _Peer, data: bytes) -> None:
        sent, reason = 0, None
        try:
            sent = peer.socket.send(data)
        except OSError as error:
            reason = channel.no_way(error)
        if sent < len(data):  # it is gone, or reads nothing
            self.drop(peer, reason)

    # ---------------------------------------------------------------------------------------------- messages

    def hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle one message. Raises ValueError for one that no rank sends."""
        match message:
            case {"beat": values}:
                self.hear_beat(peer, values)
            case {"error": str(text), "status": 1 | 2 as status, "of_peer": bool(of_peer)}:
                self.errors.append((peer.rank, text, status, of_peer))
                self.note_trouble()
            case {"place": [str(node), str(address), int(port)]}:
                self.places[peer.rank] = (node, address, port)
            case {"unreached": list(texts)}:
                self.unreached[peer.rank] = list(map(str, texts))
            case {"bye": True}:
                self.seen.pop(peer.rank, None)
                self.drop(peer)
            case _:
                raise ValueError("not a rank's message")

    def hear_beat(self, peer: _Peer, values: Any) -> None:
        beat, now = parse_beat(values), self.clock.seconds
        if beat.rank != peer.rank:
            raise ValueError("another rank's beat")
        seen = self.seen[beat.rank]
        first, moved = seen.beat is None, seen.beat is None or seen.beat.count != beat.count
        self.seen[beat.rank] = Seen(beat, now, now if moved else seen.moved)
        own = self.seen[0].beat if 0 in self.seen else None
        self.tell(peer, rank0=own and dataclasses.asdict(own))
        if first and all(seen.beat for seen in self.seen.values()):
            for seen in self.seen.values():
                seen.moved = now  # the first ones have waited for the last
            for other in list(self.ranks.values()):
                self.tell(other, here=True)

    def note_trouble(self) -> None:
        if self.trouble is None:
            self.trouble = self.clock.seconds

    # ---------------------------------------------------------------------------------------------- judgement

    def verdict(self, now: float) -> tuple[str, int, str | None, str | None] | None:
        """(text to print, exit status, why another attempt may succeed, what to compare with other attempts)."""
        for _, message, status, of_peer in self.errors:
            if not of_peer:
                return message, status, None, None
        if self.trouble is not None and now - self.trouble < GRACE:
            return None
        if self.gone:
            # One killed rank makes others end: name the first that was lost.
            rank, reason = self.gone[0]
            who = self.seen[rank].beat
            if reason is not None:
                what = (
                    f"cannot be reached any more ({reason}): {who.node} is down, or the way between {self.node} and "
                    f"{who.node} is cut"
                )
            else:
                what = "ended without a word: killed from outside (out of memory?), or crashed in native code"
            why = f"rank {rank} on {who.node} was {'killed' if reason is None else 'lost'}"
            return f"megarlhf: {who} {what}", FAILURE, why, f"a rank was lost {who.when}"
        if self.errors:
            rank, message, status, _ = self.errors[0]
            what = "a connection between ranks broke"
            beat = self.seen[rank].beat if rank in self.seen else None
            return message + self.cut_ways(), status, what, f"{what} {beat.when}" if beat else what
        missing = self.missing()
        if missing and now > 60 * self.job.join_minutes:
            return (
                f"megarlhf: error: {name_ranks(missing)} did not come within {self.job.join_minutes:g} minutes"
                f"{self.incomplete_nodes()}; look for their own messages, or at these nodes"
            ), ERROR, f"{name_ranks(missing)} did not come", "ranks did not come"  # fmt: skip
        if not missing and any(now - seen.moved > self.timeout - self.interval for seen in self.seen.values()):
            text, lagging = diagnosis(self.seen, now, 4 * self.interval)
            first, *rest = text.splitlines()
            text = "\n".join([first + self.cut_ways(), *rest])
            when = self.seen[lagging[0]].beat.when
            return f"megarlhf: {text}", FAILURE, f"no progress; {name_ranks(lagging)} lagged", f"no progress {when}"
        return None

    def missing(self) -> list[int]:
        """Ranks that have not come yet."""
        return [rank for rank, seen in self.seen.items() if seen.beat is None]

    def incomplete_nodes(self) -> str:
        return slurm.incomplete_nodes(seen.beat.node for seen in self.seen.values() if seen.beat)

    def note(self, now: float) -> str | None:
        """A line for the log, when it is time for one, while ranks have not come: a start from a new image may take
        minutes, and a node that is down as long as that until the job ends."""
        if now < self.next_note or not (missing := self.missing()):
            return None
        self.next_note = 2 * now
        return (
            f"megarlhf: {name_ranks(missing)} of {len(self.seen)} have not come after {now / 60:.3g} minutes"
            f"{self.incomplete_nodes()}; waiting for them until {self.job.join_minutes:g} (job.join_minutes)"
        )

    def cut_ways(self) -> str:
        """Which nodes cannot reach each other now, for a message; "" if there are none. The first rank of every node
        that still answers tries to connect."""
        now = self.clock.seconds
        speakers: dict[str, _Peer] = {}
        for rank, peer in sorted(self.ranks.items()):
            seen = self.seen.get(rank)
            if seen is not None and seen.beat is not None and now - seen.heard < 4 * self.interval:
                speakers.setdefault(seen.beat.node, peer)
        if len(speakers) < 2:
            return ""
        self.places, self.unreached = {}, {}
        for peer in speakers.values():
            self.tell(peer, probe=True)
        self.pump(PROBE_SECONDS, lambda: len(self.places) == len(speakers))
        for rank in list(self.places):
            if rank in self.ranks:
                self.tell(self.ranks[rank], places=list(self.places.values()))
        self.pump(2 * PROBE_SECONDS, lambda: self.unreached.keys() >= self.places.keys())
        found = [text for texts in self.unreached.values() for text in texts]
        return f"\n  {probe.several(found)}" if found else ""

    def end(self, text: str, status: int, retry: str | None, failure: str | None) -> None:
        """Print the verdict, tell all ranks, and leave when they have received it.

        The ranks are told last: when the first of them leaves, srun and mpirun end this one. Nothing before that waits
        longer than GRACE.
        """
        say(text + (request_requeue(retry, self.job, self.directory, failure) if retry else ""))
        for peer in list(self.ranks.values()):
            self.tell(peer, status=status)
        self.pump(GRACE, lambda: self.ranks.keys() <= {0})
        attempt(lambda: (channel.remove_secret(self.directory, self.secret), lease.release()))
        os._exit(status)


def attempt(work: Callable[[], Any], otherwise: Any = None) -> Any:
    """The result of `work`, or `otherwise` if it takes more than GRACE seconds, as on a file system that hangs. Only
    for callers that end the process soon, since `work` goes on in a thread."""
    result = [otherwise]
    thread = threading.Thread(target=lambda: result.insert(0, work()), daemon=True)
    thread.start()
    thread.join(GRACE)
    return result[0]


def request_requeue(reason: str, job: JobConfig, directory: Path, failure: str | None) -> str:
    """As in slurm.py, but does not wait for a file system that hangs."""
    return attempt(
        lambda: slurm.request_requeue(reason, job, directory, failure),
        "\n  whether the job is requeued is not recorded: the file system does not answer",
    )


def say(text: str) -> None:
    """Print a last message, if anything reads standard error; a full pipe must not keep the process from leaving."""
    start = "\n" if console.on_terminal() else ""  # a line of its own: the progress bar's is open
    attempt(lambda: print(f"{start}{text}", file=sys.stderr, flush=True))


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files (often 1024) to what rank 0 needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
