"""The reports of ranks on themselves, and which ranks delay the others. Pure functions."""

from __future__ import annotations

import collections
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_INNERMOST = 12  # innermost calls of a stack, which are always shown
_OURS = "megarlhf/"
_WAITS = ("torch/distributed/", "megarlhf/cpu/collectives.py", "megarlhf/cpu/shared_memory.py")


@dataclass(frozen=True)
class Beat:
    """The report of a rank on itself."""

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

    @property
    def when(self) -> str:
        return "before the first step" if self.step is None else f"in step {self.step}"


def parse_beat(values: Any) -> Beat:
    """A received message as a Beat. Raises ValueError if it is invalid."""
    kinds = {"rank": int, "node": str, "pid": int, "phase": str, "step": (int, type(None)), "count": int, "stack": list}
    sound = isinstance(values, dict) and values.keys() == kinds.keys()
    if not (sound and all(isinstance(values[name], kind) for name, kind in kinds.items())):
        raise ValueError("not a beat")
    return Beat(**{**values, "stack": tuple(map(str, values["stack"]))})


@dataclass
class Seen:
    """Rank 0's record of a rank; times are by rank 0's clock."""

    beat: Beat | None  # None: it has not come yet
    heard: float  # when its last beat came
    moved: float  # when its count last changed


def diagnosis(seen: dict[int, Seen], now: float, silence: float) -> tuple[str, list[int]]:
    """Which ranks delay the others: (the text for the user, these ranks).

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
    still = now - min(entry.moved for entry in seen.values())
    lines = [f"no progress for {still:.0f} s; {name_ranks(lagging)} {verb}: {why}"]
    groups: dict[tuple, list[Beat]] = {}
    for beat in sorted(beats, key=lambda beat: (beat.rank not in lagging, beat.rank)):
        groups.setdefault((beat.rank in lagging, beat.phase, beat.step, beat.stack), []).append(beat)
    for (lags, *_, stack), members in list(groups.items())[:8]:
        more = f" and {name_ranks(beat.rank for beat in members[1:])}" if len(members) > 1 else ""
        lines.append(f"  {'LAGS: ' if lags else ''}{members[0]}{more}; last seen in:\n{indented(stack)}")
    return "\n".join(lines), lagging


def is_of_peer(error: BaseException) -> bool:
    """Whether this error only says that another rank, or the connection to it, broke."""
    chain = [error]
    while (error := error.__cause__ or error.__context__) is not None and error not in chain:
        chain.append(error)
    names = {cls.__name__ for link in chain for cls in type(link).__mro__}
    if any(getattr(link, "failures", None) == {} for link in chain):  # CheckpointException; rank 0's has the causes
        return True
    return "DistError" in names or any("gloo/transport" in str(link) or "NCCL" in str(link) for link in chain)


def stack_of(frame: types.FrameType) -> tuple[str, ...]:
    """Each call as "file:line function", innermost last. The innermost calls are complete; of those above only our own
    functions are kept, which tell what the program was about to do.

    Not traceback.extract_stack: that reads the source files, and the file system may be what hangs.
    """
    calls = [
        f"{_short(call.f_code.co_filename)}:{line} {call.f_code.co_name}" for call, line in traceback.walk_stack(frame)
    ]
    return tuple(calls[:_INNERMOST] + [call for call in calls[_INNERMOST:] if call.startswith(_OURS)])[::-1]


def _waits(beat: Beat) -> bool:
    return bool(beat.stack) and beat.stack[-1].startswith(_WAITS)


def name_ranks(ranks: Iterable[int]) -> str:
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


def indented(stack: Iterable[str]) -> str:
    return "\n".join(f"      {frame}" for frame in stack)
