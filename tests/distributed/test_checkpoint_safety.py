"""Saves that are mixed up, damaged or malicious files, ranks that are killed while they save: nothing wrong is loaded,
nothing is run, nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarlhf import checkpoint
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster import lease
from megarlhf.config import UserError
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, LLAMA, full_weights, layout
from tests.ranks import ENVIRONMENT, ROOT

LARGE = dataclasses.replace(LLAMA, ffn_hidden_size=8192)


def save_two(directory):
    """Actor and critic, the second of which is made to be written first; what each holds after loading."""
    with layout() as topology:
        actor = build("actor", LARGE, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM, seed=1)
        critic = build("critic", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", seed=2)
        checkpoints = Checkpoints(Path(directory), CheckpointConfig(asynchronous=True))

        def write_files(step):
            for name in ("actor", "critic"):
                LLAMA.save(step / name)
            (step / "run.yaml").write_text("run: here\n")

        for step in (1, 2):
            checkpoints.save(step, {"actor": actor, "critic": critic}, {"note": "two"}, write_files)
            writers = sorted(multiprocessing.active_children(), key=lambda process: process.pid)
            if len(writers) == 2:  # the actor's stands still until the critic's has ended
                os.kill(writers[0].pid, signal.SIGSTOP)
                writers[1].join(60)
                os.kill(writers[0].pid, signal.SIGCONT)
            checkpoints.finish()
        step = checkpoints.latest()
        for role, engine in (("actor", actor), ("critic", critic)):
            options = dict(optimizer=ADAM) if role == "actor" else {}
            architecture = LARGE if role == "actor" else LLAMA
            again = build(role, architecture, topology, micro_batch_tokens=48, dtype="fp32", seed=9, **options)
            checkpoint.load(again, step / role, weights_only=role == "critic")
            before, after = full_weights(engine), full_weights(again)
            assert all(torch.equal(after[name], before[name]) for name in before), role
        return step


def test_two_models_saved_at_once_keep_their_own(ranks, tmp_path):
    assert {path.name for path in ranks.run(2, save_two, tmp_path)} == {"step_00000002"}


def refusal(work):
    try:
        work()
    except UserError as error:
        return str(error)
    return None


def flip_everywhere(directory):
    """{file: what both ranks said when one byte of it was another}."""
    run = Path(directory)
    with layout() as topology:
        engines = {
            "actor": build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM),
            "critic": build("critic", LLAMA, topology, micro_batch_tokens=48, dtype="fp32"),
        }
        checkpoints = Checkpoints(run, CheckpointConfig())

        def write_files(step):
            for name in engines:
                LLAMA.save(step / name)
                (step / name / "hf_config.json").write_text('{"model_type": "llama"}\n')
            (step / "tokenizer").mkdir()
            (step / "tokenizer" / "tokenizer.json").write_text('{"tokens": ["a", "b"]}\n')
            (step / "run.yaml").write_text("run: here\n")

        for step in (2, 3):  # a flipped bit makes a 2 of the 3 in `latest`
            checkpoints.save(step, engines, {"progress": {}}, write_files)
        step = checkpoints.latest()

        def go_on():
            if checkpoints.latest().name != step.name:
                raise AssertionError("another step than the newest")
            for role, engine in engines.items():
                checkpoint.load(engine, step / role, weights_only=True)

        assert refusal(go_on) is None
        said = {}
        for path in [run / "checkpoints" / "latest", *sorted(path for path in step.rglob("*") if path.is_file())]:
            whole = path.read_bytes()
            places = range(0, len(whole), 7) if path.name == "latest" else (0, len(whole) // 2, len(whole) - 1)
            for place in places:
                dist.barrier()
                if dist.get_rank() == 0:
                    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                dist.barrier()
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, refusal(go_on))
                said[f"{path.relative_to(run)} at {place}"] = str(path), everyone
                dist.barrier()
                if dist.get_rank() == 0:
                    path.write_bytes(whole)
        dist.barrier()
        assert refusal(go_on) is None
        if dist.get_rank() == 0:
            (step / "checksums.json").unlink()
        dist.barrier()
        return said, refusal(go_on)


def test_a_flipped_bit_in_any_file_is_named_on_every_rank(ranks, tmp_path):
    for said, without_checksums in ranks.run(2, flip_everywhere, tmp_path):
        assert len(said) > 40
        for name, (path, everyone) in said.items():
            assert everyone[0] and everyone[0] == everyone[1], name
            assert path in everyone[0] and "\n" not in everyone[0], (name, everyone)
            assert "step directory" in everyone[0], (name, everyone)
        assert without_checksums is None  # as older checkpoints are


class Evil:
    """Unpickled by the ordinary reader, it leaves a file."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def evil_index(model: Path, marker: str) -> None:
    (model / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def evil_common(model: Path, marker: str) -> None:
    torch.save({"steps": Evil(marker)}, model / "common.pt")


def evil_object(model: Path, marker: str) -> None:
    """An object in the place of a weight."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    name = "decoder.final_layernorm.weight"
    metadata = pickle.loads((model / ".metadata").read_bytes())
    torch.save(Evil(marker), model / "evil.distcp")
    entry = BytesStorageMetadata()
    entry.size, entry.properties = metadata.state_dict_metadata[name].size, None
    metadata.state_dict_metadata[name] = entry
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, (model / "evil.distcp").stat().st_size)
    (model / ".metadata").write_bytes(pickle.dumps(metadata))


EVIL = (evil_index, evil_common, evil_object)


def load_evil(directory):
    with layout() as topology:
        engine = build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM)
        checkpoints = Checkpoints(Path(directory), CheckpointConfig())
        checkpoints.save(1, {"actor": engine}, {}, LLAMA.save)
        found = []
        for make in EVIL:
            model = shutil.copytree(checkpoints.latest() / "actor", Path(directory) / make.__name__)
            marker = Path(directory) / f"{make.__name__}.marker"
            make(model, str(marker))
            message = refusal(lambda model=model: checkpoint.load(engine, model, weights_only=False))
            listing = refusal(lambda model=model: checkpoint.inspect(model))
            found.append((make.__name__, message, listing, marker.exists()))
        return found


def test_code_in_a_checkpoint_is_refused(ranks, tmp_path):
    (found,) = ranks.run(1, load_evil, tmp_path)
    for name, message, listing, has_run in found:
        assert not has_run, name
        assert message and "posix.mkdir" in message and "\n" not in message, (name, message)
        assert name == "evil_object" or listing == message  # tensors' files are not read by what only looks


RANK = """
import faulthandler, multiprocessing, os, signal, sys, threading, time
import torch, torch.distributed as dist
from megarlhf.cluster import backend
backend.install()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 1), rank=0, world_size=1)
from pathlib import Path
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.models.build import build
from tests.distributed.layouts import ADAM, layout
from tests.distributed.test_checkpoint_safety import LARGE
asynchronous = sys.argv[2] == "asynchronous"
with layout() as topology:
    engine = build("actor", LARGE, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM)
    def stop_writers():  # what is in the middle of a save stays there
        while True:
            if list(Path(sys.argv[1]).glob("checkpoints/*.partial/actor/*.distcp")):
                for thread in os.listdir("/proc/self/task"):
                    for pid in open(f"/proc/self/task/{thread}/children").read().split():
                        os.kill(int(pid), signal.SIGSTOP)
                print("saving", flush=True)
            time.sleep(0.001)
    threading.Thread(target=stop_writers, daemon=True).start()
    checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(asynchronous=asynchronous))
    for step in range(1, 1000):
        checkpoints.save(step, {"actor": engine}, {}, LARGE.save)
        checkpoints.finish()
"""


def of_this_rank(marker: str) -> list[int]:
    """Processes that were started with, or forked by one with, `marker` in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (
                marker.encode() in (directory / "environ").read_bytes()
                and "State:\tZ" not in (directory / "status").read_text()
            ):
                found.append(int(directory.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_rank_killed_in_a_save_leaves_no_process(tmp_path, mode):
    marker = f"MEGARLHF_TEST_RANK={tmp_path}"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **dict([marker.split("=")])}
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path), mode], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert rank.stdout.readline() == "saving\n"
    finally:
        rank.kill()
    rank.wait()
    deadline = time.monotonic() + 20
    while (left := of_this_rank(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def lose_the_lease(directory):
    """Another job takes the run directory over while a checkpoint is being written; what it was told, and what is
    there then."""
    run = Path(directory)
    with layout() as topology, lease.held(run):
        engine = build("critic", LLAMA, topology, micro_batch_tokens=48, dtype="fp32")
        checkpoints = Checkpoints(run, CheckpointConfig())
        checkpoints.save(1, {"critic": engine}, {}, LLAMA.save)

        def write_files(step):
            LLAMA.save(step / "critic")
            other = {**json.loads((run / lease.NAME).read_text()), "token": "another", "job": "72"}
            (run / lease.NAME).write_text(json.dumps(other))
            while refusal(lease.verify) is None:  # it is read again every few seconds
                time.sleep(0.1)

        message = refusal(lambda: checkpoints.save(2, {"critic": engine}, {}, write_files))
        return message, checkpoints.latest().name, [path.name for path in (run / "checkpoints").glob("*2")]


def test_a_job_that_lost_its_directory_publishes_nothing(ranks, tmp_path):
    ((message, latest, published),) = ranks.run(1, lose_the_lease, tmp_path)
    assert (latest, published) == ("step_00000001", [])
    assert message and f"run: {tmp_path} was taken over by job 72" in message


def fail_on_rank_1(directory, asynchronous):
    """Rank 1 cannot write its files; whether each rank was told, with what, and what a save after that brings."""
    with layout() as topology:
        engine = build("actor", LLAMA, topology, micro_batch_tokens=48, dtype="fp32", optimizer=ADAM)
        checkpoints = Checkpoints(Path(directory), CheckpointConfig(asynchronous=asynchronous))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            checkpoints.save(1, {"actor": engine}, {}, LLAMA.save)
            checkpoints.finish()
            message = None
        except BaseException as error:  # torch's own is none of Exception
            message = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return message, checkpoints.latest()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all(ranks, tmp_path, asynchronous):
    """The first rank says why, with the rank that failed; nobody goes on, and nothing is published."""
    (first, found), (second, _) = ranks.run(2, fail_on_rank_1, tmp_path, asynchronous)
    assert found is None
    assert first and first.startswith("UserError: ") and "cannot be written (rank 1: " in first
    assert second and second.startswith("CheckpointException: ")  # without a cause: the first rank has it


def agree_on(directory):
    """Both ranks have found an older step; since then there is a newer one, which rank 1, in another working directory,
    does not see."""
    from types import SimpleNamespace

    from megarlhf.cluster.launch import Rendezvous
    from megarlhf.data.cache import Cache
    from megarlhf.train import setup
    from megarlhf.train.setup import Start
    from megarlhf.train.sft import Plan

    rank = dist.get_rank()
    here = Rendezvous("env", rank, 2, rank, 2, f"node{rank}", "127.0.0.1", None)
    cache = Cache(directory)
    found = Start(LLAMA, None, None, Path(directory) / "checkpoints" / "step_00000001", cache)
    plan = Plan(start=found, total_steps=1, training=None, validation=None)

    def agreed(run, resume=True):
        settings = SimpleNamespace(run=str(run), checkpoint=CheckpointConfig(resume=resume))
        return setup.agree(settings, plan, here).start.resume_from

    found, nothing = agreed(directory), agreed(os.path.join(directory, "elsewhere"), resume=False)
    before = os.getcwd()
    os.chdir(directory if rank == 0 else os.path.join(directory, "elsewhere"))
    try:
        message = refusal(lambda: agreed("."))
    finally:
        os.chdir(before)
    cache.contents["a.jsonl"] = "1" if rank == 0 else "2"
    return found, nothing, message, refusal(lambda: agreed(directory))


def test_the_step_to_resume_from_is_rank_0s(ranks, tmp_path):
    for step in (1, 2):
        directory = tmp_path / "checkpoints" / f"step_{step:08d}"
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(f'{{"step": {step}}}')
    (tmp_path / "elsewhere").mkdir()
    for found, nothing, message, other in ranks.run(2, agree_on, tmp_path):
        assert other and "rank 1 on node1: a.jsonl has another content than on rank 0" in other
        assert found == tmp_path / "checkpoints" / "step_00000002" and nothing is None
        assert message and f"rank 1 on node1: {tmp_path}/elsewhere/checkpoints/step_00000002" in message
