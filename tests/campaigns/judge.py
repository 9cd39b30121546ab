"""The reward function of the kill campaign: each call leaves a byte in the file that KILLS_MARK names, so that it can
be seen from outside when a run scores."""

import os

from tests.e2e import judge


def score(prompts, responses):
    with open(os.environ["KILLS_MARK"], "ab") as file:
        file.write(b".")
    return judge.score(prompts, responses)
