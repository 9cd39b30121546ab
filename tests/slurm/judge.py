"""A user's reward function that takes its time while a test says so."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.e2e import judge


def score(prompts, responses):
    """The judge's scores, behind a sleep of the seconds in the file that MEGARLHF_TEST_PAUSE names, if there is one."""
    with contextlib.suppress(KeyError, FileNotFoundError):
        time.sleep(float(Path(os.environ["MEGARLHF_TEST_PAUSE"]).read_text()))
    return judge.score(prompts, responses)


def crash(prompts, responses):
    """The judge's scores; but once there is a checkpoint, rank 0 dies without a word."""
    if os.environ["SLURM_PROCID"] == "0" and (Path(os.environ["TEST_CRASH"]) / "crash/checkpoints/latest").exists():
        time.sleep(3)  # until it has said in which step it is
        os.kill(os.getpid(), signal.SIGKILL)
    return judge.score(prompts, responses)
