"""`checkpoint.export_hf`: under any layout the export of a step is what the converter makes of its checkpoint, byte by
byte, and transformers computes the run's own perplexity with it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from megarlhf import cli
from megarlhf.cli import find
from megarlhf.cluster import lease, watchdog
from megarlhf.config import UserError
from megarlhf.convert.convert import Options, megatron2hf
from megarlhf.convert.workers import Workers
from megarlhf.train import exporting
from tests.distributed.layouts import layout
from tests.e2e.runs import perplexities, prepare


def train(program, path, runs):
    """[(overrides, sizes of the layout)] one after the other; what was said."""
    from megarlhf import console

    said = []
    usual, console.say = console.say, said.append
    try:
        for overrides, sizes in runs:
            found = find(program)
            keys = [f"parallel.{name}={str(value).lower()}" for name, value in sizes.items()]
            settings = found.load(path, [*overrides, *keys])
            plan = found.check(settings, dist.get_world_size())
            with layout(**sizes) as topology:
                found.run(settings, plan, topology)
    finally:
        console.say = usual
    return said


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_run(run: Path, tmp_path: Path, role: str = "actor") -> None:
    """Both exports of a run that keeps two checkpoints."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert len(names) == 2 and sorted(path.name for path in (run / "hf").iterdir()) == names  # nothing hidden, too
    for name in names:
        shutil.rmtree(tmp_path / "wanted", ignore_errors=True)
        megatron2hf(run / "checkpoints" / name, tmp_path / "wanted", Options(role=role))
        assert digests(run / "hf" / name) == digests(tmp_path / "wanted")


def perplexity(directory: Path, validation: Path, tokenizer: Path) -> float:
    """By transformers."""
    from transformers import AutoModelForCausalLM

    from megarlhf.data.sft import SFTDataConfig, load_sft
    from megarlhf.data.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    examples, _ = load_sft(str(validation), load_tokenizer(tokenizer), SFTDataConfig(str(validation), max_length=64))
    total = count = 0
    with torch.no_grad():
        for index in range(len(examples)):
            tokens, mask, _ = examples.row(index)
            ids, mask = torch.from_numpy(tokens).long(), torch.from_numpy(mask)[1:]
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            total, count = total - logprobs[mask].sum().item(), count + mask.sum().item()
    return float(torch.tensor(total / count).exp())


def test_two_ranks_export_each_checkpoint(ranks, tmp_path):
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "checkpoint.every": 1, "training.steps": 3})
    split, data = tmp_path / "tp", tmp_path / "dp"
    cases = [([f"run={split}"], dict(tensor=2)), ([f"run={data}", "checkpoint.asynchronous=true"], {})]
    said, _ = ranks.run(2, train, "sft", str(path), cases)
    for run in (split, data):
        check_run(run, tmp_path)
        found = perplexity(run / "hf" / "step_00000003", tmp_path / "validation.jsonl", tmp_path / "reviews.model")
        assert found == pytest.approx(perplexities(run)[3], rel=1e-4)
        assert sum(f"exported {run / 'hf' / 'step_00000003'} for transformers" in line for line in said) == 1
    assert any(f"for transformers: {split / 'hf' / 'step_00000003'}" in line for line in said)

    # killed in the middle of the last export: the name is not there, and the same command writes it
    export = split / "hf" / "step_00000003"
    whole = digests(export)
    left = export.with_name(".step_00000003.partial")
    export.rename(left)
    (left / "config.json").unlink()
    ranks.run(1, train, "sft", str(path), [([f"run={split}", "training.steps=4"], {})])
    check_run(split, tmp_path)
    assert digests(export) == whole and (split / "hf" / "step_00000004").is_dir()


def long_export():
    """What the watchdog hears on this rank while rank 0 alone works, and while nobody progresses."""
    heard, workers, end = [], exporting.Ranks(), time.monotonic() + 30
    workers.step = 7
    usual, watchdog.phase = watchdog.phase, lambda *given: heard.append(given)

    def work() -> int:
        for part in range(3 if workers.rank == 0 else 0):
            workers.progressed()
            while len(heard) <= part and time.monotonic() < end:
                time.sleep(0.01)
        return workers.rank

    try:
        answers = workers.together(work)
        before = len(heard)
        workers.first(lambda: None)
        return answers, heard, len(heard) - before
    finally:
        watchdog.phase = usual


def test_the_watchdog_hears_of_a_long_export(ranks):
    """All ranks enter the same phases, also those that only wait; none if nothing moves."""
    for answers, heard, without in ranks.run(2, long_export):
        assert answers == [0, 1] and heard == [("export", 7)] * 3 and without == 0


def lost(run):
    """What an export says and raises while another job takes the run directory over."""
    said = []
    with lease.held(run):
        exporter = exporting.Exporter(run, "actor", said.append)
        usual, held = exporter.ranks.progressed, run / lease.NAME

        def progressed() -> None:
            held.write_text(json.dumps(json.loads(held.read_text()) | {"token": "another", "host": "node7"}))
            lease._held._renew()
            usual()

        exporter.ranks.progressed = progressed
        try:
            exporter(run / "checkpoints" / "step_00000008")
        except UserError as error:
            return said, str(error)
        finally:
            held.unlink()
    return said, None


def test_a_run_that_loses_its_directory_meanwhile_ends(ranks, straight, tmp_path):
    """Unlike other failures of an export, which are those of all ranks."""
    run, _ = straight
    shutil.copytree(run / "checkpoints", tmp_path / "run" / "checkpoints")
    ((said, error),) = ranks.run(1, lost, tmp_path / "run")
    assert not said and "was taken over by" in error and "on node7" in error


def test_an_export_tells_of_its_parts(straight, tmp_path):
    """Of each step of the conversion, and of each file that reaches the disk."""

    class Watched(Workers):
        parts = 0

        def progressed(self) -> None:
            self.parts += 1

    run, _ = straight
    workers = Watched()
    made = megatron2hf(run / "checkpoints" / "step_00000008", tmp_path / "hf", Options(role="actor"), workers)
    steps = made.tensors - 2 * 2 - 2  # of 2 layers: q, k and v are made in one, gate and up in another
    assert workers.parts == steps + len([path for path in (tmp_path / "hf").rglob("*") if path.is_file()])


@pytest.mark.long
def test_a_disk_that_refuses_does_not_end_the_run(ranks, tmp_path):
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "training.steps": 2})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").write_text("a file, where the exports would be")
    said, _ = ranks.run(2, train, "sft", str(path), [([], dict(pipeline=2))])
    assert any("was not written" in line and "the run goes on" in line for line in said), said
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path, capsys):
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "model.architecture.linear_bias": True,
                                "model.architecture.qk_norm": True})  # fmt: skip
    assert cli.main(["sft", "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint.export_hf: a Hugging Face 'llama' model has" in line
    assert not (tmp_path / "run").exists()


def test_a_reward_model_that_transformers_cannot_hold_is_refused(tmp_path, capsys):
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "model.architecture.family": "granite"})
    tree = yaml.safe_load(path.read_text())
    tree["data"] = {"train": str(tmp_path / "pairs.jsonl"), "max_length": 64}
    path.write_text(yaml.safe_dump(tree))
    assert cli.main(["reward", "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint.export_hf: transformers has no class for reward models of the family 'granite'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(4, dict(tensor=4, sequence=True)), (3, dict(pipeline=3)), (4, dict(tensor=2, pipeline=2))],
    ids=str,
)
def test_other_layouts(ranks, tmp_path, world_size, sizes):
    changes = {"model.architecture.num_layers": 3 if world_size == 3 else 4, "training.global_batch_size": 12}
    changes["model.architecture.num_query_groups"] = 4
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "training.steps": 4, **changes})
    ranks.run(world_size, train, "sft", str(path), [([], sizes)])
    check_run(tmp_path / "run", tmp_path)


@pytest.mark.long
def test_a_reward_model(ranks, tmp_path):
    from transformers import AutoModelForSequenceClassification

    from tests.e2e.runs import write_prompts

    write_prompts(tmp_path, 4, 40)
    path = prepare(tmp_path, **{"checkpoint.export_hf": True, "training.steps": 4})
    tree = yaml.safe_load(path.read_text())
    tree["data"] = {"train": str(tmp_path / "pairs.jsonl"), "max_length": 64}
    path.write_text(yaml.safe_dump(tree))
    ranks.run(2, train, "reward", str(path), [([], dict(tensor=2))])
    check_run(tmp_path / "run", tmp_path, "reward")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "hf" / "step_00000004")
    assert model.config.num_labels == 1
    assert json.loads((tmp_path / "run" / "hf" / "step_00000004" / "config.json").read_text())["num_labels"] == 1
