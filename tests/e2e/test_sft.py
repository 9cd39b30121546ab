"""`megarlhf sft` as a user runs it: it learns, it survives kill -9 exactly, and every launcher computes the same."""

import json
import math
import shutil
import signal
import sys
import time

import pytest
import torch.distributed as dist
import yaml

from megarlhf import config
from megarlhf.algorithms import supervised
from megarlhf.checkpoint import Checkpoints
from megarlhf.cluster import parallel
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.log import Log
from megarlhf.train import offline, setup, sft
from tests.distributed.test_launch_mpi import find_mpirun
from tests.e2e.runs import CLI, finish, losses, perplexities, start, written


def test_it_learns_and_writes_what_it_says(straight):
    run, _ = straight
    curve = perplexities(run)
    assert list(curve) == [0, 4, 8]
    assert curve[8] < curve[4] < 0.7 * curve[0]
    assert (run / "checkpoints" / "latest").read_text().split()[0] == "step_00000008"
    step = run / "checkpoints" / "step_00000008"
    assert {path.name for path in step.iterdir()} == {
        "actor", "tokenizer", "run.yaml", "state.json", "checksums.json", "data.json",
    }  # fmt: skip
    assert list((run / "tensorboard").iterdir())


def test_kill_9_and_resume_equals_a_straight_run(straight, tmp_path):
    """Killed after the third checkpoint's step; the same command then goes on, bit for bit."""
    run, config = straight
    command = (sys.executable, *CLI, "sft", "--config", str(config), f"run={tmp_path / 'run'}", "training.steps=8")
    process = start(*command)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "step_00000004").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = finish(*command)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr
    assert losses(tmp_path / "run") == losses(run)
    assert perplexities(tmp_path / "run") == perplexities(run)

    # finished runs say so and change nothing; a changed configuration is named
    before = written(tmp_path)
    again = finish(*command, "optimizer.lr=0.005", "training.steps=4")
    assert again.returncode == 0
    assert "changed since then: optimizer.lr: 0.01 -> 0.005" in again.stderr
    (line,) = [line for line in again.stderr.splitlines() if " megarlhf: " in line]
    assert "/run has done 8 steps, and the configuration asks for 4: nothing is left to do; its model is" in line
    assert str(tmp_path / "run" / "checkpoints" / "step_00000008") in line and "raise training.steps" in line
    assert written(tmp_path) == before


def test_an_old_configuration_runs_and_says_its_line(straight, tmp_path):
    """training.micro_batch_size of rows is read as so many rows of full length; a run that is resumed with the new key
    reports no change."""
    run, path = straight
    tree = yaml.safe_load(path.read_text())
    tree["training"] |= {"micro_batch_size": 4, "steps": 2}
    del tree["training"]["micro_batch_tokens"]
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump(tree))
    more = (f"run={tmp_path / 'run'}", "optimizer.schedule=constant")
    done = finish(sys.executable, *CLI, "sft", "--config", str(old), *more)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "micro_batch" in line]
    assert line[len("2026-11-23 04:28:02 ") :] == (
        "  training.micro_batch_size: 4 rows of 64 tokens are read as training.micro_batch_tokens: 256; write that"
    )
    assert losses(tmp_path / "run")[1] == losses(run)[1]
    again = finish(sys.executable, *CLI, "sft", "--config", str(path), *more, "training.steps=3")
    assert again.returncode == 0 and "resuming" in again.stderr, again.stderr
    assert "changed since then" not in again.stderr and "micro_batch" not in again.stderr


def run_planted(path, directory, bad):
    """The program's loop, with a NaN in one gradient of one rank in the updates `bad`; the error that ends it."""

    settings = config.load(sft.SFTConfig, path, [f"run={directory}", "parallel.tensor=2", "parallel.sequence=true"])
    plan = sft.check(settings, dist.get_world_size())
    topology = parallel.start(settings.parallel)
    options = setup.model_options(settings, trains=True, total_steps=plan.total_steps)
    from megarlhf.models.build import build

    engine = build("actor", plan.start.architecture, topology, **options)
    if topology.rank == 1:
        norm = next(p for name, p in engine.modules[0].named_parameters() if "norm" in name)
        norm.register_hook(lambda gradient: gradient * (math.nan if engine.steps in bad else 1.0))
    data = Loader(plan.training, global_batch=8, pad_id=plan.start.tokenizer.pad_id)
    try:
        with Log(directory, enabled=topology.rank == 0, start=0, total=plan.total_steps, unit="step") as log:
            offline.train(
                supervised.sft(), {"actor": engine}, data, None, log=log, settings=settings,
                checkpoints=Checkpoints(directory, settings.checkpoint), write_files=lambda directory: None,
            )  # fmt: skip
    except UserError as error:
        return str(error)
    finally:
        parallel.stop()


def test_gradients_that_are_not_finite(straight, ranks, tmp_path):
    """One update without them is left out and said in the metrics; three in a row stop the program on every rank."""
    _, path = straight
    assert ranks.run(2, run_planted, path, tmp_path / "one", (1, 3, 4)) == [None, None]
    records = list(map(json.loads, (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()))
    assert [record["skipped"] for record in records] == [0, 1, 0, 1, 1, 0, 0, 0]
    assert [record["step"] for record in records if record["grad_norm"] is None] == [2, 4, 5]
    for message in ranks.run(2, run_planted, path, tmp_path / "three", (1, 2, 3)):
        assert message.startswith("actor: 3 updates in a row, up to update 4, were skipped, because their gradients")


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launchers_give_the_same_losses(straight, tmp_path, launcher):
    run, config = straight
    environment = {}
    if launcher == "torchrun":
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    else:
        mpirun = find_mpirun("openmpi") or pytest.skip("no Open MPI here")
        command = (mpirun, "-n", "2", "--oversubscribe", sys.executable)
        environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = finish(
        *command, *CLI, "sft", "--config", str(config), f"run={tmp_path / 'run'}", "parallel.tensor=2",
        environment=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-5)


def test_conversion_to_huggingface_and_back(straight, tmp_path):
    """A trained checkpoint becomes a transformers model with the same perplexity, and back bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    from megarlhf.data.sft import SFTDataConfig, load_sft
    from megarlhf.data.tokenizer import load_tokenizer

    run, config = straight
    for arguments in (("megatron2hf", run, tmp_path / "hf"), ("hf2megatron", tmp_path / "hf", tmp_path / "back")):
        done = finish(sys.executable, "-m", "tools.convert", *map(str, arguments))
        assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    validation = str(config.parent / "validation.jsonl")
    examples, _ = load_sft(
        validation, load_tokenizer(config.parent / "reviews.model"), SFTDataConfig(validation, max_length=64)
    )
    total = count = 0
    with torch.no_grad():
        for index in range(len(examples)):
            tokens, mask, _ = examples.row(index)
            ids, mask = torch.from_numpy(tokens).long(), torch.from_numpy(mask)[1:]
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            total, count = total - logprobs[mask].sum().item(), count + mask.sum().item()
    assert total / count == pytest.approx(torch.tensor(perplexities(run)[8]).log().item(), rel=1e-4)

    resumed = tmp_path / "run"  # a converted model starts a run like any other
    done = finish(
        sys.executable, *CLI, "sft", "--config", str(config), f"run={resumed}", "model.architecture=null",
        f"model.checkpoint={tmp_path / 'back'}", "training.steps=1", "tokenizer=null",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert perplexities(resumed)[0] == pytest.approx(perplexities(run)[8], rel=1e-5)
    shutil.rmtree(resumed)
