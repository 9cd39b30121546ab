"""Preference files, and batches that keep a prompt's responses together."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from megarlhf import cli
from megarlhf import config as configuration
from megarlhf.algorithms.reward import best_of_loss, log_exp_loss, pairwise_loss
from megarlhf.batch import Comparisons
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.preferences import PreferenceDataConfig, PreferenceLoader, load_preferences
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.stream import num_tokens

SENTENCES = ["Two plus two is four, and the sea is slow.", "The quick brown fox jumps over the lazy dog: 0123456789."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sp") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(prefix), model_type="bpe", vocab_size=320,
        byte_fallback=True, pad_id=3, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return load_tokenizer(prefix.with_suffix(".model"))


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(path, tokenizer, **options):
    return load_preferences(path, tokenizer, PreferenceDataConfig(train=path, **options))


@pytest.fixture
def pairs(tmp_path):
    """13 pairs of very different lengths: no multiple of any batch in these tests."""
    rows = [
        {"prompt": f"{i}:", "chosen": " sea" * (1 + i * 7 % 11), "rejected": " dog" * (1 + i * 5 % 9), "margin": i / 2}
        for i in range(13)
    ]
    return write(tmp_path / "pairs.jsonl", rows)


def texts(data, tokenizer, rows=None):
    return [tokenizer.decode(data.row(k)[0]) for k in (range(len(data)) if rows is None else rows)]


# ------------------------------------------------------------------------------------------------ examples


def test_pairs(tokenizer, tmp_path):
    rows = [
        {"prompt": "Two plus two is", "chosen": " four", "rejected": " slow", "id": 7},
        {"prompt": "The sea is", "chosen": " slow", "rejected": " a dog", "margin": 1.5},
    ]
    data, report = load(write(tmp_path / "x.jsonl", [rows[0], "", rows[1]]), tokenizer)
    expected = ["Two plus two is four", "Two plus two is slow", "The sea is slow", "The sea is a dog"]
    assert texts(data, tokenizer) == [f"<s>{text}</s>" for text in expected]
    for k in range(4):
        tokens, mask, segments = data.row(k)
        assert mask.tolist() == [False] * (len(tokens) - 1) + [True] and segments is None
        before = [tokenizer.bos_id, *tokenizer.encode(rows[k // 2]["prompt"])]
        assert tokens[: len(before)].tolist() == before
    assert data.ranks.tolist() == [0, 1, 0, 1] and data.margins.tolist() == [0, 0, 1.5, 1.5] and data.num_responses == 2
    assert (report.num_lines, report.num_prompts, report.num_tokens) == (2, 2, len(data.tokens))
    assert report.summary() == f"{report.path}: 2 prompts x 2 responses, {len(data.tokens)} tokens"


def test_best_of_four_and_rankings(tokenizer, tmp_path):
    responses = [" one", " two", " three", " four"]
    rows = [
        {"prompt": "2 + 2 =", "responses": responses, "label": 3},
        {"prompt": "2 + 2 =", "responses": responses, "ranks": [2, 1, 1, 0]},
    ]
    data, _ = load(write(tmp_path / "x.jsonl", rows), tokenizer, num_responses=4)
    order = [" four", " one", " two", " three", " four", " two", " three", " one"]
    assert texts(data, tokenizer) == [f"<s>2 + 2 ={response}</s>" for response in order]
    assert data.ranks.tolist() == [0, 1, 1, 1, 0, 1, 1, 2] and not data.margins.any()


def test_options(tokenizer, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"q": "The", "good": " sea", "bad": " dog", "by": 2}])
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "margin_key": "by"}
    assert texts(load(path, tokenizer, **keys)[0], tokenizer) == ["<s>The sea</s>", "<s>The dog</s>"]
    data, _ = load(path, tokenizer, add_bos=False, add_eos=False, **keys)
    assert texts(data, tokenizer) == ["The sea", "The dog"] and data.margins.tolist() == [2, 2]
    assert data.mask[data.offsets[1:] - 1].all() and data.mask.sum() == 2


def test_what_is_too_long_or_alike(tokenizer, tmp_path):
    rows = [
        {"prompt": "The", "chosen": " sea", "rejected": " dog"},
        {"prompt": "The", "chosen": " sea" * 20, "rejected": " dog"},  # loses its end
        {"prompt": "The", "chosen": " sea" * 20 + " dog", "rejected": " sea" * 20},  # and all that differs
        {"prompt": "The sea" * 20, "chosen": " sea", "rejected": " dog"},
        {"prompt": "The", "chosen": " sea", "rejected": " sea"},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    data, report = load(path, tokenizer, max_length=12)
    assert len(data) == 4 and report.truncated.first[0].endswith(":2") and report.dropped.count == 3
    assert data.lengths.max() == 12 and data.row(2)[0][-1] != tokenizer.eos_id and data.row(2)[1].tolist()[-1]
    summary = (
        f"1 cut to 12 tokens ({path}:2); 3 dropped (better and worse responses alike) ({path}:3, {path}:4, {path}:5)"
    )
    assert summary in report.summary()
    with pytest.raises(UserError, match=r"y.jsonl: 0 prompts x 2.*no preference is left: give"):
        load(write(tmp_path / "y.jsonl", rows[4:]), tokenizer)
    # of four, two that were not told apart may be alike
    four = {"prompt": "The", "responses": [" sea", " dog", " fox", " dog"], "label": 0}
    path = write(tmp_path / "z.jsonl", [four, {**four, "label": 1}])
    assert load(path, tokenizer, num_responses=4)[1].dropped.first == (f"{path}:2",)


PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"'
FOUR = '{"prompt": "a", "responses": ["b", "c", "d", "e"]'
BAD_PAIRS = {
    '{"prompt": "a", "chosen": "b"}': "no key 'rejected' (found: prompt, chosen)",
    '{"chosen": "b", "rejected": "c"}': "no key 'prompt' (found: chosen, rejected)",
    '{"prompt": "a", "chosen": "b", "rejected": 4}': "'rejected' must be a string, not int",
    '{"prompt": "a", "chosen": " ", "rejected": "c"}': "'chosen' is empty",
    '{"prompt": "a", "chosen": "\\ud800", "rejected": "c"}': "'chosen' has half a surrogate pair",
    PAIR + ', "margin": -1}': "'margin' must be a number from 0 to 1e6, not -1",
    PAIR + ', "margin": "1"}': "'margin' must be a number from 0 to 1e6, not '1'",
    PAIR + ', "margin": NaN}': "'margin' must be a number from 0 to 1e6, not nan",
    PAIR + ', "margin": true}': "'margin' must be a number from 0 to 1e6, not True",
    FOUR + ', "label": 1}': "'responses' must be a list of num_responses 2, not 4",
    '{"prompt": "a", "responses": {}, "label": 1}': "'responses' must be a list of num_responses 2, not dict",
    PAIR: "not JSON",
    "[1]": "must be a JSON object, not list",
}
BAD_FOURS = {
    PAIR + "}": "a pair, where num_responses is 4",
    FOUR + "}": "'label' must be the best's number from 0 to 3, not None",
    FOUR + ', "label": 4}': "'label' must be the best's number from 0 to 3, not 4",
    FOUR + ', "label": true}': "'label' must be the best's number from 0 to 3, not True",
    FOUR + ', "ranks": [0, 1, 2]}': "'ranks' must be 4 whole numbers below 4, one of them 0 for the best",
    FOUR + ', "ranks": [0, 0, 1, 2]}': "'ranks' must be 4 whole numbers below 4, one of them 0 for the best",
    FOUR + ', "ranks": [1, 2, 3, 4]}': "'ranks' must be 4 whole numbers below 4, one of them 0 for the best",
    '{"prompt": "a", "responses": ["b", "c", "d", 5], "label": 0}': "'responses[3]' must be a string, not int",
}


@pytest.mark.parametrize("line", [*BAD_PAIRS, *BAD_FOURS], ids=lambda line: line[-40:])
def test_malformed_lines(tokenizer, tmp_path, line):
    fine = {"prompt": "The", "chosen": " sea", "rejected": " dog"}
    size = 2 if line in BAD_PAIRS else 4
    if size == 4:
        fine = {"prompt": "The", "responses": [" sea", " dog", " fox", " two"], "label": 1}
    path = write(tmp_path / "x.jsonl", [fine, "", line, fine])
    with pytest.raises(UserError) as caught:
        load(path, tokenizer, num_responses=size)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and {**BAD_PAIRS, **BAD_FOURS}[line] in message and "\n" not in message
    assert "1 of 3 lines are malformed, more than max_bad_fraction 0.01 allows; mend them or raise it" in message
    data, report = load(path, tokenizer, num_responses=size, max_bad_fraction=0.5)
    assert len(data) == 2 * size and ":3: " in report.bad.first[0]


def test_a_single_token_has_no_score(tokenizer, tmp_path):
    """The first token of a row has no place among those that heads answer for."""
    word = next(word for word in " ".join(SENTENCES).split() if len(tokenizer.encode(word)) == 1)
    path = write(tmp_path / "x.jsonl", [{"prompt": "", "chosen": word, "rejected": "The sea"}])
    with pytest.raises(UserError, match="a single token, which has no score; give a prompt, or set add_bos or add_eos"):
        load(path, tokenizer, add_bos=False, add_eos=False)
    assert len(load(path, tokenizer)[0]) == 2


def test_files_that_cannot_be_read(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl: cannot read the examples \(No such file"):
        load(str(tmp_path / "none.jsonl"), tokenizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_responses": 1}, "num_responses: must be at least 2"),
        ({"max_length": 1}, "max_length: must be at least 2"),
        ({"max_bad_fraction": 2}, "max_bad_fraction: must be between 0 and 1"),
    ],
)
def test_config_section(values, message):
    section = configuration.from_dict(PreferenceDataConfig, {"train": "a.jsonl"}, "run.yaml")
    assert configuration.from_dict(PreferenceDataConfig, configuration.to_dict(section), "run.yaml") == section
    with pytest.raises(UserError, match=f"run.yaml: {message}"):
        configuration.from_dict(PreferenceDataConfig, {"train": "a.jsonl", **values}, "run.yaml")


# ------------------------------------------------------------------------------------------------ batches


def rows_of(batch, tokenizer):
    """(text, where the score is read, rank, margin) of every row."""
    out = []
    for k in range(len(batch)):
        read = batch.mask[k].nonzero().flatten().tolist()
        out.append((tokenizer.decode(batch.tokens[k]), read, batch.ranks[k].item(), batch.margins[k].item()))
    return out


@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranks_together_are_one_rank(tokenizer, pairs, dp_size):
    data, _ = load(pairs, tokenizer)
    options = dict(global_batch=12, seed=3, pad_id=tokenizer.pad_id)
    one = PreferenceLoader(data, **options)
    many = [PreferenceLoader(data, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    together = list(zip(*[loader.epoch_batches() for loader in many], strict=True))
    steps = [(one.batch(step), [loader.batch(step) for loader in many]) for step in range(10)]
    for whole, parts in steps + list(zip(one.epoch_batches(), together, strict=True)):
        assert all(isinstance(part, Comparisons) and part.together == 2 for part in (whole, *parts))
        assert [len(part) for part in parts] == [12 // dp_size] * dp_size
        assert sorted(row for part in parts for row in pairs_of(part, tokenizer)) == sorted(pairs_of(whole, tokenizer))
        sizes = [int(num_tokens(part).sum()) for part in parts]
        assert max(sizes) - min(sizes) <= num_tokens(whole).reshape(-1, 2).sum(1).max()


def pairs_of(batch, tokenizer):
    rows = rows_of(batch, tokenizer)
    return list(zip(rows[::2], rows[1::2], strict=True))


def test_pairs_stay_together_and_every_epoch_has_every_pair_once(tokenizer, pairs):
    data, _ = load(pairs, tokenizer)
    loader = PreferenceLoader(data, global_batch=4, seed=1, pad_id=tokenizer.pad_id)
    known = texts(data, tokenizer)
    seen = []
    for step in range(13):  # two epochs
        batch = loader.batch(step)
        rows = rows_of(batch, tokenizer)
        assert loader.num_tokens(step) == int((batch.tokens != tokenizer.pad_id).sum())
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
            number = known.index(chosen[0]) // 2
            assert chosen[0] == known[2 * number] and rejected[0] == known[2 * number + 1]
            assert (chosen[2], rejected[2]) == (0, 1) and chosen[3] == rejected[3] == number / 2
            seen.append(number)
        for k in range(4):  # the score is read at the last token: column j of the mask is token j + 1
            assert rows[k][1] == [int((batch.tokens[k] != tokenizer.pad_id).sum()) - 2]
    assert sorted(seen[:13]) == sorted(seen[13:]) == list(range(13)) and seen[:13] != seen[13:] != list(range(13))


def test_a_batch_depends_on_its_step_alone(tokenizer, pairs):
    straight = [PreferenceLoader(load(pairs, tokenizer)[0], global_batch=6, seed=1).batch(s) for s in range(9)]
    again = PreferenceLoader(load(pairs, tokenizer)[0], global_batch=6, seed=1)
    for step in [8, 2, 8, 0]:  # a resumed run starts anywhere
        assert torch.equal(again.batch(step).tokens, straight[step].tokens)
    other = PreferenceLoader(load(pairs, tokenizer)[0], global_batch=6, seed=2).batch(0).tokens
    assert other.shape != straight[0].tokens.shape or not torch.equal(other, straight[0].tokens)


def test_rows_that_fill_up_the_last_batch_do_not_count(tokenizer, pairs):
    data, _ = load(pairs, tokenizer)
    batches = list(PreferenceLoader(data, global_batch=8).epoch_batches())
    assert [len(batch) for batch in batches] == [8] * 4
    losses = [pairwise_loss({"scores": torch.ones(batch.mask.shape)}, batch) for batch in batches]
    assert [int(count) for _, count, _ in losses] == [4, 4, 4, 1]
    margins = np.arange(13) / 2
    assert float(sum(total for total, _, _ in losses)) == pytest.approx(np.log1p(np.exp(margins)).sum(), rel=1e-6)


def test_best_of_four_batches(tokenizer, tmp_path):
    rows = [
        {"prompt": f"{i}", "responses": [f" {name}" for name in ("sea", "dog", "fox", "two")], "label": i % 4}
        for i in range(5)
    ]
    data, _ = load(write(tmp_path / "x.jsonl", rows), tokenizer, num_responses=4)
    batch = PreferenceLoader(data, global_batch=8, seed=2, pad_id=tokenizer.pad_id).batch(0)
    found = rows_of(batch, tokenizer)
    names = ("sea", "dog", "fox", "two")
    for start in (0, 4):
        label = names[int(found[start][0][3]) % 4]
        group = [text.split()[1].removesuffix("</s>") for text, *_ in found[start : start + 4]]
        assert group == [label, *[name for name in names if name != label]]
    outputs = {"scores": torch.zeros(batch.mask.shape)}
    for loss, value in [(best_of_loss, np.log(4)), (log_exp_loss, np.log(2))]:
        total, count, _ = partial(loss, num_responses=4)(outputs, batch)
        assert int(count) == 2 and float(total / count) == pytest.approx(value, rel=1e-6)


def test_batches_must_divide(tokenizer, pairs):
    data, _ = load(pairs, tokenizer)
    with pytest.raises(
        UserError, match="global batch of 6 rows .* prompts of 2 responses, 2 data.*make it a multiple of 4"
    ):
        PreferenceLoader(data, global_batch=6, dp_size=2)
    assert len(Loader(data, global_batch=6, dp_size=2).batch(0)) == 3


def test_the_scale_of_an_nll_per_token(tokenizer, pairs):
    """Pairs over tokens of the best responses, of a global batch or, for evaluation, of the whole set, so that the mean
    does not depend on the batches; the same number on every rank."""
    data, _ = load_preferences(pairs, tokenizer, PreferenceDataConfig(train=pairs), counted="response")
    whole = PreferenceLoader(data, global_batch=8)
    for dp_size in (1, 2, 4):
        ranks = [PreferenceLoader(data, global_batch=8, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
        batches = [(whole.batch(1), [loader.batch(1) for loader in ranks])]
        epoch = list(
            zip(whole.epoch_batches(), zip(*(loader.epoch_batches() for loader in ranks), strict=True), strict=True)
        )
        for together in (batches, epoch):
            masks = [expected.mask for expected, _ in together]
            scale = sum(mask.any(1).sum().item() / 2 for mask in masks) / sum(mask[0::2].sum().item() for mask in masks)
            for expected, parts in together:
                assert {part.nll_scale for part in parts} == {expected.nll_scale}
                assert expected.nll_scale == pytest.approx(scale)


def test_a_cache_is_not_of_a_quantized_model():
    given = ["run=r", "model.checkpoint=c", "data.train=t", "reference.cache=d"]
    for program in ("dpo", "kto"):
        found = cli.find(program)
        found.load(None, [*given, "model.lora.rank=4"])
        with pytest.raises(UserError, match="reference.cache: would hold the log-probs of the unquantized model"):
            found.load(None, [*given, "model.lora.quantization=nf4"])
