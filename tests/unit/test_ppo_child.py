"""The phases of a step as bench/ppo_child.py counts them."""

import importlib
import time

from tests.ranks import ROOT


def test_prompts_and_samples_are_one_generation_of_one_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    phases = importlib.import_module("ppo_child").Phases(None)
    for _ in range(2):
        for name in ("generation", "generation", "scoring", "training", "other"):
            phases.enter(name)
            time.sleep(0.01)
    phases.enter("end")
    assert [list(step) for step in phases.steps] == [["generation", "scoring", "training", "other"]] * 2
    assert all(step["generation"]["wall"] > 0.019 for step in phases.steps)
