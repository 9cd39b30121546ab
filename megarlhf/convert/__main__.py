"""megarlhf convert hf2megatron | megatron2hf | nemo2megatron | megatron2megatron | peft2megatron | megatron2peft
| verify | inspect"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megarlhf.config import UserError

COMMANDS = {
    "hf2megatron": "a Hugging Face model directory -> a checkpoint to train from",
    "megatron2hf": "a model, checkpoint or run -> a directory for transformers",
    "nemo2megatron": "a .nemo file, or a NeMo 2 checkpoint -> a checkpoint to train from",
    "megatron2megatron": "a checkpoint of Megatron-LM (iter_*) -> a checkpoint to train from",
    "peft2megatron": "adapters of peft -> a checkpoint to start from, on the model --base",
    "megatron2peft": "the adapters of a checkpoint or run -> a directory for peft",
    "verify": "recompute the certificate of a conversion's TARGET",
    "inspect": "print what a Hugging Face directory or one of ours holds",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarlhf convert", description="Checkpoints of other formats and ours.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("source", type=Path, metavar="SOURCE")
        command.set_defaults(dtype=None, role=None, tokenizer=None, vocab_size=None, ignore=[])
        if name == "verify":
            command.add_argument("target", type=Path, metavar="TARGET", help="what a conversion of SOURCE wrote")
            command.add_argument("--logits", action="store_true", help="also compare log-probs with transformers'")
        elif name != "inspect":
            command.add_argument("target", type=Path, metavar="TARGET", help="must not exist, or be empty")
        if name == "peft2megatron":
            text = "the model that the adapters are for: a model, checkpoint or run"
            command.add_argument("--base", type=Path, required=True, help=text)
        if name in ("hf2megatron", "megatron2hf", "nemo2megatron", "megatron2megatron"):
            command.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: that of the source")
        if name in ("hf2megatron", "nemo2megatron", "megatron2megatron"):
            text = "a key of the source's configuration that the converter does not know, and that changes nothing"
            command.add_argument("--ignore", action="append", metavar="KEY", default=[], help=text)
        if name in ("megatron2hf", "inspect"):
            command.add_argument("--role", help="which model of a checkpoint (default: actor)")
        if name in ("nemo2megatron", "megatron2megatron", "verify"):
            command.add_argument("--tokenizer", type=Path, help="directory or .model file, instead of the source's")
        if name == "megatron2megatron":
            text = "without padding, if the checkpoint does not say"
            command.add_argument("--vocab-size", type=_positive, metavar="N", help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    heard = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
    ]  # nohup ignores HUP
    before = {number: signal.signal(number, _stop) for number in heard}
    try:
        return _run(options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then takes large tensors' memory in huge pages
    workers = None
    try:
        from megarlhf.convert import convert, inspection  # imports torch, which --help should not wait for
        from megarlhf.convert.workers import Workers

        workers = Workers()
        choice = convert.Options(
            options.dtype, options.role, options.tokenizer, options.vocab_size, tuple(options.ignore)
        )
        if options.command in ("peft2megatron", "megatron2peft"):
            from megarlhf.convert import adapters

            if workers.size > 1:
                raise UserError(f"{options.command}: runs in one process; start it without a launcher")
            given = (options.base,) if options.command == "peft2megatron" else ()
            text = getattr(adapters, options.command)(options.source, options.target, *given)
        elif options.command == "inspect":
            text = inspection.inspect(options.source, options.role or "actor")
        elif options.command == "verify":
            text = convert.verify(options.source, options.target, choice, workers)
            if options.logits and workers.rank == 0:
                from megarlhf.convert import logits

                text += "\n" + logits.compare(options.source, options.target)
        else:
            text = str(convert.COMMANDS[options.command](options.source, options.target, choice, workers))
        if workers.rank == 0:
            print(text)
    except (UserError, OSError) as error:
        if workers is None or workers.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:  # or by _stop: temporary directories are removed by now
        number = stop.args[0] if stop.args else signal.SIGINT
        print(f"error: stopped by {signal.Signals(number).name}; nothing was written", file=sys.stderr)
        if workers is not None:
            workers.abort()
        return 128 + number
    except Exception:
        if workers is None or workers.size == 1:
            raise
        traceback.print_exc()
        workers.abort()
    return 0


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
