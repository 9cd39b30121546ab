"""Damaged, odd and malicious inputs of the converter: each is converted, or refused in one line; never a traceback.

    python -m tests.campaigns.convert_faults [--every N] [--seed S]

Odd JSON and YAML values in every file that is read, deep nesting, and flipped bytes. What a format can detect (gzip,
xz, zip members, safetensors headers) must be refused: if it is converted, it must be to the very weights.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import lzma
import random
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from megarlhf.checkpoint import pickles
from megarlhf.convert import convert, torch_dist
from megarlhf.convert.__main__ import main as program
from megarlhf.convert.certificate import FILE
from tests.convert.models import save

ODD = (None, True, 0, -1, 10**30, 1e308, "x", "", [], {}, [[]], [None], {"a": {}}, {"a": None}, "9" * 400, [1, "x"])
SECONDS = 60  # for an answer, on a busy machine


def places(value: Any, depth: int = 3) -> Iterator[tuple]:
    """The paths to all values in nested dictionaries and lists; of long ones a few."""
    yield ()
    if depth and isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys[:40]:
            yield from ((key, *rest) for rest in places(value[key], depth - 1))


def with_value(content: Any, place: tuple, value: Any) -> Any:
    if not place:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


class Originals:
    """One sound source of each kind, tiny."""

    def __init__(self, root: Path):
        self.root = root
        self.hf = save("llama", root / "hf")
        self.sharded = save("llama", root / "sharded", max_shard_size="20KB")
        convert.hf2megatron(self.hf, root / "ours")
        self.ours = root / "ours"
        self.lm, self.nemo = root / "lm", root / "nemo"
        self._foreign()

    def _foreign(self) -> None:
        """The same weights as NeMo and Megatron-LM keep them, in files of one rank and as torch_dist."""
        reader = torch_dist.Reader(self.ours / "actor", None)
        weights = {name: reader.read(name) for name in reader.specs}
        arguments = dict(
            num_layers=3, hidden_size=32, ffn_hidden_size=44, num_attention_heads=4, num_query_groups=2,
            max_position_embeddings=64, make_vocab_size_divisible_by=1, init_method_std=0.02,
        )  # fmt: skip
        (self.lm / "mp_rank_00").mkdir(parents=True)
        spoken = dict(
            **arguments, group_query_attention=True, swiglu=True, add_bias_linear=False, normalization="RMSNorm",
            untie_embeddings_and_output_weights=True, position_embedding_type="rope", vocab_size=61, norm_epsilon=1e-6,
        )  # fmt: skip
        state = {"args": argparse.Namespace(**spoken), "checkpoint_version": 3.0, "model": weights}
        torch.save(state, self.lm / "mp_rank_00" / "model_optim_rng.pt")
        self.nemo.mkdir()
        config = dict(
            **arguments, encoder_seq_length=64, activation="fast-swiglu", bias=False, normalization="rmsnorm",
            share_embeddings_and_output_weights=False, position_embedding_type="rope", layernorm_epsilon=1e-6,
            mcore_gpt=True, tokenizer={"library": "huggingface", "type": "none"},
        )  # fmt: skip
        (self.nemo / "model_config.yaml").write_text(yaml.safe_dump(config))
        torch.save({f"model.{name}": tensor for name, tensor in weights.items()}, self.nemo / "model_weights.ckpt")


def flips(data: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(changed)


def packed(directory: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(directory.iterdir()):
            archive.add(path, f"./{path.name}")
    return out.getvalue()


def sparse(size: int) -> bytes:
    """A tar of 2 KB whose only member says that it has `size` bytes, all holes (GNU's old format)."""
    header = tarfile.TarInfo("model_weights.ckpt").tobuf(tarfile.GNU_FORMAT)
    number = b"\x80" + size.to_bytes(11, "big")
    header = bytearray(header)
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[124:136] = b"%011o\x00" % 0
    header[386:398], header[398:410] = number, b"%011o\x00" % 0
    header[483:495] = number
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header) + bytes(1024)


def faults(originals: Originals, seed: int) -> Iterator[tuple[str, str, str, Callable[[Path], None], bool]]:
    """(label, command, source, change of a copy of it, whether accepting it means the very weights)."""
    rng = random.Random(seed)

    def odd(command: str, source: str, name: str, count: int) -> Iterator:
        file = originals.root / source / name
        load, dump = (yaml.safe_load, yaml.safe_dump) if name.endswith("yaml") else (json.loads, json.dumps)
        content = load(file.read_text())
        every = [(place, value) for place in places(content) for value in ODD]
        for place, value in rng.sample(every, min(count, len(every))):
            text = dump(with_value(content, place, value))
            label = f"{name} {'.'.join(map(str, place))} = {str(value)[:20]}"
            yield label, command, source, lambda d, text=text: (d / name).write_text(text), False
        for label, text in (
            ("deep", "[" * 100_000), ("deep object", '{"a":' * 100_000), ("not UTF-8", b"\xff\xfe{"), ("empty", ""),
            ("NaN", '{"a": NaN}'), ("half", dump(content)[: len(dump(content)) // 2]),
        ):  # fmt: skip
            content_ = text if isinstance(text, bytes) else text.encode()
            yield f"{name} {label}", command, source, lambda d, c=content_: (d / name).write_bytes(c), False

    yield from odd("hf2megatron", "hf", "config.json", 80)
    yield from odd("hf2megatron", "hf", "tokenizer.json", 60)
    yield from odd("hf2megatron", "hf", "tokenizer_config.json", 10)
    yield from odd("hf2megatron", "hf", "generation_config.json", 5)
    yield from odd("hf2megatron", "sharded", "model.safetensors.index.json", 40)
    yield from odd("nemo2megatron", "nemo", "model_config.yaml", 80)
    yield from odd("megatron2hf", "ours", "actor/hf_config.json", 30)
    yield from odd("megatron2hf", "ours", "tokenizer/tokenizer.json", 20)
    yield from odd("inspect", "hf", "config.json", 20)
    yield from odd("verify", "ours", FILE, 40)

    arguments = vars(pickles.read(originals.lm / "mp_rank_00" / "model_optim_rng.pt", foreign=True)["args"])
    every = [(key, value) for key in arguments for value in ODD]
    for key, value in rng.sample(every, 60):

        def spoil(directory: Path, key=key, value=value) -> None:
            file = directory / "mp_rank_00" / "model_optim_rng.pt"
            state = torch.load(file, weights_only=False)
            setattr(state["args"], key, value)
            torch.save(state, file)

        yield f"args.{key} = {str(value)[:20]}", "megatron2megatron", "lm", spoil, False

    def whole(name: str, data: bytes) -> Callable[[Path], None]:
        return lambda directory: (directory / name).write_bytes(data)

    header = (originals.hf / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(header[:8], "little")
    for data in flips(header[:length], 60, rng):  # a name, a shape or an offset; the bytes of tensors have no checksum
        change = whole("model.safetensors", data + header[length:])
        yield "safetensors header", "hf2megatron", "hf", change, True
    zipped = (originals.lm / "mp_rank_00" / "model_optim_rng.pt").read_bytes()
    for data in flips(zipped, 60, rng):
        yield "zip", "megatron2megatron", "lm", whole("mp_rank_00/model_optim_rng.pt", data), True
    archive = packed(originals.nemo)
    for kind, pack in (("gzip", gzip.compress), ("xz", lzma.compress)):
        for data in flips(pack(archive), 25, rng):
            yield kind, "nemo2megatron", "nemo", whole("a.nemo", data), True
        yield f"{kind}, cut", "nemo2megatron", "nemo", whole("a.nemo", pack(archive)[:-9]), True
    for size in (3_000_000_000, 10**15):
        yield "sparse", "nemo2megatron", "nemo", whole("a.nemo", sparse(size)), False
    yield "bomb", "nemo2megatron", "nemo", whole("a.nemo", gzip.compress(archive + bytes(200_000_000))), False


class Slow(Exception):
    pass


def judge(originals: Originals, command: str, source: str, change: Callable[[Path], None], same: bool) -> tuple:
    """(verdict, what was said)."""
    with tempfile.TemporaryDirectory(dir=originals.root.parent) as work:
        copied, target = Path(work, source), Path(work, "target")
        shutil.copytree(originals.root / source, copied)
        change(copied)
        given = copied / "a.nemo" if (copied / "a.nemo").exists() else copied
        words = [command, str(given)]
        words += [] if command == "inspect" else [str(target)]
        if command == "verify":
            words = [command, str(originals.hf), str(copied)]
        out, said, start = io.StringIO(), io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
                status = program(words)
        except Exception as error:
            return "TRACEBACK", f"{type(error).__name__}: {error}"
        left = {path.name for path in Path(work).iterdir()} - {source, "target"}
        if left:
            return "LEFT BEHIND", str(left)
        if time.monotonic() - start > SECONDS:
            return "SLOW", f"{time.monotonic() - start:.0f} s"
        if status == 2:
            lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
            one = len(lines) == 1 and said.getvalue().endswith(lines[0] + "\n")
            return ("refused" if one else "NOT ONE LINE"), said.getvalue()
        if same:
            written, sound = (json.loads((d / FILE).read_text())["target"] for d in (target, originals.ours))
            if written != sound:
                return "OTHER WEIGHTS", ""
        return "converted", ""


def run(root: Path, every: int, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """(command, label, verdict, what was said) of every `every`-th fault."""
    originals = Originals(root / "originals")
    for number, (label, command, source, change, same) in enumerate(faults(originals, seed)):
        if number % every == 0:
            yield (command, label, *judge(originals, command, source, change, same))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th fault")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which places and bytes are hit")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as root:
        for command, label, verdict, said in run(Path(root), options.every, options.seed):
            counts[command, verdict] += 1
            if verdict.isupper():
                print(f"{command} {label}: {verdict} {said.strip()[:300]}", flush=True)
    verdicts = sorted({verdict for _, verdict in counts})
    print(f"{'':20}" + "".join(f"{verdict:>16}" for verdict in verdicts))
    for command in sorted({command for command, _ in counts}):
        print(f"{command:20}" + "".join(f"{counts[command, verdict]:16}" for verdict in verdicts))
    failed = sum(count for (_, verdict), count in counts.items() if verdict.isupper())
    print(f"{counts.total() - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
