"""Kill online runs at random moments, start them again until they finish, and compare with a run that nobody killed.

    python -m tests.campaigns.kills --kills 50 --seed 0 --ranks 2,4 [--algorithm dapo]

The runs are PPO's, also with everything in host memory and a hydra reference (offload), or DAPO's, with dynamic
sampling and an evaluation that keeps the best step. Each run is killed
several times (SIGKILL): one rank, or everything with the launcher; half of the runs save asynchronously. In the end
every tensor of its last checkpoint must equal the straight run's bit for bit, metrics.jsonl (but for times),
samples.jsonl, scores.jsonl and held_out.jsonl must have the same lines once each, and nothing may be left: no process,
no lease, no directory of a save or of a removal. Moments are found from outside: by the time since the start, by the
checkpoint directory, and by the marks of the reward function. Prints a line a kill; status 0 if all is well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.runs import finish, prepare
from tests.ranks import ENVIRONMENT, ROOT

LAYOUTS = {2: ("parallel.tensor=2",), 4: ("parallel.pipeline=2",)}  # the rest is data parallel
STEPS = 8
END = 180.0  # seconds that a run may take to end by itself after one of its ranks was killed
FINISH = 900.0  # seconds of an attempt, on a busy machine
TIMED = ("time", "tokens_per_second", "cost/")
ALGORITHMS = {
    "ppo": {"ppo": {"kl": {"controller": "adaptive", "horizon": 200}}},
    "offload": {  # everything that can be kept in host memory, and a hydra reference
        "ppo": {"kl": {"controller": "adaptive", "horizon": 200}},
        "critic": {"head": "mlp", "on_host": True},
        "reference": {"kind": "hydra", "on_host": True},
        "scoring": {"on_host": True},
        "gate": {"every": 1},
    },
    "dapo": {
        "preset": "dapo",
        "reinforce": {"dynamic_rounds": 4, "shaping": {"overlong_buffer": 4}},
        "evaluation": {"prompts": {"path": "{directory}/held_out.jsonl"}, "every": 2, "samples": 2, "threshold": 0.5,
                       "best": "evaluation/score"},
    },
}  # fmt: skip
DEBRIS = ("*.partial*", "*.removing*", "lease*")


@dataclass
class Kill:
    run: str
    ranks: int
    saving: str
    moment: str
    victim: str = ""
    step: str = ""  # the last checkpoint at that moment
    seconds: float = 0.0  # from the kill to the end of the last process
    problems: list[str] = field(default_factory=list)


@dataclass
class Pace:
    """Seconds, of a run that nobody killed."""

    imports: float  # to the first score
    save: float
    phases: dict[str, float]  # medians, by name


class Attempt:
    """One start of the program, under torchrun."""

    def __init__(self, directory: Path, config: Path, run: Path, ranks: int, overrides: list[str]):
        self.token = f"{run}-{time.time_ns()}"
        self.run, self.checkpoints, self.mark = run, run / "checkpoints", directory / f"{run.name}.mark"
        self.log = directory / f"{run.name}.log"
        self.started = time.monotonic()
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER_", "OMPI", "PMI", "RANK"))}
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                 "-m", "megarlhf", "rl", "--config", str(config), f"run={run}", *overrides],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**outer, **ENVIRONMENT, "PYTHONPATH": paths, "KILLS_MARK": str(self.mark),
                     "KILLS_TOKEN": self.token},
            )  # fmt: skip

    def pids(self) -> dict[int, int | None]:
        """Living processes of this start, the rank of each that is one: of its forks, only by their parent."""
        found: dict[int, int | None] = {}
        wanted = f"KILLS_TOKEN={self.token}".encode()
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes().split(b"\0")
                if wanted not in environment:
                    continue
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state in "ZX":
                    continue
                rank = next((int(item[5:]) for item in environment if item.startswith(b"RANK=")), None)
                found[int(entry.name)] = rank if int(parent) == self.process.pid else None
        return found

    def saved(self) -> list[str]:
        """Names of the checkpoints that are complete."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.checkpoints) if name[5:].isdigit())
        return []

    def until(self, condition: Callable[[], Any]) -> bool:
        """Wait for it as closely as possible; False if the program ends before."""
        while not condition():
            if self.process.poll() is not None or time.monotonic() - self.started > FINISH:
                return False
            time.sleep(0.0005)
        return True

    def sleep(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() > end)

    def scored(self, times: int) -> bool:
        """Wait for so many more calls of the reward function."""
        size = self._marks()
        return self.until(lambda: self._marks() >= size + times)

    def _marks(self) -> int:
        try:
            return self.mark.stat().st_size
        except FileNotFoundError:
            return 0

    def removing(self) -> bool:
        """Whether an old checkpoint is being removed."""
        saved = self.saved()
        if len(saved) > 1:  # checkpoint.keep is 1
            return True
        return any(path.name.endswith(".removing") for path in self.checkpoints.glob("step_*"))

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def gone(self, seconds: float) -> list[int]:
        """Wait until nothing of it is left; the processes that still are, which are then killed."""
        end = time.monotonic() + seconds
        while (self.process.poll() is None or self.pids()) and time.monotonic() < end:
            time.sleep(0.1)
        left = list(self.pids())
        self.kill(left)
        self.process.wait()
        return left


def moments(pace: Pace, rng: random.Random) -> dict[str, Callable[[Attempt], bool]]:
    """How to wait for each moment; False if the program ended before it came."""
    phases, times = pace.phases, rng.randint(1, 4)
    begins, period = phases["time/evaluate"] + phases["time/score"], phases["time/step"]

    def saving(attempt: Attempt) -> bool:
        return attempt.until(lambda: list(attempt.checkpoints.glob("step_*.partial")))

    def renamed(attempt: Attempt) -> bool:
        before = attempt.saved()
        return attempt.until(lambda: attempt.saved() != before)

    return {
        "imports": lambda a: a.sleep(rng.uniform(0, pace.imports)),
        "score": lambda a: a.scored(times),
        "learn": lambda a: a.scored(times) and a.sleep(begins + rng.uniform(0, phases["time/learn"])),
        "sample": lambda a: a.scored(times) and a.sleep(period - rng.uniform(0, phases["time/sample"])),
        "save": lambda a: a.scored(times) and saving(a) and a.sleep(rng.uniform(0, pace.save)),
        "rename": lambda a: a.scored(times) and renamed(a) and a.sleep(rng.uniform(0, 0.005)),
        "retire": lambda a: a.scored(times) and a.until(a.removing) and a.sleep(rng.uniform(0, 0.002)),
    }


def strike(attempt: Attempt, kill: Kill, wait: Callable[[Attempt], bool], rng: random.Random, ranks: int) -> bool:
    """Kill at that moment, and see that all processes end; False if the program ended before."""
    everything, rank = rng.random() < 0.5, rng.randrange(ranks)
    if kill.moment != "imports":  # the ranks are known beforehand, so that the kill comes at once
        attempt.until(lambda: {*attempt.pids().values()} >= {*range(ranks)})
    known = attempt.pids() if kill.moment in ("rename", "retire", "save", "score") else None
    if not wait(attempt):
        return False
    pids = known or attempt.pids()
    one = [pid for pid, of in pids.items() if of == rank]
    if everything or not one:  # torchrun has not started its ranks yet
        kill.victim = "all" if len(pids) > 1 else "launcher"
        attempt.kill([attempt.process.pid, *pids])
        attempt.kill(list(attempt.pids()))  # and what they forked meanwhile
    else:
        kill.victim = f"rank {rank}"
        attempt.kill(one)
    kill.step = (attempt.saved() or ["-"])[-1].removeprefix("step_").lstrip("0")
    began = time.monotonic()
    if left := attempt.gone(END):
        kill.problems.append(f"{len(left)} processes left {END:.0f} s after the kill")
    kill.seconds = time.monotonic() - began
    return True


def a_run(name: str, ranks: int, count: int, place: Place, rng: random.Random) -> Iterator[Kill]:
    """One run, killed `count` times, unless it finishes before, and compared with the straight one."""
    asynchronous = rng.random() < 0.5
    kills: list[Kill] = []
    run, straight, pace = place.directory / name, *place.straight(ranks)
    overrides = [*LAYOUTS[ranks], f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    problems = []
    while True:
        attempt = Attempt(place.directory, place.config, run, ranks, overrides)
        if len(kills) < count:
            moment, wait = rng.choice(list(moments(pace, rng).items()))
            kill = Kill(name, ranks, "asynchronous" if asynchronous else "synchronous", moment)
            if strike(attempt, kill, wait, rng, ranks):
                kills.append(kill)
                continue
        if left := attempt.gone(FINISH):
            problems.append(f"{len(left)} processes left")
        if attempt.process.returncode:
            problems.append(f"status {attempt.process.returncode}: {attempt.log}")
        break
    problems += differences(run, straight)
    if problems and not kills:  # it failed before it could be killed
        kills.append(Kill(name, ranks, "asynchronous" if asynchronous else "synchronous", "none"))
    for kill in kills:  # what is wrong in the end is told once
        kill.problems += problems if kill is kills[-1] else ["see the last kill of this run"] if problems else []
        yield kill


@dataclass
class Place:
    """The campaign's directory: data, models and straight runs."""

    directory: Path
    algorithm: str
    runs: dict[int, tuple[Path, Pace]] = field(default_factory=dict)

    def __post_init__(self):
        sys.path.insert(0, str(ROOT / "examples"))
        import reviews

        sft = prepare(
            self.directory, **{"training.steps": 2, "training.evaluate_every": 2, "run": str(self.directory / "sft")}
        )
        done = finish(sys.executable, "-m", "megarlhf", "sft", "--config", str(sft), timeout=FINISH)
        assert done.returncode == 0, done.stderr
        prompts = [json.dumps({"prompt": review.prompt}) + "\n" for review in reviews.reviews(64, seed=5)]
        (self.directory / "prompts.jsonl").write_text("".join(prompts))
        held_out = [json.dumps({"prompt": review.prompt}) + "\n" for review in reviews.reviews(7, seed=6)]
        (self.directory / "held_out.jsonl").write_text("".join(held_out))
        own = json.loads(json.dumps(ALGORITHMS[self.algorithm]).replace("{directory}", str(self.directory)))
        judge = "dapo" if self.algorithm == "dapo" else "ppo"
        self.config = self.directory / f"{self.algorithm}.yaml"
        self.config.write_text(yaml.safe_dump(own | {
            "run": str(self.directory / "unused"),
            "model": {"checkpoint": str(self.directory / "sft"), "dtype": "fp32",
                      **({"trained_layers": 1} if self.algorithm == "offload" else {})},
            "prompts": {"path": str(self.directory / "prompts.jsonl"), "length": 16},
            "sampler": {"response_length": 12, "micro_batch_size": 4, "stop_at_eos": True,
                        "samples_per_prompt": 4 if self.algorithm == "dapo" else 1},
            "scoring": {"sources": [{"function": f"{ROOT}/tests/campaigns/judge.py:{judge}"}]} | own.pop("scoring", {}),
            "training": {"steps": STEPS, "batch_size": 16, "minibatches": 2, "epochs": 2, "micro_batch_tokens": 112},
            "optimizer": {"lr": 1e-3, "schedule": "linear", "state_on_host": self.algorithm == "offload"},
            "checkpoint": {"every": 1, "keep": 1},
            "log": {"samples": 2, "samples_every": 2},
            "job": {"hang_minutes": 10},
        }))  # fmt: skip

    def straight(self, ranks: int) -> tuple[Path, Pace]:
        """A run that nobody kills, and its pace."""
        if ranks not in self.runs:
            run = self.directory / f"straight{ranks}"
            attempt = Attempt(self.directory, self.config, run, ranks, [*LAYOUTS[ranks]])
            attempt.scored(1)
            imports, began, saves = time.monotonic() - attempt.started, None, []
            while attempt.process.poll() is None:
                there = list(attempt.checkpoints.glob("step_*.partial"))
                if bool(there) != (began is not None):
                    if began is not None:
                        saves.append(time.monotonic() - began)
                    began = time.monotonic() if there else None
                time.sleep(0.002)
            assert attempt.process.returncode == 0, attempt.log.read_text()
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            records = [line for line in lines if "time/step" in line]  # not an evaluation's
            names = [name for name in records[0] if name.startswith("time/")]
            phases = {name: statistics.median(record[name] for record in records) for name in names}
            self.runs[ranks] = run, Pace(imports, statistics.median(saves), phases)
        return self.runs[ranks]


def differences(run: Path, straight: Path) -> list[str]:
    """What is not as in the straight run."""
    found = []
    if records(run) != records(straight):
        steps = [[row["step"] for row in records(path)] for path in (run, straight)]
        found.append(f"metrics.jsonl differs (steps {steps[0]})" if steps[0] != steps[1] else "metrics.jsonl: values")
    for name in ("samples.jsonl", "held_out.jsonl", "scores.jsonl"):
        texts = [(path / name).read_text() if (path / name).exists() else None for path in (run, straight)]
        if texts[0] != texts[1]:
            found.append(f"{name} differs")
    kept = [sorted(os.listdir(path / "checkpoints")) for path in (run, straight)]
    if kept[0] != kept[1]:
        found.append(f"checkpoints/ has {', '.join(kept[0])}")
    found += [f"{path.relative_to(run)} is left" for pattern in DEBRIS for path in run.rglob(pattern)]
    for role in ("actor", "critic"):
        last = Path("checkpoints", f"step_{STEPS:08d}", role)
        tensors, expected = everything(run / last), everything(straight / last)
        unequal = [name for name in expected if name not in tensors or not tensors[name].equal(expected[name])]
        if unequal or len(tensors) != len(expected):
            found.append(f"{role}: {len(unequal)} of {len(expected)} tensors differ, {', '.join(unequal[:3])}")
    return found


def records(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def everything(directory: Path) -> dict[str, Any]:
    """All tensors of a model directory, the optimizer's too."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not directory.is_dir():
        return {}
    reader = dcp.FileSystemReader(directory)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.kills", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", default="ppo", choices=ALGORITHMS)
    parser.add_argument("--ranks", default="2,4", metavar="N,N", help=f"of {', '.join(map(str, LAYOUTS))}")
    parser.add_argument("--directory", type=Path, help="where the runs stay (default: a temporary directory)")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.ranks.split(",")]
    rng, kills = random.Random(arguments.seed), []
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        directory.mkdir(parents=True, exist_ok=True)
        place = Place(directory.resolve(), arguments.algorithm)
        print(f"{'':>4} {'run':8} {'ranks':5} {'saves':12} {'moment':8} {'killed':8} {'step':4} {'gone':>6}  outcome")
        number = 0
        while len(kills) < arguments.kills:
            count = min(rng.randint(2, 5), arguments.kills - len(kills))
            for kill in a_run(f"run{number}", sizes[number % len(sizes)], count, place, rng):
                kills.append(kill)
                print(
                    f"{len(kills):4} {kill.run:8} {kill.ranks:<5} {kill.saving:12} {kill.moment:8} {kill.victim:8} "
                    f"{kill.step:4} {kill.seconds:5.1f}s  {'; '.join(kill.problems) or 'as the straight run'}",
                    flush=True,
                )
            number += 1
    failed = sum(bool(kill.problems) for kill in kills)
    print(f"{len(kills) - failed} passed, {failed} failed ({number} runs, seed {arguments.seed})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
