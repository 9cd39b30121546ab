"""`megarlhf dpo` and `megarlhf kto` as users run them: they learn, they survive kill -9 exactly with the reference in
the run and cached, and mistakes are one line."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from megarlhf import checkpoint, cli
from megarlhf.config import UserError
from megarlhf.data.preferences import PreferenceLoader
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.train import data_set, reference, reference_cache, setup
from tests.distributed.layouts import layout
from tests.e2e import runs
from tests.e2e.runs import CLI, finish, start

STEPS = 6
PAIR = {"prompt": "the plot", "chosen": " was superb .", "rejected": " was dull ."}
RATING = {"prompt": "the plot", "response": " was superb .", "label": True}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def directory(straight, tmp_path_factory) -> Path:
    """dpo.yaml and kto.yaml over the session's SFT run, with their data."""
    path = tmp_path_factory.mktemp("preferences")
    for name, count, seed in (("train", 40, 6), ("validation", 9, 7)):
        pairs = [dict(zip(PAIR, triple, strict=True)) for triple in runs.reviews.preferences(count, seed)]
        rows = [(pair["prompt"], pair[key], key == "chosen") for key in ("chosen", "rejected") for pair in pairs]
        write(path / f"pairs.{name}.jsonl", pairs)
        write(path / f"ratings.{name}.jsonl", [dict(zip(RATING, row, strict=True)) for row in rows])
    for program, data in (("dpo", "pairs"), ("kto", "ratings")):
        tree = {
            "run": str(path / "unused"),
            "model": {"checkpoint": str(straight[0]), "dtype": "fp32"},
            "data": {"train": str(path / f"{data}.train.jsonl"), "validation": str(path / f"{data}.validation.jsonl"),
                     "max_length": 64},
            program: {},
            "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": STEPS, "evaluate_every": 3},
            "optimizer": {"lr": 3e-3, "eps": 1e-4},
            "checkpoint": {"every": 2},
        }  # fmt: skip
        (path / f"{program}.yaml").write_text(yaml.safe_dump(tree))
    return path


def numbers(run):
    """What is recorded of each step, without times."""
    return [
        {k: v for k, v in record.items() if not k.startswith(("time", "step_seconds", "tokens_per_second", "cost/"))}
        for record in runs.recorded(run)
    ]


def run_programs(program, path, cases):
    """Runs of a program in this process, one after the other."""
    import torch.distributed as dist

    found = cli.find(program)
    for overrides in cases:
        settings = found.load(str(path), overrides)
        plan = found.check(settings, dist.get_world_size())
        with layout(**dataclasses.asdict(settings.parallel)) as topology:
            found.run(settings, plan, topology)


def nearly(run, expected):
    """Accuracies apart while the log-ratios are 0: then rounding decides."""
    assert len(run) == len(expected) > STEPS
    for got, wanted in zip(run, expected, strict=True):
        undecided = {"accuracy", "validation/accuracy"} if wanted["step"] < 2 else {}
        got, wanted = ({k: v for k, v in record.items() if k not in undecided} for record in (got, wanted))
        assert got == pytest.approx(wanted, rel=1e-4, abs=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("program", ["dpo", "kto"])
def test_it_learns_in_any_layout_with_and_without_a_cache(ranks, directory, tmp_path, program):
    path, cache = directory / f"{program}.yaml", tmp_path / "cache"
    runs_of = {
        1: {"one": [], "micro": ["training.micro_batch_tokens=1"], "made": [f"reference.cache={cache}"],
            "read": [f"reference.cache={cache}"]},
        2: {"tp2": ["parallel.tensor=2", "parallel.sequence=true"], "pp2": ["parallel.pipeline=2"], "dp2": [],
            "read2": [f"reference.cache={cache}"], "made2": [f"reference.cache={cache}2"]},
    }  # fmt: skip
    for world_size, cases in runs_of.items():
        given = [[f"run={tmp_path / name}", *more] for name, more in cases.items()]
        ranks.run(world_size, run_programs, program, path, given)
    one = numbers(tmp_path / "one")
    first, last = (record["validation/loss"] for record in (one[0], one[-1]))
    assert first == pytest.approx({"dpo": math.log(2), "kto": 0.5}[program], abs=1e-6) and last < first - 0.01
    assert one[0]["validation/margins"] == 0 and one[-1]["validation/margins"] > 0.05
    assert one[0]["validation/accuracy"] == 0.5 and one[1]["loss"] == pytest.approx(first, abs=1e-6)
    for cases in runs_of.values():
        for name in cases:
            nearly(numbers(tmp_path / name), one)
    assert numbers(tmp_path / "made") == numbers(tmp_path / "read")
    assert len(list(Path(f"{cache}2").glob("*.keys.npy"))) == 2 and not list(tmp_path.glob("*.unfinished*"))


@pytest.mark.long
def test_kill_9_and_resume_equals_a_straight_run(directory, tmp_path):
    """Also with a cache, which the resumed run reads: the reference stays what the run began with."""
    for how in ([], [f"reference.cache={tmp_path / 'cache'}"]):
        name = "cached" if how else "plain"
        command = (sys.executable, *CLI, "dpo", "--config", str(directory / "dpo.yaml"), *how)
        done = finish(*command, f"run={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        process = start(*command, f"run={tmp_path / name}.killed")
        deadline = time.monotonic() + 240
        while not (tmp_path / f"{name}.killed" / "checkpoints" / "step_00000002").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = finish(*command, f"run={tmp_path / name}.killed")
        assert done.returncode == 0 and "resuming" in done.stderr, done.stderr
        straight, killed = (numbers(tmp_path / run) for run in (name, f"{name}.killed"))
        assert killed == straight and straight[-1]["validation/margins"] > 0.05
    nearly(numbers(tmp_path / "cached"), numbers(tmp_path / "plain"))
    step = tmp_path / "plain" / "checkpoints" / f"step_{STEPS:08d}"
    assert {path.name for path in step.iterdir()} == {
        "actor", "tokenizer", "run.yaml", "state.json", "checksums.json", "data.json", reference_cache.FILE,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(("program", "data"), [("dpo", "pairs"), ("kto", "ratings")])
def test_several_files_with_weights(directory, program, data):
    """The checks before a start; kto's note on the balance of classes counts what an epoch has."""
    found = cli.find(program)
    files = [f"{directory}/{data}.train.jsonl", {"path": f"{directory}/{data}.validation.jsonl", "weight": 2}]
    plan = found.check(found.load(directory / f"{program}.yaml", [f"data.train={json.dumps(files)}"]), 2)
    assert plan.training.epoch_rows == 2 * (40 + 2 * 9) and "weight 2" in plan.notes[0]
    if program == "kto":
        assert plan.training.class_sizes == (58, 58)


def error(capsys, program, path, *overrides):
    assert cli.main([program, "--config", str(path), *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("megarlhf: error: ")


LONG = "the plot " * 60
BAD_DATA = {
    "no rejected": ("dpo", [{"prompt": "a", "chosen": " b"}], ":1: no key 'rejected' (found: prompt, chosen); 1 of 1"),
    "equal answers": ("dpo", [PAIR | {"rejected": PAIR["chosen"]}], "1 dropped (better and worse responses alike)"),
    "no room for pairs": ("dpo", [PAIR | {"prompt": LONG}], "1 dropped (the prompt leaves no room"),
    "margins of ipo": ("dpo", [PAIR | {"margin": 1.0}], ": has margins, which the loss ipo does not use; choose dpo"),
    "no response": ("kto", [RATING, {"prompt": "a", "label": True}], ":2: no key 'response' (found: prompt, label)"),
    "no label": ("kto", [RATING, {"prompt": "a", "response": "b"}], ":2: no key 'label' (found: prompt, response)"),
    "a number": ("kto", [RATING | {"label": 1}], ":1: 'label' must be true or false, not 1; 1 of 1 lines"),
    "a word": ("kto", [RATING | {"label": "good"}], ":1: 'label' must be true or false, not 'good'; 1 of 1 lines"),
    "empty": ("kto", [RATING | {"response": " "}], ":1: 'response' is empty; 1 of 1 lines"),
    "no room": ("kto", [RATING | {"prompt": LONG}], "1 dropped (the prompt leaves no room)"),
    "all good": ("kto", [RATING, RATING], "all 2 responses are good ('label'), and there is nothing to tell them from"),
    "all bad": ("kto", [RATING | {"label": False}], "all 1 responses are bad ('label'), and there is nothing"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(directory, tmp_path, capsys, name):
    program, rows, expected = BAD_DATA[name]
    data = write(tmp_path / "bad.jsonl", rows)
    more = ["dpo.loss=ipo"] if name == "margins of ipo" else []
    line = error(capsys, program, directory / f"{program}.yaml", f"data.train={data}", *more)
    assert data in line and expected in line, line


SETTINGS = {
    "dropout": ("dpo", ["model.dropout=0.1"], "model.dropout: must be 0: it would change the policy's log-probs"),
    "dropout of kto": ("kto", ["model.dropout=0.1"], "model.dropout: must be 0: it would change the policy's"),
    "a reference of simpo": (
        "dpo", ["dpo.loss=simpo", "reference.cache=x"], "reference: the loss simpo has no reference; remove this"
    ),
    "four responses": ("dpo", ["data.num_responses=4"], "data.num_responses: dpo compares 2 responses, not 4"),
    "half a pair": ("dpo", ["training.global_batch_size=7"], "training.global_batch_size: 7 is not a multiple of 2"),
    "one row": ("kto", ["training.global_batch_size=1"], "training.global_batch_size: kto compares each prompt with"),
    "no reference": ("dpo", ["reference.checkpoint=/no/such"], "/no/such: no such directory; give a model"),
    "a loss": ("dpo", ["dpo.loss=dop"], "dpo.loss must be one of dpo, cdpo, ipo, hinge, robust, simpo, orpo, cpo"),
    "sums": ("dpo", ["dpo.loss=orpo", "dpo.logprobs=sum"], "dpo.logprobs: orpo is defined on mean log-probs; remove"),
    "another program": ("sft", ["dpo.beta=1"], "the file looks like a configuration for 'megarlhf dpo'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(directory, capsys, name):
    program, overrides, expected = SETTINGS[name]
    path = directory / ("dpo.yaml" if program == "sft" else f"{program}.yaml")
    assert expected in error(capsys, program, path, *overrides)


def test_a_cache_of_anything_else_is_refused(ranks, straight, directory, tmp_path, capsys):
    """Each mistake is named in a line; a good cache is used as before."""
    cache, path = tmp_path / "cache", directory / "dpo.yaml"
    use = f"reference.cache={cache}"
    given = [[f"run={tmp_path / 'run'}", use, "training.steps=1"], [f"run={tmp_path / 'longer'}", use, "seed=1"]]
    ranks.run(1, run_programs, "dpo", path, given)
    assert len(numbers(tmp_path / "longer")) > STEPS, "the cache has all of the data"
    other = write(tmp_path / "other.jsonl", [PAIR])
    step = straight[0] / "checkpoints" / "step_00000004" / "actor"
    earlier = step if step.is_dir() else straight[0] / "checkpoints" / "step_00000006" / "actor"
    for overrides, expected in (
        ([f"data.train={other}"], "was made with other data.train; remove it, and the run makes it again"),
        ([f"data.validation={other}"], "was made with other data.validation"),
        (["data.validation=null"], "was made with other data.validation"),
        (["data.max_length=63"], "was made with another max_length"),
        (["data.add_eos=false"], "was made with other data.train, other data.validation"),
        (["model.dtype=bf16"], "was made with another dtype"),
        ([f"reference.checkpoint={earlier}"], "was made with another reference"),
    ):
        line = error(capsys, "dpo", path, f"run={tmp_path / 'new'}", use, *overrides)
        assert line.startswith(f"reference.cache: {cache} was made with") and expected in line, line
    new = [f"run={tmp_path / 'new'}"]
    assert f"{tmp_path} exists and is no cache" in error(capsys, "dpo", path, *new, f"reference.cache={tmp_path}")
    damages = {
        "reference.json": b"{",
        "00000.logprobs.npy": bytes(1000),
        "00000.keys.npy": (cache / "00000.keys.npy").read_bytes()[:-1],
        "checksums.json": None,
    }
    for file, content in damages.items():
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(cache, broken)
        (broken / file).unlink() if content is None else (broken / file).write_bytes(content)
        line = error(capsys, "dpo", path, *new, f"reference.cache={broken}")
        assert "damaged" in line and str(broken) in line and "remove it, and the run makes it again" in line, line
    random = [*new, "model.checkpoint=null", f"tokenizer={straight[1].parent / 'reviews.model'}", use]
    random += [f"model.architecture={json.dumps(yaml.safe_load(straight[1].read_text())['model']['architecture'])}"]
    assert "random weights have none" in error(capsys, "dpo", path, *random)

    # a run goes on with the reference that it began with
    line = error(capsys, "dpo", path, f"run={tmp_path / 'run'}", f"reference.checkpoint={earlier}")
    assert line.startswith(f"reference.checkpoint: {earlier} is not the reference that this run began with")


def test_kto_caches_belong_to_an_order_of_the_rows(ranks, directory, tmp_path, capsys):
    path, use = directory / "kto.yaml", f"reference.cache={tmp_path / 'cache'}"
    ranks.run(1, run_programs, "kto", path, [[f"run={tmp_path / 'run'}", use, "training.steps=1"]])
    for change in ("seed=1", "training.steps=2", "training.global_batch_size=4"):
        line = error(capsys, "kto", path, f"run={tmp_path / 'new'}", use, *{"training.steps=1": 0, change: 0})
        assert "was made with another order of the data (seed, training.global_batch_size, steps or weights" in line
    # the same rows in two files, where equal prompts are different ones: other rows are put together
    lines = (directory / "ratings.train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:40]), ("b", lines[40:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    files = f"data.train=[{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}]"
    line = error(capsys, "kto", path, f"run={tmp_path / 'new'}", use, "training.steps=1", files)
    assert "was made with other data.train; remove it" in line


def refused(work, *args):
    """The message of the UserError that `work` raises; None if it raises none."""
    try:
        work(*args)
    except UserError as error:
        return str(error)


def share_caches(path, directory):
    """What each rank is told when jobs make one cache at a time, and when disks and nodes fail."""
    import torch.distributed as dist

    from megarlhf.models.build import build

    found, rank = cli.find("dpo"), dist.get_rank()
    settings = found.load(str(path), [f"data.train={directory / 'twice.jsonl'}"])
    plan = found.check(settings, dist.get_world_size())
    content = plan.reference.content
    with layout() as topology:
        loader, _ = data_set.loaders(settings, plan, topology, PreferenceLoader)
        options = setup.model_options(settings, trains=False, total_steps=1)
        engine = build("reference", plan.start.architecture, topology, **options)
        checkpoint.load(engine, plan.reference.source, weights_only=True)

        def parts(meanwhile=lambda: None):
            yield from reference.batches(plan, loader, None)
            meanwhile()

        def make(name, other, meanwhile):
            return refused(reference_cache.write_cache, directory / name, engine, other, parts(meanwhile))

        def another(name, other):
            return lambda: reference_cache.write_cache(directory / name, engine, other, parts())

        def full():
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

        said, limits = {}, resource.getrlimit(resource.RLIMIT_FSIZE)
        said["equal"] = make("equal", content, another("equal", content))
        said["different"] = make("different", content, another("different", {**content, "dtype": "bf16"}))
        try:
            said["full"] = make("full", content, full)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (directory / "file").touch(exist_ok=True)
        said["no directory"] = make("file/cache", content, lambda: None)
        rows = sum(len(keys) for keys, *_ in reference_cache.Cached.read(directory / "equal", topology).parts)
        if rank == 0:
            for name, missing in (("part", "00000.*.npy"), ("stale", reference_cache.FILE)):
                shutil.copytree(directory / "equal", directory / name)
                for file in (directory / name).glob(missing):
                    file.unlink()
        dist.barrier()
        for name in ("part", "stale", "nothing"):
            own = directory / (name if rank == 1 else "equal")
            said[name] = refused(reference_cache.Cached.read, own, topology)
    return rows, said


def test_jobs_and_ranks_that_share_a_cache(ranks, directory, tmp_path):
    """The later of two jobs uses the cache of the first; a rank that cannot write or see it stops all of them."""
    lines = (directory / "pairs.train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "twice.jsonl").write_text("".join(line + line for line in lines))  # ranks read equal rows
    told = ranks.run(2, share_caches, directory / "dpo.yaml", tmp_path)
    assert told[0] == told[1], "all ranks say the same"
    rows, said = told[0]
    kept = json.loads((tmp_path / "equal" / reference_cache.FILE).read_text())["rows"]
    keys = [key for file in (tmp_path / "equal").glob("*.keys.npy") for key in np.load(file)]
    assert rows == kept == len(set(keys)) == len(keys) > 40
    assert said.pop("equal") is None
    assert "different was made with another dtype; remove it" in said["different"]
    assert "rank 1 on " in said["full"] and f"cannot make {tmp_path / 'full'} (" in said["full"]
    assert f"cannot make {tmp_path / 'file' / 'cache'} (Not a directory); mount" in said["no directory"]
    for name in ("part", "stale", "nothing"):
        assert f"rank 1 on {socket.gethostname()} does not see all of {tmp_path / name} (" in said[name]
        assert f" of {rows} rows, or another" in said[name] and "mount the same file system on every" in said[name]
    assert all(line.startswith("reference.cache: ") for line in said.values())
    assert not list(tmp_path.glob("*.unfinished*")) and not (tmp_path / "full").exists()


def test_a_reference_that_cannot_be_told(straight, directory, tmp_path, capsys):
    """Without checksums a resumed run says so; a reference with another tokenizer is refused."""
    path = directory / "dpo.yaml"
    step = max((straight[0] / "checkpoints").glob("step_*"))
    for name in ("bare", "moved"):  # without checksums.json
        shutil.copytree(step / "actor", tmp_path / name / "actor")
        shutil.copytree(step / "tokenizer", tmp_path / name / "tokenizer")
    command = (
        sys.executable,
        *CLI,
        "dpo",
        "--config",
        str(path),
        f"run={tmp_path / 'run'}",
        "training.evaluate_every=9",
    )
    done = finish(*command, "training.steps=2", f"reference.checkpoint={tmp_path / 'bare'}")
    assert done.returncode == 0 and "not checked" not in done.stderr, done.stderr
    done = finish(*command, "training.steps=4", f"reference.checkpoint={tmp_path / 'moved'}")
    assert done.returncode == 0, done.stderr
    began, now = tmp_path / "bare" / "actor", tmp_path / "moved" / "actor"
    note = f"began with ({began}) had no checksums.json, so whether {now} is the same is not checked"
    assert note in done.stderr, done.stderr

    known = tmp_path / "known" / "checkpoints" / "step_00000002"
    shutil.copytree(tmp_path / "run", tmp_path / "known")
    (known / reference_cache.FILE).write_text(json.dumps({"weights": "0" * 64}))
    (known / "checksums.json").unlink()
    shutil.rmtree(known.with_name("step_00000004"))
    (known.parent / "latest").write_text(known.name)
    line = error(capsys, "dpo", path, f"run={tmp_path / 'known'}", f"reference.checkpoint={tmp_path / 'bare'}")
    assert f"{began} has no checksums.json, so it is not known to be the reference that this run began with" in line

    texts = [review.response for review in runs.reviews.reviews(200, seed=5)]
    runs.reviews.train_tokenizer(texts, str(tmp_path / "other"), 300)
    shutil.rmtree(tmp_path / "moved" / "tokenizer")
    load_tokenizer(tmp_path / "other.model").save(tmp_path / "moved" / "tokenizer")
    line = error(capsys, "dpo", path, f"reference.checkpoint={tmp_path / 'moved'}")
    assert (
        line.startswith(f"reference.checkpoint: {tmp_path / 'moved'}: token ") and "to the reference model; use" in line
    )
    shutil.rmtree(tmp_path / "moved" / "tokenizer")
    found = cli.find("dpo")
    plan = found.check(found.load(str(path), [f"reference.checkpoint={tmp_path / 'moved'}"]), 1)
    assert "came without a tokenizer, so whether it reads tokens as the policy" in plan.reference.notes[0]


def test_a_cache_that_cannot_be_made(directory, capsys):
    for value, expected in (("''", "is empty; name a directory"), ("/proc/x", "/proc/x cannot be written (")):
        line = error(capsys, "dpo", directory / "dpo.yaml", f"reference.cache={value}")
        assert line.startswith(f"reference.cache: {expected}"), line


def test_batches_of_one_class(ranks, directory, tmp_path):
    """Batches of 2 rows, some without good or without bad ones: their means are left out, and the run goes on."""
    few = [f"run={tmp_path}", "training.global_batch_size=2", "data.validation=null"]
    ranks.run(2, run_programs, "kto", directory / "kto.yaml", [few])
    found = [
        {kind for kind in ("chosen", "rejected") if f"logratios_sum/{kind}" in record} for record in numbers(tmp_path)
    ]
    assert len(found) == STEPS and 1 in map(len, found), found
