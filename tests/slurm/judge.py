"""A user's reward function that takes its time while a test says so."""

import contextlib
import os
import time
from pathlib import Path

from tests.e2e import judge


def score(prompts, responses):
    """The judge's scores, behind a sleep of the seconds in the file that MEGARLHF_TEST_PAUSE names, if there is one."""
    with contextlib.suppress(KeyError, FileNotFoundError):
        time.sleep(float(Path(os.environ["MEGARLHF_TEST_PAUSE"]).read_text()))
    return judge.score(prompts, responses)
