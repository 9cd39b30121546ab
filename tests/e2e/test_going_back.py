"""`--step N`: a run goes on from an earlier checkpoint, bit for bit as before, and what it did later is set aside."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from megarlhf import cli
from megarlhf.checkpoint import steps
from megarlhf.convert import torch_dist
from tests.e2e.runs import CLI, finish, losses, recorded


def weights(step_directory):
    reader = torch_dist.Reader(step_directory / "actor", None)
    return {name: reader.read(name) for name in reader.specs}


def test_a_run_goes_on_from_an_earlier_step(straight, tmp_path):
    run, config = straight
    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    (mine / "hf" / "step_00000008").mkdir(parents=True)
    (mine / "wandb.id").write_text("1234\n")
    done = finish(sys.executable, *CLI, "sft", "--config", str(config), f"run={mine}", "--step", "6")
    assert done.returncode == 0, done.stderr
    aside = mine / "after_step_6"
    assert f"going back to step 6: the checkpoints of steps 8 and the records after it are in {aside}" in done.stderr
    assert "resuming" in done.stderr and "after step 6" in done.stderr
    assert losses(mine) == losses(run) and [r["step"] for r in recorded(mine)] == [r["step"] for r in recorded(run)]
    again, first = weights(mine / "checkpoints" / "step_00000008"), weights(run / "checkpoints" / "step_00000008")
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)
    # nothing is lost
    assert (aside / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    before = weights(aside / "checkpoints" / "step_00000008")
    assert all(torch.equal(before[name], first[name]) for name in first)
    assert (aside / "hf" / "step_00000008").is_dir() and (aside / "wandb.id").read_text() == "1234\n"
    assert not (mine / "wandb.id").exists() and not list((mine / "hf").iterdir())
    # the file that a later start may use does not go back again
    assert "step: null" in (mine / "run.yaml").read_text()


def test_a_run_of_which_nothing_is_left_goes_back_too(straight, tmp_path):
    """The configuration asks for no step after N: what is later is set aside all the same, and the user is told what to
    do. The same command once more finds nothing to set aside, and says so. `latest` is not needed: N is given."""
    run, config = straight
    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    (mine / "checkpoints" / "latest").unlink()
    more = (f"run={mine}", "training.steps=6", "--step", "6")
    command = (sys.executable, *CLI, "sft", "--config", str(config), *more)
    for said in ("going back to step 6: the checkpoints of steps 8 and", f"step 6 is the last that {mine} has done"):
        done = finish(*command)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        assert f"{mine} has done 6 steps, and the configuration asks for 6: nothing is left to do" in done.stderr
        assert "for more steps raise training.steps" in done.stderr
        assert "latest is missing" not in done.stderr
        assert steps.latest(mine / "checkpoints").name == "step_00000006"
        assert recorded(mine) == [record for record in recorded(run) if record["step"] <= 6]
    assert (mine / "after_step_6" / "checkpoints" / "step_00000008" / "state.json").is_file()
    assert (mine / "after_step_6" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert not (mine / "after_step_6.2").exists()


@pytest.mark.long
def test_a_kill_while_it_is_set_aside_loses_nothing(straight, tmp_path):
    """After `latest` was written, before the later checkpoint was moved. The job is restarted."""
    run, config = straight
    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    steps.point(mine / "checkpoints" / "step_00000006")
    assert steps.latest(mine / "checkpoints").name == "step_00000006"
    command = (sys.executable, *CLI, "sft", "--config", str(config), f"run={mine}", "--step", "6")
    again = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "71"}
    done = finish(*command, environment=again)
    assert done.returncode == 0, done.stderr
    assert (mine / "after_step_6" / "checkpoints" / "step_00000008" / "state.json").is_file()
    assert losses(mine) == losses(run)

    # restarted once more, the job goes on from its own checkpoints: this one is finished
    restarted = finish(*command, environment=again)
    assert restarted.returncode == 0 and "nothing is left to do" in restarted.stderr, restarted.stderr
    assert not (mine / "after_step_6.2").exists()


def test_a_disk_that_refuses_is_named(straight, tmp_path):
    """Before anything is moved."""
    run, config = straight
    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    (mine / "after_step_6").symlink_to(tmp_path / "nowhere")
    done = finish(sys.executable, *CLI, "sft", "--config", str(config), f"run={mine}", "--step", "6")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"checkpoint.step: {mine}: what the run did after step 6 cannot be set aside ({mine}/after" in done.stderr
    assert steps.latest(mine / "checkpoints").name == "step_00000008" and losses(mine) == losses(run)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--step", "4"], "checkpoint.step: {run}/checkpoints has no complete checkpoint of step 4; there are: 6, 8"),
        (["--step", "0"], "checkpoint.step: must be at least 1, not 0; to begin anew give another run directory"),
        (["--step", "6", "checkpoint.resume=false"], "step: goes on with a run, and resume is false"),
    ],
)
def test_mistakes(straight, capsys, more, message):
    run, config = straight
    before = json.dumps(sorted(map(str, run.rglob("*"))))
    assert cli.main(["sft", "--config", str(config), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(run=run) in line
    assert json.dumps(sorted(map(str, run.rglob("*")))) == before
