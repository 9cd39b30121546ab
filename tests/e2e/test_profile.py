"""`log.profile` and the costs of a step: traces of the wanted steps on every rank; FLOPs as counted by torch."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megarlhf import cli
from megarlhf.algorithms import supervised
from megarlhf.cli import find
from megarlhf.models.build import build
from megarlhf.train import meter, profiling, setup
from tests.distributed.layouts import layout
from tests.e2e.runs import prepare, recorded


def train(path, overrides):
    program = find("sft")
    settings = program.load(path, overrides)
    plan = program.check(settings, dist.get_world_size())
    with layout() as topology:
        program.run(settings, plan, topology)


def test_steps_are_profiled_on_every_rank(ranks, tmp_path):
    path = prepare(tmp_path, **{"log.profile": [2, 3], "training.steps": 4})
    ranks.run(2, train, str(path), [])
    run = tmp_path / "run"
    for rank in range(2):
        trace = json.loads((run / "profile" / f"rank_{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert any("aten::mm" in name for name in names)
        assert "Self CPU" in (run / "profile" / f"rank_{rank}.txt").read_text()
    records = [record for record in recorded(run) if "loss" in record]
    assert all(record["cost/flops_per_second"] > 0 and 0.05 < record["cost/memory_gb"] < 50 for record in records)
    assert "cost/mfu" not in records[0]  # a CPU has no peak
    # the steps beyond the last one: what there is is written
    ranks.run(1, train, str(path), [f"run={tmp_path / 'short'}", "log.profile=[3,9]", "log.memory_snapshot=true"])
    assert (tmp_path / "short" / "profile" / "rank_0.json").is_file()


def profile_step(directory):
    profile = profiling.Profile(directory, (1, 1))
    profile.begin(1)
    torch.ones(2) @ torch.ones(2)
    profile.end(1, last=True)


def test_a_disk_that_refuses_a_profile_does_not_end_the_run(ranks, tmp_path):
    (tmp_path / "profile").write_text("a file, where the profiles would be")
    ranks.run(1, profile_step, str(tmp_path))
    (tmp_path / "full" / "profile" / "rank_0.json").mkdir(parents=True)
    ranks.run(1, profile_step, str(tmp_path / "full"))


def counted(path) -> tuple[float, float, str]:
    """(FLOPs of a step by `meter.offline_flops`, those that torch counts in an update without attention's scores, all
    that it counts)."""
    settings = find("sft").load(path, [])
    plan = find("sft").check(settings, 1)
    with layout() as topology:
        options = setup.model_options(settings, trains=True, total_steps=plan.total_steps)
        engine = build("actor", plan.start.architecture, topology, **options)
        from megarlhf.data.loader import Loader

        data = Loader(plan.training, global_batch=8, pad_id=plan.start.tokenizer.pad_id)
        batch, tokens = data.batch(0), data.num_tokens(0)
        # weight gradients are added to their buffer by addmm_, which torch's counter does not know
        own = {torch.ops.aten.addmm_: lambda total, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
        with FlopCounterMode(display=False, custom_mapping=own) as counter:
            engine.step(batch, supervised.sft().loss)
        operations = counter.get_flop_counts()["Global"]
        scores = ("bmm", "attention")  # of attention: not counted by us
        theirs = sum(count for name, count in operations.items() if not any(part in str(name) for part in scores))
        return meter.offline_flops(settings, plan.start.architecture) * tokens, float(theirs), str(operations)


def test_flops_are_those_that_torch_counts(ranks, tmp_path):
    """Up to the tokens that the head and the last MLP do not read, since they are a prompt's."""
    path = prepare(tmp_path)
    ((ours, theirs, operations),) = ranks.run(1, counted, str(path))
    assert 0.7 * ours < theirs < 1.02 * ours, (ours, theirs, operations)


@pytest.mark.parametrize("steps", ["[3, 2]", "[0, 2]", "[1]", "[1, 2, 3]", "2"])
def test_mistakes(tmp_path, capsys, steps):
    path = prepare(tmp_path)
    assert cli.main(["sft", "--config", str(path), f"log.profile={steps}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.profile" in line


def test_steps_that_the_run_does_not_have(tmp_path, capsys):
    """By training.steps, and by epochs of the data. One of the steps is enough."""
    path = prepare(tmp_path, **{"training.steps": 4})
    assert find("sft").check(find("sft").load(path, ["log.profile=[4, 9]"]), 1).total_steps == 4
    mistakes = ((["log.profile=[5, 9]"], 5, 4), (["training.steps=null", "log.profile=[21, 21]"], 21, 20))
    for more, begin, total in mistakes:
        assert cli.main(["sft", "--config", str(path), *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"log.profile: begins at step {begin}, and the run has {total} steps, so nothing would be" in line
    assert not (tmp_path / "run" / "run.yaml").exists()


def test_peaks(monkeypatch):
    """By the name that the driver gives."""
    monkeypatch.setattr(meter.backend, "on_cuda", lambda: True)
    for name, peak in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA H20": 148e12,
                       "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA B200": 2250e12, "Tesla T4": None}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert meter.peak_flops() == peak
