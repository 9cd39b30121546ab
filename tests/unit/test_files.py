"""Data sets of several files with weights: exact counts, the same rows for every rank and after every resume."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.data.files import DataFile, Part, data_files
from megarlhf.data.loader import Loader, permutation, rows_of_step, weighted_epoch
from megarlhf.data.preferences import PreferenceDataConfig, PreferenceLoader, load_preferences
from megarlhf.data.prompts import PromptLoader, PromptsConfig, load_prompts
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.train.settings import TrainingConfig
from tests.unit.test_data import bare_rows, save_hf

SIZES = {"a": 7, "b": 10, "c": 3}
WEIGHTS = {"a": 2.0, "b": 0.5, "c": 1.0}
EPOCH = 14 + 5 + 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_hf(tmp_path_factory.mktemp("hf")))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path}; every row is of its own length."""
    directory, found, number = tmp_path_factory.mktemp("files"), {}, 0
    for name, size in SIZES.items():
        rows = []
        for _ in range(size):
            number += 1
            text = f"{name}{number}" + " sea" * (number * 7 % 11)
            rows.append({"prompt": text, "response": " slow", "chosen": " four", "rejected": " five"})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = str(directory / f"{name}.jsonl")
    return found


def mixed(files, weights=WEIGHTS):
    return tuple(DataFile(path, weights[name]) for name, path in files.items())


def sft(files, tokenizer, given=None, **options):
    given = mixed(files) if given is None else given
    return load_sft(given, tokenizer, SFTDataConfig(train=given, **options))


def test_counts_are_exact():
    """Of every row over epochs, by the definition: a file's passes, one after the other."""
    parts = (Part(7, 2.0), Part(10, 0.5), Part(3, 1.0), Part(9, 1 / 3), Part(4, 2.6))
    assert [part.size for part in parts] == [14, 5, 3, 3, 10]
    seen, starts = Counter(), np.cumsum([0, 7, 10, 3, 9, 4])
    for epoch in range(12):
        rows = weighted_epoch(parts, 5, epoch)
        assert len(rows) == 35
        seen.update(rows.tolist())
        for start, part in zip(starts, parts, strict=False):
            counts = [seen[row] for row in range(start, start + part.num_groups)]
            assert sum(counts) == (epoch + 1) * part.size and max(counts) - min(counts) <= 1
    assert [seen[row] for row in (0, 7, 17, 20, 29)] == [24, 6, 12, 4, 30]
    assert not np.array_equal(weighted_epoch(parts, 5, 0), weighted_epoch(parts, 5, 1))
    assert sorted(weighted_epoch(parts, 5, 0)) != sorted(
        weighted_epoch(parts, 6, 0)
    )  # which of the rows is random, too
    assert Part(3, 0.01).size == 1


def test_the_order_never_changes():
    """Saved runs depend on it."""
    parts = (Part(4, 0.5), Part(2, 2.0))
    first, second = [0, 5, 4, 2, 4, 5], [5, 4, 5, 3, 1, 4]
    assert weighted_epoch(parts, 7, 0).tolist() == first and weighted_epoch(parts, 7, 1).tolist() == second
    assert permutation(7, 0, 8).tolist() == [7, 4, 6, 1, 5, 0, 2, 3] != permutation(7, 0, 8, 1).tolist()
    assert rows_of_step(1, num_rows=6, global_batch=4, seed=7, parts=parts).tolist() == first[4:] + second[:2]


def test_files_without_weights_are_as_one(files, tokenizer, tmp_path):
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(Path(path).read_text() for path in files.values()))
    one, report = sft(files, tokenizer, str(whole))
    for given in (tuple(files.values()), mixed(files, dict.fromkeys(SIZES, 1.0))):
        several, reports = sft(files, tokenizer, given)
        assert several.parts == () and several.epoch_rows == len(several) == len(one) == 20
        for name in ("tokens", "mask", "offsets"):
            assert np.array_equal(getattr(several, name), getattr(one, name))
            assert getattr(several, name).dtype == getattr(one, name).dtype
        assert "\n" not in report.summary()
        lines = reports.summary().splitlines()
        assert [line.split(":")[0].strip() for line in lines] == [*files.values()] and "weight" not in lines[0]
    alone, report = sft(files, tokenizer, (files["a"],))
    assert len(alone) == 7 and report.summary().startswith(files["a"])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranks_together_are_one_rank(files, tokenizer, packing, dp_size):
    data, reports = sft(files, tokenizer, packing=packing, max_length=40)
    if not packing:
        assert data.epoch_rows == EPOCH and "; weight 0.5: 5 of 10 an epoch" in reports.summary().splitlines()[1]
    options = dict(global_batch=6, seed=3, pad_id=tokenizer.pad_id)
    one = Loader(data, **options)
    many = [Loader(data, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    for step in range(12):
        parts = [loader.batch(step) for loader in many]
        assert sorted(row for part in parts for row in bare_rows(part)) == sorted(bare_rows(one.batch(step)))
    # evaluation reads every row once, whatever its weight
    assert sum(int(batch.mask.sum()) for batch in one.epoch_batches()) == data.mask.sum()


def test_a_batch_depends_on_its_step_alone(files, tokenizer):
    straight = [Loader(sft(files, tokenizer)[0], global_batch=4, seed=1).batch(step).tokens for step in range(20)]
    again = Loader(sft(files, tokenizer)[0], global_batch=4, seed=1)
    for step in [13, 2, 19, 13, 0]:
        assert torch.equal(again.batch(step).tokens, straight[step])


def test_epochs_count_weighted_rows(files, tokenizer):
    data, _ = sft(files, tokenizer)
    assert TrainingConfig(global_batch_size=2, epochs=2).total_steps(data.epoch_rows) == EPOCH
    loader = Loader(data, global_batch=EPOCH, seed=1)
    counts = Counter(row for step in range(2) for row in loader.rows(step).tolist())
    assert [counts[row] for row in range(20)] == [4] * 7 + [1] * 10 + [2] * 3


def test_prompts_and_preferences_have_weights(files, tokenizer):
    given = mixed(files)
    pairs, reports = load_preferences(given, tokenizer, PreferenceDataConfig(train=given))
    assert pairs.epoch_rows == 2 * EPOCH and len(pairs) == 40 and len(pairs.ranks) == len(pairs.margins) == 40
    loader = PreferenceLoader(pairs, global_batch=2 * EPOCH, seed=2)
    rows = loader.rows(0).reshape(-1, 2)
    assert (rows[:, 0] % 2 == 0).all() and (rows[:, 1] == rows[:, 0] + 1).all()
    counts = Counter(row for step in range(2) for row in loader.rows(step)[::2].tolist())
    assert [counts[2 * row] for row in range(20)] == [4] * 7 + [1] * 10 + [2] * 3
    assert all(tokenizer.decode(pairs.row(k)[0]).endswith(("four<|im_end|>", "five<|im_end|>")) for k in range(40))

    prompts, reports = load_prompts(tokenizer, PromptsConfig(given))
    loader = PromptLoader(prompts, length=64, global_batch=EPOCH, pad_id=999, seed=2)
    counts = Counter(row for step in range(2) for row in loader.batch(step).prompt_ids.tolist())
    assert [counts[row] for row in range(20)] == [4] * 7 + [1] * 10 + [2] * 3
    lines = [json.loads(line) for path in files.values() for line in Path(path).read_text().splitlines()]
    assert prompts.records(range(20)) == lines and len(reports.summary().splitlines()) == 3
    halves = [PromptLoader(prompts, length=64, global_batch=6, pad_id=999, dp_rank=r, dp_size=2) for r in range(2)]
    whole = PromptLoader(prompts, length=64, global_batch=6, pad_id=999)
    for step in range(8):
        both = torch.cat([half.batch(step).prompt_ids for half in halves])
        assert torch.equal(both, whole.batch(step).prompt_ids)


def test_conversations_of_several_files_keep_their_records(tmp_path):
    from tests.unit.test_data import CHATML

    tokenizer = load_tokenizer(save_hf(tmp_path / "hf", CHATML))
    talk = [{"role": "user", "content": "And the sea?"}]
    rows = [{"prompt": "a"}, {"messages": talk, "n": 1}, {"messages": talk}, {"prompt": "b"}]
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "c"}) + "\n")
    config = PromptsConfig(tuple(str(tmp_path / f"{number}.jsonl") for number in range(4)))
    assert load_prompts(tokenizer, config)[0].records(range(0, 8, 2)) == rows


def test_errors_name_the_file_and_its_line(files, tokenizer, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(UserError) as caught:
        sft(files, tokenizer, (files["a"], str(bad)))
    assert str(caught.value).startswith(f"{bad}:2: no key 'response'")
    with pytest.raises(UserError) as caught:  # not outweighed by the good lines of other files
        sft(files, tokenizer, (files["b"], str(tmp_path / "none.jsonl")))
    assert str(caught.value).startswith(f"{tmp_path}/none.jsonl: cannot read")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "run.yaml: data.train: is an empty list; name a file"),
        ("", "run.yaml: data.train: is empty; name a file"),
        (["a", "./a"], "run.yaml: data.train: a is named twice"),
        (["a", "b", "a"], "run.yaml: data.train: a is named twice; name it once, with the weight 2"),
        (["a", 3], r"run.yaml: data.train\[1\] must be a string or a section \(path, weight\), not 3"),
        ([{"path": "a", "wieght": 2}], r"run.yaml: unknown key 'data.train\[0\].wieght'; did you mean 'weight'"),
        ([{"weight": 2}], r"run.yaml: 'data.train\[0\].path' is missing"),
        ([{"path": "a", "weight": 0}], r"run.yaml: data.train\[0\].weight: must be above 0 and at most 1000, not 0"),
        ([{"path": "a", "weight": "x"}], r"run.yaml: data.train\[0\].weight must be a number, not 'x'"),
        (3, "run.yaml: data.train must be a string or a list, not 3"),
        ({"path": "a"}, "run.yaml: data.train must be a string or a list, not a section"),
    ],
)
def test_the_key_of_files(train, message):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Program:
        data: SFTDataConfig

    with pytest.raises(UserError, match=message):
        configuration.from_dict(Program, {"data": {"train": train}}, "run.yaml")


def test_a_configuration_with_files_survives_a_file():
    for train in ("a", ["a", "b"], ["a", {"path": "b", "weight": 0.5}]):
        for section in (SFTDataConfig, PreferenceDataConfig):
            made = configuration.from_dict(section, {"train": train}, "run.yaml")
            assert configuration.from_dict(section, configuration.to_dict(made), "run.yaml") == made
    assert data_files(made.train) == (DataFile("a"), DataFile("b", 0.5))
