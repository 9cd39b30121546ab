"""Rating files, and batches in which every prompt also stands before another row's response."""

import numpy as np
import pytest
import torch

from megarlhf.config import UserError
from megarlhf.data.files import DataFile
from megarlhf.data.ratings import RatingDataConfig, RatingLoader, load_ratings
from megarlhf.data.tokenizer import load_tokenizer
from tests.unit.test_data import CHATML, save_hf
from tests.unit.test_preferences import tokenizer, write  # noqa: F401

ROWS = [
    {"prompt": "The sea", "response": " is slow" * (1 + i * 5 % 7), "label": i % 3 == 0} if i % 4 else
    {"prompt": f"{i}:", "response": " dog" * (1 + i), "label": i % 3 == 0}
    for i in range(11)
]  # fmt: skip


def load(path, tokenizer, both=True, **options):  # noqa: F811
    return load_ratings(path, tokenizer, RatingDataConfig(train=path, **options), both=both)


def test_rows(tokenizer, tmp_path):  # noqa: F811
    """BOS prompt response EOS, of which the response counts; other names of the keys."""
    rows = [{"q": "The sea", "completion": " is slow", "good": True}, {"q": "The", "completion": " dog", "good": False}]
    keys = {"prompt_key": "q", "response_key": "completion", "label_key": "good"}
    data, report = load(write(tmp_path / "x.jsonl", rows), tokenizer, **keys)
    assert data.labels.tolist() == [True, False] and data.prompts.tolist() == [0, 1]
    for number, row in enumerate(rows):
        tokens, mask, _ = data.row(number)
        before = [tokenizer.bos_id, *tokenizer.encode(row["q"])]
        assert tokenizer.decode(tokens) == f"<s>{row['q']}{row['completion']}</s>"
        assert tokens[: len(before)].tolist() == before and data.starts[number] == len(before)
        assert mask.tolist() == [False] * len(before) + [True] * (len(tokens) - len(before))
    assert report.summary() == f"{report.path}: 1 good and 1 bad responses, {len(data.tokens)} tokens"
    data, _ = load(report.path, tokenizer, add_bos=False, add_eos=False, **keys)
    assert tokenizer.decode(data.tokens[: data.offsets[1]]) == "The sea is slow"


def test_conversations_and_several_files(tmp_path):
    """Messages are what the chat template makes of them; prompts of two files are different, one file's are not; a file
    of weight 2 occurs twice."""
    chat = load_tokenizer(save_hf(tmp_path / "chat", CHATML))
    ask = [{"role": "user", "content": "the sea"}]
    rows = [
        {"prompt": ask, "response": "slow", "label": True},
        {"prompt": ask, "response": [{"role": "assistant", "content": "cold"}], "label": False},
    ]
    one, two = write(tmp_path / "one.jsonl", rows), write(tmp_path / "two.jsonl", rows[:1])
    data, report = load_ratings([one, DataFile(two, 2.0)], chat, RatingDataConfig(train=one), both=True)
    for number, text in enumerate(("slow", "cold", "slow")):
        tokens, mask, _ = data.row(number)
        before, whole = chat.chat_prompt(ask), [*ask, {"role": "assistant", "content": text}]
        assert tokens.tolist() == chat.chat(whole)[0][: len(tokens)] and data.starts[number] == len(before)
        assert chat.decode(tokens[mask]) == f"{text}<|im_end|>" and not mask[: len(before)].any()
    assert data.prompts.tolist() == [0, 0, 1] and data.epoch_rows == 4
    assert sorted(RatingLoader(data, global_batch=4, seed=0).rows(0).tolist()) == [0, 1, 2, 2]
    assert f"{two}: 1 good and 0 bad" in report.summary() and "weight 2: 2 of 1 an epoch" in report.summary()
    assert data.class_sizes == (3, 1)
    with pytest.raises(UserError, match="two.jsonl: all 1 responses are good"):
        load_ratings(two, chat, RatingDataConfig(train=two), both=True)


def test_without_prompt_and_bos(tokenizer, tmp_path):  # noqa: F811
    """The first token of all then is the context, and no mismatched row is longer than max_length, or empty."""
    rows = [{"prompt": "", "response": " slow" * (1 + 4 * i), "label": i % 2 == 0} for i in range(5)]
    data, _ = load(write(tmp_path / "x.jsonl", rows), tokenizer, add_bos=False, max_length=16)
    assert (data.starts == 1).all() and not data.mask[data.offsets[:-1]].any()
    for batch in RatingLoader(data, global_batch=4, seed=0).epoch_batches():
        lengths = (batch.mismatched_segments > 0).sum(1)
        assert lengths.min() >= 1 and lengths.max() <= 16


def test_what_is_too_long(tokenizer, tmp_path):  # noqa: F811
    good, bad = ({"prompt": "The", "response": " sea", "label": label} for label in (True, False))
    path = write(tmp_path / "x.jsonl", [good, bad, good | {"prompt": "The sea" * 20}, bad | {"response": " dog" * 30}])
    data, report = load(path, tokenizer, max_length=12)
    assert report.crowded.first[0].endswith(":3") and report.truncated.first[0].endswith(":4")
    assert data.lengths.max() == 12
    assert f"1 dropped (the prompt leaves no room) ({path}:3)" in report.summary()
    with pytest.raises(UserError, match="no rating is left: give a file that has some, or raise max_length"):
        load(write(tmp_path / "y.jsonl", [good | {"prompt": "The sea" * 20}]), tokenizer, max_length=12)
    assert load(write(tmp_path / "z.jsonl", [good]), tokenizer, both=False)[1].num_good == 1  # held-out data


@pytest.mark.parametrize("max_length", [64, 20])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_mismatched_pairs(tokenizer, tmp_path, dp_size, max_length):  # noqa: F811
    """Of all ranks together: every prompt once, every response once, no row's own, and a prompt that is too long loses
    its beginning."""
    path = write(tmp_path / "x.jsonl", ROWS)
    data, _ = load(path, tokenizer, max_length=max_length)
    whole = RatingLoader(data, global_batch=8, seed=1)
    loaders = [RatingLoader(data, global_batch=8, seed=1, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
    parts = [(whole.batch(0), [loader.batch(0) for loader in loaders], list(whole.rows(0)))]
    parts += [
        (batch, others, [row for row in range(start, min(start + 8, len(data)))])
        for batch, others, start in zip(
            whole.epoch_batches(), map(list, zip(*(loader.epoch_batches() for loader in loaders), strict=True)), (0, 8),
            strict=True,
        )
    ]  # fmt: skip
    for expected, batches, rows in parts:
        pairs = [pair for batch in batches for pair in zip(*read(batch), read(batch.mismatched)[1], strict=True)]
        assert sorted(pairs) == sorted(zip(*read(expected), read(expected.mismatched)[1], strict=True))
        prompts = {tuple(data.row(row)[0][: data.starts[row]].tolist()) for row in rows}
        responses = sorted(tuple(data.row(row)[0][data.starts[row] :].tolist()) for row in rows)
        mixed = [pair for batch in batches for pair in zip(*read(batch.mismatched), strict=True) if pair[1]]
        assert sorted(response for _, response in mixed) == responses
        for prompt, response in mixed:
            room = max_length - len(response)
            assert any(prompt == whole_prompt[-room:] for whole_prompt in prompts) and len(prompt) >= 1
    cut = [len(p) for p, r in mixed if len(p) + len(r) == max_length]
    assert bool(cut) == (max_length == 20)


def read(batch):
    """(prompts, counted responses) of the rows."""
    found = []
    for tokens, mask, segments in zip(batch.tokens, batch.mask, batch.segments, strict=True):
        real = tokens[segments > 0]
        counted = torch.nn.functional.pad(mask, (1, 0))[segments > 0]
        found.append((tuple(real[~counted].tolist()), tuple(real[counted].tolist())))
    return [list(part) for part in zip(*found, strict=True)]


def test_a_row_alone_has_no_partner(tokenizer, tmp_path):  # noqa: F811
    data, _ = load(write(tmp_path / "x.jsonl", ROWS), tokenizer)
    *_, last = RatingLoader(data, global_batch=10).epoch_batches()
    assert last.mask.any(1).sum() == 1 and not last.mismatched_mask.any() and len(last) == 10
    assert np.array_equal(last.labels[:1].numpy(), data.labels[10:])
