"""A Python reward function as users write one: the true sentiment of the review."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import reviews


def score(prompts, responses):
    return [2 * reviews.judge(prompt + response) - 1 for prompt, response in zip(prompts, responses, strict=True)]


def nan(prompts, responses):
    return [float("nan")] * len(prompts)


def huge(prompts, responses):
    return [1e30] * len(prompts)
