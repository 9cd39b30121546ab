"""A program and its tests in two processes, so that the program cannot forge the tests' result.

The tests' process has the program's names as proxies. It sends calls, and the program's process answers them with plain
data (None, numbers, strings, bytes, lists, tuples, sets, dicts) or with handles of other objects. All comparisons of
plain data happen in the tests' process. Whatever the program does to its own interpreter - leaves it, changes builtins,
looks for a token - is no answer to a call. This file runs inside the sandbox (jail.py); standard library alone.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import operator
import os
import struct
import sys
import types
from typing import Any

ARITHMETIC = ("add", "sub", "mul", "truediv", "neg")
OPERATIONS = {
    "call": lambda function, *args, **keywords: function(*args, **keywords),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, *error: manager.__exit__(*error),
    "getattr": getattr, "setattr": setattr, "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "eq", *ARITHMETIC)},
}  # fmt: skip
SETS = {"l": list, "t": tuple, "s": set, "f": frozenset}


class Remote:
    """An object of the other process. It never equals plain data: its own __eq__ would be the program's word."""

    def __init__(self, peer: Peer, number: int):
        self.__dict__.update(_peer=peer, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols are those of this class
            raise AttributeError(name)
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        return self._number == other._number or self._peer.request("eq", self, other) is True

    def __hash__(self) -> int:
        return 0  # equal objects may have different handles

    def __bool__(self) -> bool:
        return True

    def __exit__(self, *error: Any) -> None:
        """Swallows nothing, and replaces no exception by another: the exception is the tests' own, or meant for
        them."""
        with contextlib.suppress(*([] if error[0] is None else [Exception])):
            self._peer.request("exit", self, *error)


def _forward(name: str) -> Any:
    return lambda self, *args, **keywords: self._peer.request(name, self, *args, **keywords)


def _forward_arithmetic(name: str) -> Any:
    """Plain data is no result: the program sees the expected value here, and could answer f(x) - expected with 0."""

    def operate(self: Remote, *others: Any) -> Remote:
        result = self._peer.request(name, self, *others)
        if not isinstance(result, Remote):
            raise TypeError(f"{name} of a handle gave {type(result).__name__}, not a handle")
        return result

    return operate


for _name in OPERATIONS.keys() - {*ARITHMETIC, "getattr", "setattr", "eq", "exit"}:
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__{_name}__", _forward_arithmetic(_name))


class Peer:
    """One end of the connection. `answers`: the operations that it does for the other end."""

    def __init__(self, reads: int, writes: int, answers: frozenset[str]):
        self.reads, self.writes, self.answers = reads, writes, answers
        self.objects: list[Any] = []  # of which the other end has handles

    def request(self, operation: str, *args: Any, **keywords: Any) -> Any:
        """The other end's result of OPERATIONS[operation]; calls that it makes meanwhile are answered."""
        self.send(["do", operation, self.encode(args), self.encode(keywords)])
        while (message := self.receive())[0] == "do":
            self.answer(message)
        if message[0] == "error":
            error = _error(*message[1:])
            if isinstance(error, StopIteration) and operation != "next":  # would end the all(map(...)) of a test
                error = RuntimeError("StopIteration")
            raise error
        _, value, new_args, new_keywords = message
        if new_args is not None:
            for old, new in zip(args, self.decode(new_args), strict=True):
                _refresh(old, new)
            for name, new in self.decode(new_keywords).items():
                _refresh(keywords[name], new)
        return self.decode(value)

    def answer(self, message: list[Any]) -> None:
        try:
            _, operation, args, keywords = message
            args, keywords = self.decode(args), self.decode(keywords)
            if operation not in self.answers:
                raise TypeError(operation)
            value = self.encode(OPERATIONS[operation](*args, **keywords))
            mutable = any(isinstance(arg, (list, dict, set)) for arg in (*args, *keywords.values()))
            back = [self.encode(args), self.encode(keywords)] if mutable else [None, None]
            reply = ["value", value, *back]
        except BaseException as error:
            reply = ["error", [cls.__name__ for cls in type(error).__mro__], str(error)[:1000]]
        self.send(reply)

    def encode(self, value: Any) -> Any:
        """`value` as JSON: plain data by copy, other objects as handles."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        for tag, kind in SETS.items():
            if isinstance(value, kind):
                return [tag, *map(self.encode, value)]
        if isinstance(value, dict):
            return ["d", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if isinstance(value, (bytes, bytearray)):
            return ["b", value.hex()]
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        if isinstance(value, Remote):
            return ["yours", value._number]
        numpy = sys.modules.get("numpy")
        if isinstance(value, (getattr(numpy, "ndarray", ()), getattr(numpy, "generic", ()))):
            return self.encode(value.tolist())
        self.objects.append(value)
        name = value.__name__ if isinstance(value, types.ModuleType) else None
        return ["mine", len(self.objects) - 1, name]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, *items = value
        if tag in SETS:
            return SETS[tag](map(self.decode, items))
        if tag == "d":
            return {self.decode(key): self.decode(item) for key, item in items}
        if tag == "b":
            return bytes.fromhex(items[0])
        if tag == "c":
            return complex(*items)
        if tag == "yours":
            return self.objects[items[0]]
        number, module = items
        if module is not None and module.partition(".")[0] in sys.stdlib_module_names:
            return importlib.import_module(module)  # this process's own
        return Remote(self, number)

    def send(self, message: list[Any]) -> None:
        content = json.dumps(message).encode()
        content = struct.pack("<Q", len(content)) + content
        while content:
            content = content[os.write(self.writes, content) :]

    def receive(self) -> list[Any]:
        return json.loads(read_block(self.reads))


def read_block(descriptor: int) -> bytes:
    """8 bytes of length, little-endian, and as many bytes. EOFError: fewer come."""
    length = struct.unpack("<Q", _read(descriptor, 8))[0]
    return _read(descriptor, length)


def run_code(code: bytes, peer: Peer) -> None:
    """Run the program, then answer for its objects until the other end closes."""
    module = sys.modules["solution"] = types.ModuleType("solution")  # not __main__: no script's ending runs
    exec(compile(code.decode(errors="surrogatepass"), "solution.py", "exec"), module.__dict__)
    peer.send(peer.encode({name: value for name, value in vars(module).items() if isinstance(name, str)}))
    while True:
        peer.answer(peer.receive())


def run_tests(tests: list[str], peer: Peer) -> None:
    """Run the tests, one after the other, with the program's names. Raises what a failed one raises."""
    names = peer.decode(peer.receive())
    known = vars(builtins)
    namespace = {name: value for name, value in names.items() if not name.startswith("__") and name not in known}
    namespace["__name__"] = "tests"
    for test in tests:
        exec(compile(test, "tests.py", "exec"), namespace)


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _refresh(old: Any, new: Any) -> None:
    """What a call did to an argument, done to the caller's object as well."""
    if isinstance(old, list) and isinstance(new, list) and old != new:
        old[:] = new
    elif isinstance(old, (dict, set)) and isinstance(new, type(old)) and old != new:
        old.clear()
        old.update(new)


def _error(names: list[str], text: str) -> Exception:
    """The other process's exception, as the nearest built-in class."""
    for name in names:
        cls = getattr(builtins, name, None)
        if isinstance(cls, type) and issubclass(cls, Exception):
            try:
                return cls(text)
            except TypeError:  # UnicodeDecodeError has five parameters
                continue
    return Exception(f"{names[0]}: {text}")
