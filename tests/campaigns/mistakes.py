"""The campaign of bad inputs: `python -m tests.campaigns.mistakes [WORDS]` tries every case of the table (those whose
area or name has the WORDS) and prints a line for each; status 1 if one fails.

A mistake must be refused (status 2) within 30 seconds, in lines that begin with "error:", without a traceback, and must
name the place. Everything runs in this process, by way of `megarlhf preflight` where a program would otherwise start
its ranks; what concerns a launch runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.runs import CLI, finish, prepare

SECONDS = 30
LONGEST = 2000  # characters of a line
TABLES = ("tests.campaigns.table", "tests.campaigns.convert")  # modules with CASES; the second one may be missing


@dataclass(frozen=True)
class Case:
    """`attempt` makes the mistake and returns (status, standard error); `place` is what the message must name."""

    area: str
    name: str
    attempt: Callable[[World], tuple[int, str]]
    place: str
    seconds: int = SECONDS

    def __str__(self) -> str:
        return f"{self.area}: {self.name}"


class World:
    """Files to be wrong about: a finished sft `run` (read only) with its configuration, and what other programs need.
    `fresh()` is a directory for one case."""

    def __init__(self, directory: Path, run: Path, config: Path):
        self.directory, self.run = directory, run
        self.count = 0
        sft = yaml.safe_load(config.read_text()) | {"run": str(directory / "run")}
        texts = [json.loads(line) for line in (config.parent / "train.jsonl").read_text().splitlines()]
        self.lines = texts
        pairs = [
            {"prompt": a["prompt"], "chosen": a["response"], "rejected": b["response"]}
            for a, b in itertools.pairwise(texts)
            if a["response"] != b["response"]
        ]
        self.pairs = self.jsonl("pairs.jsonl", pairs)
        self.prompts = self.jsonl("prompts.jsonl", [{"prompt": row["prompt"]} for row in texts])
        (directory / "rules.py").write_text(
            "def score(prompts, responses): return [0.0 for _ in responses]\n"
            "def one(prompts): pass\n"
            "def four(prompts, responses, records, more): pass\n"
        )
        os.mkfifo(directory / "pipe")
        base = {"run": sft["run"], "model": {"checkpoint": str(run), "dtype": "fp32"}}
        prompts = {"path": str(self.prompts), "length": 16}
        self.settings: dict[str, dict[str, Any]] = {
            "sft": sft,
            "reward": base | {
                "data": {"train": str(self.pairs), "max_length": 64},
                "normalization": {"prompts": prompts, "samples": 8, "response_length": 8},
                "training": {"global_batch_size": 8, "micro_batch_tokens": 256, "steps": 4},
            },
            "ppo": base | {
                "prompts": prompts,
                "sampler": {"response_length": 8, "stop_at_eos": True},
                "scoring": {"sources": [{"function": f"{directory}/rules.py:score"}]},
                "ptx": {"data": {"train": str(config.parent / "train.jsonl"), "max_length": 24}, "batch_size": 8},
                "critic": {"optimizer": {}},
                "training": {"steps": 2, "batch_size": 8, "micro_batch_tokens": 96},
            },
            "generate": {
                "checkpoint": str(run), "out": str(directory / "out.jsonl"), "prompts": prompts, "dtype": "fp32",
                "sampler": {"response_length": 16},
            },
            "serve-reward": {"function": f"{directory}/rules.py:score"},
        }  # fmt: skip

    def jsonl(self, name: str, rows: list[Any]) -> Path:
        path = self.directory / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def fresh(self) -> Path:
        self.count += 1
        directory = self.directory / f"case{self.count}"
        directory.mkdir()
        return directory

    def write(self, program: str, **changes: Any) -> Path:
        """The program's configuration with `changes` at its top (None: left out), as a file."""
        settings = {key: value for key, value in (self.settings[program] | changes).items() if value is not None}
        path = self.fresh() / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    def program(self, program: str, *overrides: str, config: Path | None = None) -> tuple[int, str]:
        """The checks of a program before it starts its ranks."""
        config = config or self.write(program)
        if program in ("sft", "reward", "ppo"):
            alone = [] if any("gpus-per-node" in override for override in overrides) else ["--gpus-per-node=1"]
            arguments = ["preflight", "--program", program, "--config", str(config), *alone]
            return command(*arguments, *(override.format(d=self.directory) for override in overrides))
        return call(lambda: self._check(program, config, [override.format(d=self.directory) for override in overrides]))

    def _check(self, program: str, config: Path, overrides: list[str]) -> None:
        from megarlhf import config as configuration
        from megarlhf.experience.sources import FunctionScorer
        from megarlhf.train import generate, serve_reward

        if program == "generate":
            generate.check(configuration.load(generate.GenerateConfig, config, overrides), 1)
        else:
            settings = configuration.load(serve_reward.ServeRewardConfig, config, overrides)
            FunctionScorer(settings.function) if settings.function else serve_reward.model_scorer(settings)

    def answers(self, said: str) -> tuple[int, str]:
        """A reward function that returns the expression `said` for one response, `abc`."""
        from megarlhf.experience.sources import FunctionScorer

        path = self.fresh() / "judge.py"
        path.write_text(f"def score(prompts, responses, records): return {said}\n")
        return call(lambda: FunctionScorer(f"{path}:score")(["a"], ["abc"], [{"answer": 1}]))

    def text(self, content: bytes, program: str = "sft") -> tuple[int, str]:
        """A configuration of these bytes."""
        path = self.fresh() / "run.yaml"
        path.write_bytes(content)
        return self.program(program, config=path)

    def data(self, program: str, key: str, content: bytes | list[Any], *overrides: str) -> tuple[int, str]:
        """A data file of these bytes, or of good lines with these instead of the first ones."""
        path = self.fresh() / "data.jsonl"
        if isinstance(content, list):
            good = {"sft": self.lines, "reward": None, "ppo": None}[program]
            lines = good or [json.loads(x) for x in (self.pairs if program == "reward" else self.prompts).open()]
            content = "".join(json.dumps(row) + "\n" for row in [*content, *lines[len(content) :]]).encode()
        path.write_bytes(content)
        return self.program(program, f"{key}={path}", *overrides)

    def tokenizer(self, damage: Callable[[Path], Any]) -> tuple[int, str]:
        directory = self.fresh() / "tokenizer"
        directory.mkdir()
        damage(directory)
        return self.program("sft", f"tokenizer={directory}")

    def checkpoint(self, damage: Callable[[Path], Any]) -> tuple[int, str]:
        """Start from the run's checkpoint after `damage` to its directory (actor/, tokenizer/, ...)."""
        directory = self.fresh() / "model"
        (step,) = (self.run / "checkpoints").glob("step_00000008")
        shutil.copytree(step, directory)
        damage(directory)
        return self.program("ppo", f"model.checkpoint={directory}")

    def resume(self, damage: Callable[[Path], Any]) -> tuple[int, str]:
        """Resume the run after `damage` to its directory."""
        directory = self.fresh() / "run"
        shutil.copytree(self.run, directory)
        damage(directory)
        return self.program("sft", f"run={directory}", "training.steps=16")

    def report(self, damage: Callable[[Path], Any]) -> tuple[int, str]:
        directory = self.fresh() / "run"
        directory.mkdir()
        for name in ("run.yaml", "metrics.jsonl"):
            shutil.copy(self.run / name, directory)
        damage(directory)
        return command("report", str(directory))

    def started(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """`megarlhf` in a process of its own."""
        config = self.write("sft")
        done = finish(sys.executable, *CLI, "sft", "--config", str(config), *arguments, environment=environment)
        return done.returncode, done.stderr


def launched(environment: Mapping[str, str]) -> tuple[int, str]:
    """What a process finds of its place in `environment`."""
    from megarlhf.cluster import launch

    return call(lambda: launch.rendezvous(environment))


def command(*arguments: str) -> tuple[int, str]:
    """`megarlhf ARGUMENTS` in this process."""
    from megarlhf import cli

    with _captured() as text:
        try:
            status = cli.main(list(arguments))
        except SystemExit as error:  # argparse
            status = error.code if isinstance(error.code, int) else 1
    return status, text.getvalue()


def call(function: Callable[[], Any]) -> tuple[int, str]:
    """A function of the package, with its errors as the command line says them."""
    from megarlhf.config import UserError

    with _captured() as text:
        try:
            function()
            return 0, text.getvalue()
        except UserError as error:
            return 2, f"{text.getvalue()}megarlhf: error: {error}\n"
        except (Exception, SystemExit):
            return 1, text.getvalue() + traceback.format_exc()


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(text):
        yield text


def judge(case: Case, world: World) -> str | None:
    """What is wrong with how the mistake was met; None if nothing is."""

    def alarm(*_: Any) -> None:
        raise TimeoutError(f"no end after {case.seconds} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(case.seconds)
    try:
        status, said = case.attempt(world)
    except TimeoutError as error:
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if "Traceback" in said:
        return f"a traceback: {said.strip().splitlines()[-1]}"
    if status != 2:
        return f"status {status}: {said.strip() or 'accepted in silence'}"
    errors = [line for line in said.splitlines() if "error: " in line]
    if not errors:
        return f"no line with an error: {said!r}"
    if case.place not in " ".join(errors):
        return f"does not name {case.place!r}: {errors[0]}"
    if len(errors) > 3 or max(map(len, errors)) > LONGEST:
        return f"{len(errors)} lines of up to {max(map(len, errors))} characters"
    return None


def cases() -> list[Case]:
    found = []
    for name in TABLES:
        if importlib.util.find_spec(name) is not None:
            found += importlib.import_module(name).CASES
    assert len({str(case) for case in found}) == len(found), "two cases of one name"
    return found


def main() -> int:
    words = " ".join(sys.argv[1:])
    failed = passed = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "world").mkdir()
        config = prepare(directory)
        done = finish(sys.executable, *CLI, "sft", "--config", str(config))
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        world = World(directory / "world", directory / "run", config)
        for case in cases():
            if words not in str(case):
                continue
            started = time.monotonic()
            trouble = judge(case, world)
            passed, failed = passed + (trouble is None), failed + (trouble is not None)
            print(f"{'ok  ' if trouble is None else 'FAIL'} {time.monotonic() - started:5.1f} s  {case}", flush=True)
            if trouble:
                print(f"       {trouble[:1000]}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    from tests.campaigns.mistakes import main as _main  # not __main__'s classes: the tables import this module by name

    sys.exit(_main())
