"""The HTTP side of the reward server: GET /health and POST /score, with limits on connections and memory.

One thread serves all connections (asyncio), a second one computes. The bytes of bodies are counted as they arrive, up
to HELD times the largest body; beside them asyncio buffers up to 350 KiB a connection. At the limit of connections, the
server closes the one that has waited longest without a complete request. At the limit of bytes, it refuses the
incomplete body that has been idle longest. So hundreds of idle connections or incomplete bodies do not block a client
that sends a complete request at once. Complete requests queue.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

CONNECTIONS = 512
BACKLOG = 128
HEADER_BYTES = 16 * 1024
HELD = 4  # bodies of the largest size that are in memory at once, those that wait to be computed included
READ_SECONDS = 60.0  # for a request's head, for room for its body, and for the client to take the answer
BODY_SECONDS = 20.0  # for a body, while there is room for it
LINGER_SECONDS = 2.0  # for a refused client to finish sending and read the answer

Answer = tuple[int, dict[str, Any]]  # status, JSON
BUSY = "too many requests at once; send it again later"


class _Refusal(Exception):
    """A request that is not read to its end; the connection is closed after the answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """health: the answer to GET /health. score: a body -> the answer to POST /score; always called in the same thread.
    max_body: bytes."""

    def __init__(self, health: dict[str, Any], score: Callable[[bytearray], Answer], *, max_body: int):
        self.health, self.score, self.max_body = health, score, max_body
        self.computing = ThreadPoolExecutor(1)
        self.open = 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)
        self.waiting: dict[asyncio.StreamWriter, None] = {}  # without a complete request, longest first
        self.held = 0  # bytes of bodies
        self.arriving: dict[asyncio.Task[bytearray], int] = {}  # bytes of incomplete bodies, longest idle first

    async def run(self, listener: socket.socket) -> None:
        """Serve for ever."""
        self.released = asyncio.Condition()
        options = dict(sock=listener, limit=HEADER_BYTES, backlog=BACKLOG)
        async with await asyncio.start_server(self._connection, **options) as server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        if self.open > self.most:
            oldest = next(iter(self.waiting), writer)
            self.waiting.pop(oldest, None)
            oldest.transport.abort()
        try:
            going_on = not writer.is_closing()
            while going_on:
                self.waiting[writer] = None
                going_on = await self._exchange(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            writer.transport.abort()  # the client left, or is too slow
        finally:
            self.open -= 1
            self.waiting.pop(writer, None)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request and answer it. Returns whether another one may follow on this connection."""
        size = 0
        try:
            method, path, version, headers = await asyncio.wait_for(_head(reader), READ_SECONDS)
            going_on = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
            if (method, path) == ("GET", "/health"):
                self.waiting.pop(writer, None)
                status, answer = 200, self.health
                going_on = going_on and not {"content-length", "transfer-encoding"} & headers.keys()
            elif (method, path) == ("POST", "/score"):
                length = _length(headers, self.max_body)
                if headers.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await self._body(reader, length)
                size = length
                self.waiting.pop(writer, None)
                status, answer = await asyncio.get_running_loop().run_in_executor(self.computing, self.score, body)
            elif path in ("/health", "/score"):
                raise _Refusal(405, f"{method} {path} is not understood; use GET /health and POST /score")
            else:
                raise _Refusal(404, f"there is no {path[:200]}; use GET /health and POST /score")
        except _Refusal as refusal:
            await _reply(writer, refusal.status, {"error": str(refusal)}, going_on=False)
            await _linger(reader, writer)
            return False
        finally:
            await self._release(size)
        await _reply(writer, status, answer, going_on=going_on)
        return going_on

    async def _body(self, reader: asyncio.StreamReader, size: int) -> bytearray:
        """A complete body; the caller releases its `size` bytes."""
        arrival = asyncio.create_task(self._arrival(reader, size))
        self.arriving[arrival] = 0
        try:
            await asyncio.wait([arrival])
        finally:
            held = self.arriving.pop(arrival, None)
        if held is None:  # cancelled to make room
            raise _Refusal(503, BUSY)
        try:
            return arrival.result()
        except BaseException:
            await self._release(held)
            raise

    async def _arrival(self, reader: asyncio.StreamReader, size: int) -> bytearray:
        body, mine = bytearray(), asyncio.current_task()
        left, clock = BODY_SECONDS, asyncio.get_running_loop().time
        while len(body) < size:
            start = clock()
            part = await asyncio.wait_for(reader.read(min(65536, size - len(body))), left)
            left -= clock() - start
            if not part:
                raise asyncio.IncompleteReadError(b"", size)
            try:
                await asyncio.wait_for(self._room(mine, len(part)), READ_SECONDS)
            except asyncio.TimeoutError:
                raise _Refusal(503, BUSY)
            body += part
        return body

    async def _room(self, mine: asyncio.Task[bytearray], size: int) -> None:
        """Count `size` more bytes of the body that `mine` reads, once there is room: an idle incomplete body is
        refused, or a complete one is computed."""
        async with self.released:
            while self.held + size > HELD * self.max_body:
                idle = next((task for task, held in self.arriving.items() if held and task is not mine), None)
                if idle is None:
                    await self.released.wait()
                else:
                    self.held -= self.arriving.pop(idle)
                    idle.cancel()
                    self.released.notify_all()
            if mine not in self.arriving:  # cancelled meanwhile to make room
                raise _Refusal(503, BUSY)
            self.held += size
            self.arriving[mine] = self.arriving.pop(mine) + size

    async def _release(self, size: int) -> None:
        if size:
            async with self.released:
                self.held -= size
                self.released.notify_all()


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, str, dict[str, str]]:
    """(method, path, version, headers with names in lower case) of the next request."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refusal(431, f"the request's head has more than {HEADER_BYTES} bytes")
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise _Refusal(400, "this is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise _Refusal(400, f"the header {line[:60]!r} is none")
        if name == "content-length" and headers.get(name, value) != value:
            raise _Refusal(400, "two headers Content-Length contradict each other")
        headers[name] = value
    return words[0], words[1], words[2], headers


def _length(headers: dict[str, str], most: int) -> int:
    """The body's length in bytes, checked before any of it is read."""
    length = headers.get("content-length")
    if length is None or "transfer-encoding" in headers:
        raise _Refusal(411, "send the body with a Content-Length, not in chunks")
    if not (length.isascii() and length.isdigit()):
        raise _Refusal(400, f"Content-Length {length[:60]!r} is not a whole number of 0 or more")
    if len(length) > 18 or int(length) > most:
        raise _Refusal(413, f"a body of {length[:30]} bytes is more than max_request_mb allows, {most} bytes")
    return int(length)


async def _reply(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any], *, going_on: bool) -> None:
    content = json.dumps(answer).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: {'keep-alive' if going_on else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await asyncio.wait_for(writer.drain(), READ_SECONDS)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Discard what a refused client still sends: closing the connection at once could lose the answer in transit."""

    async def discard() -> None:
        while await reader.read(65536):
            pass

    writer.write_eof()
    await asyncio.wait_for(discard(), LINGER_SECONDS)
