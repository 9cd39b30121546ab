"""What happens to jobs, and what users do to them: `sbatch examples/slurm/...` unedited, on a real Slurm of six nodes.

Every scenario submits the scripts with a tiny model, strikes when the run has saved, and compares what comes out with
one uninterrupted run under torchrun. A job takes whole nodes, so three scenarios go on at a time; most of their time is
spent waiting for Slurm.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megarlhf.convert import torch_dist
from tests.e2e.runs import CLI, finish
from tests.ranks import ENVIRONMENT, ROOT
from tests.slurm.conftest import SlurmCluster, running_cluster

sys.path.insert(0, str(ROOT / "examples"))
import reviews

pytestmark = [pytest.mark.slurm, pytest.mark.long]

STEPS = 10
SEEN = 60  # seconds from a fault's being seen to the job's having ended or gone back into the queue
LONG = 600  # seconds to wait for what takes as long as the machine is busy


@dataclass(frozen=True)
class Site:
    cluster: SlurmCluster
    root: Path  # a checkout made of links, where jobs run, with the data; what jobs leave behind is not left in ours
    sft: Path  # a run
    tiny: dict[str, Any]  # a small PPO, by key
    straight: concurrent.futures.Future[Path]  # the run that nothing interrupts

    def submit(
        self, name: str, *overrides: str, pause: float | None = None, nodes: int = 2, flags: tuple[str, ...] = (),
        **environment: str,
    ) -> Job:  # fmt: skip
        """`sbatch examples/slurm/ppo_7b.sh`, one rank a node. `pause`: seconds that each step waits for its rewards
        until `Job.hurry`."""
        run = next((Path(text.removeprefix("run=")) for text in overrides if text.startswith("run=")), self.root / name)
        slow = self.root / f"{name}.pause"
        if pause is not None:
            slow.write_text(str(pause))
        log = self.root / f"{name}.log"
        overrides = (*(f"{key}={json.dumps(value)}" for key, value in self.tiny.items()), f"run={run}", *overrides)
        sent = self.cluster.run(
            "sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--time=60", f"--chdir={self.root}",
            f"--output={log}", *flags, "examples/slurm/ppo_7b.sh", *overrides,
            timeout=60, MEGARLHF_TEST_PAUSE=str(slow), **ENVIRONMENT, **environment,
        )  # fmt: skip
        assert sent.returncode == 0, sent.stderr
        return Job(self.cluster, sent.stdout.strip(), run, log, slow)

    def assert_as_straight(self, job: Job) -> None:
        """The same numbers at each step, and the same weights, bit for bit."""
        straight = self.straight.result()
        assert numbers(job.run) == numbers(straight), job.text()
        readers = [
            torch_dist.Reader(run / "checkpoints" / f"step_{STEPS:08d}" / "actor", None) for run in (job.run, straight)
        ]
        assert readers[0].specs
        for name in readers[0].specs:
            assert torch.equal(readers[0].read(name), readers[1].read(name)), name


@dataclass(frozen=True)
class Job:
    cluster: SlurmCluster
    id: str
    run: Path
    log: Path
    pause: Path

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def show(self, field: str) -> str:
        shown = self.cluster.run("scontrol", "show", "job", "-o", self.id, timeout=60)
        found = re.search(rf"(?:^| ){field}=(\S*)", shown.stdout)
        assert found, shown
        return found[1]

    def until(self, what: Callable[[], Any], seconds: float = LONG) -> Any:
        """Wait for `what` to come true, while the job is in the queue."""
        deadline, look = time.monotonic() + seconds, 0.0
        while not (value := what()):
            now = time.monotonic()
            assert look != math.inf and now < deadline, f"in vain, for {seconds} s or the job's life:\n{self.text()}"
            if now > look:
                queued = self.cluster.run("squeue", "-h", "-j", self.id, timeout=60).stdout.strip()
                look = now + 2 if queued else math.inf  # it has ended: `what` is asked a last time
            time.sleep(0.05)
        return value

    def saved(self) -> int:
        """The step of the newest complete checkpoint; 0: none."""
        latest = self.run / "checkpoints" / "latest"
        return int(latest.read_text().split()[0].removeprefix("step_")) if latest.exists() else 0

    def saves(self) -> None:
        """Wait until there is one more checkpoint than now."""
        before = self.saved()
        self.until(lambda: self.saved() > before)

    def says(self, pattern: str, seconds: float = LONG) -> re.Match[str]:
        return self.until(lambda: re.search(pattern, self.text(), re.MULTILINE), seconds)

    def requeued(self, times: int) -> None:
        """Wait until it has gone back into the queue."""
        self.until(lambda: int(self.show("Restarts")) == times, SEEN)

    def restarts(self, times: int) -> None:
        """Wait until it has gone back into the queue, and until Slurm has started it again."""
        self.requeued(times)
        self.says(f"^== ppo_7b: job {self.id}, restart {times}, on ")

    def hurry(self) -> None:
        self.pause.unlink()

    def ends(self, seconds: float = LONG) -> str:
        state = self.cluster.script("wait", self.id, str(seconds), timeout=seconds + 60).stdout.strip()
        assert state, f"still running after {seconds} s; the log:\n{self.text()}"
        return state

    def completes(self) -> None:
        assert self.ends() == "COMPLETED", self.text()

    def fails(self) -> str:
        """The line for the user of a job that ends with his mistake; nothing else about the error is in the log."""
        assert (self.ends(), self.show("ExitCode")) == ("FAILED", "2:0"), self.text()
        assert "Traceback" not in self.text()
        return self.says(r"^megarlhf \[rank \d on node\d\]: error: (.*)$", 1)[1]

    def importing(self, rank: int) -> int:
        """Wait for a rank's process that heeds USR1 and has not met the others; its pid."""

        def find() -> int | None:
            with contextlib.suppress(AssertionError, OSError):
                pid, _ = self.rank(rank)
                caught = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                return pid if int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1 else None

        return self.until(find)

    def left_behind(self) -> list[str]:
        """Files beside the run, and processes, of a job that has ended."""
        found = [path.name for path in (*self.log.parent.glob(".requeue-*"), *self.run.glob(".watchdog-*"))]
        mine = {f"SLURM_CONF={self.cluster.environment['SLURM_CONF']}", f"SLURM_JOB_ID={self.id}"}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine <= set((process / "environ").read_bytes().decode(errors="replace").split("\0")):
                    found.append((process / "cmdline").read_text())
        return [name for name in found if not name.startswith(".requeue-") or name == f".requeue-{self.id}"]

    def rank(self, rank: int) -> tuple[int, str]:
        """(pid, node) of a rank's process."""
        wanted = {f"SLURM_CONF={self.cluster.environment['SLURM_CONF']}", f"SLURM_JOB_ID={self.id}",
                  f"SLURM_PROCID={rank}"}  # fmt: skip
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = set((process / "environ").read_bytes().decode(errors="replace").split("\0"))
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if wanted <= environment and "\0-m\0megarlhf\0" in (process / "cmdline").read_text():
                    if (Path("/proc") / parent / "comm").read_text() != "slurmstepd\n":
                        continue  # a helper process of a rank, or srun
                    (node,) = (text for text in environment if text.startswith("SLURMD_NODENAME="))
                    return int(process.name), node.partition("=")[2]
        raise AssertionError(f"no process of rank {rank} of job {self.id}; the log:\n{self.text()}")


def numbers(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what is a matter of time."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if not k.startswith(("time", "tokens_per", "cost/"))} for record in records
    ]


# --------------------------------------------------------------------------------------------------- scenarios

REQUEUED = (
    r"^[\d:-]+ [\d:]+ megarlhf: the job's end is near, or USR1 came: saved and left after step (\d+) of 10\n"
    r" +the job is requeued \("
)
STOPPED = (
    r"^[\d:-]+ [\d:]+ megarlhf: TERM came: saved and left after step (\d+) of 10\n"
    r" +it goes on when it is started again$"
)


def a_time_limit_of_two_minutes(site: Site) -> None:
    """For a run of more than two minutes: each step takes twelve seconds."""
    job = site.submit("limit", "job.margin_minutes=0.5", pause=12, flags=("--time=2", "--signal=USR1@1"))
    job.completes()
    left = re.findall(REQUEUED, job.text(), re.MULTILINE)
    assert left and int(job.show("Restarts")) == len(left), job.text()
    assert "DUE TO TIME LIMIT" not in job.text()
    site.assert_as_straight(job)


def a_node_loses_power(site: Site) -> None:
    """First the one with rank 1, then the one that runs the batch script and rank 0."""
    job = site.submit("power", pause=1)
    for restarts, rank in ((1, 1), (2, 0)):
        job.saves()
        _, node = job.rank(rank)
        assert site.cluster.script("kill", node).returncode == 0
        if rank == 0:  # nobody is left to requeue but Slurm, which has to find out
            job.until(lambda node=node: "down" in job.cluster.run("sinfo", "-hn", node, "-o%t", timeout=60).stdout)
        else:
            job.says(rf"^megarlhf: rank 1 on {node} \(.*\) ended without a word: killed from outside")
        job.requeued(restarts)
        assert site.cluster.script("start", node).returncode == 0
    job.hurry()
    job.completes()
    site.assert_as_straight(job)


def kill_9(site: Site) -> None:
    """Of rank 1, then of rank 0 in the middle of a save."""
    job = site.submit("kill", pause=1)
    for restarts, rank in ((1, 1), (2, 0)):
        job.saves()
        pid, node = job.rank(rank)
        if rank == 0:
            job.until(lambda: list(job.run.glob("checkpoints/step_*.partial")))
        os.kill(pid, signal.SIGKILL)
        job.says(rf"^megarlhf.*: rank {rank} on {node} \(pid {pid}, phase .*\) ended without a word: killed")
        job.restarts(restarts)
    job.hurry()
    job.completes()
    assert len(re.findall("megarlhf[^\n]*ended without a word", job.text())) == 2
    assert "Traceback" not in job.text()
    site.assert_as_straight(job)


def a_stopped_rank(site: Site) -> None:
    job = site.submit("stop", "job.hang_minutes=0.5", pause=1)
    job.saves()
    pid, node = job.rank(1)
    os.kill(pid, signal.SIGSTOP)
    job.hurry()
    seconds = int(job.says(r"^megarlhf: no progress for (\d+) s; rank 1 lags: silent for \d+ s$")[1])
    assert seconds <= 30
    stack = job.says(rf"^  LAGS: rank 1 on {node} \(pid {pid}, phase '.*'.*\); last seen in:\n((?: {{6}}.*\n)+)")[1]
    assert "megarlhf/train/online.py:" in stack
    job.restarts(1)
    job.completes()
    site.assert_as_straight(job)


def death_and_usr1_during_imports(site: Site) -> None:
    """A rank that is killed before anybody could report it; then a USR1 that comes too early to be acted on."""
    job = site.submit("imports")
    os.kill(job.importing(1), signal.SIGKILL)
    job.says("^== requeue: a rank was killed before the ranks had met$", SEEN)
    job.restarts(1)
    for rank in (0, 1):
        job.importing(rank)
    assert site.cluster.run("scancel", "--signal=USR1", job.id, timeout=60).returncode == 0
    assert int(job.says(REQUEUED)[1]) == job.saved() == 1
    job.restarts(2)
    job.completes()
    assert job.left_behind() == []
    site.assert_as_straight(job)


def two_deaths_during_imports(site: Site) -> None:
    job = site.submit("twice")
    os.kill(job.importing(1), signal.SIGKILL)
    job.restarts(1)
    os.kill(job.importing(0), signal.SIGKILL)
    job.says("^== not requeued: twice in a row a rank was killed before the ranks had met", SEEN)
    assert job.ends(SEEN) == "FAILED"
    assert job.left_behind() == []


def a_crash_that_repeats(site: Site) -> None:
    """In native code, say: it is not tried for ever."""
    job = site.submit("crash", "scoring.sources=[{function: 'tests.slurm.judge:crash'}]", TEST_CRASH=str(site.root))
    job.says(r"^ +not requeued: the attempt before ended alike \(rank 0 was lost in step 3\)")
    assert job.ends(SEEN) == "FAILED"
    assert (job.show("Restarts"), job.saved(), job.left_behind()) == ("1", 2, [])


def suspended(site: Site) -> None:
    """For longer than hang_minutes; nobody is accused."""
    job = site.submit("suspend", "job.hang_minutes=0.5", pause=1)
    job.saves()
    assert site.cluster.run("scontrol", "suspend", job.id, timeout=60).returncode == 0
    time.sleep(45)
    job.hurry()
    assert site.cluster.run("scontrol", "resume", job.id, timeout=60).returncode == 0
    job.completes()
    assert "no progress" not in job.text() and job.show("Restarts") == "0"
    site.assert_as_straight(job)


def a_port_that_is_taken(site: Site) -> None:
    """By a program that answers nothing, so that rank 1 sees an open port; plain srun ends it when rank 0 leaves."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        job = site.submit("port", MASTER_PORT=str(port))
        line = job.says(r"^megarlhf \[rank 0 on node\d\]: error: (.*)$")[1]
        assert f"port {port} cannot be used (Address already in use); set MASTER_PORT to a free one" in line
        assert (job.ends(SEEN), job.show("ExitCode"), job.show("Restarts")) == ("FAILED", "2:0", "0")
    assert job.left_behind() == []
    assert "Traceback" not in job.text()


def asked_to_leave(site: Site) -> None:
    """By `scontrol requeue`, then by USR1."""
    job = site.submit("ask", pause=1)
    job.saves()
    assert site.cluster.run("scontrol", "requeue", job.id, timeout=60).returncode == 0
    job.restarts(1)
    job.saves()
    assert site.cluster.run("scancel", "--signal=USR1", job.id, timeout=60).returncode == 0
    step = int(job.says(REQUEUED)[1])
    assert job.saved() == step
    job.restarts(2)
    job.hurry()
    job.completes()
    site.assert_as_straight(job)


def cancelled(site: Site) -> None:
    """TERM alone, then `scancel`; the same command goes on."""
    job = site.submit("cancel", pause=1)
    job.saves()
    assert site.cluster.run("scancel", "--signal=TERM", job.id, timeout=60).returncode == 0
    step = int(job.says(STOPPED)[1])
    assert (job.ends(SEEN), job.show("ExitCode")) == ("FAILED", "75:0")
    assert job.saved() == step
    job = site.submit("cancel")
    job.saves()
    assert site.cluster.run("scancel", job.id, timeout=60).returncode == 0
    assert job.ends(SEEN) == "CANCELLED"
    job.hurry()
    site.submit("cancel").completes()
    site.assert_as_straight(job)


def a_full_disk(site: Site) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = site.root / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    try:
        job = site.submit("full", f"run={disk / 'run'}", pause=1)
        job.saves()
        with (disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 200_000)
        good = f"step_{job.saved():08d}"
        line = job.fails()
        # what torch says of it differs: the kernel's message, or "unexpected pos"
        assert "cannot be written" in line and "0.000 GB are free there" in line
        assert line.endswith(f"the last good checkpoint is {disk}/run/checkpoints/{good}")
        assert (disk / "run" / "checkpoints" / "latest").read_text().split()[0] == good
        (disk / "ballast").unlink()
        job.hurry()
        job = site.submit("full", f"run={disk / 'run'}")
        job.completes()
        site.assert_as_straight(job)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def a_truncated_checkpoint(site: Site) -> None:
    """Going back to the one before is by hand."""
    run = site.root / "truncated"
    shutil.copytree(site.straight.result(), run)
    newest, before = (run / "checkpoints" / f"step_{step:08d}" for step in (STEPS, STEPS - 2))
    data = max((newest / "critic").glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = data.stat().st_size
    os.truncate(data, size // 2)
    line = site.submit("truncated", f"training.steps={STEPS + 2}").fails()  # or there is nothing left to do
    assert line.startswith(f"{data}: has {size // 2} of ")
    assert "the checkpoint is damaged; use another one" in line
    (run / "checkpoints" / "latest").write_text(f"{before.name}\n")
    job = site.submit("truncated")
    job.completes()
    site.assert_as_straight(job)


def two_nodes(site: Site) -> None:
    job = site.submit("two")
    job.completes()
    site.assert_as_straight(job)


def four_nodes(site: Site) -> None:
    """Two model copies instead of one: the same numbers up to rounding."""
    job = site.submit("four", nodes=4)
    job.completes()
    records = zip(numbers(job.run), numbers(site.straight.result()), strict=True)
    for got, expected in records:
        for key in ("objective/scores", "objective/kl", "ppo/loss/policy", "ppo/loss/value", "grad_norm"):
            assert got[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-4), (got["step"], key)


def a_pipeline(site: Site) -> None:
    """From a Hugging Face model to a PPO policy with pipeline_7b.sh, over smaller configurations of the same names; and
    once more, where the second of the four jobs fails."""
    done = finish(sys.executable, "-m", "megarlhf", "convert", "megatron2hf", str(site.sft), str(site.root / "hf"))
    assert done.returncode == 0, done.stderr
    prompts = {"path": str(site.root / "prompts.jsonl"), "length": 16}
    training = {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 3}
    changes = {
        "sft": {"data": {"train": str(site.root / "train.jsonl"), "max_length": 64}, "training": training},
        "reward": {
            "data": {"train": str(site.root / "pairs.jsonl"), "max_length": 64},
            "normalization": {"prompts": prompts, "samples": 16, "response_length": 8},
            "training": training,
        },
        "ppo": {"prompts": prompts, "sampler": site.tiny["sampler"],
                "training": site.tiny["training"]},
    }  # fmt: skip

    def submit(name: str) -> list[Job]:
        root = site.root / name
        (root / "examples" / "configs").mkdir(parents=True)
        for link in ("examples/slurm", "megarlhf", "tools"):
            (root / link).symlink_to(ROOT / link)
        for program, sections in changes.items():
            config = yaml.safe_load((ROOT / f"examples/configs/{program}_7b.yaml").read_text())
            config |= {"parallel": {}} | sections
            config["model"]["dtype"] = "fp32"
            config["optimizer"]["warmup_steps"] = 0  # a run of so few steps has none
            (root / f"examples/configs/{program}_7b.yaml").write_text(yaml.safe_dump(config))
        script = root / "examples" / "slurm" / "pipeline_7b.sh"
        arguments = ("--ntasks-per-node=1", "log.every=1", "ppo:training.steps=2", "sft:seed=3")
        sent = site.cluster.run("bash", script, site.root / "hf", *arguments, timeout=60, cwd=root, **ENVIRONMENT)
        assert sent.returncode == 0, sent.stderr
        jobs = re.findall(r"(convert|sft|reward|ppo) (\d+)", sent.stdout)
        assert [link for link, _ in jobs] == ["convert", "sft", "reward", "ppo"]
        return [Job(site.cluster, id, root / "runs" / f"{link}_7b", root / f"{link}_7b-{id}.log", root)
                for link, id in jobs]  # fmt: skip

    good = submit("pipeline")
    changes["sft"]["data"]["train"] = "/no/such.jsonl"
    bad = submit("broken")
    for job in good:
        job.completes()
    assert good[-1].saved() == 2
    seeds = [yaml.safe_load((job.run / "run.yaml").read_text())["seed"] for job in good[1:]]
    assert seeds == [3, 0, 0]
    bad[0].completes()
    assert "/no/such.jsonl" in bad[1].fails()
    assert [job.ends(SEEN) for job in bad[2:]] == ["CANCELLED", "CANCELLED"]


def a_chain_of_rounds(site: Site) -> None:
    """A round of rejection sampling with rounds_7b.sh, a job for each stage; then nothing is left to do."""
    chain = {
        "run": "runs/chain",
        "model": str(site.sft),
        "rounds": 1,
        "generate": {"dtype": "fp32", "prompts": site.tiny["prompts"],
                     "sampler": site.tiny["sampler"] | {"samples_per_prompt": 2}},
        "score": {"dtype": "fp32", "tokenizer": str(site.sft.parent / "reviews.model"),
                  "scoring": {"sources": [{"function": "tests.slurm.judge:score"}]}},
        "select": {"kind": "best", "unfinished": "keep"},
        "sft": {"model": {"dtype": "fp32"}, "data": {"max_length": 48},
                "training": {"global_batch_size": 8, "steps": 2}},
    }  # fmt: skip
    root = site.root / "rounds"
    root.mkdir()
    for name in ("examples", "megarlhf", "tests"):
        (root / name).symlink_to(ROOT / name)
    (root / "chain.yaml").write_text(yaml.safe_dump(chain))

    def submit() -> str:
        command = ("bash", "examples/slurm/rounds_7b.sh", "chain.yaml", "--ntasks-per-node=1")
        sent = site.cluster.run(*command, timeout=LONG, cwd=root, **ENVIRONMENT)
        assert sent.returncode == 0, sent.stderr
        return sent.stdout

    jobs = re.findall(r"(round_1_\w+) (\d+)", submit())
    assert [name for name, _ in jobs] == [f"round_1_{program}" for program in ("generate", "score", "select", "sft")]
    run = root / "runs" / "chain" / "round_1"
    for name, id in jobs:
        job = Job(site.cluster, id, run / "sft", root / f"{name}-{id}.log", root)
        job.completes()
    assert job.saved() == 2
    scored = [json.loads(line) for line in (run / "scored.jsonl").read_text().splitlines()]
    assert len(scored) == 2 * 64 and all("score" in line for line in scored)
    assert "nothing is left to do" in submit()


SCENARIOS = (  # long ones first
    a_time_limit_of_two_minutes, a_node_loses_power, kill_9, a_stopped_rank, asked_to_leave, cancelled, a_pipeline,
    a_chain_of_rounds, suspended, death_and_usr1_during_imports, a_crash_that_repeats, two_deaths_during_imports,
    a_full_disk, a_truncated_checkpoint, four_nodes, two_nodes, a_port_that_is_taken,
)  # fmt: skip


# --------------------------------------------------------------------------------------------------- set-up


@pytest.fixture(scope="module")
def outcomes(request, straight, tmp_path_factory) -> Iterator[dict[Callable, concurrent.futures.Future]]:
    """The scenarios that this session is to show, started three at a time."""
    sft, config = straight
    root = tmp_path_factory.mktemp("jobs")
    for name in ("examples", "megarlhf", "tests", "tools"):
        (root / name).symlink_to(ROOT / name)
    prompts = [{"prompt": review.prompt} for review in reviews.reviews(64, seed=5)]
    pairs = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in reviews.preferences(64, seed=6)]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    shutil.copy(config.parent / "train.jsonl", root)
    tiny = {
        "model": {"checkpoint": str(sft), "dtype": "fp32"},
        "prompts": {"path": str(root / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 8, "stop_at_eos": True},
        "scoring": {"sources": [{"function": "tests.slurm.judge:score"}]},
        "critic": {"kind": "separate"},
        "training": {"steps": STEPS, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 96},
        "parallel.tensor": 2,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
        "checkpoint": {"every": 2, "keep": 2},
    }

    def torchrun() -> Path:
        done = finish(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *CLI, "ppo",
            "--config", "examples/configs/ppo_7b.yaml", f"run={root / 'straight'}",
            *(f"{key}={json.dumps(value)}" for key, value in tiny.items()), timeout=LONG,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return root / "straight"

    wanted = [item.callspec.params["scenario"] for item in request.session.items if item.path == request.path]
    with running_cluster(6, MEGARLHF_PYTHON=sys.executable) as cluster:
        pool = concurrent.futures.ThreadPoolExecutor(3)
        try:
            site = Site(cluster, root, sft, tiny, pool.submit(torchrun))
            yield {scenario: pool.submit(scenario, site) for scenario in SCENARIOS if scenario in wanted}
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__)
def test_job(outcomes, scenario):
    outcomes[scenario].result()
