"""Common functions of the examples: a stage of the pipeline on 2 CPU ranks, JSONL files, metrics of a run."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments(doc: str, out: str, files: tuple[str, ...] = ()) -> argparse.Namespace:
    """Read the command line `DIRECTORY [--out RUNS] [--seed N]`; without `files` there is no DIRECTORY. Checks that it
    has `files`; empties `out`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if files:
        parser.add_argument("data", type=Path, help=f"directory with {' and '.join(files)}")
    parser.add_argument("--out", type=Path, default=ROOT / out, help=f"for all runs, overwritten; default {out}")
    parser.add_argument("--seed", type=int, default=0, help="of every stage's data order, new heads and sampling")
    args = parser.parse_args()
    for name in files:
        if not (args.data / name).is_file():
            sys.exit(f"{args.data / name}: not found; give the directory that has {' and '.join(files)}")
    args.out = args.out.resolve()
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / "tokenizer.model").exists():
        sys.exit(f"{args.out}: has files that no example wrote; give --out a new directory")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    return args


def stage(program: str, config: Path | None, directory: Path, *overrides: str) -> None:
    """`megarlhf program` on 2 CPU ranks in `directory`, to which the configuration's paths are relative. Exits if it
    fails."""
    given = [] if config is None else ["--config", str(config)]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "megarlhf", program, *given, *overrides,
    ]  # fmt: skip
    status = subprocess.run(command, cwd=directory, env=environment())
    if status.returncode:
        sys.exit(status.returncode)


def environment() -> dict[str, str]:
    """Of a rank: one thread, and this checkout's megarlhf."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def report(run: Path) -> None:
    """Run `megarlhf report` on a run."""
    status = subprocess.run([sys.executable, "-m", "megarlhf", "report", str(run)], cwd=ROOT)
    if status.returncode:
        sys.exit(status.returncode)


def write(path: Path, rows: Iterable[dict[str, str]]) -> int:
    """Write rows as JSONL. Returns their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read(path: Path, *keys: str) -> Iterator[dict]:
    """Read rows of JSONL; each must have `keys`."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                for key in keys:
                    row[key]
            except (ValueError, TypeError, KeyError):
                wanted = f" with {' and '.join(keys)}" if keys else ""
                sys.exit(f"{path}:{number}: not a JSON object{wanted}; give the data set's own file")
            yield row


def column(run: Path, name: str) -> list[float]:
    """A metric's values over a run, in the order of steps."""
    return [row[name] for row in read(run / "metrics.jsonl") if name in row]


def shuffled(items: Iterable, seed: int) -> list:
    """`items` in a random order, a function of `seed`."""
    items = list(items)
    random.Random(seed).shuffle(items)
    return items
