"""What reading the data costs at a start: seconds and memory of a rank, with 7,000, 56,000 and a million examples.

    python -m bench.data [--quick] [--examples N ...] [--plain] [--instant] [--ranks 2] [--old DIR] [--json FILE]
        [--directory DIR]

Prompts and responses of some 150 tokens (GSM8K beside the checkout, otherwise sentences made here) as JSONL, read as
`megarlhf sft` reads them, plain and packed into rows of 1024 tokens; each measurement in fresh processes, imports and
tokenizer not counted. `first`: the first start, in which so many ranks tokenize together; `again`: a later start of one
rank, as at a requeue, with twenty batches. Memory is what the process has for itself (RssAnon) beyond what it had
before, at its largest; pages of the mapped files, which the ranks of a node share, are a column of their own. `old` is
the megarlhf of another checkout, DIR, in which every rank tokenizes everything at every start; packed, it is measured
up to 56,000 examples, because its time grows with their square. `--instant` takes a stand-in for the tokenizer that
gives an id for every third byte: what is left is the cost of everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | {"TOKENIZERS_PARALLELISM": "false"}
SIZES = 7_000, 56_000, 1_000_000
LARGEST_OLD_PACKED = 56_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="7,000 and 56,000 examples, packed alone")
    parser.add_argument("--examples", type=int, nargs="+", metavar="N", help="so many in the place of the usual sizes")
    parser.add_argument("--plain", action="store_true", help="not packed")
    parser.add_argument("--instant", action="store_true", help="with a tokenizer that takes no time")
    parser.add_argument("--ranks", type=int, default=2, help="that tokenize together at the first start")
    parser.add_argument("--old", type=Path, metavar="DIR", help="another checkout of this project, to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--directory", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one measurement, in a process of its own
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(**json.loads(arguments.child))))
        return
    figures = []
    print(f"{'examples':>9} {'':7}{'start':8}{'seconds':>9}{'MB own':>9}{'MB files':>10}{'tokenized':>11}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        train_tokenizer(directory / "tokenizer")
        for size in arguments.examples or (SIZES[:2] if arguments.quick else SIZES):
            path = write(directory / f"{size}.jsonl", size)
            for packing in [False] * (not arguments.quick) + [True] * (not arguments.plain):
                given = {"path": str(path), "tokenizer": str(directory / "tokenizer"), "packing": packing,
                         "instant": arguments.instant}  # fmt: skip
                cached = {**given, "cache": str(directory / "cache")}
                kinds = {"first": (ROOT, cached, arguments.ranks), "again": (ROOT, cached, 1)}
                if arguments.old and (not packing or size <= LARGEST_OLD_PACKED):
                    kinds["old"] = arguments.old.resolve(), given, 1
                for kind, (root, options, ranks) in kinds.items():
                    runs = in_processes(root, options, ranks)
                    figures.append({"examples": size, "packing": packing, "start": kind, "ranks": runs})
                    report(figures[-1])
                    if arguments.json:
                        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def lines() -> list[tuple[str, str]]:
    if GSM8K.is_file():
        rows = map(json.loads, GSM8K.read_text().splitlines())
        return [(row["question"], row["answer"]) for row in rows]
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 9))) for _ in range(3000)]
    return [(sentence(draw, words, 45), sentence(draw, words, 50)) for _ in range(7000)]


def sentence(draw: random.Random, words: list[str], mean: int) -> str:
    return " ".join(draw.choices(words, k=max(5, round(draw.gauss(mean, mean / 3)))))


def train_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator((text for pair in lines() for text in pair), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(directory)


def write(path: Path, size: int) -> Path:
    """So many examples, each with a number of its own."""
    found = lines()
    with path.open("w") as file:
        for number in range(size):
            prompt, response = found[number % len(found)]
            file.write(json.dumps({"prompt": f"{number}. {prompt}", "response": f" {response}"}) + "\n")
    return path


def in_processes(root: Path, options: dict, ranks: int) -> list[dict]:
    """What each of so many ranks measures; they start together."""
    start = time.time() + 15 if ranks > 1 else None  # after the imports
    command = [sys.executable, str(ROOT / "bench" / "data.py"), "--child", json.dumps({**options, "start": start})]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(root)}
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    found = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{' '.join(command)} failed")
    return [json.loads(text.splitlines()[-1]) for text in found]


def measure(
    path: str, tokenizer: str, packing: bool, instant: bool, cache: str | None = None, start: float | None = None
) -> dict:
    """{"seconds", "own" and "files" in bytes, "tokenized" lines, "rows"} of a start."""
    from megarlhf.data.loader import Loader
    from megarlhf.data.sft import SFTDataConfig, load_sft
    from megarlhf.data.tokenizer import load_tokenizer

    loaded, config = load_tokenizer(tokenizer), SFTDataConfig(train=path, packing=packing)
    loaded.encode("what is loaded with the first text")
    if instant:
        loaded.encode = lambda text: [*text.encode()[::3]]
    options = {}
    if cache is not None:
        from megarlhf.data.cache import Cache

        options["cache"] = Cache(cache)
    if start is not None:
        time.sleep(max(0.0, start - time.time()))
    before, largest, ended = memory(), [0, 0], threading.Event()

    def watch() -> None:
        while True:
            largest[:] = map(max, largest, memory())
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    data, _ = load_sft(path, loaded, config, **options)
    loader = Loader(data, global_batch=64, seed=1)
    loader.batch(0)
    seconds = time.perf_counter() - began
    for step in range(1, 20):
        loader.batch(step)
    ended.set()
    thread.join()
    own, files = (most - base for most, base in zip(largest, before, strict=True))
    tokenized = options["cache"].converted if options else None
    return {"seconds": seconds, "own": own, "files": files, "tokenized": tokenized, "rows": len(data)}


def memory() -> list[int]:
    """Bytes of the process's own memory and of mapped files."""
    values = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return [int(values[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]


def report(figure: dict) -> None:
    for run in figure["ranks"]:
        tokenized = figure["examples"] if run["tokenized"] is None else run["tokenized"]
        packed = "packed" if figure["packing"] else ""
        print(
            f"{figure['examples']:>9,} {packed:7}{figure['start']:8}{run['seconds']:>9.2f}"
            f"{run['own'] / 1e6:>9.1f}{run['files'] / 1e6:>10.1f}{tokenized:>11,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
