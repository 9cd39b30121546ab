"""What is said: plain lines with their time in a file, a bar on a terminal, and nothing on standard output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from megarlhf import console
from tests.ranks import ENVIRONMENT, ROOT

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
CODE = """
from megarlhf import console
with console.Progress(3, "step") as progress:
    console.say("  a note\\n  of two lines")
    for step in (1, 2, 3):
        progress.to(step, {"loss": f"{1 / step:.2f}"})
with console.Progress(2000, "tokens") as progress:
    progress.add(2000)
"""


def run(**options) -> subprocess.CompletedProcess:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, timeout=60, **options)


def test_a_file_has_lines_with_their_time():
    done = run(capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and "\r" not in done.stderr and "\x1b" not in done.stderr
    first, second, *steps, tokens = done.stderr.splitlines()
    assert re.fullmatch(f"{TIME}  a note", first) and second == "  of two lines"
    line = re.compile(f"{TIME}step (\\d) of 3: loss ([\\d.]+)(, 0:00 left)?")
    assert [line.fullmatch(step).groups()[:2] for step in steps] == [("1", "1.00"), ("2", "0.50"), ("3", "0.33")]
    assert re.fullmatch(f"{TIME}tokens 2,000 of 2,000: [\\d,]+ tokens/s", tokens)


def test_a_terminal_has_a_bar():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = run(stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert done.returncode == 0 and done.stdout == b""
    assert b"\r" in said and b"3/3" in said and b"loss=0.33" in said and b"  a note" in said
    assert not re.search(TIME.encode(), said)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (36000, "10:00:00")])
def test_durations(seconds, text):
    assert console.duration(seconds) == text
