"""The reward server against strangers: whatever bytes come, it answers others, and its memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from megarlhf.experience.sources import RemoteScorer
from megarlhf.train.serve_reward import AnsweredRequests, RefusedError, _request
from tests.scoring import reward_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    (directory / "rules.py").write_text("def score(prompts, responses): return [len(text) for text in responses]\n")
    with reward_server(directory, function=f"{directory}/rules.py:score", max_request_mb=1) as (url, process):
        yield int(url.rpartition(":")[2]), process


def talk(port: int, *parts: bytes, wait: float = 30) -> tuple[int, dict]:
    """Send `parts` and read one answer to its end: (status, JSON)."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        with contextlib.suppress(ConnectionError):  # refused before it was all sent
            for part in parts:
                connection.sendall(part)
        return answer(connection)


def answer(connection: socket.socket) -> tuple[int, dict]:
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = dict(line.split(b": ") for line in iter(file.readline, b"\r\n"))
        return status, json.loads(file.read(int(headers[b"Content-Length"])))


def post(content: bytes, *, path: str = "/score", length: str | None = None, more: str = "") -> bytes:
    length = f"Content-Length: {len(content)}\r\n" if length is None else length and f"Content-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: here\r\n{length}{more}\r\n".encode() + content


GOOD = json.dumps({"id": "1", "prompts": ["a"], "responses": ["abc"]}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


def healthy(port: int) -> bool:
    scorer = RemoteScorer(f"http://127.0.0.1:{port}", timeout=30, retries=0, batch_size=8)
    scorer.check_health()
    return scorer(["a", "b"], ["abc", "d"]) == [3, 1]


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (post(GOOD), 200, "[3.0]"),
        (post(GOOD, length="-1"), 400, "Content-Length '-1' is not a whole number"),
        (post(GOOD, length="abc"), 400, "Content-Length 'abc' is not a whole number"),
        (post(GOOD, length="1000000000000"), 413, "a body of 1000000000000 bytes is more than"),
        (post(GOOD, length="9" * 400), 413, "is more than"),
        (post(GOOD, length=""), 411, "send the body with a Content-Length"),
        (post(GOOD, more="Transfer-Encoding: chunked\r\n"), 411, "not in chunks"),
        (post(GOOD, more="Content-Length: 3\r\n"), 400, "contradict each other"),
        (post(b"", path="/elsewhere", length="1000000000"), 404, "there is no /elsewhere"),
        (post(GOOD, path="/health"), 405, "POST /health is not understood"),
        (post(b"[" * 100_000), 400, "the body must be a JSON object"),
        (post(b'{"a":' * 100_000), 400, "more than 16 lists and objects within each other"),
        (post(GOOD[:-1] + b', "more": {"a": [{}, null]}}'), 200, "[3.0]"),
        (post(GOOD[:-1] + b', "more": {"a": [{}, ]}}'), 400, "the body must be a JSON object"),
        (post(GOOD[:-1] + b', "more": {"a" 1}}'), 400, "the body must be a JSON object"),
        (post(GOOD[:-1] + b', "prompts": ["a"]}'), 400, "the key 'prompts' is there twice"),
        (post(GOOD[:-1] + b', "version": 3}'), 400, "version must be a whole number from 1 to 2"),
        (post(GOOD[:-1] + b', "version": true}'), 400, "version must be a whole number from 1 to 2"),
        (post(GOOD[:-1] + b', "version": 2}'), 400, "records must be a list of objects, one for each response"),
        (post(GOOD[:-1] + b', "version": 2, "records": [{}, {}]}'), 400, "records must be a list of objects"),
        (post(GOOD[:-1] + b', "version": 2, "records": ["a"]}'), 400, "records must be a list of objects"),
        (post(GOOD[:-1] + b', "version": 2, "records": [{"a": ' + b"[" * 99), 400, "more than 16 lists and objects"),
        (post(GOOD[:-1] + b', "version": 2, "records": [{"a": [1.5, {"b": null}]}]}'), 200, "[3.0]"),
        (post(GOOD[:-1] + b', "version": 2, "records": [{"a": [-Infinity]}]}'), 400, "-Infinity is no finite number"),
        (post(GOOD[:-1] + b', "version": 2, "records": [{"a": 1e999}]}'), 400, "1e999 is no finite number"),
        (post(GOOD + b"x"), 400, "the body must be a JSON object"),
        (post(b" {" + GOOD[1:-1] + b',"n" : -1.5e3 ,"b":null, "s" : [ ] } \n'), 200, "[3.0]"),
        (post(b'{"id": "1", "prompts": ["a", ], "responses": ["a"]}'), 400, "the body must be a JSON object"),
        (post(b'{"id": "1", "prompts": ["a", 1], "responses": ["a", "b"]}'), 400, "the body must be a JSON object"),
        (post(b"\xff"), 400, "the body must be a JSON object"),
        (post(b'{"id": "1", "prompts": ["a"], "responses": ["\\ud800"]}'), 400, "half a surrogate pair"),
        (post(json.dumps({"id": "1" * 999, "prompts": ["a"], "responses": ["a"]}).encode()), 400, "id may have 200"),
        (
            post(json.dumps({"id": "1", "prompts": [""] * 20000, "responses": [""] * 20000}).encode()),
            413,
            "16384 responses",
        ),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431, "more than 16384 bytes"),
        (b"hello\r\n\r\n", 400, "no request of HTTP/1.1"),
        (b"GET /health HTTP/9\r\n\r\n", 400, "no request of HTTP/1.1"),
        (b"GET /health HTTP/1.1\r\nnonsense\r\n\r\n", 400, "is none"),
        (b"\x16\x03\x01\x02\x00" + bytes(20_000), 431, "more than 16384 bytes"),
        (HEALTH, 200, "ok"),
    ],
)
def test_every_request_gets_a_clear_answer(server, request_bytes, status, words):
    port, _ = server
    found, said = talk(port, request_bytes)
    assert found == status and words in json.dumps(said), said
    assert healthy(port)


def test_version_1_gets_the_sum_of_steps():
    requests = AnsweredRequests(lambda prompts, responses, records: [[(1, 0.5), (3, 2.0)]], needs_records=False)
    assert requests(GOOD) == (200, {"scores": [2.5]})
    again = GOOD[:-1] + b', "version": 2, "records": [{}]}'
    assert requests(again) == (200, {"scores": [[(1, 0.5), (3, 2.0)]]})


def test_requests_may_share_a_connection(server):
    """As clients keep them; one request may come in pieces, or two at once."""
    port, _ = server
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(post(GOOD)[:30])
            time.sleep(0.01)
            connection.sendall(post(GOOD)[30:])
            assert answer(connection) == (200, {"scores": [3]})
        connection.sendall(post(GOOD, more="Expect: 100-continue\r\n")[: -len(GOOD)])
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(GOOD)
        assert answer(connection)[0] == 200


def test_strangers_keep_nobody_out_and_fill_no_memory(server):
    port, process = server
    assert healthy(port)

    def peak() -> int:
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1]) // 1024

    before = peak()
    with contextlib.ExitStack() as stack:
        idle = []
        for index in range(800):
            with contextlib.suppress(OSError):
                idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)))
                idle[-1].sendall((b"", b"POST /score", post(GOOD)[:-5], b"\n")[index % 4])
            if index % 200 == 199:
                assert healthy(port), f"after {index + 1} connections"
        assert len(idle) > 700
    line = b"a" * 2**20
    for start in (b"", b"GET /", post(b"", length="1000000"), post(b"", length=str(2**30), path="/nowhere")):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(start)
                for _ in range(1024):  # 1 GiB
                    connection.sendall(line)
            assert healthy(port)
    assert peak() - before < 50, f"{before} -> {peak()} MiB"


@pytest.mark.parametrize("begun", [b"", b"x" * 300_000])
def test_bodies_that_do_not_come_keep_nobody_out(server, begun):
    """60 requests announce a body of the largest size; together they could send 15 times what is held at once."""
    port, _ = server
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(60):
            strangers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)))
            with contextlib.suppress(ConnectionError):
                strangers[-1].sendall(post(begun, length=str(2**20)))
        assert talk(port, post(GOOD)) == (200, {"scores": [3]})
        large = json.dumps({"id": "large", "prompts": ["a"], "responses": ["a" * 900_000]}).encode()
        assert talk(port, post(large)) == (200, {"scores": [900_000]})
        if begun:
            status, said = answer(strangers[0])
            assert status == 503 and "send it again later" in said["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * 300_000 + b"{}]",
        b'{"prompts": [' + b"{}," * 300_000 + b"{}]}",
        b'{"prompts": [' + b"[]," * 300_000 + b"[]]}",
        b'{"prompts": [' + b'"ab",' * 200_000 + b'"ab"]}',
        b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
    ],
)
def test_parsing_takes_no_more_than_the_body(body):
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError):
            _request(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * len(body) + 2 * 2**20, f"{peak / len(body):.1f} times the body"


@pytest.mark.parametrize("element", [b"{}", b"[]", b"1.5", b'"ab"', b'{"a":1}', b'{"a":{"b":[0.5]}}'])
def test_records_take_no_more_than_their_bound(element):
    """131,072 values, also of a body that has many more."""
    for start in (b'{"records": [', b'{"records": [{"a": [', b'{"other": ['):
        tracemalloc.start()
        try:
            with pytest.raises(RefusedError, match="may have 131072 values in all"):
                _request(start + (element + b",") * 200_000)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2.5 * 200_000 * len(element) + 40 * 2**20, f"{peak / 2**20:.0f} MiB"
