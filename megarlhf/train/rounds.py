"""`megarlhf rounds`: a policy learns from its own samples: generate, score, select, train, round by round.

Each stage is a program of its own with a configuration of its own, RUN/round_N/PROGRAM.yaml, which this program writes.
It starts the stages one after the other, or writes the list of those that are left for a chain of Slurm jobs
(examples/slurm/rounds.sh). A stage whose output is complete is not started again; so the same command continues a
chain that was killed.
"""

from __future__ import annotations

import copy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megarlhf import checkpoint, config, console
from megarlhf.checkpoint import steps
from megarlhf.config import PathName, UserError
from megarlhf.data.outputs import write_text
from megarlhf.train import dpo, generate, score, scoring, select, sft
from megarlhf.train.settings import flat
from megarlhf.train.setup import check_writable

CONFIGURATIONS = {  # program: the class of its configuration
    "generate": generate.GenerateConfig,
    "score": score.ScoreConfig,
    "select": select.SelectConfig,
    "sft": sft.SFTConfig,
    "dpo": dpo.DPOConfig,
}
TRAINERS = {"sft": ("best", "conditional"), "dpo": ("pairs",)}  # program: the kinds of data that it learns from
UNFINISHED = 75  # exit status of a chain that a signal has ended; run.sh's too
# Changing these does not change a stage's output (beyond rounding).
FREE = (
    "parallel.", "job.", "log.", "checkpoint.every", "checkpoint.keep", "checkpoint.asynchronous", "micro_batch_tokens",
    "training.micro_batch_", "sampler.micro_batch_", "batch_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """A chain. The sections from `generate` on are configurations of these programs; their models, files and seeds come
    from the chain. `select` has no ranks; give one of `sft` and `dpo`."""

    run: PathName  # directory of the chain: round_1/, round_2/, ...
    model: PathName  # the first policy: a run, a checkpoint or a model directory
    rounds: int = 3
    reference: Literal["previous", "first"] = "previous"  # dpo: of a round, the policy of the round before or `model`
    seed: int = 0  # of round 1; each later round has the next one, so that it samples with other noise
    launch: str = ""  # the command in front of "-m megarlhf PROGRAM", such as torchrun --nproc-per-node=8
    plan: bool = False  # only check, write the stages' files and print "PROGRAM FILE" of each stage that is left
    generate: dict[str, Any]
    score: dict[str, Any]
    select: dict[str, Any]
    sft: dict[str, Any] | None = None
    dpo: dict[str, Any] | None = None

    def __post_init__(self):
        config.check_seed(self.seed)
        if self.rounds < 1:
            raise ValueError(f"rounds: must be at least 1, not {self.rounds}")
        if (self.sft is None) == (self.dpo is None):
            raise ValueError("sft: give one of the sections sft and dpo, which trains in each round")
        kind = self.select.get("kind")
        if kind not in TRAINERS[self.trainer]:
            raise ValueError(
                f"select: kind must be {' or '.join(TRAINERS[self.trainer])} for {self.trainer}, not {kind}"
            )
        if self.reference == "first" and self.dpo is None:
            raise ValueError("reference: is for dpo; remove it")
        if kind == "conditional" and self.rounds > 1:
            raise ValueError(
                "rounds: must be 1 with kind conditional: the trained policy reads other prompts than the first model "
                "(megarlhf select with kind ask writes them)"
            )

        sampler, prompts = (self.generate.get(name) or {} for name in ("sampler", "prompts"))
        if not sampler.get("stop_at_eos", True):
            raise ValueError(
                "generate: sampler.stop_at_eos must be true: otherwise nobody knows which responses were cut, and the "
                "policy learns to end where they were"
            )
        if kind == "pairs" and sampler.get("samples_per_prompt", 1) < 2:
            raise ValueError("generate: sampler.samples_per_prompt must be at least 2 for pairs, such as 8")
        for name in ("start_text", "end_text"):
            if prompts.get(name) is not None:
                raise ValueError(
                    f"generate: prompts.{name} cuts the prompts that are sampled from, but {self.trainer} would learn "
                    "with the whole ones; write a file of the cut ones"
                )
        try:
            shlex.split(self.launch)
        except ValueError as error:
            raise ValueError(f"launch: cannot be split into words ({error}); correct it")

    @property
    def trainer(self) -> str:
        return "sft" if self.sft is not None else "dpo"


@dataclass(frozen=True)
class Stage:
    """A program of a round."""

    round: int
    program: str
    values: dict[str, Any]  # its configuration, without what it leaves to the defaults
    settings: Any  # the same, complete
    output: Path  # a file, or the directory of a run

    @property
    def file(self) -> Path:
        return self.output.parent / f"{self.program}.yaml"

    @property
    def name(self) -> str:
        return f"round {self.round}, {self.program}"

    def is_done(self) -> bool:
        """Whether the output is complete: programs write their files at once, and a run its last checkpoint last."""
        if self.program not in TRAINERS:
            return self.output.is_file()
        newest = steps.latest(self.output / "checkpoints")
        if newest is None:
            return False
        state = checkpoint.read_state(newest)
        return state["step"] == state.get("total_steps")


def stages(settings: RoundsConfig, path: str | None) -> list[Stage]:
    """All stages in their order. Raises UserError for a section that its program would refuse."""
    found, policy = [], settings.model
    for number in range(1, settings.rounds + 1):
        directory, seed = Path(settings.run) / f"round_{number}", settings.seed + number - 1
        files = {name: directory / f"{name}.jsonl" for name in ("samples", "scored", "data")}
        trained = directory / settings.trainer
        wired: dict[str, dict[str, Any]] = {
            "generate": {"checkpoint": policy, "out": str(files["samples"]), "seed": seed},
            "score": {"input": str(files["samples"]), "out": str(files["scored"])},
            "select": {"input": str(files["scored"]), "out": str(files["data"])},
            settings.trainer: {
                "run": str(trained),
                "seed": seed,
                "model": {"checkpoint": policy},
                "data": {"train": str(files["data"])},
            },
        }
        for section, key in ((settings.generate.get("prompts") or {}, "chat"), (settings.generate, "chat_template")):
            if key in section:  # the trainer reads prompts as they were sampled from
                place = wired[settings.trainer]["data"] if key == "chat" else wired[settings.trainer]
                place[key] = section[key]
        if (settings.generate.get("prompts") or {}).get("add_bos") is False:
            wired[settings.trainer]["data"]["add_bos"] = False
        if settings.dpo is not None and settings.reference == "first":
            wired["dpo"]["reference"] = {"checkpoint": settings.model}
        for (program, values), output in zip(wired.items(), [*files.values(), trained], strict=True):
            where = f"{path or 'command line'}: section {program}"
            tree = _joined(copy.deepcopy(getattr(settings, program)), values, where)
            complete = config.from_dict(CONFIGURATIONS[program], tree, where)
            found.append(Stage(number, program, tree, complete, output))
        policy = str(trained)
    return found


configurations = (RoundsConfig,)


def main(path: str | None, overrides: list[str]) -> None:
    settings = config.load(RoundsConfig, path, overrides)
    chain = stages(settings, path)
    check_writable(settings.run)
    left = list(unfinished(chain))
    if left and left[0] is chain[0]:
        check_first(*chain[:2])
    for stage in left:
        stage.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(stage.file, config.dump_values(stage.values))
    if settings.plan:
        for stage in left:
            print(stage.program, stage.file)
        return
    say(f"{len(chain) - len(left)} of {len(chain)} stages are done")
    for stage in left:
        say(stage.name)
        start(stage, shlex.split(settings.launch))
        if not stage.is_done():  # a run that was asked to leave, and will be started again
            raise SystemExit(UNFINISHED)
    say(f"done: the policy is {chain[-1].output}")


def check_first(sampling: Stage, scored: Stage) -> None:
    """Refuse (UserError) models, prompts and sources that cannot work, before hours of sampling. The programs check the
    rest when they start: files of earlier stages, and the number of ranks."""
    draw, rewards = sampling.settings, scored.settings
    plan = generate.find(draw, draw.parallel.model)
    scoring.check_sources(
        rewards.scoring, plan.tokenizer, rewards.parallel, vocab_size=plan.tokenizer.vocab_size,
        prompt_length=draw.prompts.length, response_length=draw.sampler.response_length,
    )  # fmt: skip
    check = scoring.RecordCheck(rewards.scoring)
    for row in range(len(plan.prompts)):
        try:
            check(plan.prompts.records([row])[0])
        except ValueError as error:
            raise UserError(f"{draw.prompts.path}: prompt {row + 1}: {error}")


def unfinished(chain: list[Stage]) -> Iterator[Stage]:
    """The stages from the first one on whose output is not complete. Raises UserError where the configuration of a
    stage whose output exists, complete or not, has changed since: it would not be the output of this chain."""
    first = None
    for stage in chain:
        if first is not None or not stage.is_done():
            if first is not None and stage.output.exists():
                raise UserError(
                    f"{stage.output}: is there, but {first.output} is not complete; remove what follows from that, or "
                    "give another run"
                )
            if first is None and stage.output.exists():
                check_unchanged(stage)
            first = first or stage
            yield stage
            continue
        check_unchanged(stage)


def check_unchanged(stage: Stage) -> None:
    """Refuse (UserError) another configuration than that with which the stage began."""
    try:
        before = flat(yaml.safe_load(stage.file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{stage.file}: cannot be read ({error}); restore it, or give another run")
    now = flat(stage.values)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(FREE):
            raise UserError(
                f"{stage.program}.{key}: was {before.get(key)} in round {stage.round}, whose output exists, and is "
                f"{now.get(key)} now; set it back, or give another run, or remove {stage.output} and what follows "
                "from it"
            )


def start(stage: Stage, launch: list[str]) -> None:
    """Run a stage, here if it has no ranks. SystemExit with its status if it fails."""
    if stage.program == "select":
        console.say(select.select(config.load(select.SelectConfig, stage.file)))
        return
    command = [*(launch or [sys.executable]), "-m", "megarlhf", stage.program, "--config", str(stage.file)]
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise UserError(f"launch: {command[0]} cannot be started ({error.strerror}); correct it")
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: process.send_signal(number)) for number in numbers]
    try:
        status = process.wait()  # after a signal it saves and leaves
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if status:
        say(f"{stage.name} ended with status {status}; the same command goes on there")
        raise SystemExit(status if status > 0 else 128 - status)


def say(text: str) -> None:
    console.say(f"megarlhf rounds: {text}")


def _joined(given: dict[str, Any], wired: dict[str, Any], where: str) -> dict[str, Any]:
    """A program's section with what the chain sets. Raises UserError for a key that both have."""
    for key, value in wired.items():
        if isinstance(value, dict):
            section = given.get(key) if given.get(key) is not None else {}
            if not isinstance(section, dict):
                raise UserError(f"{where}: {key} must be a section")
            given[key] = _joined(section, value, where)
        elif key in given:
            raise UserError(f"{where}: {key} is set by the chain; remove it")
        else:
            given[key] = value
    return given
