"""The tokenized data on disk: made once by all ranks together, memory-mapped by each, reused by every later start.

A directory that all nodes share, and that several runs may share, has

    files/NAME.json     what is known of a data file: its hash and where its parts begin, for its size and times
    KEY/                a finished table: an .npy file for each column, table.json with their checksums
    KEY.building/       the parts of a table that is being made, and who makes which (shares.py)
    KEY.*.unused        what is being removed (unused.py)

KEY is a hash of the content of the data files, of the tokenizer, of the options that decide the table, and of the code
that makes it. Nobody coordinates the ranks: each takes a part that nobody has, writes it under another name and renames
it, and so do the ranks of other jobs that want the same table. A finished directory appears by one rename. So a process
that is killed at any moment leaves parts that the next start uses, and never half of a table.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megarlhf import console
from megarlhf.config import UserError
from megarlhf.data import shares, sources, unused
from megarlhf.data.jsonl import Lines, Records
from megarlhf.data.shares import unique, write_atomically
from megarlhf.data.sources import Reader, Source, Span
from megarlhf.data.stored import BLOCK, META, DamagedPart, Writer, load_part, mapped, opened, save_part, saved_lines
from megarlhf.data.tables import Recipe, Table, read_part
from megarlhf.data.tokenizer import Tokenizer

SETTLED = 2.0  # seconds after its last change, a file's times tell whether it has changed again


class Cache:
    """The tables in a directory."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.converted = 0  # lines that this process has tokenized
        self.contents: dict[str, str] = {}  # a hash of the files behind each name that was read
        self.used: set[Path] = set()  # tables

    def table(self, source: Source, recipe: Recipe, tokenizer: Tokenizer, *, again: bool = False) -> Table:
        """The table of a source, whose columns are memory-mapped; made first if it is not there, together with all
        processes that ask for it meanwhile. Raises UserError if a file cannot be read, if the directory cannot be
        written, and for a damaged table, which is read `again` first."""
        sources.check_installed(source)
        indices = self._indices(source)
        digests = [index["digest"] for index in indices]
        self.contents[source.name] = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        key = _key(recipe, tokenizer, digests)
        final = self.directory / key
        starts = tuple(np.cumsum([0, *(index["lines"] for index in indices)]).tolist()[:-1])
        while not unused.touch(final):
            try:
                self._make(final, source, recipe, indices, starts)
            except OSError as error:
                raise UserError(
                    f"data_cache: {self.directory} cannot be written ({error.strerror or error}), and the tokenized "
                    f"{source.name} is not there yet; make room, or give another directory"
                )
        self.used.add(final)
        try:
            return opened(final, starts)
        except UserError:  # damaged, or it had another name for a moment (unused.py)
            if again:
                raise
            return self.table(source, recipe, tokenizer, again=True)

    def keep(self) -> None:
        """Say that the tables are still in use. Call it now and then: what no job has used for long is removed."""
        for table in self.used:
            unused.touch(table)

    # -------------------------------------------------------------------------------------------- the files

    def _indices(self, source: Source) -> list[dict[str, Any]]:
        """`sources.index` of each file, made or read by all ranks together."""
        found: dict[str, dict[str, Any]] = {}
        where = self.directory / "files"

        def known(path: str) -> bool:
            if path not in found and (content := _remembered(where / _name_of(path), path)) is not None:
                found[path] = content
            return path in found

        def make(path: str) -> None:
            state, now = _state(path), time.time()
            content = found[path] = {"state": state, **sources.index(path)}
            if state is not None and state == _state(path) and now - state[1] / 1e9 > SETTLED:
                write_atomically(where / _name_of(path), json.dumps(content).encode())

        try:
            where.mkdir(parents=True, exist_ok=True)
            shares.share(where, list(source.files), known, make, name=_name_of)
        except OSError:  # another's cache, which may only be read
            for path in source.files:
                if not known(path):
                    found[path] = {"state": _state(path), **sources.index(path)}
        return [found[path] for path in source.files]

    # -------------------------------------------------------------------------------------------- making a table

    def _make(
        self, final: Path, source: Source, recipe: Recipe, indices: list[dict[str, Any]], starts: tuple[int, ...]
    ) -> None:
        """Until `final` is there."""
        building = final.with_name(f"{final.name}.building")
        building.mkdir(parents=True, exist_ok=True)
        spans = [Span(number, *span) for number, index in enumerate(indices) for span in index["spans"]]
        names = [f"{number:06d}.npz" for number in range(len(spans))]
        readers: dict[int, Reader] = {}
        progress = Progress(source.name, len(spans))

        def there() -> bool:
            return (final / META).is_file()

        def make(name: str) -> None:
            span = spans[int(name.removesuffix(".npz"))]
            records = Records(source, span=span, starts=starts, readers=readers)
            part = read_part(recipe, records)
            path = source.files[span.file]
            if _state(path) != indices[span.file]["state"]:  # its hash is that of another content
                raise UserError(f"{path}: has changed while it was read; start again when it is complete")
            self.converted += records.num_lines
            save_part(part, building / name)

        def done(name: str) -> bool:
            return name in present or there() or (building / name).exists()

        present: set[str] = set()
        looked = 0.0

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > 1:  # there may be very many parts
                looked = time.monotonic()
                os.listdir(self.directory)  # makes a network file system refresh its cache
                with contextlib.suppress(FileNotFoundError):  # removed by the process that finished the table
                    present.update(os.listdir(building))
                progress.show(sum(name in present for name in names))

        while not there():
            building.mkdir(parents=True, exist_ok=True)
            try:
                shares.share(building, names, done, make, look=look)
                shares.share(
                    building, ["table"], lambda _: there(),
                    lambda _: self._join(building, final, recipe, names, starts), look=look,
                )  # fmt: skip
            except FileNotFoundError:  # another process has finished and removed the parts
                if not there():
                    time.sleep(0.1)
            except DamagedPart as error:
                error.path.unlink(missing_ok=True)
                present.clear()
        for reader in readers.values():
            reader.close()
        shutil.rmtree(building, ignore_errors=True)

    def _join(self, building: Path, final: Path, recipe: Recipe, names: list[str], starts: tuple[int, ...]) -> None:
        """Write the table of all parts. It appears under the name `final` when it is complete."""
        target = building / unique("table")
        target.mkdir()
        raw = target / "raw" if recipe.finish is not None else target
        raw.mkdir(exist_ok=True)
        counts, notes, columns = {}, {}, {}
        for name in names:
            meta, arrays = load_part(building / name)
            for column, values in arrays.items():
                if column not in columns:
                    columns[column] = Writer(raw / f"{column}.npy", values.dtype)
                columns[column].write(values)
            for count, value in meta["counts"].items():
                counts[count] = counts.get(count, 0) + value
            for note, value in meta["notes"].items():
                notes[note] = notes.get(note, Lines()) + saved_lines(value)
        if not names:  # an empty file: the columns are those of no line
            table = recipe.read(Records(Source("", ())))
            counts, notes = table.counts | {"lines": 0}, table.notes | {"bad": Lines()}
            columns = {name: Writer(raw / f"{name}.npy", values.dtype) for name, values in table.columns.items()}
        files = {name: writer.close() for name, writer in columns.items()}
        if recipe.finish is not None:
            table = Table({name: mapped(raw / f"{name}.npy") for name in files}, counts, notes, starts)
            files = {}
            for name, given in recipe.finish(table).items():
                writer = None
                for block in (given,) if isinstance(given, np.ndarray) else given:
                    writer = writer or Writer(target / f"{name}.npy", block.dtype)
                    for start in range(0, len(block), BLOCK):
                        writer.write(block[start : start + BLOCK])
                files[name] = writer.close()
            del table
            shutil.rmtree(raw)
        meta = {"files": files, "counts": counts, "notes": {name: [n.count, n.first] for name, n in notes.items()}}
        write_atomically(target / META, json.dumps(meta).encode())
        try:
            os.rename(target, final)
        except OSError:
            if not (final / META).is_file():
                raise
            shutil.rmtree(target, ignore_errors=True)  # another process was faster
            return
        shares.sync_directory(final.parent)
        unused.remove(final)


class Progress:
    """A line every ten seconds from the first rank, and none for what takes less."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.first = what, total, None
        self.started = self.said = time.monotonic()
        names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        self.speaks = all(os.environ.get(name, "0") == "0" for name in names)

    def show(self, done: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done
        if not self.speaks or now - self.said < 10:
            return
        self.said, made = now, done - self.first
        left = f", about {(self.total - done) * (now - self.started) / made:.0f} s left" if made else ""
        console.say(f"  tokenizing {self.what}: {done} of {self.total} parts{left}")


# ------------------------------------------------------------------------------------------------ keys


def _key(recipe: Recipe, tokenizer: Tokenizer, digests: list[str]) -> str:
    content = [recipe.kind, recipe.options, tokenizer.identity, digests, _code()]
    return f"{recipe.kind}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}"


@lru_cache(maxsize=1)
def _code() -> str:
    """A hash of what makes tables: this package's files, and the versions of the libraries that tokenize."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for name in ("transformers", "tokenizers", "sentencepiece", "jinja2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()


def _name_of(path: str) -> str:
    return f"{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]}.json"


def _state(path: str) -> list[int] | None:
    """What changes with a file: its size, the times of its content and of its entry, its number."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_size, max(found.st_mtime_ns, found.st_ctime_ns), found.st_mtime_ns, found.st_ino]


def _remembered(memo: Path, path: str) -> dict[str, Any] | None:
    try:
        content = json.loads(memo.read_bytes())
        return content if content["state"] == _state(path) and {"digest", "lines", "spans"} <= content.keys() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
