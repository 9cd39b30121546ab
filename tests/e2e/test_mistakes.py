"""A share of the campaign of bad inputs; `python -m tests.campaigns.mistakes`, of which CI runs all, says more."""

from __future__ import annotations

import pytest

from tests.campaigns.mistakes import World, cases, judge

EVERY = 9


@pytest.fixture(scope="module")
def world(straight, tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), *straight)


@pytest.mark.parametrize("case", cases()[::EVERY], ids=str)
def test_a_mistake_is_refused_and_its_place_named(world, case):
    assert judge(case, world) is None
