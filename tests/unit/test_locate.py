"""Paths of models, checkpoints and runs."""

from __future__ import annotations

import pytest

from megarlhf.config import UserError
from megarlhf.models.locate import find_model, find_tokenizer


@pytest.fixture
def run(tmp_path):
    for step in ("step_00000001", "step_00000002"):
        for role in ("actor", "critic"):
            model = tmp_path / "checkpoints" / step / role
            model.mkdir(parents=True)
            (model / "architecture.yaml").touch()
        (tmp_path / "checkpoints" / step / "tokenizer").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000002\n")
    return tmp_path


def test_run_checkpoint_and_model_lead_to_the_model(run):
    checkpoint = run / "checkpoints" / "step_00000002"
    for path in (run, checkpoint, checkpoint / "critic"):
        assert find_model(path, "critic") == checkpoint / "critic"
        assert find_tokenizer(path) == checkpoint / "tokenizer"
    assert find_model(str(run)) == checkpoint / "actor"
    assert find_model(checkpoint / "critic") == checkpoint / "critic"  # a model is itself, whatever its role


@pytest.mark.parametrize("left", ["no latest", "a step put aside"])
def test_a_run_is_found_as_it_goes_on(run, left):
    """Where a resumed run goes on, others find its model: without `latest` the newest complete step, and a step that is
    being replaced under the name that it has meanwhile."""
    checkpoints = run / "checkpoints"
    for step in checkpoints.glob("step_*"):
        (step / "state.json").write_text('{"step": 1}')
    newest = checkpoints / "step_00000002"
    if left == "no latest":
        (checkpoints / "latest").unlink()
        (checkpoints / "step_00000003").mkdir()  # not complete
    else:
        newest = newest.rename(checkpoints / "step_00000002.replaced")
    assert find_model(run, "critic") == newest / "critic" and find_tokenizer(run) == newest / "tokenizer"


def test_the_best_of_a_run(run):
    """RUN/best, as the latest checkpoint names it; a directory of that name is itself."""
    checkpoints = run / "checkpoints"
    for step, best in ((1, 1), (2, 1)):
        (checkpoints / f"step_{step:08d}" / "state.json").write_text(f'{{"step": {step}, "best": {best}}}')
    assert find_model(run / "best", "critic") == checkpoints / "step_00000001" / "critic"
    assert find_tokenizer(str(run / "best")) == checkpoints / "step_00000001" / "tokenizer"
    (checkpoints / "step_00000002" / "state.json").write_text('{"step": 2, "best": 0}')
    with pytest.raises(UserError, match="best: this run has no best checkpoint"):
        find_model(run / "best")
    with pytest.raises(UserError, match="elsewhere/best: no such directory"):
        find_model(run / "elsewhere" / "best")
    checkpoints.joinpath("step_00000001").rename(run / "best")
    assert find_model(run / "best") == run / "best" / "actor"


def test_no_tokenizer(run):
    (run / "checkpoints" / "step_00000002" / "tokenizer").rmdir()
    assert find_tokenizer(run) is None
    assert find_tokenizer(run / "checkpoints" / "step_00000002" / "actor") is None


def test_one_line_errors(run, tmp_path):
    with pytest.raises(UserError, match="no 'reward' model; present: actor, critic"):
        find_model(run, "reward")
    (run / "checkpoints" / "latest").write_text("step_00000003")
    for find in (find_model, find_tokenizer):
        with pytest.raises(UserError, match="latest: names 'step_00000003'"):
            find(run)
    (run / "checkpoints" / "latest").write_text("")
    with pytest.raises(UserError, match="names '', which is no step directory"):
        find_model(run)
    with pytest.raises(UserError, match="neither a model"):
        find_model(run / "checkpoints")
    (run / "checkpoints" / "config.json").touch()
    with pytest.raises(UserError, match="hf2megatron"):
        find_model(run / "checkpoints")
    with pytest.raises(UserError, match="no such directory"):
        find_model(run / "nothing")
