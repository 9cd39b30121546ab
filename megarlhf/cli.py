"""megarlhf sft --config run.yaml [key.sub=value ...]: one program a command; every rank runs the same.

torch and megatron are imported by the program that needs them, so `--help` and mistakes in the command line are
instant.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from megarlhf import __version__, report
from megarlhf.cluster import signals
from megarlhf.config import UnknownKeyError, UserError

PROGRAMS = {  # command: (module, or module:name, that has its `main`; help)
    "sft": ("megarlhf.train.sft:PROGRAM", "supervised fine-tuning on prompts and responses, chats or plain text"),
    "reward": ("megarlhf.train.reward:PROGRAM", "a reward model from preferences"),
    "dpo": ("megarlhf.train.dpo:PROGRAM", "a policy from pairs of responses: DPO and related losses"),
    "kto": ("megarlhf.train.kto:PROGRAM", "a policy from responses marked good or bad"),
    "prm": ("megarlhf.train.prm:PROGRAM", "a process reward model from solutions with labelled steps"),
    "ilql": ("megarlhf.train.ilql:PROGRAM", "Q-learning of a policy from responses with rewards, without sampling"),
    "serve-reward": ("megarlhf.train.serve_reward", "scores over HTTP, from a function or a reward model"),
    "rl": ("megarlhf.train.rl:PROGRAM", "a policy that scores higher, with the algorithm that the file names"),
    "ppo": ("megarlhf.train.rl:PPO", "the same with PPO"),
    "generate": ("megarlhf.train.generate:PROGRAM", "responses to a file of prompts"),
    "score": ("megarlhf.train.score:PROGRAM", "the rewards of responses that exist already"),
    "select": ("megarlhf.train.select", "training data from scored responses: the best ones, pairs, scores in prompts"),
    "rounds": ("megarlhf.train.rounds", "learning from own samples: generate, score, select and train, round by round"),
}
TRAINING = ("sft", "reward", "prm", "dpo", "kto", "ilql", "ppo", "rl")
DESCRIPTIONS = {  # command: what it prints of a program's configuration
    "init": "a configuration to start from: the required keys, and all others as comments",
    "schema": "the JSON schema of a program's configurations, for editors",
}
CONVERT = "checkpoints from Hugging Face, NeMo and Megatron-LM, and to Hugging Face; adapters from and to peft"
PREFLIGHT = "checks of a run on a login node: configuration, files, models, layout, disk; no GPU"
PLAN = "memory of a rank and seconds of each phase of a run, predicted from its configuration"
# Flags that stand for keys of a program's configuration. The file is optional for programs that do not train.
FLAGS = {
    "generate": {
        "checkpoint": ("checkpoint", "PATH", "a run, a checkpoint or a model directory"),
        "prompts": ("prompts.path", "JSONL", 'a {"prompt": ...} or {"messages": [...]} on every line'),
        "out": ("out", "JSONL", "where the responses go"),
    },
    "score": {
        "input": ("input", "JSONL", "the responses"),
        "out": ("out", "JSONL", "where they go with their scores"),
    },
    **{name: {"step": ("checkpoint.step", "N", "go on from the checkpoint of step N")} for name in TRAINING},
    "select": {
        "input": ("input", "JSONL", "the scored responses"),
        "out": ("out", "JSONL", "where the data of the next stage go"),
        "kind": ("kind", "KIND", "best, pairs, conditional or ask"),
    },
}


def parser() -> argparse.ArgumentParser:
    """Of all commands but `convert`, whose options are its own."""
    parser = argparse.ArgumentParser(
        prog="megarlhf",
        description="RLHF on Megatron-core. Start one process a device: with srun, torchrun, mpirun, or alone.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    programs = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    for name, (_, text) in PROGRAMS.items():
        program = programs.add_parser(name, help=text, description=text)
        flags = FLAGS.get(name, {})
        program.add_argument("--config", metavar="YAML", help="the run's configuration")
        program.add_argument(
            "--help-config", action="store_true", help="describe all keys of a configuration, and exit"
        )
        for flag, (key, kind, meaning) in flags.items():
            of = int if kind == "N" else str
            program.add_argument(f"--{flag}", metavar=kind, type=of, help=f"{meaning} ({key})")
        program.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the configuration")
    check = programs.add_parser("preflight", help=PREFLIGHT, description=PREFLIGHT)
    check.add_argument("--config", required=True, metavar="YAML", help="the run's configuration")
    check.add_argument("--program", dest="subject", choices=TRAINING, help="whose configuration (default: by its keys)")
    check.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    check.add_argument("--gpus-per-node", type=int, default=8, metavar="G", help="ranks a node (default 8)")
    check.add_argument("--gpu", metavar="NAME", help="refuse what the memory of this kind of GPU cannot hold")
    check.add_argument("--hardware", metavar="YAML", help="a file with further kinds of GPU")
    check.add_argument("--verify", action="store_true", help="also read every checkpoint whole, for its checksums")
    check.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the configuration")
    plan = programs.add_parser("plan", help=PLAN, description=PLAN)
    plan.add_argument("--config", required=True, metavar="YAML", help="the run's configuration")
    plan.add_argument("--program", dest="subject", choices=TRAINING, help="whose configuration (default: by its keys)")
    plan.add_argument("--gpu", metavar="NAME", help="the kind of GPU (default: CPU ranks on this machine, measured)")
    plan.add_argument("--hardware", metavar="YAML", help="a file with further kinds of GPU, as examples/hardware.yaml")
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    plan.add_argument("--gpus-per-node", type=int, metavar="G", help="ranks a node (default: the GPU's, or 8)")
    plan.add_argument(
        "--search", action="store_true", help="rank all layouts; write the best one's keys and job script"
    )
    plan.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the configuration")
    programs.add_parser("convert", help=CONVERT, add_help=False)
    for name, text in DESCRIPTIONS.items():
        describe = programs.add_parser(name, help=text, description=text)
        describe.add_argument("subject", choices=PROGRAMS, metavar="PROGRAM", help=f"one of {', '.join(PROGRAMS)}")
    text = "curves, phase times, samples and configuration of a run, or of several on common axes, as one HTML file"
    report.arguments(programs.add_parser("report", help=text, description=text))
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["convert"]:  # its messages and processes are its own, too
        return importlib.import_module("megarlhf.convert.__main__").main(argv[1:])
    arguments = parser().parse_args(argv)
    try:
        if arguments.program == "report":  # a reader of files: no configuration, no rank, no torch
            report.main(arguments.runs, arguments.output)
        elif arguments.program == "preflight":
            importlib.import_module("megarlhf.train.preflight").main(
                arguments.config,
                arguments.overrides,
                programs={name: find(name) for name in TRAINING},
                program=arguments.subject,
                nodes=arguments.nodes,
                per_node=arguments.gpus_per_node,
                verify=arguments.verify,
                gpu=arguments.gpu,
                table=arguments.hardware,
            )
        elif arguments.program == "plan":
            importlib.import_module("megarlhf.train.plan").main(
                arguments.config,
                arguments.overrides,
                programs={name: find(name) for name in TRAINING},
                program=arguments.subject,
                nodes=arguments.nodes,
                per_node=arguments.gpus_per_node,
                gpu=arguments.gpu,
                table=arguments.hardware,
                searches=arguments.search,
            )
        elif arguments.program in DESCRIPTIONS:
            print(described(arguments.program, arguments.subject), end="")
        elif arguments.help_config:
            print(described("reference", arguments.program), end="")
        else:
            if arguments.config is None and (arguments.program in TRAINING or arguments.program not in FLAGS):
                raise UserError(f"--config is missing; 'megarlhf init {arguments.program}' writes a file to start from")
            given = {key: getattr(arguments, flag) for flag, (key, _, _) in FLAGS.get(arguments.program, {}).items()}
            overrides = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
            find(arguments.program).main(arguments.config, [*overrides, *arguments.overrides])
        status = 0
    except UserError as error:
        status = _fail(f"error: {error}{_belongs_to(arguments, error)}", 2, error)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as left:  # saved and left early
        status = left.code
    except BaseException as error:  # torch's CheckpointException is not an Exception
        status = _fail(f"failed\n{traceback.format_exc()}", 1, error)
    if watchdog := _watchdog():
        watchdog.close()
    return status


def find(name: str):
    """The object with the `main` and the `configurations` of a command, a `Program` if it has ranks; imports torch."""
    module, _, attribute = PROGRAMS[name][0].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def described(form: str, name: str) -> str:
    """The configurations of a command as text; `form`: init, schema or reference."""
    describe, configurations = importlib.import_module("megarlhf.config.describe"), find(name).configurations
    if form == "schema":
        return json.dumps(describe.schema(configurations, f"megarlhf {name}"), indent=1) + "\n"
    write = describe.template if form == "init" else describe.reference
    if len(configurations) == 1:
        return write(configurations[0])
    return "\n".join(f"# {'-' * 40} with {cls.algorithm}\n{write(cls)}" for cls in configurations)


def _belongs_to(arguments: argparse.Namespace, error: UserError) -> str:
    """A note if the configuration is for another program, else ""."""
    program = arguments.subject if arguments.program in ("preflight", "plan") else arguments.program
    programs = (*TRAINING, "generate", "score")
    if not isinstance(error, UnknownKeyError) or arguments.config is None or program not in programs:
        return ""
    programs = {name: find(name) for name in programs}
    return importlib.import_module("megarlhf.train.preflight").belongs_to(arguments.config, program, programs)


def _watchdog():
    """The watchdog, if the program has imported it (and torch with it)."""
    return sys.modules.get("megarlhf.cluster.watchdog")


def _fail(message: str, status: int, error: BaseException) -> int:
    """Print the reason once. With a watchdog, it prints the first error of all ranks. Before there is one, the first
    rank of a node prints its error; the others wait for the launcher to end them and print theirs only if it does
    not."""
    local_rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    who = f" [rank {rank} on {node}]" if rank is not None else ""
    if watchdog := _watchdog():
        watchdog.fail(f"megarlhf{who}: {message}", status, error)
    with contextlib.suppress(KeyError, OSError):  # the batch script need not guess what has happened
        Path(os.environ["MEGARLHF_REQUEUE"]).touch()
    if local_rank != "0":
        time.sleep(3)
    print(f"megarlhf{who}: {message}", file=sys.stderr, flush=True)
    return status


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def run() -> None:
    """Console entry point. Leaves with os._exit: after a failure, peers and background threads must not keep this rank
    alive."""
    if sys.argv[1:2] == ["convert"]:  # under mpirun, mpi4py finalizes MPI when the interpreter exits
        sys.exit(main())
    signals.watch()
    sys.stdout, sys.stderr = _Unfailing(sys.stdout), _Unfailing(sys.stderr)
    try:
        status = main()
    except SystemExit as error:  # argparse
        status = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Unfailing:
    """A text stream that drops text that cannot be written: a full log disk or a closed pipe must not end a run."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
