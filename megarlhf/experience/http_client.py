"""One HTTP request with limits on time and size: the complete answer by a deadline, or an error.

It uses the standard library's client, which ignores proxies and redirects, so that the environment cannot send texts to
another address than the one in the configuration.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import socket
import threading
import urllib.parse
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    status: int
    reason: str
    location: str | None  # of a redirect
    content: bytes


class TooLongError(Exception):
    """The answer has more bytes than the limit."""


def exchange(url: str, body: bytes | None, *, timeout: float, limit: int) -> Reply:
    """GET `url`, or POST `body` (JSON) to it.

    Raises TimeoutError if the answer is not complete after `timeout` seconds, which include the name look-up, the
    connection attempts to each of its addresses, and a slow answer; TooLongError for more than `limit` bytes of
    content; OSError and http.client.HTTPException for other failures.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    answer: concurrent.futures.Future[Reply] = concurrent.futures.Future()
    given_up = threading.Event()
    opened: list[socket.socket] = []

    def work() -> None:
        try:
            connection.connect()
            opened.append(connection.sock)
            if not given_up.is_set():
                answer.set_result(_talk(connection, parts.path or "/", body, limit))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            connection.close()

    # A thread, because a look-up has no time-out, and that of a socket is for each address and each read: a server that
    # sends a byte a second would never time out.
    threading.Thread(target=work, name="http", daemon=True).start()
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:  # not Python's own before 3.11
        raise TimeoutError
    finally:
        given_up.set()
        for one in opened:
            with contextlib.suppress(OSError):  # ends pending calls on it, in TLS too
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def _talk(connection: http.client.HTTPConnection, path: str, body: bytes | None, limit: int) -> Reply:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has the whole body
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    content = response.read(limit + 1)
    if len(content) > limit:
        raise TooLongError
    if response.length:
        raise http.client.IncompleteRead(content, response.length)
    return Reply(response.status, response.reason, response.getheader("Location"), content)
