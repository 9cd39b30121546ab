"""The reward function of test_bandit.py: a table of scores of one-word responses."""

WORDS = ["a", "b", "c", "d", "e", "f", "g", ""]  # by token; the last is EOS
SCORES = [1.2, -0.4, 0.3, -1.5, 0.8, 0.0, -0.7, 0.5]


def score(prompts, responses):
    return [SCORES[WORDS.index(response.strip())] for response in responses]
