"""The watchdog: every rank's heartbeat, the first error shown once, and an end for ranks that hang.

A side channel over TCP joins every rank to rank 0, apart from NCCL and gloo and served by threads of its own, so it
works while the main thread is stuck in a collective. Over it go

    rank -> rank 0   a beat every few seconds: phase, step, count of phases entered, the main thread's Python stack;
                     an error, before the rank exits; "bye"
    rank 0 -> rank   an answer to each beat, with rank 0's own state; the verdict, which ends the rank

Rank 0 judges when there is trouble: an error, a connection that ended without "bye" (the process was killed), or no
progress for `JobConfig.hang_minutes`. It prints what happened, once, and every rank leaves with a nonzero status. If
rank 0 itself is gone or stopped, the others notice by its silence. All ages are measured on one machine's monotonic
clock, so clocks that differ do no harm.

A phase is entered by all ranks in the same order: that is what makes their counts comparable.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import socket
import socketserver
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarlhf.cluster import lease, slurm
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.slurm import JobConfig

GRACE = 2.0  # seconds that rank 0 waits for a better explanation than "I lost a peer"
ERROR, FAILURE = 2, 1  # exit statuses: the user's mistake, anything else
GONE = "ended without a word: killed, or its machine is gone"
_INNERMOST = 12  # calls of a stack that are shown whosever they are
_OURS = "megarlhf/"
_WAITS = ("torch/distributed/", "megarlhf/cluster/collectives.py", "megarlhf/cluster/shared_memory.py")


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    node: str
    pid: int
    phase: str
    step: int | None
    count: int  # phases entered so far
    stack: tuple[str, ...]  # of the main thread, innermost last

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"rank {self.rank} on {self.node} (pid {self.pid}, phase '{self.phase}'{step})"


@dataclass
class Seen:
    """A rank as rank 0 sees it; times are of rank 0's monotonic clock."""

    beat: Beat | None  # None: it has not connected yet
    heard: float  # when its last beat came
    moved: float  # when its count last changed


_watch: _Watch | None = None


def start(rendezvous: Rendezvous, store: Any, job: JobConfig) -> None:
    """Join the side channel; returns when all ranks have. `store` (torch's, of any kind) tells them the port.

    Ranks that do not come within `JobConfig.join_minutes` are named, with the nodes on which ranks are missing, and all
    leave.
    """
    global _watch
    assert _watch is None
    _watch = _Watch(rendezvous, store, job)
    if not _watch.all_here.wait(60 * job.join_minutes + 30):
        _watch.lost("did not say that all ranks are here")


def phase(name: str, step: int | None = None) -> None:
    """Say what the program does from now on. Every call counts as progress and must be made by all ranks in the same
    order. `step` counts from 1. Costs microseconds; without `start`, nothing happens. Raises UserError if this job has
    lost its run directory to another one."""
    lease.verify()
    if _watch is not None:
        _watch.enter(name, step)


def fail(message: str, status: int, error: BaseException) -> None:
    """Tell rank 0 why this rank fails; it prints the first such message of the job. Does not return, unless there is no
    watchdog: then the caller prints."""
    if _watch is not None:
        _watch.fail(message, status, error)


def close() -> None:
    """This rank ends as it should."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


class _Watch:
    """This rank's end of the channel; on rank 0 also the hub."""

    def __init__(self, rendezvous: Rendezvous, store: Any, job: JobConfig):
        self.rendezvous, self.job = rendezvous, job
        self.timeout = 60 * job.hang_minutes
        self.interval = min(10.0, self.timeout / 20)
        self.phase, self.step, self.count = "start", None, 0
        self.main = threading.main_thread().ident
        self.all_here, self.closing = threading.Event(), threading.Event()
        self.rank0: Beat | None = None  # its last answer
        self.hub = None
        if rendezvous.rank == 0:
            self.hub = _Hub(rendezvous.world_size, job, self.timeout, self.interval)
            store.set("megarlhf/watchdog", str(self.hub.port))
        port = int(store.get("megarlhf/watchdog"))
        self.socket = socket.create_connection((rendezvous.master_addr, port), timeout=30)
        self.socket.settimeout(self.timeout)
        self.sending = threading.Lock()
        self.send(beat=dataclasses.asdict(self.beat()))
        for loop in (self.listen, self.keep_beating):
            threading.Thread(target=loop, name=f"watchdog {loop.__name__}", daemon=True).start()

    def enter(self, name: str, step: int | None) -> None:
        self.phase, self.step, self.count = name, step, self.count + 1

    def beat(self) -> Beat:
        place, stack = self.rendezvous, stack_of(sys._current_frames()[self.main])
        return Beat(place.rank, place.node, os.getpid(), self.phase, self.step, self.count, stack)

    def send(self, **message: Any) -> None:
        with self.sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def keep_beating(self) -> None:
        while not self.closing.wait(self.interval):
            try:
                self.send(beat=dataclasses.asdict(self.beat()))
            except OSError:
                return  # `listen` sees it too

    def listen(self) -> None:
        """Rank 0's answers. It answers every beat, so its silence for the time-out means that it is stopped."""
        try:
            with self.socket.makefile("r") as lines:
                for line in lines:
                    message = json.loads(line)
                    if message.get("rank0"):
                        self.rank0 = _beat(message["rank0"])
                    if message.get("here"):
                        self.all_here.set()
                    if message.get("bye"):
                        return
                    if "status" in message and self.hub is None:  # rank 0 leaves when all have heard
                        os._exit(message["status"])
            how = GONE
        except ConnectionResetError:  # the kernel's last word for a process that was killed with beats unread
            how = GONE
        except TimeoutError:
            how = f"has been silent for {self.timeout:.0f} s: stopped, or cut off"
        except (OSError, ValueError) as error:
            how = f"cannot be reached any more ({error})"
        if not self.closing.is_set():
            self.lost(how)

    def lost(self, how: str) -> None:
        """Without rank 0 nobody can be asked who speaks: rank 1 does, and the first rank of every other node."""
        if self.rendezvous.rank == 1 or self.rendezvous.local_rank == 0:
            requeued = slurm.request_requeue(f"rank 0 {how}", self.job)
            stack = f"; last seen in:\n{_indented(self.rank0.stack)}" if self.rank0 else ""
            who = f"rank {self.rendezvous.rank} on {self.rendezvous.node}"
            _print(f"megarlhf [{who}]: {self.rank0 or 'rank 0'} {how}{stack}{requeued}")
        else:
            time.sleep(1)
        os._exit(FAILURE)

    def fail(self, message: str, status: int, error: BaseException) -> None:
        try:
            self.send(error=message, status=status, of_peer=is_of_peer(error))
            time.sleep(15)  # the verdict comes and ends this process
        except OSError:
            pass
        _print(message)
        os._exit(status)

    def close(self) -> None:
        self.closing.set()
        try:
            self.send(bye=True)
        except OSError:
            return  # rank 0 has left already
        if self.hub is not None:
            self.hub.close()


class _Hub(socketserver.ThreadingTCPServer):
    """Rank 0's side: hears every rank and judges."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, world_size: int, job: JobConfig, timeout: float, interval: float):
        super().__init__(("", 0), None)
        self.port = self.server_address[1]
        self.job, self.timeout, self.interval = job, timeout, interval
        now = time.monotonic()
        self.started = now
        self.seen = {rank: Seen(None, now, now) for rank in range(world_size)}
        self.streams: dict[int, Any] = {}
        self.lock = threading.RLock()
        self.errors: list[tuple[int, str, int, bool]] = []  # rank, message, status, of a peer
        self.gone: list[int] = []
        self.trouble = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.2,), name="watchdog hub", daemon=True).start()
        threading.Thread(target=self.judge, name="watchdog judge", daemon=True).start()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def finish_request(self, request: socket.socket, _) -> None:
        """One connection, in a thread of its own, until it ends."""
        rank = None
        stream = request.makefile("rw")
        try:
            for line in stream:
                message = json.loads(line)
                if "beat" in message:
                    rank = self.hear(_beat(message["beat"]), stream)
                elif "error" in message:
                    with self.lock:
                        self.errors.append((rank, message["error"], message["status"], message["of_peer"]))
                    self.trouble.set()
                elif "bye" in message:
                    with self.lock:
                        del self.seen[rank], self.streams[rank]
                    return
        except (OSError, ValueError):  # the connection broke; half a line
            pass
        if rank is not None:
            with self.lock:
                self.gone.append(rank)
            self.trouble.set()

    def hear(self, beat: Beat, stream: Any) -> int:
        now = time.monotonic()
        with self.lock:
            before = self.seen[beat.rank].beat
            moved = now if before is None or before.count != beat.count else self.seen[beat.rank].moved
            self.seen[beat.rank] = Seen(beat, now, moved)
            self.streams[beat.rank] = stream
            own = self.seen[0].beat if 0 in self.seen else None
            self.answer(stream, rank0=own and dataclasses.asdict(own))
            if before is None and all(seen.beat for seen in self.seen.values()):
                for seen in self.seen.values():
                    seen.moved = now  # the first ones have waited for the last
                for other in self.streams.values():
                    self.answer(other, here=True)
        return beat.rank

    def answer(self, stream: Any, **message: Any) -> None:
        """Under the lock: a connection is written by its own thread and by the judge."""
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except (OSError, ValueError):  # its own thread sees that it ended
            pass

    def judge(self) -> None:
        while not self.ended.is_set():
            if self.trouble.wait(self.interval):
                with self.lock:
                    explained = any(not of_peer for *_, of_peer in self.errors)
                if not explained:
                    time.sleep(GRACE)
            with self.lock:
                verdict = self.verdict(time.monotonic())
            if verdict is not None and not self.ended.is_set():
                self.end(*verdict)

    def verdict(self, now: float) -> tuple[str, int, str | None] | None:
        """(what to print, exit status, why another attempt may succeed)."""
        for _, message, status, of_peer in self.errors:
            if not of_peer:
                return message, status, None
        if self.gone:
            # Seen from outside, one killed rank takes others with it: the first to go is the one to name.
            who = self.seen[self.gone[0]].beat
            what = "ended without a word: killed from outside (out of memory?), or crashed in native code"
            return f"megarlhf: {who} {what}", FAILURE, f"rank {who.rank} on {who.node} was killed"
        if self.errors:
            _, message, status, _ = self.errors[0]
            return message, status, "a connection between ranks broke"
        missing = [rank for rank, seen in self.seen.items() if seen.beat is None]
        if missing and now - self.started > 60 * self.job.join_minutes:
            text = slurm.incomplete_nodes(seen.beat.node for seen in self.seen.values() if seen.beat)
            return (
                f"megarlhf: error: {_ranks(missing)} did not come within {self.job.join_minutes:g} minutes{text}; "
                "look for their own messages, or at these nodes"
            ), ERROR, f"{_ranks(missing)} did not come"  # fmt: skip
        if not missing and any(now - seen.moved > self.timeout - self.interval for seen in self.seen.values()):
            text, lagging = diagnosis(self.seen, now, 4 * self.interval)
            return f"megarlhf: {text}", FAILURE, f"no progress; {_ranks(lagging)} lagged"
        return None

    def end(self, text: str, status: int, retry: str | None) -> None:
        """Print the verdict, tell all ranks, and leave when they have heard."""
        requeued = slurm.request_requeue(retry, self.job) if retry else ""
        _print(text + requeued)
        with self.lock:
            streams = list(self.streams.values())
            for stream in streams:
                self.answer(stream, status=status)
        deadline = time.monotonic() + GRACE
        while len(set(self.gone) | {0}) < len(self.seen) and time.monotonic() < deadline:
            time.sleep(0.05)
        releasing = threading.Thread(target=lease.release, daemon=True)  # the file system may be what hangs
        releasing.start()
        releasing.join(GRACE)
        os._exit(status)

    def close(self) -> None:
        """Rank 0 ends as it should; the others, which end now too, must not take it for a loss."""
        self.ended.set()
        with self.lock:
            for stream in self.streams.values():
                self.answer(stream, bye=True)


def diagnosis(seen: dict[int, Seen], now: float, silence: float) -> tuple[str, list[int]]:
    """Who holds up the others: (the text for the user, the ranks that lag).

    In this order: ranks not heard of for `silence` seconds (stopped, or their machine is cut off); ranks that have
    entered fewer phases than others; ranks that do not wait in a collective while others do; the ranks whose stack is
    the rarest.
    """
    beats = [entry.beat for entry in seen.values()]
    silent = [rank for rank, entry in seen.items() if now - entry.heard > silence]
    fewest = min(beat.count for beat in beats)
    behind = [beat.rank for beat in beats if beat.count == fewest]
    busy = [beat.rank for beat in beats if not _waits(beat)]
    common = collections.Counter(beat.stack for beat in beats)
    rarest = [beat.rank for beat in beats if common[beat.stack] == min(common.values())]
    choices = [silent, behind, busy, rarest]
    lagging = next((choice for choice in choices if 0 < len(choice) < len(beats)), list(seen))
    why = f"silent for {now - min(seen[rank].heard for rank in lagging):.0f} s" if lagging == silent else "behind"
    if len(lagging) == len(beats):
        why = "all at the same place"
    verb = "lags" if len(lagging) == 1 else "lag"
    lines = [
        f"no progress for {now - min(entry.moved for entry in seen.values()):.0f} s; {_ranks(lagging)} {verb}: {why}"
    ]
    groups: dict[tuple, list[Beat]] = {}
    for beat in sorted(beats, key=lambda beat: (beat.rank not in lagging, beat.rank)):
        groups.setdefault((beat.rank in lagging, beat.phase, beat.step, beat.stack), []).append(beat)
    for (lags, *_, stack), members in list(groups.items())[:8]:
        more = f" and {_ranks(beat.rank for beat in members[1:])}" if len(members) > 1 else ""
        lines.append(f"  {'LAGS: ' if lags else ''}{members[0]}{more}; last seen in:\n{_indented(stack)}")
    return "\n".join(lines), lagging


def is_of_peer(error: BaseException) -> bool:
    """Does this error only say that another rank, or the way to it, broke?"""
    chain = [error]
    while (error := error.__cause__ or error.__context__) is not None and error not in chain:
        chain.append(error)
    names = {cls.__name__ for link in chain for cls in type(link).__mro__}
    if any(getattr(link, "failures", None) == {} for link in chain):  # CheckpointException; rank 0's has the causes
        return True
    return "DistError" in names or any("gloo/transport" in str(link) or "NCCL" in str(link) for link in chain)


def stack_of(frame: types.FrameType) -> tuple[str, ...]:
    """Each call as "file:line function", innermost last: where the program is, and of what lies above it our own
    functions, which say what it was about to do.

    Not traceback.extract_stack: that looks at the source files, and the file system may be what hangs."""
    calls = [
        f"{_short(call.f_code.co_filename)}:{line} {call.f_code.co_name}" for call, line in traceback.walk_stack(frame)
    ]
    return tuple(calls[:_INNERMOST] + [call for call in calls[_INNERMOST:] if call.startswith(_OURS)])[::-1]


def _beat(values: dict[str, Any]) -> Beat:
    return Beat(**{**values, "stack": tuple(values["stack"])})


def _waits(beat: Beat) -> bool:
    return bool(beat.stack) and beat.stack[-1].startswith(_WAITS)


def _ranks(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2,5"."""
    ranks, parts = sorted(ranks), []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _short(path: str) -> str:
    for root in ("site-packages/", _OURS):
        _, found, rest = path.rpartition(root)
        if found:
            return rest if root == "site-packages/" else found + rest
    return path


def _indented(stack: Iterable[str]) -> str:
    return "\n".join(f"      {frame}" for frame in stack)


def _print(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)  # on a line of its own: the progress bar's is open
