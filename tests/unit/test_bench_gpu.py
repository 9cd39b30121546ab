"""bench.gpu: each stage stands alone, and what it has measured is kept."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys

from bench import gpu
from tests.ranks import ENVIRONMENT, ROOT


def test_a_stage_that_fails_keeps_its_figures_and_stops_no_other(tmp_path, monkeypatch, capsys):
    """One fails, one does not end, one ends well; the files have all of them."""
    figure = 'import json, sys, time; print(json.dumps({"what": "a copy", "value": 2.5, "unit": "GB/s"}), flush=True)\n'
    programs = {
        "environment": figure + 'sys.exit("no driver")',
        "probes": figure + "time.sleep(600)",
        "memory": figure,
        "kernels": 'print(\'{"what": "a sum", "error": "off by 2"}\')',
    }
    monkeypatch.setattr(gpu, "command", lambda stage, *_: [sys.executable, "-c", programs[stage]])
    monkeypatch.setitem(gpu.LIMITS, "probes", 15)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", *programs, "ppo", "--out", str(tmp_path / "found")])
    assert gpu.main() == 1
    found = {result["stage"]: result for result in json.loads((tmp_path / "found.json").read_text())}
    states = {stage: (result["status"], len(result["figures"])) for stage, result in found.items()}
    assert states == {"environment": ("failed", 1), "probes": ("failed", 1), "kernels": ("failed", 1),
                      "memory": ("ok", 1), "ppo": ("skipped", 0)}  # fmt: skip
    assert found["environment"]["reason"] == "no driver"
    assert found["probes"]["reason"] == "not done after 15 s"
    assert found["kernels"]["reason"] == "a sum"
    assert "--trl PYTHON" in found["ppo"]["reason"]
    table = (tmp_path / "found.md").read_text().splitlines()
    assert len(table) == 2 + 5 + 4 and all(line.count("|") == 5 for line in table)
    assert "|  | a copy | 2.5 GB/s |  |" in table
    assert "no driver" in capsys.readouterr().out


def test_packages_of_a_site_count_as_installed(tmp_path, monkeypatch):
    """The tests need pytest, which a machine may have in the packages that it is given alone."""
    arguments, path = argparse.Namespace(minutes=1, trl=None), [str(tmp_path)]
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.missing("tests", arguments, 60, path) == "pytest is not installed, nor in the packages of --site"
    (tmp_path / "pytest").mkdir()
    (tmp_path / "pytest" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert gpu.missing("tests", arguments, 60, path) == ""


def test_a_test_that_was_ended_keeps_its_results():
    text = "tests/gpu/a.py::test_one[x] PASSED [ 10%]\ntests/gpu/a.py::test_two FAILED [ 20%]\ntests/gpu/a.py::test_thr"
    assert gpu.tested(text) == [
        {"what": "tests passed", "value": 1, "unit": "of 2"},
        {"what": "tests/gpu/a.py::test_two", "error": "failed"},
    ]


def test_the_probes_hold_on_a_cpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--quick", "--only", "probes", "--out", str(tmp_path / "found")], cwd=ROOT,
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (stage,) = json.loads((tmp_path / "found.json").read_text())
    assert stage["status"] == "ok" and sum("value" in figure for figure in stage["figures"]) >= 6, stage
