"""Messages that only the ranks of one job can write, and the secret that these ranks share.

Both ends of a connection send a random line. Every line after these is a message: JSON behind a proof, the HMAC-SHA256
of the message's number and text under a key of this connection and direction (RFC 2104). So a message is rejected if
its sender does not know the secret, if it was sent on another connection, or if it was sent before. Nothing is
encrypted.

Rank 0 makes the secret and writes it, readable for its user alone, into a directory that all nodes share. The file is
removed as soon as all ranks have read it. Without such a directory MEGARLHF_SECRET is the secret. torch's store, which
has no authentication, carries only a fingerprint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megarlhf.config import UserError

VARIABLE = "MEGARLHF_SECRET"
READ_SECONDS = 30.0  # until a file that rank 0 has written must be seen on the other nodes
FIRST_LINES = 512  # bytes of a line before the other end has proved that it knows the secret
LINE = 2**20  # bytes of a line after that
DEAD_SECONDS = 45  # after which a machine that acknowledges nothing is considered lost


class Lines:
    """Bytes as they arrive -> lines without their ends. No line is longer than `limit` bytes."""

    def __init__(self, limit: int = FIRST_LINES):
        self.limit = limit
        self.rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises ValueError at a line that is too long. `limit` may change from line to line."""
        self.rest += data
        while True:
            end = self.rest.find(b"\n")
            if (len(self.rest) if end < 0 else end) > self.limit:
                raise ValueError(f"a line of more than {self.limit} bytes")
            if end < 0:
                return
            line = bytes(self.rest[:end])
            del self.rest[: end + 1]
            yield line


def nonce() -> bytes:
    """The random line that each end sends first."""
    return secrets.token_hex(32).encode()


class Channel:
    """One end of a connection, after the two nonces."""

    def __init__(self, secret: bytes, end: Literal["hub", "rank"], hub: bytes, rank: bytes):
        """`hub`, `rank`: the nonces of the two ends. Raises ValueError when one is not of the form of a nonce."""
        if not all(re.fullmatch(rb"[0-9a-f]{64}", line) for line in (hub, rank)):
            raise ValueError("not a nonce")
        other = "rank" if end == "hub" else "hub"
        self._keys = [hmac.digest(secret, side.encode() + b" " + hub + rank, "sha256") for side in (end, other)]
        self._counts = [0, 0]  # sent, received

    def pack(self, message: dict[str, Any]) -> bytes:
        """The next line to send."""
        text = json.dumps(message).encode()
        return self._proof(0, text) + b" " + text + b"\n"

    def unpack(self, line: bytes) -> dict[str, Any]:
        """The message in the next line received. Raises ValueError."""
        given, _, text = line.partition(b" ")
        if not hmac.compare_digest(given, self._proof(1, text)):
            raise ValueError("a line without proof")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _proof(self, way: int, text: bytes) -> bytes:
        number = self._counts[way]
        self._counts[way] += 1
        return hmac.digest(self._keys[way], b"%d " % number + text, "sha256").hex().encode()


def fingerprint(secret: bytes) -> str:
    """A hash that identifies the secret without revealing it."""
    return hashlib.sha256(b"megarlhf " + secret).hexdigest()[:32]


def make_secret(directory: Path, world_size: int) -> bytes:
    """The job's secret, for rank 0: from the environment, or new and in a file of `directory` that only this user
    reads. Raises UserError."""
    if VARIABLE in os.environ:
        return _from_environment()
    secret = secrets.token_hex(32).encode()
    if world_size > 1:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for debris in directory.glob(".watchdog-*"):  # of a start that was killed
                with contextlib.suppress(OSError):  # it is another user's, or another start has removed it
                    if time.time() - debris.stat().st_mtime > 86400:
                        debris.unlink()
            descriptor = os.open(_path(directory, fingerprint(secret)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secret)
        except OSError as error:
            raise UserError(
                f"{directory}: rank 0 cannot write the job's secret there ({error.strerror}); mend it, or set "
                f"{VARIABLE} for all ranks"
            )
    return secret


def read_secret(directory: Path, wanted: str) -> bytes:
    """The secret whose fingerprint rank 0 has published, for the other ranks. Raises UserError."""
    if VARIABLE in os.environ:
        secret = _from_environment()
        if fingerprint(secret) != wanted:
            raise UserError(f"{VARIABLE} is not the one of rank 0; export the same to all ranks, or to none")
        return secret
    path = _path(directory, wanted if re.fullmatch("[0-9a-f]{32}", wanted) else "none")
    deadline = time.monotonic() + READ_SECONDS
    while True:
        try:
            secret = path.read_bytes()
            reason = "it holds something else"
        except OSError as error:
            secret, reason = b"", error.strerror
        if fingerprint(secret) == wanted:
            return secret
        if time.monotonic() > deadline:
            raise UserError(
                f"{path}: the secret that rank 0 has written cannot be read ({reason}); all nodes must see the same "
                f"{directory}, or set {VARIABLE} (32 characters or more) to the same value for all ranks"
            )
        time.sleep(0.2)


def remove_secret(directory: Path, secret: bytes) -> None:
    """Remove the secret's file, once all ranks have read it."""
    with contextlib.suppress(OSError):
        _path(directory, fingerprint(secret)).unlink()


def no_way(error: OSError) -> str | None:
    """Why the network cannot reach the other machine, if this error says so; None if the other end has closed."""
    unreachable = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
    return error.strerror if error.errno in unreachable else None


def notice_death(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other machine is gone or cut off. A machine whose processes are only
    stopped still acknowledges packets."""
    options = dict(TCP_KEEPIDLE=DEAD_SECONDS // 2, TCP_KEEPINTVL=5, TCP_KEEPCNT=5, TCP_USER_TIMEOUT=1000 * DEAD_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _path(directory: Path, name: str) -> Path:
    return directory / f".watchdog-{name}"


def _from_environment() -> bytes:
    secret = os.environ[VARIABLE].encode()
    if len(secret) < 32:
        raise UserError(
            f"{VARIABLE} has {len(secret)} characters; give it 32 or more (openssl rand -hex 32), or unset it"
        )
    return secret
