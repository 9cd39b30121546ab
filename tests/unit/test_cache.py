"""Tokenized data on disk, and the formats of data files: the same examples as from JSONL in memory, bit for bit."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf.config import UserError
from megarlhf.data import cache as cache_module
from megarlhf.data import shares, sources, stored, unused
from megarlhf.data.cache import Cache
from megarlhf.data.files import DataFile
from megarlhf.data.loader import Loader
from megarlhf.data.packing import first_fit
from megarlhf.data.preferences import PreferenceDataConfig, load_preferences
from megarlhf.data.prompts import PromptsConfig, load_prompts
from megarlhf.data.ratings import RatingDataConfig, load_ratings
from megarlhf.data.responses import Reading, load_responses
from megarlhf.data.rewarded import RewardedDataConfig, load_rewarded
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.data.steps import StepDataConfig, load_steps
from megarlhf.data.stored import META
from megarlhf.data.tables import Joined
from megarlhf.data.tokenizer import load_tokenizer
from tests.ranks import ENVIRONMENT, ROOT
from tests.unit.test_data import CHATML, save_hf

ROWS = 97


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("hf"), CHATML)


@pytest.fixture(scope="module")
def hf(hf_path):
    return load_tokenizer(hf_path)


@pytest.fixture
def small_parts(monkeypatch):
    """Some ten parts of these files."""
    monkeypatch.setattr(sources, "CHUNK", 2000)


def lines(count=ROWS, start=0):
    """Lines for every program; conversations among them, and prompts that come again."""
    found = []
    for number in range(start, start + count):
        prompt = f"Question {number % 23}:" + " sea" * (number % 23 * 7 % 11)
        row = {"prompt": prompt, "response": f" {number} shells" + " slow" * (number % 5), "label": number % 3 == 0,
               "reward": number / 7, "chosen": f" four {number}", "rejected": " five",
               "steps": ["The sea", f"is {number}"], "labels": [True, number % 2 == 0],
               "answer": {"value": number, "names": ["a", None]}}  # fmt: skip
        if number % 4 == 1:
            row["answer"]["note"] = "of some rows alone"
        if number % 10 == 3:
            row["prompt"] = [{"role": "user", "content": prompt}]
            row["response"] = [{"role": "assistant", "content": row["response"]}]
            del row["steps"]
        found.append(row)
    return found


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft(given, tokenizer, cache=None, **options):
    return load_sft(given, tokenizer, SFTDataConfig(train=given, **options), cache=cache)


PROGRAMS = {
    "sft": sft,
    "sft, packed": lambda given, tokenizer, cache: sft(given, tokenizer, cache, packing=True, max_length=150),
    "preferences": lambda given, tokenizer, cache: load_preferences(
        given, tokenizer, PreferenceDataConfig(train=given), cache=cache
    ),
    "ratings": lambda given, tokenizer, cache: load_ratings(given, tokenizer, RatingDataConfig(given), cache=cache),
    "rewarded": lambda given, tokenizer, cache: load_rewarded(given, tokenizer, RewardedDataConfig(given), cache=cache),
    "steps": lambda given, tokenizer, cache: load_steps(
        given, tokenizer, StepDataConfig(given, max_bad_fraction=0.2), cache=cache
    ),
    "prompts": lambda given, tokenizer, cache: load_prompts(tokenizer, PromptsConfig(given), cache=cache),
    "responses": lambda given, tokenizer, cache: (
        load_responses(given, tokenizer, Reading(), keep_records=True, cache=cache), None,
    ),
}  # fmt: skip


def values(data):
    """All that a data set holds, as plain values."""
    found = {}
    for field in fields(data):
        value = getattr(data, field.name)
        if isinstance(value, (np.ndarray, Joined)):
            found[field.name] = (str(value.dtype), np.asarray(value).tolist())
        elif field.name == "places":  # (number, file)
            pairs = [place.rpartition(":")[::-2] for place in value]
            found[field.name] = [(number.removeprefix("row "), file) for number, file in pairs]
        elif field.name == "tokens":
            found[field.name] = [ids.tolist() for ids in value]
        elif field.name in ("texts", "others", "whole"):
            found[field.name] = list(value)
        else:
            found[field.name] = value
    if hasattr(data, "records"):
        found["records"] = data.records(range(len(data)))
    return found


# -------------------------------------------------------------------------------------------------- formats


def written(rows, directory):
    """{format: name} of the rows in every format."""
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    found = {"jsonl": write(directory / "a.jsonl", rows)}
    with gzip.open(directory / "a.jsonl.gz", "wt") as file:
        file.write(Path(found["jsonl"]).read_text())
    found["gzip"] = str(directory / "a.jsonl.gz")
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, directory / "a.parquet", row_group_size=10)
    parquet.write_table(table, directory / "one-group.parquet", compression="gzip")
    found |= {"parquet": str(directory / "a.parquet"), "one row group": str(directory / "one-group.parquet")}
    with pyarrow.OSFile(str(directory / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    found["arrow"] = str(directory / "a.arrow")
    datasets.Dataset.from_list(rows).save_to_disk(directory / "saved", num_shards=3)
    found["datasets"] = str(directory / "saved")
    chosen = datasets.Dataset.from_list([*rows, *rows]).select(range(len(rows)))  # an index, which is saved as rows
    chosen.save_to_disk(directory / "chosen")
    found["a selection"] = str(directory / "chosen")
    for number in range(3):
        part = rows[number * 33 : (number + 1) * 33]
        with gzip.open(directory / f"shard-{number}.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)
    found["a pattern"] = str(directory / "shard-*.gz")
    return found


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """With texts alone, since a column of a table has one type."""
    return written([row for row in lines() if isinstance(row["prompt"], str)], tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_format_gives_the_same_examples(hf, formats, tmp_path, small_parts, program):
    given, load = formats, PROGRAMS[program]
    expected = values(load(given["jsonl"], hf, None)[0])
    cache = Cache(tmp_path / "cache")
    for kind, name in given.items():
        for where in (None, cache):
            found = values(load(name, hf, where)[0])
            places, wanted = found.pop("places", []), expected.get("places", [])
            if kind in ("a pattern", "datasets"):
                assert len({file for _, file in places}) in (0, 3)
            else:
                assert [number for number, _ in places] == [number for number, _ in wanted]
            assert found == {key: value for key, value in expected.items() if key != "places"}, (kind, where)
    assert cache.converted > 0


def test_conversations_of_tables_are_those_of_lines(hf, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    talk = [{"role": "user", "content": "The sea?"}, {"role": "assistant", "content": "It is slow.", "name": "a"}]
    rows = [{"messages": talk}, {"messages": [talk[0], {"role": "assistant", "content": "Four."}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")  # `name` is null in most
    found = values(sft(str(tmp_path / "a.parquet"), hf)[0])
    assert found == values(sft(write(tmp_path / "a.jsonl", rows), hf)[0])


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_a_cache_as_without(hf, tmp_path, small_parts, program):
    """Of two files with weights, some with conversations."""
    load, cache = PROGRAMS[program], Cache(tmp_path / "cache")
    given = write(tmp_path / "a.jsonl", lines(30))
    if program != "responses":
        given = (DataFile(given, 2.0), DataFile(write(tmp_path / "b.jsonl", lines(40, start=30)), 0.5))
    else:
        write(tmp_path / "a.jsonl", [row for row in lines(30) if isinstance(row["prompt"], str)])
    plain, report = load(given, hf, None)
    for _ in range(2):
        kept, again = load(given, hf, cache)
        assert values(kept) == values(plain)
        assert report is None or again.summary() == report.summary()
    if hasattr(plain, "lengths") and program != "preferences":
        loaders = [Loader(data, global_batch=6, seed=3) for data in (plain, kept)]
        for step in range(25):  # into the third epoch
            one, other = (loader.batch(step) for loader in loaders)
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.mask, other.mask)
            assert torch.equal(one.segments, other.segments)


BROKEN = {
    "gzip": ":3: no key 'response'", "parquet": "a.parquet:row 3: no key 'response'", "datasets": "arrow:row 3: no key"
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("cached", [False, True])
def test_errors_name_the_line_or_row(hf, tmp_path, small_parts, kind, cached):
    rows = [row for row in lines() if isinstance(row["prompt"], str)]
    del rows[2]["response"]
    name = written(rows, tmp_path)[kind]
    cache = Cache(tmp_path / "cache") if cached else None
    with pytest.raises(UserError) as caught:
        sft(name, hf, cache, max_bad_fraction=0.001)
    assert BROKEN[kind] in str(caught.value) and f"1 of {len(rows)} lines are malformed" in str(caught.value)
    _, report = sft(name, hf, cache, max_bad_fraction=0.5)
    assert report.bad.count == 1 and BROKEN[kind] in report.summary()


def test_names_that_stand_for_no_data(hf, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "response": " b"}]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(rows[0]).encode() * 50)[:-9])
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(100))
    for name, message in {
        "x-*.jsonl": "x-*.jsonl: no file has a name of this pattern",
        "splits": f"splits: holds several splits (train); name one of them, such as {tmp_path / 'splits' / 'train'}",
        "broken": "state.json: is not that of a data set",
        "cut.gz": "cut.gz: is a damaged gzip file",
        "a.parquet": "a.parquet: is a damaged or unknown Parquet file",
        "": f"cannot read the examples (a directory); give a file, a pattern such as {tmp_path}/*.jsonl, or",
    }.items():
        for cache in (None, Cache(tmp_path / "cache")):
            with pytest.raises(UserError) as caught:
                sft(str(tmp_path / name), hf, cache)
            assert message in str(caught.value)
    with pytest.raises(UserError, match=r"a.jsonl is named twice, by .*a.jsonl and .*\*.jsonl; name it once"):
        sft((str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")), hf)
    assert len(sft(str(tmp_path / "splits" / "train"), hf)[0]) == 1


@pytest.mark.parametrize("cached", [False, True])
def test_a_value_that_python_does_not_have_is_of_its_row_alone(hf, tmp_path, small_parts, cached):
    """A text that is not UTF-8, and a time after the year 9999: other programs write such tables."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    starts = b"".join(n.to_bytes(4, "little") for n in (0, 1, 2, 3, 4))
    table = {
        "prompt": pyarrow.StringArray.from_buffers(4, pyarrow.py_buffer(starts), pyarrow.py_buffer(b"a\xffcd")),
        "response": [" b"] * 4,
        "when": pyarrow.array([0, 0, 2**60, None], pyarrow.timestamp("us")),
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    cache = Cache(tmp_path / "cache") if cached else None
    data, report = sft(str(tmp_path / "a.parquet"), hf, cache, max_bad_fraction=0.5)
    assert len(data) == 2 and report.bad.count == 2
    first, second = report.bad.first
    assert "a.parquet:row 2: 'prompt' cannot be read (" in first
    assert "a.parquet:row 3: 'when' cannot be read (" in second


def test_a_file_of_one_long_line_is_not_read_into_memory(tmp_path, small_parts, monkeypatch):
    """The index of the cache stops at it, as a reader does."""
    monkeypatch.setattr(sources, "LONGEST", 5000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b'{"text": "b"}\n' + bytes(100_000))
    with pytest.raises(UserError, match="a.jsonl:3: a line of more than 5000 bytes; give a JSONL file"):
        sources.index(str(path))
    path.write_bytes(b"\xfd7zXZ" + bytes(100))
    with pytest.raises(UserError, match="a.jsonl: is compressed by xz, not JSONL"):
        sources.index(str(path))
    path.write_bytes(b'{"text": "' + b"a" * 4000 + b'"}\n{"text": "b"}')
    assert sources.index(str(path))["spans"] == [[1, 1, 0], [2, 1, 4013]]


def test_prompts_of_ratings_are_numbered_as_they_come(hf, tmp_path, small_parts):
    """Also across parts: of a run that began before there was a cache."""
    for cache in (None, Cache(tmp_path / "cache")):
        data, _ = PROGRAMS["ratings"](write(tmp_path / "a.jsonl", lines()), hf, cache)
        known = {}
        expected = [
            known.setdefault(tuple(data.row(row)[0][: data.starts[row]]), len(known)) for row in range(len(data))
        ]
        assert data.prompts.tolist() == expected and 10 < len(known) < ROWS


def test_more_files_than_may_be_open(hf, tmp_path):
    for number in range(60):
        with gzip.open(tmp_path / f"{number:02d}.gz", "wt") as file:
            file.write(json.dumps({"text": f"The sea {number}"}) + "\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, limits[1]))
    try:
        for cache in (None, Cache(tmp_path / "cache")):
            data, _ = sft(str(tmp_path / "*.gz"), hf, cache)
            assert [hf.decode(data.row(row)[0][1:-1]) for row in (7, 59)] == ["The sea 7", "The sea 59"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -------------------------------------------------------------------------------------------------- the cache


def test_what_is_there_is_not_made_again(hf, tmp_path, small_parts):
    path = Path(write(tmp_path / "a.jsonl", lines()))

    def converted(**options):
        cache = Cache(tmp_path / "cache")
        sft(str(path), hf, cache, **options)
        return cache.converted

    assert converted() == ROWS and converted() == 0  # as at a requeue
    os.utime(path, (1, 1))
    moved = path.rename(tmp_path / "moved.jsonl")
    path = moved
    assert converted() == 0  # the content decides
    assert converted(max_bad_fraction=0.5) == 0  # which does not change what the lines become
    assert converted(max_length=20) == ROWS == converted(packing=True) == converted(loss_on="all")
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"shells", b"wells!"))  # as long as before, and as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert converted() == ROWS
    path.write_bytes(content)
    assert converted() == 0


def test_another_tokenizer_is_another_table(hf, tmp_path):
    path = write(tmp_path / "a.jsonl", lines(10))
    other = load_tokenizer(save_hf(tmp_path / "other", CHATML.replace("im_start", "s")))
    cache = Cache(tmp_path / "cache")
    for tokenizer in (hf, other):
        assert values(sft(path, tokenizer, cache)[0]) == values(sft(path, tokenizer)[0])
    assert cache.converted == 20


def test_the_first_lines_of_a_kind_are_named_whoever_found_them(hf, tmp_path, small_parts):
    rows = lines()
    for number in (20, 40, 60, 80):
        rows[number] = {"prompt": "The sea " * 2000, "response": " slow"}
    path = write(tmp_path / "a.jsonl", rows)
    cached, plain = (sft(path, hf, cache)[1] for cache in (Cache(tmp_path / "cache"), None))
    assert cached == plain and cached.dropped.count == 4
    assert cached.dropped.first == (f"{path}:21", f"{path}:41", f"{path}:61")


def test_an_empty_file(hf, tmp_path):
    (tmp_path / "a.jsonl").touch()
    for options in ({}, {"packing": True}):
        for cache in (None, Cache(tmp_path / "cache")):
            with pytest.raises(UserError, match="a.jsonl: 0 examples.*no example is left"):
                sft(str(tmp_path / "a.jsonl"), hf, cache, **options)


def build(path, tokenizer, directory, barrier=True):
    """(lines that this rank tokenized, what it reads)"""
    import torch.distributed as dist

    sources.CHUNK = 500
    tokenizer = load_tokenizer(tokenizer)
    cache = Cache(directory)
    if barrier:
        dist.barrier()
    data, report = sft(path, tokenizer, cache, packing=True, max_length=120)
    sources.CHUNK = 2**20
    return cache.converted, values(data), report.summary()


def test_two_ranks_make_it_together(ranks, hf, hf_path, tmp_path):
    path = write(tmp_path / "a.jsonl", lines(400))
    (one, first, report), (other, second, same) = ranks.run(2, build, path, hf_path, tmp_path / "cache")
    assert one + other == 400 and min(one, other) > 0
    plain, expected = sft(path, hf, packing=True, max_length=120)
    assert first == second == values(plain) and report == same == expected.summary()
    assert [entry.name[:4] for entry in (tmp_path / "cache").iterdir() if entry.name != "files"] == ["sft-"]
    assert [count for count, *_ in ranks.run(2, build, path, hf_path, tmp_path / "cache")] == [0, 0]


def test_each_rank_begins_with_parts_of_its_own(tmp_path, monkeypatch):
    """And asks the file system about a part twice, not once more for each other rank."""
    tasks, asked = [f"{number}.npz" for number in range(8)], []
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for given, first in (({}, 0), ({"RANK": "3", "WORLD_SIZE": "4"}, 6), ({"RANK": "x", "WORLD_SIZE": "0"}, 0),
                         ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, 1)):  # fmt: skip
        made, directory = [], tmp_path / str(len(asked))
        directory.mkdir()
        with monkeypatch.context() as context:
            for name, value in given.items():
                context.setenv(name, value)
            shares.share(directory, tasks, lambda task, made=made: asked.append(task) or task in made, made.append)
        assert made == [*tasks[first:], *tasks[:first]] and not list(directory.iterdir())
    assert len(asked) == 4 * 2 * len(tasks)


KILLED = """
import os, signal, sys
from megarlhf.data import sources
from megarlhf.data.cache import Cache
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.data.tokenizer import load_tokenizer
sources.CHUNK = 2000
tokenizer = load_tokenizer(sys.argv[1])
encode, calls = tokenizer.encode, [0]
def counted(text):
    calls[0] += 1
    if calls[0] == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(text)
tokenizer.encode = counted
load_sft(sys.argv[2], tokenizer, SFTDataConfig(train=sys.argv[2]), cache=Cache(sys.argv[3]))
"""


def test_a_claim_without_a_sign_of_life_is_taken_over(hf, tmp_path, small_parts, monkeypatch):
    """Of a process on another machine."""
    path, cache = write(tmp_path / "a.jsonl", lines()), Cache(tmp_path / "cache")
    make = shares._claim

    def abandoned(task):
        if not (claim := make(task)).exists() and claim.name.startswith("000002") and not left:
            claim.write_text("elsewhere 1")
            os.utime(claim, (0, 0))
            left.append(claim)
        return claim

    left = []
    monkeypatch.setattr(shares, "_claim", abandoned)
    assert values(sft(path, hf, cache)[0]) == values(sft(path, hf)[0])
    assert left and not left[0].exists() and cache.converted == ROWS


def test_what_a_killed_builder_has_made_is_used(hf, hf_path, tmp_path, small_parts, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", lines()), Cache(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(hf_path), path, str(cache.directory)], cwd=ROOT, capture_output=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    (building,) = cache.directory.glob("*.building")
    made, claims = [*building.glob("??????.npz")], [*building.glob("*.claim")]
    assert made and len(claims) == 1
    made[0].write_bytes(made[0].read_bytes()[:-200])  # and one of the parts was lost in a crash
    monkeypatch.setattr(shares, "ABANDONED", 1e9)  # on this machine it is seen at once
    assert values(sft(path, hf, cache)[0]) == values(sft(path, hf)[0])
    assert 0 < cache.converted < ROWS and not building.exists()


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[-5] ^= 4
    else:
        content = content[:-7]
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["a bit", "cut"])
@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "lengths.npy", META])
def test_a_damaged_table_is_refused_by_name(hf, tmp_path, name, how):
    path, cache = write(tmp_path / "a.jsonl", lines(20)), Cache(tmp_path / "cache")
    sft(path, hf, cache)
    (table,) = cache.directory.glob("sft-*")
    damaged(table / name, how)
    if (name, how) == (META, "a bit"):
        (table / name).write_text("[1]")
    with pytest.raises(UserError) as caught:
        sft(path, hf, cache)
    assert str(caught.value).startswith(f"{table / name}: the tokenized data are damaged (")
    assert str(caught.value).endswith(f"remove {table}, and they are made again")


def test_a_directory_that_cannot_be_written(hf, tmp_path):
    path = write(tmp_path / "a.jsonl", lines(10))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^data_cache: .*file/x cannot be written \(Not a directory\).* give another"):
        sft(path, hf, Cache(tmp_path / "file" / "x"))


def test_nothing_is_copied_into_memory(hf, tmp_path):
    """What a rank holds of a data set: arrays over its rows, and views of files."""
    given = tuple(write(tmp_path / f"{number}.jsonl", lines(30, start=30 * number)) for number in range(2))
    data, _ = sft(given, hf, Cache(tmp_path / "cache"))
    for values_ in (data.tokens, data.mask):
        assert isinstance(values_, Joined) and not any(part.flags.owndata for part in values_.parts)
        assert not any(part.flags.writeable for part in values_.parts)
    for row in (3, 29, 30, 55, 59):
        assert np.shares_memory(data.row(row)[0], data.tokens.parts[row // 30])


def test_pages_that_were_read_do_not_stay(hf, tmp_path):
    """Of a table of several MB, all of which is read."""
    words = [{"text": "sea " * 2000}] * 500
    data, _ = sft(write(tmp_path / "a.jsonl", words), hf, Cache(tmp_path / "cache"), max_length=2048)
    own = {str(path) for path in (tmp_path / "cache").glob("sft-*/tokens.npy")}

    def resident():
        """KiB of the table's tokens in this process's memory"""
        found, here = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if not line.split()[0].endswith(":"):
                here = line.split()[-1] in own
            elif here and line.startswith("Rss:"):
                found += int(line.split()[1])
        return found

    loader = Loader(data, global_batch=4, seed=1)
    total = int(data.tokens.sum())
    assert resident() > 3000  # the sum has read them all
    loader.batch(0)
    assert resident() < 1000 and int(data.tokens.sum()) == total


def test_packing_of_many_is_first_fit():
    generator = np.random.RandomState(0)
    for size, room, largest in ((0, 8, 8), (1, 8, 8), (2, 8, 8), (400, 64, 64), (400, 1000, 40), (300, 64, 33)):
        lengths = generator.randint(1, largest + 1, size)
        space, members = np.full(size + 1, room), [[] for _ in range(size + 1)]
        for example, length in enumerate(lengths):  # the definition
            row = int(np.argmax(space >= length))
            members[row].append(example)
            space[row] -= length
        order, counts = first_fit(lengths, room)
        assert counts.tolist() == [len(row) for row in members if row]
        assert order.tolist() == [example for row in members for example in row]


def test_a_file_that_changes_while_it_is_read_is_refused(hf, tmp_path, small_parts):
    """Its lines would stand under the hash of others."""
    path, encode, calls = Path(write(tmp_path / "a.jsonl", lines())), hf.encode, []

    class Changing(type(hf)):
        def __init__(self):
            vars(self).update(vars(hf))

        def encode(self, text):
            calls.append(text)
            if len(calls) == 100:
                with path.open("a") as file:
                    file.write(json.dumps(lines(1)[0]) + "\n")
            return encode(text)

    cache = Cache(tmp_path / "cache")
    with pytest.raises(UserError, match="a.jsonl: has changed while it was read; start again when it is complete"):
        sft(str(path), Changing(), cache)
    assert not [*cache.directory.glob("sft-*/table.json")]
    assert values(sft(str(path), hf, cache)[0]) == values(sft(str(path), hf)[0])


# -------------------------------------------------------------------------------------------------- removal


def age(table, days=unused.DAYS + 1):
    """As if it was made and used so long ago."""
    for path in (*table.iterdir(), table):
        os.utime(path, (time.time() - 86400 * days,) * 2)


def test_tables_that_no_job_has_used_for_long_are_removed(hf, tmp_path, capsys):
    """By whoever writes another one; with parts of unfinished ones, and what an interrupted removal has left. Nothing
    else in the directory goes. A process that has mapped one goes on reading it."""
    path, cache = write(tmp_path / "a.jsonl", lines(10)), Cache(tmp_path / "cache")
    data, _ = sft(path, hf, cache)
    (old,) = cache.directory.glob("sft-*")
    sft(path, hf, Cache(cache.directory), max_length=20)
    (recent,) = set(cache.directory.glob("sft-*")) - {old}
    key = "0" * 32
    gone = [cache.directory / name for name in (f"sft-{key}.building", f"sft-{key}.node.1.2.unused")]
    stay = [cache.directory / name for name in ("sft-old", f"{key}", f"sft-{key}.mine", f"prompts-{key}.building")]
    for directory in (*gone, *stay):
        directory.mkdir()
        (directory / "file").touch()
        age(directory)
    os.utime(stay[-1])  # a part was made
    age(old), age(recent, unused.DAYS - 1), age(cache.directory / "files")
    sft(path, hf, Cache(cache.directory))  # used again
    sft(path, hf, Cache(cache.directory), max_length=30)
    assert old.is_dir() and recent.is_dir() and all(p.is_dir() for p in stay) and not any(p.exists() for p in gone)
    said = capsys.readouterr().err
    assert f"{gone[0].name}, {gone[1].name} not used for 30 days, removed" in said

    age(old)
    cache.keep()  # as at a checkpoint
    sft(path, hf, Cache(cache.directory), max_length=40)
    assert old.is_dir()
    age(old)
    expected = values(data)
    sft(path, hf, Cache(cache.directory), max_length=50)
    assert not old.exists() and values(data) == expected and (cache.directory / "files").is_dir()
    again = Cache(cache.directory)
    assert values(sft(path, hf, again)[0]) == expected and again.converted == 10


def test_a_table_that_cannot_be_removed_stays_without_a_word(hf, tmp_path, capsys, monkeypatch):
    """It is another user's in a directory that all may write. Another process removes a second one while we look: the
    third is removed all the same, and said."""
    cache = Cache(tmp_path / "cache")
    cache.directory.mkdir()
    kept, vanished, gone = (cache.directory / f"sft-{digit * 32}" for digit in "012")
    for directory in (kept, vanished, gone):
        directory.mkdir()
        age(directory)
    rename = os.rename

    def refused(source, target):
        if source == kept:
            vanished.rmdir()
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    sft(write(tmp_path / "a.jsonl", lines(10)), hf, cache)
    assert kept.is_dir() and not gone.exists()
    said = capsys.readouterr().err
    assert f"cache: {gone.name} not used for 30 days, removed" in said and kept.name not in said


def test_a_table_that_is_used_again_while_it_is_removed_stays(hf, tmp_path, monkeypatch):
    """Another rank marks it after its age was read, or finds it away under its other name."""
    path, cache = write(tmp_path / "a.jsonl", lines(10)), Cache(tmp_path / "cache")
    expected = values(sft(path, hf, cache)[0])
    (old,) = cache.directory.glob("sft-*")
    age(old)
    rename, found = os.rename, []

    def late(source, target):
        if source == old and not found:
            assert unused.touch(old)
            rename(source, target)
            found.append("marked")
        else:
            rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    sft(path, hf, Cache(cache.directory), max_length=20)
    assert found and old.is_dir() and not list(cache.directory.glob("*.unused"))
    again = Cache(cache.directory)
    assert values(sft(path, hf, again)[0]) == expected and again.converted == 0

    away, opened = tmp_path / "away", stored.opened

    def opened_late(directory, starts):
        if found.pop():
            found.append("")
            rename(directory, away)
            try:
                return opened(directory, starts)
            finally:
                rename(away, directory)
        return opened(directory, starts)

    monkeypatch.setattr(cache_module, "opened", opened_late)
    again = Cache(cache.directory)
    assert values(sft(path, hf, again)[0]) == expected and again.converted == 0 and found == []
