"""Verifiable rewards: final answers, numbers, patterns and code in texts, against tables and the marked solutions of
GSM8K; what prompts' records must have before a run starts."""

import json
from fractions import Fraction

import pytest

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.data.prompts import PromptsConfig, load_prompts
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.answers import code_of, final_answer, final_number, found, is_one_number, last_number
from megarlhf.experience.scorer import ScoringConfig
from megarlhf.experience.verifiers import Verifier, VerifyConfig
from megarlhf.train import scoring
from tests.scoring import train_tokenizer


def verifier(kind, **options) -> Verifier:
    return Verifier(VerifyConfig(verify=kind, **options))


def score(kind, response, record, **options) -> float:
    (answer,) = verifier(kind, **options)(["a prompt"], [response], [record])
    return answer


# ------------------------------------------------------------------------------------------------ final answers

FINAL = {
    "42": "42",
    "so\n#### 42": "42",
    "#### 42\nand more words": "42",
    "#### Step 1\nadd\n#### Step 2\nso it is \\boxed{x + 1}": "x + 1",  # headings of Markdown: the last mark counts
    "\\boxed{\\frac{1}{2}} it is": "\\frac{1}{2}",
    "\\boxed{5} no: \\boxed{6": "5",  # cut off
    "\\boxed{5} no: \\boxed{ }": "5",
    "the answer is  Paris.": "Paris",
    "**Answer:** `Paris`": "Paris",
    "**Answer**: $x$.": "x",
    "Answer:\n\n  B": "B",
    "FINAL ANSWER IS: B": "B",
    "The answer is \\boxed{7}.": "7",
    "an unanswered question\nlast line \n\n": "last line",
    "": None,
    " \n ": None,
    "####": "####",
}


@pytest.mark.parametrize("text", FINAL)
def test_final_answers(text):
    assert final_answer(text) == FINAL[text]


def test_final_answers_by_a_pattern():
    tags = r"<answer>(.*?)</answer>"
    assert final_answer("<answer>1</answer> <answer> 2 </answer> #### 3", tags) == "2"
    assert final_answer("#### 3", tags) is None and final_answer("a b c", r"[ab]") == "b"
    assert final_answer("x = ", r"x = (\d)?") == ""


EXACT = [
    ("#### 42", "why\n#### 42", {}, 1.0),
    ("#### 42", 42, {}, 1.0),
    ("#### 42.0", "42", {}, 0.0),
    ("The answer is  New   York.", "New York", {}, 1.0),
    ("new york", "New York", {}, 0.0),
    ("new york", "New York", {"ignore_case": True}, 1.0),
    ("<answer>B</answer> or #### A", "#### B", {"pattern": "<answer>(.*?)</answer>"}, 1.0),
    ("B", "B", {"pattern": "<answer>(.*?)</answer>"}, 0.0),
    ("<answer>B</answer>", "<answer>B</answer>", {"pattern": "<answer>(.*?)</answer>"}, 1.0),
    ("", "B", {}, 0.0),
]


@pytest.mark.parametrize(("response", "truth", "options", "expected"), EXACT)
def test_exact(response, truth, options, expected):
    assert score("exact", response, {"answer": truth}, **options) == expected


# ------------------------------------------------------------------------------------------------ numbers

NUMBERS = {
    "42": 42, "16 - 3 = 13": 13, "16-3": 3, "(5)-3": 3, "is -3": -3, "x=-3.50": "-3.5", "−3": -3, "from 3 to -4.": -4,
    "$1,234.50 a day": "1234.5", "-$5": -5, "$-5": -5, "\\$5": 5, "€ 5": 5, "50%": 50, "1,234,567": 1234567,
    "a, b: 3,4": 4, "12,34": 34, "70{,}000": 70000, "70,\\!000": 70000, ".5": "1/2", "5.": 5, "1/2": "1/2",
    "-1/2": "-1/2", "3 / 4": "3/4", "1 1/2 cups": "3/2", "\\frac{3}{4}": "3/4", "-\\dfrac{1}{2}": "-1/2",
    "\\frac{-1}{2}": "-1/2", "\\frac12": "1/2", "-\\dfrac 1{20}": "-1/20", "\\frac{11}2": "11/2",
    "1.5e-3": "3/2000", "2 x 10^3": 2000, "2 \\times 10^{-2}": "1/50", "3 * 10**2": 300,
    "3 eggs": 3, "<<9*2=18>>18": 18, "7th": 7, "7 or 1/0": 7, "7, not 1e999": 7, "7, not " + "9" * 400: 7,
    "none": None, "": None, "-": None, "१": None,
}  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:20])
def test_last_numbers(text):
    expected = NUMBERS[text]
    assert last_number(text) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7\n#### 7 apples\nThere are 2 more.", 7),
        ("The answer is 42. There were 10 birds.", 42),
        ("The final answer is $\\boxed{\\frac{1}{2}}$.", Fraction(1, 2)),
        ("#### Conclusion\nIt is 5", 5),
        ("5 and then 6", 6),
        ("nothing", None),
    ],
)
def test_final_numbers(text, expected):
    assert final_number(text) == expected


NUMBER = [
    ("It is $1,000.00.", "#### 1000", {}, 1.0),
    ("0.5", "1/2", {}, 1.0),
    ("0.333333", "1/3", {}, 0.0),
    ("0.333333", "1/3", {"tolerance": 1e-6}, 1.0),
    ("0.333", "1/3", {"tolerance": 1e-6}, 0.0),
    ("1001", 1000, {"tolerance": 1e-3}, 1.0),
    ("1001.5", 1000, {"tolerance": 1e-3}, 0.0),
    ("-999", -1000, {"tolerance": 1e-3}, 1.0),
    ("1e-4", 0, {"tolerance": 1e-3}, 1.0),
    ("123456789012345678901", "123456789012345678902", {}, 0.0),
    ("<a>7</a> 8", "#### 7", {"pattern": "<a>(.*)</a>"}, 1.0),
    ("8", "#### 8", {"pattern": "<a>(.*)</a>"}, 0.0),
    ("no number", 8, {}, 0.0),
    ("3e-05", 3e-05, {}, 1.0),
]


@pytest.mark.parametrize(("response", "truth", "options", "expected"), NUMBER)
def test_number(response, truth, options, expected):
    assert score("number", response, {"answer": truth}, **options) == expected


@pytest.mark.shared
def test_the_verdicts_on_gsm8k_are_those_of_its_authors(shared):
    number, exact = (verifier(kind, answer_key="ground_truth") for kind in ("number", "exact"))
    marks = verbatim = 0
    for line in (shared / "data" / "gsm8k" / "example_model_solutions.jsonl").read_text().splitlines():
        record = json.loads(line)
        number.check(record)
        for name in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            said, right = record[name]["solution"], record[name]["is_correct"]
            assert number.is_right(said, record) == right, (said, record["ground_truth"])
            marks += right
            verbatim += exact.is_right(said, record)
            assert right or not exact.is_right(said, record)
    assert marks - 10 == verbatim > 1000  # ten have their commas elsewhere
    number = verifier("number")
    for line in (shared / "data" / "gsm8k" / "test.jsonl").read_text().splitlines():
        record = json.loads(line)
        number.check(record)
        true = record["answer"].split("####")[1].strip()
        assert number.is_right(record["answer"], record) and number.is_right(f"It is ${true}.", record)
        assert not number.is_right(f"{true}1", record) and not number.is_right("#### 0.123", record)


# ------------------------------------------------------------------------------------------------ patterns and code

REGEX = [
    ("a colour of red", {}, {"pattern": "colou?r"}, 1.0),
    ("a Colour", {}, {"pattern": "colou?r"}, 0.0),
    ("a Colour", {}, {"pattern": "colou?r", "ignore_case": True}, 1.0),
    ("a\nb", {}, {"pattern": "(?s)a.b"}, 1.0),
    ("seven", {"pattern": r"^\w{5}$"}, {}, 1.0),
    ("seventy", {"pattern": r"^\w{5}$"}, {}, 0.0),
    ("seven", {"form": "eve"}, {"answer_key": "form"}, 1.0),
]


@pytest.mark.parametrize(("response", "record", "options", "expected"), REGEX)
def test_regex(response, record, options, expected):
    assert score("regex", response, record, **options) == expected


ENDLESS = (r"(a|aa)+$", r"(a|a?)+$", r"(?:a?a?a?a?a?a?)*$", r"^(a*|b)*c|(?:a|aa|aaa)*!")


def test_patterns_that_backtrack_without_end_are_given_up(monkeypatch):
    """Without the limit this test would not end."""
    monkeypatch.setattr("megarlhf.experience.answers.PATTERN_SECONDS", 0.05)
    text = "a" * 5000 + "b"
    assert not any(found(pattern, text, False) for pattern in ENDLESS)
    assert final_answer(text, ENDLESS[0]) is None
    assert score("exact", text, {"answer": "a"}, pattern=ENDLESS[0]) == 0
    assert score("regex", text, {"pattern": ENDLESS[1]}) == 0


TRUTHS = [
    "42", 42, 3e-05, "1e+20", "-$3.50", "$1,234", "€ 5", "50%", "50\\%", "7 apples", "5 km/h", "3 dollars.", "3 a day",
    "1 1/2 cups", "70{,}000", "\\frac12", "-\\frac{3}{4}", "$\\boxed{\\frac{1}{2}}$", "x = 5", "2 x 10^3", "It is -7",
    "#### 5. See step 3.", "The answer is \\$5.", "5\\text{ cm}", "90^\\circ", "30°", "\\boxed{5 \\mathrm{kg}}",
]  # fmt: skip
NO_TRUTHS = [
    "\\boxed{\\sqrt{2}}", "x^2", "2x", "\\frac{\\pi}{2}", "2\\pi", "2 pi", "3i", "\\frac{1}{2}x", "1\\frac{1}{2}",
    "2^10", "#### 5 (see step 3)", "1.000.000", "3 or 4", "#### two of 3 or 4", "12,34", "10:30", "16 - 3 = 13",
    "(1, 2)", "5!", "6 cm^2", "5 million", "10_2", "\\frac123", "x_1 = 5",
]  # fmt: skip


def test_a_true_number_is_wholly_one_number():
    for truth in TRUTHS:
        verifier("number").check({"answer": truth})
        assert score("number", f"#### {truth}".replace("#### ####", "####"), {"answer": truth}) == 1
    for truth in NO_TRUTHS:
        with pytest.raises(ValueError, match="'answer' is not one number"):
            verifier("number").check({"answer": truth})
    tagged = verifier("number", pattern="<a>(.*?)</a>")
    tagged.check({"answer": "1 or 2 <a>7</a>"})
    tagged.check({"answer": "#### 7"})
    for truth in ("7 <a>1 or 2</a>", "<a>x^2</a>", "#### x^2"):
        with pytest.raises(ValueError, match="'answer' is not one number"):
            tagged.check({"answer": truth})


LONG = ["a", "1,", "1 ", "111,", "\\boxed{", "answer is ", "answer:\n**\n", "#### \n", "```\n", "```python\nx", "(",
        "$ ", "\\frac{", "1/", "-", "9" * 299 + " ", "e1", "answer" + " " * 99]  # fmt: skip


def test_long_texts_are_read_in_time_proportional_to_them():
    """With the square of their length this test would not end."""
    for part in LONG:
        text = part * (150_000 // len(part))
        final_answer(text), final_number(text), code_of(text), is_one_number(text), is_one_number("#### 1 " + text)
    for part in ("a", " ", " a", "\u0663"):  # a line that has no end
        assert code_of("```" + part * (600_000 // len(part))).startswith("```")


CODE = {
    "x = 1": "x = 1",
    "Here:\n```python\nx = 1\n```\nDone.": "x = 1\n",
    "```\nx = 1\n```": "x = 1\n",
    "```python\nx = 1\n```\n```python\nx = 2\n```\n```bash\nls\n```": "x = 2\n",
    "```sh\nls\n```\n```\nx = 3\n```": "x = 3\n",
    "```Py\nx = 1": "x = 1",
    "  ```python3 title=a\n  x\n  ```": "  x\n",
    "": "",
}


@pytest.mark.parametrize("response", CODE)
def test_the_code_of_a_response(response):
    assert code_of(response) == CODE[response]


# ------------------------------------------------------------------------------------------------ before a run starts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("sp") / "tokenizer"))


def load(tokenizer, path, rows, source, **options):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configuration.from_dict(ScoringConfig, {"sources": [source]}, "here")
    return load_prompts(
        tokenizer, PromptsConfig(str(path), **options), check_record=scoring.RecordCheck(config)
    )[0]  # fmt: skip


BAD = [
    ("exact", {}, r"no key 'answer' for verify: exact \(found: prompt\); add it or set answer_key"),
    ("exact", {"answer": " "}, "'answer' is empty"),
    ("exact", {"answer": None}, "'answer' is no text or number but NoneType"),
    ("exact", {"answer": ["a"]}, "'answer' is no text or number but list"),
    ("number", {"answer": True}, "'answer' is no text or number but bool"),
    ("number", {"answer": "#### none"}, "'answer' has no number"),
    ("number", {"answer": "#### x^2"}, r"'answer' is not one number \('x\^2'\)"),
    ("regex", {"pattern": "(a"}, r"'pattern' '\(a' is no regular expression"),
    ("regex", {"pattern": ""}, "'pattern' is empty"),
    ("regex", {"pattern": 3}, "'pattern' is no regular expression"),
    ("code", {"answer": "x"}, "no key 'tests' for verify: code"),
    ("code", {"tests": 3}, "'tests' is no string or list of strings"),
    ("code", {"tests": ["assert True", 3]}, "'tests' is no string or list of strings"),
    ("code", {"tests": "assert f("}, "'tests' is not Python"),
    ("code", {"tests": []}, "'tests' tests nothing"),
    ("code", {"tests": "def check(candidate):\n    assert candidate(1) == 2"}, "'tests' tests nothing"),
]
HUMAN_EVAL = "\n\nMETADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
BAD += [
    ("code", {"tests": test}, "'tests' tests nothing: .*has no assert and no call" + hint)
    for test, hint in (
        (HUMAN_EVAL, "; add a last line that calls check, such as check\\(name\\)"),
        ('"a text"\npass\nx = dict(a=1)', ""),
        ("class A:\n    assert f(1) == 2", ""),
        ("if True:\n    def check(g): assert g(1) == 2", ""),
        ("x: int = 3\nimport math\nfor _ in range(3): pass", ""),
    )
]


@pytest.mark.parametrize(
    "test",
    [
        HUMAN_EVAL + "check(f)",
        "for x in (1, 2):\n    if x: assert f(x)",
        "with open('a'):\n    f(1)",
        "x = f(1)\nif x != 2: raise ValueError(x)",
        "try:\n    x = 1\nexcept ValueError:\n    assert False",
        "match f(1):\n    case 2: pass\n    case _: assert False",
        "[check(g) for g in (f,)]",
    ],
)
def test_tests_that_can_fail_are_accepted(test):
    verifier("code").check({"tests": test})
    verifier("code").check({"tests": ["x = 1", test]})


GOOD = {"prompt": "the sea", "answer": "#### 1", "pattern": "a", "tests": ["def check(f): assert f()", "check(f)"]}


@pytest.mark.parametrize(("kind", "row", "expected"), BAD)
def test_records_without_what_a_verifier_needs_are_refused_with_their_line(tokenizer, tmp_path, kind, row, expected):
    rows, path = [GOOD, {"prompt": "slow"} | row], tmp_path / "prompts.jsonl"
    with pytest.raises(UserError, match=f"^{path}:2: {expected}.*; 1 of 2 lines are malformed"):
        load(tokenizer, path, rows, {"verify": kind})
    assert [*load(tokenizer, path, rows, {"verify": kind}, max_bad_fraction=0.5).texts] == ["the sea"]
    assert len(load(tokenizer, path, rows, {"verify": "regex", "pattern": "a"})) == 2  # reads no record


def test_the_longest_time_of_a_batch(monkeypatch):
    sources = [{"verify": "code", "sandbox": {"seconds": 3}}, {"verify": "code"}, {"verify": "exact"}]
    sources += [{"verify": "exact", "pattern": "a"}, {"verify": "regex"}]
    config = configuration.from_dict(ScoringConfig, {"sources": sources}, "here")
    assert config.names == ("code", "code-2", "exact", "exact-2", "regex")
    monkeypatch.setattr("megarlhf.experience.sandbox.workers", lambda: 4)
    assert scoring.longest_judging(config, rows=10) == 3 * (3 + 10) + 10 * (0.2 + 0.2)
    for minutes in (0.1, 0.5, 1, 30):
        most = scoring.most_rows(config, minutes)
        assert scoring.longest_judging(config, most) < 60 * minutes <= scoring.longest_judging(config, most + 1)
    assert scoring.most_rows(configuration.from_dict(ScoringConfig, {"sources": sources[2:3]}, "here"), 1) > 10**6
