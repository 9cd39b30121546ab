"""One HTTP request with limits on time and size: the whole answer arrives by a deadline or not at all. Before that, the
look-up of the name has the resolver's limits, and each address of the name may take the whole time to be connected.

The standard library's client alone: it knows neither proxies nor redirects, so that nothing in the environment sends
texts elsewhere than to the address in the configuration.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
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

    Raises TimeoutError where the whole answer is not there after `timeout` seconds, however it trickles, or a
    connection to one of the host's addresses takes as long; TooLongError for more than `limit` bytes of content;
    OSError and http.client.HTTPException for what else goes wrong.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    deadline = time.monotonic() + timeout
    timer = None
    try:
        connection.connect()
        # The time-out of a socket is for each read: whoever sends a byte a second would keep us for ever.
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, [connection.sock])
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may say why before it has all of the body
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("GET" if body is None else "POST", parts.path or "/", body, headers)
        response = connection.getresponse()
        content = response.read(limit + 1)
        if len(content) > limit:
            raise TooLongError
        if time.monotonic() >= deadline:  # what was cut may look like an end
            raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(content, response.length)
        return Reply(response.status, response.reason, response.getheader("Location"), content)
    except (OSError, http.client.HTTPException):
        if time.monotonic() >= deadline:
            raise TimeoutError
        raise
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _cut(connection: socket.socket) -> None:
    """End whatever waits for it, in TLS too."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
