"""Lines of public data sets, in small samples of our own."""

import pytest

from megarlhf.data.shapes import hh, is_hh, is_prm800k, prm800k


def completion(text, rating):
    return {"text": text, "rating": rating, "flagged": None}


def step(*completions, chosen=0, human=None):
    return {"completions": [*completions], "human_completion": human, "chosen_completion": chosen}


def line(*steps, finish="solution"):
    return {
        "labeler": "a", "generation": 9, "question": {"problem": "What is 2 + 2?", "ground_truth_answer": "4"},
        "label": {"steps": [*steps], "total_time": 1, "finish_reason": finish},
    }  # fmt: skip


def test_prm800k_follows_the_labeler():
    human = {"text": "So it is four.", "rating": None, "source": "human", "flagged": False}
    row = line(
        step(completion("Add them.", 0)),
        step(completion("Two and two is five.", -1), completion("Two and two is four.", 1), chosen=1),
        step(completion("I do not know.", None)),
        step(completion("It is three.", -1), chosen=None, human=human),
    )
    assert is_prm800k(row) and not is_prm800k({"prompt": "a", "steps": ["b"], "labels": [True]})
    assert not is_prm800k({"question": "a", "label": {"steps": []}})
    want = {
        "prompt": "What is 2 + 2?",
        "steps": ["Add them.", "Two and two is four.", "I do not know.", "So it is four."],
        "labels": [True, True, None, True],
    }
    assert prm800k(row) == want
    for neutral in (None, False, 0.5):
        assert prm800k(row, neutral=neutral)["labels"] == [neutral, True, None, True]


def test_prm800k_ends_at_the_first_error():
    """Phase 2: the labels of alternatives at the error are of other solutions."""
    row = line(
        step(completion("Add them.", 1)),
        step(completion("It is five.", -1), completion("It is four.", 1), chosen=None),
        finish="found_error",
    )
    assert prm800k(row) | {"prompt": ""} == {
        "prompt": "",
        "steps": ["Add them.", "It is five."],
        "labels": [True, False],
    }
    assert prm800k(line(step(completion("Add.", 1)), step(chosen=None)))["steps"] == ["Add."]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (line(), "a solution without a step"),
        ({"question": {"problem": "a"}}, r"not a line of PRM800K \(KeyError: 'label'\)"),
        ({"question": "a", "label": {"steps": []}}, "not a line of PRM800K"),
        (line(step(completion("a", 1), chosen=1)), "chosen_completion 1 of 1"),
        (line(step(completion("a", 1), chosen=-1)), "chosen_completion -1 of 1"),
        (line(step(completion("a", 7))), "not a line of PRM800K"),
        (line(step(completion("a", [1]))), "not a line of PRM800K"),
        (line(step(completion(3, 1))), "the problem and the steps must be strings"),
        (line(step({"text": "a"})), "not a line of PRM800K"),
    ],
)
def test_other_lines(row, message):
    with pytest.raises(ValueError, match=message):
        prm800k(row)


TALK = "\n\nHuman: Two and two?\n\nAssistant: Four.\n\nHuman: And the sea?\n\nAssistant:"


def test_hh_is_cut_at_the_last_answer_that_both_share_the_beginning_of():
    assert is_hh(TALK) and not is_hh("Human: a") and not is_hh(["\n\nHuman: a"])
    assert hh({"a": TALK + " Slow.", "b": TALK + " Sings."}) == (TALK, [[(" Slow.", True)], [(" Sings.", True)]])
    assert hh({"a": TALK + " Slow.", "b": TALK + " Slow."})[0] == TALK  # equal ones
    assert hh({"a": TALK + " Slow.", "b": TALK + " Slow. Sea."}) == (
        TALK,
        [[(" Slow.", True)], [(" Slow. Sea.", True)]],
    )
    assert hh({"a": TALK + " Slow."}) == (TALK, [[(" Slow.", True)]])
    first = TALK.index(" Four.")
    other = "\n\nHuman: Two and two?\n\nAssistant: Five. Human: no turn."
    prompt, answers = hh({"a": TALK + " Slow.", "b": other})
    assert prompt == TALK[:first] and answers[1] == [(" Five. Human: no turn.", True)]
    assert answers[0] == [(" Four.", True), ("\n\nHuman: And the sea?\n\nAssistant:", False), (" Slow.", True)]
    assert "".join(text for text, _ in answers[0]) == TALK[first:] + " Slow."


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: b", "'a' and 'b' share no beginning that ends"),
        (TALK + " b", TALK, "'b': an answer of the assistant is empty or missing"),
        (TALK + " b", TALK + " c\n\nHuman: d", "'b': an answer of the assistant is empty or missing"),
        (TALK + " b", TALK + "\n\nHuman: d\n\nAssistant: e", "'b': an answer of the assistant is empty or missing"),
        (TALK + " b", TALK + " c\n\nHuman: d\n\nAssistant:", "'b': an answer of the assistant is empty or missing"),
    ],
)
def test_conversations_without_answers(one, other, message):
    with pytest.raises(ValueError, match=message):
        hh({"a": one, "b": other})
