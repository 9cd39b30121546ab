"""The reward functions of the kill campaign: each call leaves a byte in the file that KILLS_MARK names, so that it can
be seen from outside when a run scores."""

import os

from tests.e2e import judge


def ppo(prompts, responses):
    _mark()
    return judge.score(prompts, responses)


def dapo(prompts, responses):
    """Often the same for all samples of a prompt."""
    _mark()
    return [float(len(response) % 8 == 0) for response in responses]


def _mark():
    with open(os.environ["KILLS_MARK"], "ab") as file:
        file.write(b".")
