"""One HTTP request with limits on time and size: the whole answer arrives by a deadline or not at all.

The standard library's client alone: it knows neither proxies nor redirects, so that nothing in the environment sends
texts elsewhere than to the address in the configuration.
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
    """The answer has more bytes than it may."""


def exchange(url: str, body: bytes | None, *, timeout: float, limit: int) -> Reply:
    """GET `url`, or POST `body` (JSON) to it.

    Raises TimeoutError where the whole answer is not there after `timeout` seconds, whatever takes the time: looking up
    the name, connecting to one of its addresses after the other, or an answer that trickles; TooLongError for more than
    `limit` bytes of content; OSError and http.client.HTTPException for what else goes wrong.
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

    # A thread, because a look-up has no time-out, and that of a socket is for each address and each read: whoever sends
    # a byte a second would keep us for ever.
    threading.Thread(target=work, name="http", daemon=True).start()
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:  # not Python's own before 3.11
        raise TimeoutError
    finally:
        given_up.set()
        for one in opened:
            with contextlib.suppress(OSError):  # ends whatever waits for it, in TLS too
                socket.socket.shutdown(one, socket.SHUT_RDWR)


def _talk(connection: http.client.HTTPConnection, path: str, body: bytes | None, limit: int) -> Reply:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may say why before it has all of the body
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    content = response.read(limit + 1)
    if len(content) > limit:
        raise TooLongError
    if response.length:
        raise http.client.IncompleteRead(content, response.length)
    return Reply(response.status, response.reason, response.getheader("Location"), content)
