"""Process reward models: files of labelled steps, the loss, the first wrong step, and scores at the ends of steps."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf.algorithms.process_reward import found_errors, response_score, step_loss
from megarlhf.batch import LabelledSteps
from megarlhf.config import UserError
from megarlhf.data.steps import StepDataConfig, StepLoader, load_steps
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.scorer import SourceConfig
from megarlhf.experience.texts import step_ends, with_placeholders
from megarlhf.metrics import of_loss
from tests.scoring import make_rollout

GOLDENS = Path(__file__).parent / "goldens"
SENTENCES = ["Two plus two is four; so it is.", "a = 1; b = 2; c = 3", "0123456789 # <step> !", "the sea is slow"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """SentencePiece with byte fallback, which keeps line breaks; <step> is a token, BOS 1, EOS 2."""
    import sentencepiece

    prefix = tmp_path_factory.mktemp("tokenizer") / "steps"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(prefix), model_type="bpe", vocab_size=330,
        byte_fallback=True, pad_id=3, user_defined_symbols=["<step>"], normalization_rule_name="identity",
        minloglevel=2, hard_vocab_limit=False, num_threads=1,
    )  # fmt: skip
    return load_tokenizer(f"{prefix}.model")


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(path, tokenizer, **options):
    return load_steps(path, tokenizer, StepDataConfig(train=path, **options))


# ---------------------------------------------------------------------------------------------------- the loss


def batch(scores, labels, *, lengths=None, decided=None) -> tuple[dict, LabelledSteps]:
    """Rows whose labels are None where a token is no labelled step."""
    rows, columns = len(labels), len(labels[0])
    mask = torch.tensor([[label is not None for label in row] for row in labels])
    values = torch.tensor([[label or 0.0 for label in row] for row in labels], dtype=torch.float64)
    return {"scores": scores}, LabelledSteps(
        tokens=torch.zeros(rows, columns + 1, dtype=torch.long), mask=mask, labels=values,
        decided=torch.ones(rows, dtype=torch.bool) if decided is None else torch.tensor(decided),
    )  # fmt: skip


def test_the_loss_equals_a_loop_in_float64():
    """Hard and soft labels; what stands outside the mask changes nothing, and its gradient is 0."""
    draw = np.random.RandomState(0)
    labels = [[draw.choice([None, 0.0, 1.0, draw.rand()]) for _ in range(7)] for _ in range(5)]
    labels[3] = [None] * 7  # a row that pads a batch
    scores = torch.tensor(3 * draw.randn(5, 7))
    scores[torch.tensor([[label is None for label in row] for row in labels])] = torch.nan
    scores.requires_grad_()
    total, count, metrics = step_loss(*batch(scores, labels))
    total.backward()
    expected, number, gradient, right = 0.0, 0, np.zeros((5, 7)), 0
    for row in range(5):
        for column in range(7):
            if (label := labels[row][column]) is not None:
                p = 1 / (1 + math.exp(-scores[row, column].item()))
                expected -= label * math.log(p) + (1 - label) * math.log(1 - p)
                gradient[row, column] = p - label
                right += (p >= 0.5) == (label >= 0.5)
                number += 1
    assert total.item() == pytest.approx(expected, rel=1e-12) and count == number
    np.testing.assert_allclose(scores.grad.numpy(), gradient, rtol=1e-9, atol=1e-15)
    found = of_loss(metrics)
    assert found["accuracy"].sum == right and found["accuracy"].count == number
    assert found["loss"].value == pytest.approx(expected / number)


def test_the_loss_is_that_of_trl():
    """PRMTrainer's cross-entropy of two classes; the score is the difference of their logits."""
    with np.load(GOLDENS / "steps_trl.npz") as file:
        golden = dict(file)
    logits = torch.tensor(golden["logits"])
    scores = (logits[..., 1] - logits[..., 0])[:, 1:].requires_grad_()
    labels = [[None if label < 0 else float(label) for label in row] for row in golden["labels"][:, 1:]]
    total, count, _ = step_loss(*batch(scores, labels))
    assert total.item() / count.item() == pytest.approx(golden["loss"].item(), rel=1e-6)
    (total / count).backward()
    assert scores.grad.sum().item() == pytest.approx(golden["grad/score.bias"][1].item(), rel=1e-5)


def test_the_first_wrong_step():
    """(scores, labels, decided) -> (of a wrong solution, found, of a right one, found)."""
    n = None
    cases = {
        "found": ([3, -1, 2], [1, 0, n], True, (1, 1, 0, 0)),
        "later flags do not matter": ([3, -1, -2], [1, 0, 1], True, (1, 1, 0, 0)),
        "unlabelled steps are not read": ([-9, 3, -1], [n, 1, 0], True, (1, 1, 0, 0)),
        "one step too early": ([-1, -1, 2], [1, 0, n], True, (1, 0, 0, 0)),
        "not found": ([3, 1, -2], [1, 0, n], True, (1, 0, 0, 0)),
        "a right one": ([3, 0, 2], [1, 0.5, 1], True, (0, 0, 1, 1)),
        "a right one, flagged": ([3, -0.1, 2], [1, 1, 1], True, (0, 0, 1, 0)),
        "soft labels": ([3, -1, 2], [0.6, 0.4, 0.0], True, (1, 1, 0, 0)),
        "not known": ([3, -1, 2], [1, 0, n], False, (0, 0, 0, 0)),
        "padding": ([-3, -1, 2], [n, n, n], True, (0, 0, 0, 0)),
    }
    names = ("solutions/wrong", "solutions/wrong_found", "solutions/right", "solutions/right_found")
    for name, (scores, labels, decided, expected) in cases.items():
        found = of_loss(step_loss(*batch(torch.tensor([scores]).double(), [labels], decided=[decided]))[2])
        assert tuple(int(found[key].sum) for key in names) == expected, name
        assert found[names[0]].count == (name != "padding")
    rows = [list(case[:3]) for case in cases.values()]
    scores, labels, decided = ([row[i] for row in rows] for i in range(3))
    found = of_loss(step_loss(*batch(torch.tensor(scores).double(), labels, decided=decided))[2])
    derived = found_errors({name: metric.value for name, metric in found.items()})
    assert derived == pytest.approx(
        {"first_error": 5 / 8, "first_error/wrong": 4 / 6, "first_error/right": 1 / 2, "first_error/f1": 4 / 7}
    )
    assert found_errors(dict.fromkeys(names, 0.0)) == {}
    assert found_errors(dict.fromkeys(names, 0.0) | {names[0]: 0.5}) == {"first_error": 0.0, "first_error/wrong": 0.0}


def test_one_score_from_those_of_steps():
    chances = torch.tensor([[0.9, 0.1, 0.5, 0.2], [0.3, 0.8, 0.7, 0.6]])
    ends = torch.tensor([[True, False, True, False], [False, False, False, True]])
    expected = {"min": [0.5, 0.6], "product": [0.45, 0.6], "last": [0.5, 0.6]}
    for how, values in expected.items():
        torch.testing.assert_close(response_score(chances, ends, how), torch.tensor(values))


# ---------------------------------------------------------------------------------------------------- the data


def ends_of(examples, tokenizer, row=0) -> list[tuple[str, float]]:
    """(text up to each labelled end, label)."""
    tokens, mask, _ = examples.row(row)
    labels = examples.labels[examples.offsets[row] : examples.offsets[row + 1]]
    assert not labels[~mask].any()
    return [(tokenizer.decode(tokens[: i + 1]), round(float(labels[i]), 4)) for i in mask.nonzero()[0]]


def test_labels_stand_at_the_ends_of_steps(tokenizer, tmp_path):
    rows = [
        {"prompt": "Two plus two:", "steps": [" a = 1", " b = 2", " c = 3"], "labels": [True, None, 0.25], "id": 4},
        {"prompt": "", "steps": ["it is"], "labels": [0]},
    ]
    examples, report = load(write(tmp_path / "x.jsonl", [rows[0], "", rows[1]]), tokenizer)
    assert ends_of(examples, tokenizer) == [
        ("<s>Two plus two: a = 1\n", 1.0),
        ("<s>Two plus two: a = 1\n b = 2\n c = 3", 0.25),
    ]
    assert ends_of(examples, tokenizer, 1) == [("<s>it is", 0.0)]
    assert examples.decided.tolist() == [False, True]
    assert report.summary() == (
        f"{report.path}: 2 solutions, {len(examples.tokens)} tokens, 3 labelled steps, 2 wrong, the first error known "
        "in 1"
    )
    whole = "Two plus two: a = 1\n b = 2\n c = 3"  # the tokens are those of the whole text, as a policy learns it
    assert examples.row(0)[0].tolist() == [tokenizer.bos_id, *tokenizer.encode(whole)]
    with_text, _ = load(report.path, tokenizer, separator=" ;;", add_bos=False)
    assert ends_of(with_text, tokenizer)[0] == ("Two plus two: a = 1 ;;", 1.0)
    placed, _ = load(report.path, tokenizer, placeholder="<step>")
    assert ends_of(placed, tokenizer) == [
        ("<s>Two plus two: a = 1\n<step>", 1.0),
        ("<s>Two plus two: a = 1\n<step> b = 2\n<step> c = 3<step>", 0.25),
    ]
    token = tokenizer.encode("a<step>")[-1]
    for row in range(2):  # the other tokens are those without placeholders
        tokens = placed.row(row)[0]
        assert tokens[tokens != token].tolist() == examples.row(row)[0].tolist()


def test_lines_of_prm800k(tokenizer, tmp_path):
    """As the same solution in our own shape."""
    steps = [(["One.", "No."], 0, [1, -1]), (["Two."], 0, [None]), (["Three."], None, [-1])]
    public = {"question": {"problem": "One Two:"}, "label": {"steps": [
        {"completions": [{"text": text, "rating": rating} for text, rating in zip(texts, ratings, strict=True)],
         "chosen_completion": chosen, "human_completion": None} for texts, chosen, ratings in steps
    ]}}  # fmt: skip
    own = {"prompt": "One Two:", "steps": ["One.", "Two.", "Three."], "labels": [True, None, False]}
    (one, _), (two, _) = (
        load(write(tmp_path / f"{name}.jsonl", [row]), tokenizer) for name, row in (("public", public), ("own", own))
    )
    assert one.tokens.tolist() == two.tokens.tolist() and one.mask.tolist() == two.mask.tolist()
    assert one.labels.tolist() == two.labels.tolist() and one.mask.sum() == 2 and not one.decided.any()
    right = {"completions": [{"text": "One.", "rating": 1}], "chosen_completion": 0, "human_completion": None}
    for reason, decided in (("solution", True), ("give_up", False), ("bad_problem", False)):
        row = public | {"label": {"steps": [right], "finish_reason": reason}}
        assert load(write(tmp_path / "x.jsonl", [row]), tokenizer)[0].decided.tolist() == [decided]


def test_a_cut_takes_labels_with_their_texts(tokenizer, tmp_path):
    """At every length: exactly the labels of whole steps are left; without its end no verdict is known."""
    row = {"prompt": "Two:", "steps": [" a = 1", " b = 2", " c = 3"], "labels": [True, True, False]}
    path = write(tmp_path / "x.jsonl", [row])
    whole, _ = load(path, tokenizer)
    ends, total = whole.mask.nonzero()[0].tolist(), len(whole.tokens)
    for length in range(2, total + 1):
        if length <= ends[0]:
            with pytest.raises(UserError, match=r"1 dropped \(no labelled step\).*no solution is left: give a file"):
                load(path, tokenizer, max_length=length)
            continue
        cut, report = load(path, tokenizer, max_length=length)
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert cut.mask.nonzero()[0].tolist() == [end for end in ends if end < length]
        assert cut.labels.tolist() == whole.labels[:length].tolist()
        assert cut.decided.tolist() == [length == total]
        assert report.truncated.count == (length < total)


def test_rows_without_labels_are_dropped_and_others_reported(tokenizer, tmp_path):
    rows = [
        {"prompt": "a", "steps": ["b"], "labels": [None]},
        {"prompt": "a", "steps": ["b;c", "d"], "labels": [1, 0]},
        {"prompt": "a", "steps": ["b", "c"], "labels": [1, None]},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    examples, report = load(path, tokenizer, separator=";")
    assert len(examples) == 2 and report.unlabelled.first[0].endswith(":1") and report.joined.first[0].endswith(":2")
    assert examples.decided.tolist() == [True, False]
    assert f"1 dropped (no labelled step) ({path}:1); 1 with the separator within a step ({path}:2)" in report.summary()


BAD = {
    "no prompt": ({"prompt": None}, "'prompt' must be a string, not NoneType"),
    "no steps": ({"steps": ...}, "no key 'steps' (found: prompt, labels)"),
    "no labels": ({"labels": ...}, "no key 'labels' (found: prompt, steps)"),
    "steps are text": ({"steps": "a\nb"}, "'steps' must be a list of texts, one for each step"),
    "no step": ({"steps": [], "labels": []}, "'steps' must be a list of texts, one for each step"),
    "an empty step": ({"steps": ["a", " \n"]}, "'steps[1]' is empty"),
    "a step that is no text": ({"steps": ["a", 3]}, "'steps[1]' must be a string, not int"),
    "fewer labels": ({"labels": [True]}, "'labels' must be a list with one label for each of 2 steps, not 1 of them"),
    "more labels": ({"labels": [1, 1, 1]}, "'labels' must be a list with one label for each of 2 steps, not 3 of them"),
    "labels are a number": ({"labels": 1}, "'labels' must be a list with one label for each of 2 steps, not int"),
    "above 1": ({"labels": [1, 2]}, "'labels[1]' must be true, false, a number from 0 to 1, or null without a label"),
    "below 0": ({"labels": [-1, 1]}, "'labels[0]' must be true, false, a number from 0 to 1, or null"),
    "NaN": ({"labels": [1, math.nan]}, "'labels[1]' must be true, false, a number from 0 to 1, or null"),
    "a word": ({"labels": ["+", "-"]}, "'labels[0]' must be true, false, a number from 0 to 1, or null"),
    "half a pair": ({"steps": ["a", "\ud800"]}, "'steps[1]' has half a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines(tokenizer, tmp_path, name):
    """One line that names file, line and key."""
    good = {"prompt": "a", "steps": ["b", "c"], "labels": [True, False]}
    change, expected = BAD[name]
    bad = {key: value for key, value in (good | change).items() if value is not ...}
    path = write(tmp_path / "x.jsonl", [good, bad])
    with pytest.raises(UserError) as refused:
        load(path, tokenizer)
    assert str(refused.value).startswith(f"{path}:2: {expected}") and "\n" not in str(refused.value)
    examples, report = load(path, tokenizer, max_bad_fraction=0.5)
    assert len(examples) == 1 and ":2: " in report.bad.first[0]


def test_bad_files_and_configurations(tokenizer, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"prompt": "a", "steps": ["b"], "labels": [None]}])
    with pytest.raises(UserError, match="no solution is left: give a file with labels, or raise max_length"):
        load(path, tokenizer)
    with pytest.raises(UserError, match="data.placeholder: 'no token' is not one token"):
        load(path, tokenizer, placeholder="no token")
    single = write(tmp_path / "y.jsonl", [{"prompt": "", "steps": ["a"], "labels": [1]}])
    with pytest.raises(UserError, match=r"y.jsonl:1: a step that is the row's first token has no score; give a prompt"):
        load(single, tokenizer, add_bos=False)
    for wrong, message in (
        ({"separator": ""}, "separator: is empty"),
        ({"max_length": 1}, "max_length: must be at least 2"),
        ({"max_bad_fraction": 2}, "max_bad_fraction: must be between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            StepDataConfig(train="x", **wrong)


def test_a_separator_that_the_tokenizer_changes(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(tmp_path / "x"), vocab_size=330, byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False, num_threads=1,
    )  # fmt: skip
    path = write(tmp_path / "x.jsonl", [{"prompt": "a", "steps": ["b"], "labels": [1]}])
    with pytest.raises(UserError, match=r"data.separator: '\\n' becomes another text in the tokenizer"):
        load(path, load_tokenizer(tmp_path / "x.model"))


def test_batches_have_the_labels_of_their_rows(tokenizer, tmp_path):
    """All rows of an epoch over 1 and 3 ranks; rows that pad the last batch have no label and no verdict."""
    rows = [
        {"prompt": "a" * i, "steps": [f" {i} = {j}" for j in range(1 + i % 4)], "labels": [i / 16] * (1 + i % 4)}
        for i in range(13)
    ]
    examples, _ = load(write(tmp_path / "x.jsonl", rows), tokenizer)
    for size in (1, 3):
        seen = []
        for rank in range(size):
            for part in StepLoader(examples, global_batch=6, dp_rank=rank, dp_size=size).epoch_batches():
                assert not part.labels[~part.mask].any()
                for row in range(len(part)):
                    values = part.labels[row][part.mask[row]].tolist()
                    seen.append(tuple(values))
        assert sorted(filter(None, seen)) == sorted((i / 16,) * (1 + i % 4) for i in range(13))
    assert len(StepLoader(examples, global_batch=6).batch(3)) == 6


# ---------------------------------------------------------------------------------- ends of steps of responses


def rollout_of(tokenizer, responses, *, prompt="Two:", eos=True, cut=None):
    """A rollout of these responses, each behind the prompt, left- and right-padded; `cut`: columns."""
    before = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    ids = [[*tokenizer.encode(prompt + text)[len(before) - 1 :], *([tokenizer.eos_id] if eos else [])][:cut]
           for text in responses]  # fmt: skip
    first, length = len(before) + 2, max(map(len, ids)) + 3
    tokens = torch.full((len(ids), first + length), 9999)
    segments = torch.zeros_like(tokens)
    for row, response in enumerate(ids):
        part = slice(2, first + len(response))
        tokens[row, part], segments[row, part] = torch.tensor([*before, *response]), 1
    whole = make_rollout(len(ids))
    return dataclasses.replace(
        whole, tokens=tokens, segments=segments, mask=segments[:, first:] > 0, prompt_len=first,
        logprobs=torch.zeros(len(ids), length),
    )  # fmt: skip


def texts_up_to_ends(rollout, ends, tokenizer) -> list[list[str]]:
    first, found = rollout.prompt_len, []
    for row in range(len(rollout)):
        columns = ends[row].nonzero().flatten().tolist()
        assert all(rollout.mask[row, column] for column in columns)
        found.append([tokenizer.decode(rollout.tokens[row, first : first + column + 1]) for column in columns])
    return found


def test_ends_of_steps(tokenizer):
    """A known answer for each kind of response."""
    responses = [" a = 1; b = 2; c = 3", " the sea", " a = 1; b = 2;", ";;", "", " a; ;b", "; a"]
    expected = [
        ["a = 1;", "a = 1; b = 2;", "a = 1; b = 2; c = 3"],
        ["the sea"],
        ["a = 1;", "a = 1; b = 2;"],
        [";;</s>"],
        ["</s>"],
        ["a;", "a; ;b"],
        ["; a"],
    ]
    rollout = rollout_of(tokenizer, responses)
    ends = step_ends(rollout, tokenizer, ";")
    assert texts_up_to_ends(rollout, ends, tokenizer) == expected
    lines = rollout_of(tokenizer, [" a\n\n b\n", "\n\n"])  # blank lines are no steps
    ends = step_ends(lines, tokenizer, "\n")
    assert texts_up_to_ends(lines, ends, tokenizer) == [["a\n", "a\n\n b\n"], ["\n\n</s>"]]
    # cut off, the last step ends where the response does
    count = len(tokenizer.encode("Two: a = 1; b")) - len(tokenizer.encode("Two:"))
    cut = rollout_of(tokenizer, responses[:1], cut=count)
    ends = step_ends(cut, tokenizer, ";")
    assert texts_up_to_ends(cut, ends, tokenizer) == [["a = 1;", "a = 1; b"]]


def same_ends(tokenizer, path):
    """Training and scoring read a solution at the same tokens; its tokens are those of the whole text."""
    draw = np.random.RandomState(0)
    words = [" a = 1", " the sea", "b: 2.", " é ü", "Step 3:", "so it is", "  two", "#"]
    rows = []
    for _ in range(40):
        steps = ["".join(draw.choice(words, draw.randint(1, 4))) for _ in range(draw.randint(1, 6))]
        rows.append({"prompt": "Two plus two:", "steps": steps, "labels": [1.0] * len(steps)})
    count = len(tokenizer.encode("Two plus two:"))
    for separator in ("\n", "\n\n", "; "):
        examples, report = load(write(path, rows), tokenizer, separator=separator, add_bos=False)
        assert not report.joined.count
        for row in range(len(examples)):
            tokens, mask, _ = examples.row(row)
            text = "Two plus two:" + separator.join(rows[row]["steps"])
            assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(text))
            padded = torch.tensor([[*tokens, tokenizer.eos_id]])
            rollout = dataclasses.replace(
                make_rollout(1), tokens=padded, segments=torch.ones_like(padded), prompt_len=count,
                mask=torch.ones(1, padded.shape[1] - count, dtype=torch.bool),
                logprobs=torch.zeros(1, padded.shape[1] - count),
            )  # fmt: skip
            ends = step_ends(rollout, tokenizer, separator)[0].tolist()
            assert ends == [*mask[count:], False], (text, tokens)


def test_training_and_scoring_read_the_same_tokens(tokenizer, tmp_path):
    same_ends(tokenizer, tmp_path / "x.jsonl")


@pytest.mark.shared
def test_training_and_scoring_read_the_same_tokens_of_byte_level_bpe(shared, tmp_path):
    same_ends(load_tokenizer(shared / "fixtures" / "hf" / "tiny_gpt2"), tmp_path / "x.jsonl")


def test_placeholders_stand_behind_the_ends(tokenizer):
    rollout = rollout_of(tokenizer, [" a = 1; b = 2", " the sea is slow", ""])
    token = tokenizer.encode("a<step>")[-1]
    ends = step_ends(rollout, tokenizer, ";")
    rows, places = with_placeholders(rollout, ends, token)
    whole = [tokenizer.decode(row.tokens[0][row.segments[0] > 0]) for row in map(rows.select, ([0], [1], [2]))]
    assert whole == ["<s>Two: a = 1;<step> b = 2<step></s>", "<s>Two: the sea is slow<step></s>", "<s>Two:</s><step>"]
    assert (rows.tokens[:, 1:][places] == token).all() and int((rows.tokens == token).sum()) == int(ends.sum())
    assert places.sum(1).tolist() == ends.sum(1).tolist() == [2, 1, 1]


def test_sources_of_process_reward_models():
    for wrong, message in (
        ({"function": "a:b", "steps": "min"}, "steps: is for a checkpoint of megarlhf prm"),
        ({"checkpoint": "x", "steps": "min", "step_token": "."}, "steps: is for a checkpoint"),
        ({"checkpoint": "x", "separator": ";"}, "separator: separator and placeholder are of process reward models"),
        ({"checkpoint": "x", "placeholder": ";"}, "separator: separator and placeholder are of process reward models"),
        ({"checkpoint": "x", "steps": "min", "separator": ""}, "separator: is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            SourceConfig(**wrong)
