"""Communication of real ranks, checked for what NCCL would not forgive. gloo runs calls that deadlock over NCCL, so a
test on CPU ranks alone does not show them.

    with layout(pipeline=2) as topology, traffic.recorded() as log:   # on every rank
        ...
    found = traffic.violations(traffic.gathered(log))                 # lines for people; [] if all is well

`recorded` puts wrappers in the place of torch.distributed's functions, wherever a module of torch, megatron or megarlhf
holds one; megarlhf/cpu's collectives count as what they replace. Objects (`broadcast_object_list`) show as the tensors
that they are sent as. Groups of one rank are left out.

The rules, for groups as communicators (two groups of the same ranks are two communicators):

1. The ranks of a group make the same collectives in the same order, of equal shapes, types, roots and operations.
2. The n-th message that one rank sends another in a group has the shape and type of the n-th that the other receives.
3. No call waits for itself, around a circle of ranks. The model is torch over NCCL:
   - Calls of a rank run one after the other within a communicator; a call is over when all its ranks have made it. A
     single message runs in a communicator of its two ranks that the group keeps for them, a batch
     (`batch_isend_irecv`) in the group's own, and its messages at the same time.
   - A rank makes no further call before the collectives that it has made are over, or the messages it has waited for.
     For collectives that is stricter than torch: NCCL may still block where two communicators have work at once.
   - The first call in a communicator makes it, and returns when all its ranks make their first call.
   So two groups in different orders on two ranks are a circle, and so are two ranks that both send first.
4. Between two ranks, single messages of one group go one way. Both ways need two groups, or one batch. Such messages
   may well have no circle today; but the order of both ways then has to agree on both ranks at every moment, which
   nobody sees in the code. megatron's interleaved schedule does this by design over more than two stages (`_p2p_ops` in
   p2p_communication.py: even stages send first, odd ones receive first), so rule 4 leaves that function out; rule 3
   holds for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.ranks import ROOT

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
MESSAGES = {"send": "send", "isend": "send", "recv": "receive", "irecv": "receive"}
SPLITS = "input_split_sizes", "output_split_sizes"  # megatron's dispatcher of experts gives tensors
BATCH = "batch_isend_irecv"
BOTH_WAYS_BY_DESIGN = "megatron/core/pipeline_parallel/p2p_communication.py", "_p2p_ops"
PACKAGES = ("torch.distributed", "megatron", "megarlhf", "tests")
TORCH = str(Path(torch.__file__).parent)
HIDDEN = (TORCH, __file__, contextlib.__file__, functools.__file__)  # files that a call's place leaves out


@dataclass(frozen=True)
class Call:
    """One call of one rank. `what` has to be the same on all ranks of a collective, and at both ends of a message."""

    kind: str  # a name of COLLECTIVES, or "send", "receive"
    group: str  # its name, which is the same on all its ranks
    ranks: tuple[int, ...]  # of the group, counted over all ranks
    what: str  # shapes, type, root, operation
    place: str  # file:line of the call, and of our own code that led to it
    function: tuple[str, str]  # the caller: (file, name)
    peer: int | None = None  # of a message
    batch: int | None = None  # messages of one batch have one number
    own: str = ""  # what this rank gives to an all-to-all, as in `what`: ranks may give different numbers of elements


@dataclass(frozen=True)
class Wait:
    """A rank has waited for its call number `call`, a message."""

    call: int


Log = list[Call | Wait]


# --------------------------------------------------------------------------------------------------- one rank records


@contextlib.contextmanager
def recorded(run: bool = True) -> Iterator[Log]:
    """This rank's log, filled while this is open. With `run=False` calls are recorded but not made: plans that would
    hang can be checked, too."""
    log: Log = []
    recorder = _Recorder(log, run)
    wrappers: dict[Any, Callable] = {}
    for name in (*COLLECTIVES, *MESSAGES, BATCH):
        # On a CPU the two differ: megarlhf/cpu has replaced torch.distributed's.
        for function in {getattr(dist, name, None), getattr(distributed_c10d, name, None)} - {None}:
            wrappers[function] = recorder.wrapper(name, function)
    places = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module is not None and module_name.startswith(PACKAGES)
        for name, value in list(vars(module).items())
        if inspect.isfunction(value) and value in wrappers
    ]
    for module, name, function in places:
        setattr(module, name, wrappers[function])
    try:
        yield log
    finally:
        for module, name, function in places:
            setattr(module, name, function)


def gathered(log: Log) -> list[Log]:
    """The logs of all ranks, by rank. Collective; call it when nothing is recorded."""
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)
    return logs


class _Recorder:
    def __init__(self, log: Log, run: bool):
        self.log, self.run = log, run
        self.inside = threading.local()  # a recorded call makes others, which are no calls of the program

    def wrapper(self, name: str, function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if getattr(self.inside, "it", False):
                return function(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            if name == BATCH:
                numbers = self._batch(args[0] if args else kwargs["p2p_op_list"])
            else:
                group = arguments.get("group") or dist.group.WORLD
                numbers = self._record(name, group, arguments) if group.size() > 1 else []
            if not self.run:
                return _as_if(name, arguments, numbers)
            self.inside.it = True
            try:
                result = function(*args, **kwargs)
            finally:
                self.inside.it = False
            if name in ("send", "recv"):
                self.log.extend(map(Wait, numbers))
            elif name in ("isend", "irecv") and numbers:
                return _Work(result, self.log, numbers)
            elif name == BATCH and numbers:  # a work each message, or one for all of them
                each = [numbers] if len(result) == 1 else [[number] for number in numbers]
                return [_Work(work, self.log, part) for work, part in zip(result, each, strict=True)]
            return result

        return call

    def _record(self, name: str, group: dist.ProcessGroup, arguments: dict[str, Any]) -> list[int]:
        if name in MESSAGES:
            way = "dst" if MESSAGES[name] == "send" else "src"
            tensor = next(iter(arguments.values()))
            return [self._message(MESSAGES[name], group, tensor, _peer(group, arguments, way))]
        own = _tensors([_given(arguments)[1]]) if name == "all_to_all_single" else ""
        what = _describe(name, group, arguments)
        self._add(Call(name, _group_name(group), _ranks(group), what, *_place(), own=own))
        return []

    def _batch(self, operations: list[dist.P2POp]) -> list[int]:
        number = len(self.log)
        return [
            self._message(MESSAGES[operation.op.__name__], group, operation.tensor, operation.peer, number)
            for operation in operations
            if (group := operation.group or dist.group.WORLD).size() > 1
        ]

    def _message(
        self, kind: str, group: dist.ProcessGroup, tensor: Tensor, peer: int | None, batch: int | None = None
    ) -> int:
        return self._add(Call(kind, _group_name(group), _ranks(group), _tensors([tensor]), *_place(), peer, batch))

    def _add(self, call: Call) -> int:
        self.log.append(call)
        return len(self.log) - 1


class _Work:
    """torch's Work, which also records that it was waited for."""

    def __init__(self, work: Any, log: Log, calls: list[int]):
        self.work, self.log, self.calls = work, log, calls

    def wait(self, *args, **kwargs):
        self.log.extend(map(Wait, self.calls))
        return self.work.wait(*args, **kwargs) if self.work is not None else True

    def __getattr__(self, name: str):
        return getattr(self.work, name)


def _as_if(name: str, arguments: dict[str, Any], calls: list[int]) -> Any:
    """What a call returns that is not made."""
    if name == BATCH:
        return [_Work(None, [], [])]
    return _Work(None, [], []) if name in ("isend", "irecv") or arguments.get("async_op") else None


def _group_name(group: dist.ProcessGroup) -> str:
    """The name is the same on all ranks; with it goes what megatron calls its groups."""
    description = group.group_desc.removesuffix("_GROUP").lower()
    return group.group_name if description == "undefined" else f"{group.group_name} ({description})"


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _peer(group: dist.ProcessGroup, arguments: dict[str, Any], way: str) -> int | None:
    """The other rank, counted over all ranks; None for a receive from anyone."""
    if arguments.get(f"group_{way}") is not None:
        return dist.get_global_rank(group, arguments[f"group_{way}"])
    return arguments.get(way)


def _describe(name: str, group: dist.ProcessGroup, arguments: dict[str, Any]) -> str:
    """What has to be the same on all ranks."""
    tensors = _given(arguments)
    if name in ("gather", "scatter"):
        tensors = tensors[:1]  # the root alone has the list
    # Parts of different sizes are allowed where the caller gives their sizes.
    own_sizes = name == "all_to_all" or any(arguments.get(key) is not None for key in SPLITS)
    words = [_tensors(tensors, shapes=not own_sizes)]
    if "op" in arguments or name.startswith(("all_reduce", "reduce")):
        words.append(_operation(arguments.get("op", dist.ReduceOp.SUM)))
    for way in ("src", "dst"):
        if way in arguments or f"group_{way}" in arguments:
            words.append(f"{way} {_peer(group, arguments, way)}")
    return " ".join(filter(None, words))


def _given(arguments: dict[str, Any]) -> list[Any]:
    """The tensors, and lists of them, that a call is about."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) or _is_list(value)}
    return [value for name, value in tensors.items() if name not in SPLITS]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _tensors(values: list[Any], shapes: bool = True) -> str:
    """As in "float32 [2], [2] <- [2]": of an all_gather."""
    flat = [[value] if isinstance(value, Tensor) else list(value) for value in values]
    types = sorted({str(tensor.dtype).removeprefix("torch.") for part in flat for tensor in part})
    sizes = [", ".join(str(list(tensor.shape)) for tensor in part) for part in flat]
    return " ".join([*types, *([" <- ".join(sizes)] if shapes and sizes else [])])


def _operation(operation: Any) -> str:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name for name in names if operation == getattr(dist.ReduceOp, name)), str(operation))


def _place() -> tuple[str, tuple[str, str]]:
    """Where the program made this call: "file:line", followed by the nearest of our own lines if it is another's; and
    the calling function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HIDDEN):
        frame = frame.f_back
    caller = (_short(frame.f_code.co_filename), frame.f_code.co_name)
    place = f"{caller[0]}:{frame.f_lineno}"
    while frame is not None and not frame.f_code.co_filename.startswith((f"{ROOT}/megarlhf", f"{ROOT}/tests")):
        frame = frame.f_back
    ours = "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return place if ours in ("", place) else f"{place} from {ours}", caller


def _short(file: str) -> str:
    return file.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]


# ------------------------------------------------------------------------------------------- the logs of all ranks


def violations(logs: list[Log]) -> list[str]:
    """What breaks the rules above, one line each, of the logs of all ranks."""
    calls = [[entry for entry in log if isinstance(entry, Call)] for log in logs]
    collectives: dict[str, dict[int, list[Call]]] = defaultdict(dict)
    messages: dict[tuple[str, int, int], tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    lines = []
    for rank, own in enumerate(calls):
        for call in own:
            if call.kind not in MESSAGES.values():
                for member in call.ranks:
                    collectives[call.group].setdefault(member, [])
                collectives[call.group][rank].append(call)
            elif call.peer is None:
                lines.append(f"rank {rank} receives from any rank, which NCCL cannot: {call.place}")
            elif call.kind == "send":
                messages[call.group, rank, call.peer][0].append(call)
            else:
                messages[call.group, call.peer, rank][1].append(call)
    for group, members in collectives.items():
        lines += _unequal_collectives(group, members)
    for key, ends in messages.items():
        lines += _unequal_messages(key, *ends)
    lines += _both_ways(messages)
    return [*lines, *_absent(calls, set(collectives)), *_circles(logs)]


def _unequal_collectives(group: str, members: dict[int, list[Call]]) -> list[str]:
    """Rule 1; the first difference of a group."""
    length = max(map(len, members.values()))
    for number in range(length):
        found: dict[str, list[int]] = {}
        for rank, calls in sorted(members.items()):
            call = calls[number] if number < len(calls) else None
            found.setdefault(f"{call.kind} {call.what}".strip() if call else "no call", []).append(rank)
        if len(found) > 1:
            parts = []
            for what, ranks in found.items():
                calls = members[ranks[0]]
                place = f" at {calls[number].place}" if number < len(calls) else ""
                parts.append(f"ranks {ranks}: {what}{place}")
            return [f"group {group} of ranks {sorted(members)}, collective {number}: {'; '.join(parts)}"]
    return []


def _unequal_messages(key: tuple[str, int, int], sent: list[Call], received: list[Call]) -> list[str]:
    """Rule 2; the first difference of a pair of ranks."""
    group, source, destination = key
    title = f"group {group}, messages from rank {source} to rank {destination}"
    for number, (one, other) in enumerate(zip(sent, received, strict=False)):
        if one.what != other.what:
            return [
                f"{title}, number {number}: {one.what} is sent at {one.place}, {other.what} is received at "
                f"{other.place}"
            ]
    if len(sent) != len(received):
        more, what = (sent, "sent") if len(sent) > len(received) else (received, "received")
        extra = more[min(len(sent), len(received))]
        return [f"{title}: {len(sent)} are sent and {len(received)} received; the first too many is {what} at "
                f"{extra.place}"]  # fmt: skip
    return []


def _absent(calls: list[list[Call]], with_collectives: set[str]) -> list[str]:
    """The first call in a communicator returns on no rank if a rank makes none: here for groups with batches alone."""
    batches = [call for own in calls for call in own if call.batch is not None and call.group not in with_collectives]
    absent = {
        call.group: (call, sorted(lacking))
        for call in reversed(batches)
        if (lacking := {rank for rank in call.ranks if all(other.group != call.group or other.batch is None
                                                           for other in calls[rank])})
    }  # fmt: skip
    return [
        f"group {group} of ranks {list(call.ranks)}: ranks {lacking} make no call in its communicator, so the first "
        f"batch of the others does not return: {call.place}"
        for group, (call, lacking) in absent.items()
    ]


def _both_ways(messages: dict[tuple[str, int, int], tuple[list[Call], list[Call]]]) -> list[str]:
    """Rule 4."""
    single = {
        key: found[0]
        for key, ends in messages.items()
        if (found := [call for end in ends for call in end if call.batch is None and not _by_design(call)])
    }
    return [
        f"group {group}: ranks {one} and {other} send each other single messages, from {one} to {other} at "
        f"{call.place}, back at {single[group, other, one].place}; one way needs a group of its own, or both a batch"
        for (group, one, other), call in single.items()
        if one < other and (group, other, one) in single
    ]


def _by_design(call: Call) -> bool:
    file, name = BOTH_WAYS_BY_DESIGN
    return call.function[0].endswith(file) and call.function[1] == name


# Nodes of the graph of rule 3: ("collective", group, n), ("message", group, source, destination, n), ("communicator",
# name), and ("rank", rank, n): the moment of that rank before its next call.
Node = tuple


class _Graph:
    def __init__(self):
        self.after: dict[Node, dict[Node, int]] = defaultdict(dict)  # node -> {a node that must be later: whose rank}
        self.before: dict[Node, set[Node]] = defaultdict(set)
        self.calls: dict[tuple[Node, int], Call] = {}  # (node, rank) -> that rank's call

    def add(self, first: Node, then: Node, rank: int) -> None:
        self.after[first].setdefault(then, rank)
        self.before[then].add(first)

    def circle(self) -> list[Node] | None:
        """A circle with few nodes, if there is one."""
        nodes = set(self.after) | set(self.before)
        for forward, backward in ((self.after, self.before), (self.before, self.after)):
            degree = {node: sum(other in nodes for other in backward[node]) for node in nodes}
            free = deque(node for node in nodes if not degree[node])
            while free:
                node = free.popleft()
                nodes.discard(node)
                for other in forward[node]:
                    if other in nodes:
                        degree[other] -= 1
                        if not degree[other]:
                            free.append(other)
        starts = sorted((node for node in nodes if node[0] != "rank"), key=repr)[:100]
        return min(filter(None, (self._shortest(start, nodes) for start in starts)), key=len, default=None)

    def _shortest(self, start: Node, nodes: set[Node]) -> list[Node] | None:
        """The shortest way from `start` back to it, within `nodes`."""
        origin: dict[Node, Node] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for other in self.after[node]:
                if other == start:
                    way = [node]
                    while way[-1] != start:
                        way.append(origin[way[-1]])
                    return way[::-1]
                if other in nodes and other not in origin:
                    origin[other] = node
                    queue.append(other)
        return None


def _circles(logs: list[Log]) -> list[str]:
    """Rule 3."""
    graph = _Graph()
    for rank, log in enumerate(logs):
        _add_rank(graph, rank, log)
    circle = graph.circle()
    if circle is None:
        return []
    # Of the steps in a row that one rank takes, the first call and the last.
    steps: list[tuple[int, Node, Node]] = []
    for node, other in zip(circle, [*circle[1:], circle[0]], strict=True):
        rank = graph.after[node][other]
        if steps and steps[-1][0] == rank:
            steps[-1] = (rank, steps[-1][1], other)
        else:
            steps.append((rank, node, other))
    if len(steps) > 1 and steps[0][0] == steps[-1][0]:
        steps[0] = (steps[0][0], steps.pop()[1], steps[0][2])
    parts = [f"rank {rank}: {_name(graph, a, rank)} before {_name(graph, b, rank)}" for rank, a, b in steps]
    return [f"a circle, in which each call waits for the next: {'; '.join(parts)}"]


def _add_rank(graph: _Graph, rank: int, log: Log) -> None:
    """The calls of one rank, and what each must wait for."""
    now, moments = ("rank", rank, 0), 0
    numbers: dict[tuple, int] = defaultdict(int)  # calls so far, of each kind that is counted
    nodes: dict[int, Node] = {}  # of the messages, by their place in the log
    running: dict[tuple, list[Node]] = {}  # the last call in each communicator; several nodes for a batch
    batch, filling = None, None

    def waited(node: Node) -> None:
        nonlocal now, moments
        moments += 1
        later = ("rank", rank, moments)
        graph.add(now, later, rank)
        graph.add(node, later, rank)
        now = later

    for place, entry in enumerate(log):
        if isinstance(entry, Wait):
            waited(nodes[entry.call])
            continue
        pair = tuple(sorted((rank, entry.peer))) if entry.peer is not None else ()
        if entry.kind not in MESSAGES.values():
            node, communicator = ("collective", entry.group), (entry.group,)
        else:
            ends = (rank, entry.peer) if entry.kind == "send" else (entry.peer, rank)
            node = ("message", entry.group, *ends)
            communicator = (entry.group,) if entry.batch is not None else (entry.group, *pair)
        numbers[node] += 1
        node = (*node, numbers[node])
        graph.calls[node, rank] = entry
        if communicator not in running:
            made = ("communicator", *communicator)
            graph.calls.setdefault((made, rank), entry)
            graph.add(now, made, rank)
            waited(made)
        if entry.batch is None or entry.batch != batch:
            filling = (list(running.get(communicator, [])), now)  # what the whole batch comes after
            running[communicator] = []
        batch = entry.batch
        before, moment = filling
        for earlier in (*before, moment):
            graph.add(earlier, node, rank)
        running[communicator].append(node)
        if entry.kind in MESSAGES.values():
            nodes[place] = node
        else:
            waited(node)


def _name(graph: _Graph, node: Node, rank: int) -> str:
    call = graph.calls[node, rank]
    made = "the first call of a communicator, " if node[0] == "communicator" else ""
    to = {"send": f" to rank {call.peer}", "receive": f" from rank {call.peer}"}.get(call.kind, "")
    return f"{made}{call.kind}{to} in group {call.group} of ranks {list(call.ranks)} ({call.place})"
