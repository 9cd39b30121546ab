"""The watchdog: every rank's heartbeat, the first error printed once, and an end for ranks that hang.

A side channel over TCP joins every rank to rank 0 (hub.py), apart from NCCL and gloo and served by threads of its own,
so it works while the main thread is stuck in a collective. Both ends prove that they know the job's secret
(channel.py). torch's store, which has no authentication, only has the hub's address. Over the channel go

    rank -> rank 0   a beat every few seconds: phase, step, number of phases entered, the main thread's Python stack;
                     an error, before the rank exits; "bye"
    rank 0 -> rank   an answer to each beat, with rank 0's own state; the verdict, which ends the rank; the question
                     which nodes this one reaches

Rank 0 decides in three cases: an error; a connection that ended without "bye" (the process was killed, or its machine
is gone); no progress for `JobConfig.hang_minutes`. It prints what happened, once, and every rank exits with a nonzero
status. The other ranks notice by its silence when rank 0 itself is gone or stopped. All ages are measured on one
machine's clock, so clocks that differ do no harm, and time in which rank 0 itself was stopped does not count.

All ranks enter the same phases in the same order, so that their numbers of phases can be compared.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megarlhf.cluster import channel, lease, probe, slurm
from megarlhf.cluster.channel import Channel, Lines
from megarlhf.cluster.diagnosis import Beat, indented, is_of_peer, parse_beat, stack_of
from megarlhf.cluster.hub import (
    ERROR,
    FAILURE,
    FIRST_WORD,
    GRACE,
    PROBE_SECONDS,
    Hub,
    RunningClock,
    request_requeue,
    say,
)
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.slurm import JobConfig
from megarlhf.config import UserError

KEY = "megarlhf/watchdog"  # in the store: address, port, fingerprint of the secret
GONE = "ended without a word: killed, or its machine is gone"
_LONGEST = 50_000  # characters of an error message, from its end; as JSON at most six times as many bytes

_watch: _Watch | None = None


def start(rendezvous: Rendezvous, store: Any, job: JobConfig, directory: Path) -> None:
    """Join the side channel; returns when all ranks have joined. The ranks read its address from `store` (torch's, of
    any kind) and the secret from `directory`, which all nodes share.

    If ranks do not join within `JobConfig.join_minutes`, a message names them and their nodes, and all ranks exit.
    Raises UserError if the channel cannot be set up.
    """
    global _watch
    assert _watch is None
    _watch = watch = _Watch(rendezvous, store, job, directory)
    if not watch.all_here.wait(60 * job.join_minutes + 30):
        watch.lost("did not say that all ranks are here")
    if watch.hub is not None:
        channel.remove_secret(directory, watch.hub.secret)
        slurm.take_over()


def phase(name: str, step: int | None = None) -> None:
    """Record what the program does from now on. Every call counts as progress, and all ranks must make the same calls
    in the same order. `step` counts from 1. Costs microseconds; does nothing without `start`. Raises UserError if this
    job has lost its run directory to another one."""
    lease.verify()
    if _watch is not None:
        _watch.enter(name, step)


def fail(message: str, status: int, error: BaseException) -> None:
    """Tell rank 0 why this rank fails; it prints the first such message of the job. Does not return, unless there is no
    watchdog: then the caller prints."""
    if _watch is not None:
        _watch.fail(message, status, error)


def close() -> None:
    """A regular end of this rank."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


class _Watch:
    """This rank's end of the channel; on rank 0 also the hub."""

    def __init__(self, rendezvous: Rendezvous, store: Any, job: JobConfig, directory: Path):
        self.rendezvous, self.job, self.directory = rendezvous, job, directory
        self.timeout = 60 * job.hang_minutes
        self.interval = min(10.0, self.timeout / 20)
        self.phase, self.step, self.count = "start", None, 0
        self.main = threading.main_thread().ident
        self.pause = max(1.0, rendezvous.world_size / 500)  # seconds between two beats, at least: rank 0 reads them all
        self.all_here, self.closing, self.stepped = threading.Event(), threading.Event(), threading.Event()
        self.rank0: Beat | None = None  # its last answer
        self.broken: OSError | None = None  # why no beat can be sent any more
        self.hub = None
        try:
            own = probe.own_address(rendezvous, store)
        except TimeoutError as error:
            why = "ranks did not come"
            raise UserError(f"{error}{slurm.request_requeue(why, job, directory, why)}")
        if rendezvous.rank == 0:
            secret = channel.make_secret(directory, rendezvous.world_size)
            self.hub = Hub(
                own, rendezvous.node, rendezvous.world_size, secret, job, directory,
                timeout=self.timeout, interval=self.interval,
            )  # fmt: skip
            address, port = self.hub.address
            store.set(KEY, f"{address} {port} {channel.fingerprint(secret)}")
        else:
            address, port, wanted = _published(rendezvous, store)
            secret = channel.read_secret(directory, wanted)
        self.sending = threading.Lock()
        self.connect(address, int(port), secret)
        for loop in (self.listen, self.keep_beating):
            threading.Thread(target=loop, name=f"watchdog {loop.__name__}", daemon=True).start()

    def connect(self, address: str, port: int, secret: bytes) -> None:
        """Open the channel. Too many other connections may close this rank's; then it tries again."""
        deadline = time.monotonic() + 60 * self.job.join_minutes
        while True:
            try:
                self.socket = socket.create_connection((address, port), timeout=FIRST_WORD)
                self.lines, self.arrived = Lines(), []
                theirs, mine = self.next_line(), channel.nonce()
                self.channel = Channel(secret, "rank", theirs, mine)
                self.socket.sendall(mine + b"\n")
                self.send(rank=self.rendezvous.rank)
                self.send(beat=dataclasses.asdict(self.beat()))
                self.lines.limit = channel.LINE
                self.socket.settimeout(60 * self.job.join_minutes)  # rank 0 knows this rank now: it may come once
                self.take(self.channel.unpack(self.next_line()))  # only rank 0 can have written it
                channel.notice_death(self.socket)
                self.socket.settimeout(self.interval)
                return
            except (OSError, EOFError, ValueError) as error:
                self.socket.close()
                if time.monotonic() > deadline:
                    reason = getattr(error, "strerror", None) or str(error)
                    raise UserError(
                        f"rank {self.rendezvous.rank} on {self.rendezvous.node}: no watchdog of rank 0 answers at "
                        f"{address}:{port} ({reason}); look for rank 0's own message, or open the firewall between "
                        "the compute nodes"
                    )
                time.sleep(0.2)

    def next_line(self) -> bytes:
        """Raises EOFError at the connection's end, TimeoutError after the socket's time-out without losing anything."""
        while not self.arrived:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError("the connection was closed")
            self.arrived += self.lines.feed(data)
        return self.arrived.pop(0)

    def enter(self, name: str, step: int | None) -> None:
        new = step != self.step
        self.phase, self.step, self.count = name, step, self.count + 1
        if new:  # rank 0 needs the step in which a rank is killed
            self.stepped.set()

    def beat(self) -> Beat:
        place, stack = self.rendezvous, stack_of(sys._current_frames()[self.main])
        return Beat(place.rank, place.node, os.getpid(), self.phase, self.step, self.count, stack)

    def send(self, **message: Any) -> None:
        with self.sending:
            self.socket.sendall(self.channel.pack(message))

    def keep_beating(self) -> None:
        while not self.closing.wait(min(self.pause, self.interval)):
            self.stepped.wait(self.interval - min(self.pause, self.interval))
            self.stepped.clear()
            try:
                self.send(beat=dataclasses.asdict(self.beat()))
            except OSError as error:
                self.broken = error
                return

    def listen(self) -> None:
        """Rank 0's messages. It answers every beat, so its silence for the time-out means that it is stopped."""
        clock, heard = RunningClock(self.interval), 0.0
        try:
            while not self.closing.is_set():
                try:
                    line = self.next_line()
                except TimeoutError as error:
                    if error.errno is not None:  # the kernel's own: nothing was acknowledged for too long
                        raise
                    if clock.read() - heard > self.timeout:
                        how = f"has been silent for {self.timeout:.0f} s: stopped, or cut off"
                        break
                    continue
                heard = clock.read()
                if self.take(self.channel.unpack(line)):
                    return
        except (EOFError, OSError, ValueError) as error:
            time.sleep(0.2)  # the kernel tells its reason once, to this thread or to the one that sends
            reasons = [channel.no_way(one) for one in (error, self.broken) if isinstance(one, OSError)]
            how = GONE
            if reason := next(filter(None, reasons), None):
                how = (
                    f"cannot be reached any more ({reason}): its machine is down, or the way between it and "
                    f"{self.rendezvous.node} is cut"
                )
        if not self.closing.is_set():
            self.lost(how)

    def take(self, message: dict[str, Any]) -> bool:
        """Handle a message of rank 0; returns whether it was the last."""
        match message:
            case {"rank0": dict(values)}:
                self.rank0 = parse_beat(values)
            case {"here": True}:
                self.all_here.set()
            case {"probe": True}:
                self.probed = probe.listener(self.socket.getsockname()[0])  # open to the end: others may be slower
                self.send(place=(self.rendezvous.node, *self.probed.getsockname()[:2]))
            case {"places": list(places)}:
                self.send(unreached=probe.unreached(self.rendezvous.node, places, PROBE_SECONDS))
            case {"bye": True}:
                return True
            case {"status": int(status)} if self.hub is None:  # rank 0 leaves when all have received it
                os._exit(ERROR if status == ERROR else FAILURE)
        return False

    def lost(self, how: str) -> None:
        """Without rank 0, rank 1 and the first rank of every other node print the message."""
        if not self.all_here.is_set():
            time.sleep(GRACE)  # a TERM that has ended rank 0 comes to this one, too, and asks for no other attempt
        if self.rendezvous.rank == 1 or self.rendezvous.local_rank == 0:
            failure = f"rank 0 was lost {self.beat().when}"  # by this rank's step: rank 0's, as last heard of, is older
            requeued = request_requeue(f"rank 0 {how}", self.job, self.directory, failure)
            stack = f"; last seen in:\n{indented(self.rank0.stack)}" if self.rank0 else ""
            who = f"rank {self.rendezvous.rank} on {self.rendezvous.node}"
            say(f"megarlhf [{who}]: {self.rank0 or 'rank 0'} {how}{stack}{requeued}")
        else:
            time.sleep(2 * GRACE)  # after the first exit the launcher ends the others
        os._exit(FAILURE)

    def fail(self, message: str, status: int, error: BaseException) -> None:
        try:
            self.send(error=message[-_LONGEST:], status=status, of_peer=is_of_peer(error))
            time.sleep(30)  # the verdict comes and ends this process
        except OSError:
            pass
        say(message)
        os._exit(status)

    def close(self) -> None:
        self.closing.set()
        try:
            self.send(bye=True)
        except OSError:
            return  # rank 0 has left already
        if self.hub is not None:
            self.hub.close()


def _published(rendezvous: Rendezvous, store: Any) -> tuple[str, str, str]:
    """What rank 0 has written into the store. Raises UserError after a time-out."""
    try:
        address, port, wanted = store.get(KEY).decode().split()
    except (RuntimeError, ValueError) as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
        (reason, *_) = str(error).splitlines() or [""]
        raise UserError(
            f"rank {rendezvous.rank} on {rendezvous.node}: rank 0 left before the ranks had met, or does not answer "
            f"({reason[:200]}); see rank 0's own message"
        )
    return address, port, wanted
