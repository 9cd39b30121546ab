"""Whether a start goes on with a run, begins one, or is refused because it would lose what is there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megarlhf.checkpoint import CheckpointConfig
from megarlhf.config import UserError
from megarlhf.data.cache import Cache
from megarlhf.data.sources import find
from megarlhf.data.tables import Recipe, Table
from megarlhf.train import resuming, same_data

RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in RESTARTS:
        monkeypatch.delenv(name, raising=False)


def latest(run, *, resume: bool = True):
    return resuming.latest(SimpleNamespace(run=str(run), checkpoint=CheckpointConfig(resume=resume)))


@pytest.mark.parametrize("name", RESTARTS)
def test_a_restart_goes_on_although_the_run_was_to_begin(tmp_path, monkeypatch, name):
    """checkpoint.resume=false is for the first attempt: what it has saved is its own."""
    monkeypatch.setenv(name, "0")
    assert latest(tmp_path, resume=False) is None
    step = tmp_path / "checkpoints" / "step_00000003"
    step.mkdir(parents=True)
    (step / "state.json").write_text('{"step": 3}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(UserError, match=r"already holds a run \(step_00000003, metrics.jsonl\)"):
        latest(tmp_path, resume=False)
    monkeypatch.setenv(name, "1")
    assert latest(tmp_path, resume=False) == latest(tmp_path) == step


@pytest.mark.parametrize(
    ("every", "last", "refused"), [(5, 9, False), (5, 10, True), (50, 10, False), (None, 1000, False)]
)
def test_a_run_that_lost_its_checkpoints_does_not_begin_again(tmp_path, every, last, refused):
    """Two intervals after its first step it has saved at least once."""
    if every is not None:
        (tmp_path / "run.yaml").write_text(f"checkpoint: {{every: {every}}}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, last + 1)))
    if refused:
        with pytest.raises(UserError, match=f"has metrics up to step {last}, but no checkpoint; restore "):
            latest(tmp_path)
    else:
        assert latest(tmp_path) is None


def test_data_that_changed_are_refused(tmp_path):
    """Whatever they are called, and whenever they were written."""
    step, data = tmp_path / "step_00000003", tmp_path / "a.jsonl"
    step.mkdir()

    def read() -> Cache:
        cache = Cache(tmp_path / "cache")
        cache.table(find(str(data)), Recipe("none", {}, lambda records: Table({}, {}, {})), Named())
        return cache

    class Named:
        identity = "a tokenizer"

    data.write_text('{"text": "a"}\n')
    assert same_data.changed(read(), step) is None  # saved by an earlier version
    (step / same_data.FILE).write_text(json.dumps(read().contents | {"gone.jsonl": "0"}))
    data.touch()
    assert same_data.changed(read(), step) is None
    data.write_text('{"text": "b"}\n')
    assert same_data.changed(read(), step).startswith(f"{data}: has changed since {step} was saved; restore it, or")
    (step / same_data.FILE).write_text("[1]")
    assert same_data.changed(read(), step).startswith(f"{step / 'data.json'}: damaged (TypeError)")
