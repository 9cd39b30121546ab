"""pass@k against enumeration, the best evaluation so far, and which step directories stay."""

from __future__ import annotations

import itertools
import math
import shutil
from fractions import Fraction

import pytest
import torch

from megarlhf.checkpoint import checksums, steps
from megarlhf.config import UserError, from_dict
from megarlhf.experience.held_out import EvaluationConfig, pass_at
from megarlhf.train.evaluation import Best, measured, stopped
from tests.unit.test_steps import assert_whole, killed, write

PROMPTS = {"path": "held_out.jsonl"}


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples):
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([i < right for i in range(samples)], k))
        expected = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at(k, right, samples) == pytest.approx(float(expected), abs=1e-15), (right, k)


def test_pass_at_k_of_many_samples():
    assert pass_at(1, 3, 16384) == pytest.approx(3 / 16384)
    assert pass_at(8192, 1, 16384) == pytest.approx(0.5)
    assert pass_at(100, 16384 - 99, 16384) == 1


def test_measures_of_scores():
    config = from_dict(EvaluationConfig, {"prompts": PROMPTS, "samples": 4, "k": [1, 2], "threshold": 0.5}, "test")
    scores = torch.tensor([[0.5, 0.4, 1.0, math.nan], [0.0, 0.1, 0.2, 0.3], [0.0, 0.0, 0.0, 9.0]]).double()
    found = torch.stack([scores, torch.ones_like(scores)], 2)
    shares = {"evaluation/pass@1": (2 / 4 + 0 + 1 / 4) / 3, "evaluation/pass@2": (5 / 6 + 0 + 3 / 6) / 3}
    assert measured(found, config, greedy=False) == pytest.approx(shares)
    greedy = measured(found[:, :1], config, greedy=True)
    assert greedy == {"evaluation/greedy": pytest.approx(1 / 3), "evaluation/score": pytest.approx(1 / 6),
                      "evaluation/response_length": 1}  # fmt: skip


def test_the_best_so_far():
    config = from_dict(EvaluationConfig, {"prompts": PROMPTS, "best": "evaluation/greedy", "patience": 2}, "test")
    best, ends = Best(), []
    for step, value in enumerate([math.nan, 0.2, 0.2, 0.3, math.nan, 0.3]):
        best = best.extended("evaluation/greedy", step, value)
        ends.append((best.step, best.since, stopped(config, best) is not None))
    assert ends == [(0, 0, False), (1, 0, False), (1, 1, False), (3, 0, False), (3, 1, False), (3, 2, True)]
    assert stopped(None, best) is None
    other = best.extended("evaluation/score", 6, 0.1)  # by another metric from now on
    assert other == Best("evaluation/score", 6, 0.1)


def save(directory, step: int, best: int) -> tuple:
    """The arguments of `publish` for a step directory that knows the best one."""
    final = steps.path_of(directory, step)
    partial = final.with_name(final.name + steps.PARTIAL)
    write(partial, str(step))
    (partial / steps.STATE).write_text(f'{{"step": {step}, "best": {best}}}')
    return partial, final, checksums.write(partial, {})


@pytest.mark.parametrize(
    ("best", "kept"),
    [([0, 0, 0, 0], [3, 4]), ([1, 1, 1, 1], [1, 3, 4]), ([1, 1, 3, 3], [3, 4]), ([1, 2, 2, 4], [2, 3, 4])],
)
def test_the_best_of_each_kept_one_is_kept(tmp_path, best, kept):
    """So that a run that goes on from any of them has its best."""
    for step, of in enumerate(best, start=1):
        steps.publish(*save(tmp_path, step, of))
        steps.retire(steps.path_of(tmp_path, step), keep=2)
    assert [path.name for path in steps.complete(tmp_path)] == [f"step_{step:08d}" for step in kept]
    for step in kept[-2:]:
        (tmp_path / steps.LATEST).write_text(f"step_{step:08d}")
        assert steps.best(tmp_path) == (steps.path_of(tmp_path, best[step - 1]) if best[step - 1] else None)


@pytest.mark.parametrize("step", [2, 3])
def test_a_kill_leaves_a_best_one(tmp_path, step):
    """At any moment while a better one is saved, also in the place of an older directory of that step: the best one is
    whole, and is the one that the latest checkpoint knows."""
    before = tmp_path / "before"
    for old, of in ((1, 1), (2, 1)):
        steps.publish(*save(before, old, of))
    save(before, step, step)
    seen = set()
    for moment in itertools.count(1):
        directory = shutil.copytree(before, tmp_path / str(moment))
        partial, final = (directory / f"step_{step:08d}{suffix}" for suffix in (steps.PARTIAL, ""))
        own = checksums.own(partial)

        def work(partial=partial, final=final, own=own):
            steps.publish(partial, final, own)
            steps.retire(final, keep=1)

        ended = killed(work, moment)
        for _ in range(2):  # as others find it, and after the next start
            best = steps.best(directory)
            assert checksums.damage(best) is None
            assert steps.read_state(best)["step"] == steps.read_state(steps.latest(directory))["best"]
            seen.add(best.name)
            assert_whole(directory)
        if ended:
            assert [path.name for path in steps.complete(directory)] == [final.name] == [best.name]
            break
    assert seen == {"step_00000001", f"step_{step:08d}"} and moment > 20


def test_a_best_one_that_is_gone(tmp_path):
    for step, of in ((1, 1), (2, 1)):
        steps.publish(*save(tmp_path, step, of))
    shutil.rmtree(steps.path_of(tmp_path, 1))
    with pytest.raises(UserError, match="state.json: names step step_00000001 as the best, which is not a complete"):
        steps.best(tmp_path)
