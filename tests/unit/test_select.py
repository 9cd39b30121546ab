"""`megarlhf select`: known answers by hand, what is dropped, and one line for each mistake."""

import json
import subprocess
import sys

import pytest

from megarlhf import cli
from tests.ranks import ROOT

ROWS = [  # (prompt id, prompt, response, score): ids 0 and 1 have the same text, and 0's lines are apart
    (0, "a", "x", 1.0),
    (0, "a", "y", 3.0),
    (1, "a", "z", 5.0),
    (1, "a", "w", 5.0),
    (0, "a", "v", 0.5),
    ("two", "{score}", "only", 7.0),
    (3, "b", "low", -2.0),
    (3, "b", "lower", -4.0),
]


def lines(rows=ROWS, **more):
    names = ("prompt_id", "prompt", "response", "score")
    return [dict(zip(names, row, strict=True)) | more for row in rows]


def select(tmp_path, capsys, rows, *overrides, status=0):
    """(what is written, what is said)."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.unlink(missing_ok=True)
    assert cli.main(["select", "--input", str(source), "--out", str(out), *overrides]) == status
    said = capsys.readouterr()
    assert not (tmp_path / "out.jsonl.partial").exists() and out.exists() == (status == 0)
    if status:
        (line,) = said.err.splitlines()
        return line
    (line,) = said.out.splitlines()
    return [json.loads(row) for row in out.read_text().splitlines()], line


def test_odd_texts_and_conversations(tmp_path, capsys):
    """Half of a surrogate pair, which JSON can write as an escape alone; prompts that are lists of messages."""
    prompt = [{"role": "user", "content": "a \ud800"}]
    rows, _ = select(tmp_path, capsys, lines([(1, prompt, "b", 1.0), (1, prompt, "c", 2.0)]), "--kind", "pairs")
    assert rows == [{"prompt": prompt, "chosen": "c", "rejected": "b"}]
    cut = [*lines([(1, "a", "b", 1.0)]), *lines([(1, "a", "c", 2.0)], ended=False)]
    assert "1 prompts with one response" in select(tmp_path, capsys, cut, "--kind", "pairs", status=2)


def test_the_best(tmp_path, capsys):
    rows, said = select(tmp_path, capsys, lines(), "--kind", "best")
    assert rows == [
        {"prompt": "a", "response": "y"},
        {"prompt": "a", "response": "z"},  # the first of equal ones
        {"prompt": "{score}", "response": "only"},
        {"prompt": "b", "response": "low"},
    ]
    assert "8 responses to 4 prompts: 4 kept, mean score 1.938 -> 3.25, 2 without a choice" in said
    rows, said = select(tmp_path, capsys, lines(), "--kind", "best", "ties=drop", "min_score=0")
    assert rows == [{"prompt": "a", "response": "y"}]
    assert "2 prompts whose responses all have the same score" in said
    assert "1 prompts whose best score is below min_score 0" in said


def test_pairs(tmp_path, capsys):
    rows, said = select(tmp_path, capsys, lines(), "--kind", "pairs", "margin=true")
    assert rows == [
        {"prompt": "a", "chosen": "y", "rejected": "v", "margin": 2.5},
        {"prompt": "b", "chosen": "low", "rejected": "lower", "margin": 2.0},
    ]
    assert "2 pairs kept, mean difference 2.25; dropped: " in said
    assert "1 prompts whose responses all have the same score, 1 prompts with one response" in said
    rows, said = select(tmp_path, capsys, lines(), "--kind", "pairs", "min_margin=2.25")
    assert rows == [{"prompt": "a", "chosen": "y", "rejected": "v"}]
    assert "1 prompts with a difference below min_margin 2.25" in said
    same = lines([(0, "a", "x", 1.0), (0, "a", "x", 2.0), (1, "a", "x", 1.0), (1, "a", "y", 2.0)])
    rows, said = select(tmp_path, capsys, same, "--kind", "pairs")
    assert rows == [{"prompt": "a", "chosen": "y", "rejected": "x"}]
    assert "1 prompts whose best and worst responses are the same text" in said


def test_what_cannot_be_learnt_is_dropped(tmp_path, capsys):
    """Cut responses would teach to stop in mid-sentence; empty ones are no example."""
    rows = lines([(0, "a", "cut", 9.0), (0, "a", " ", 8.0), (0, "a", "x", 1.0), (0, "a", "y", 2.0)])
    rows[0]["ended"] = False
    found, said = select(tmp_path, capsys, rows, "--kind", "pairs")
    assert found == [{"prompt": "a", "chosen": "y", "rejected": "x"}]
    assert "1 unfinished responses, 1 empty responses" in said
    found, _ = select(tmp_path, capsys, rows, "--kind", "best", "unfinished=keep")
    assert found == [{"prompt": "a", "response": "cut"}]


def test_scores_in_prompts(tmp_path, capsys):
    """Scores 1, 2, 3, 6: mean 3, standard deviation sqrt(14 / 4)."""
    rows = lines([(i, "p{x}", f"r{i}", score) for i, score in enumerate((1.0, 2.0, 3.0, 6.0))])
    for row, kind in zip(rows, (0, 0, 4, 8), strict=True):
        row["scores"] = {"score": -99.0, "kind": kind}  # a source named as the total
    found, said = select(tmp_path, capsys, rows, "--kind", "conditional", 'template="{score}|{prompt}"', "decimals=2")
    assert [row["prompt"] for row in found] == ["-1.07|p{x}", "-0.53|p{x}", "0.00|p{x}", "1.60|p{x}"]
    assert [row["response"] for row in found] == ["r0", "r1", "r2", "r3"] and "score mean 3" in said
    found, _ = select(
        tmp_path, capsys, rows, "--kind", "conditional", 'template="{score} {kind}|{prompt}"',
        "attributes=[score, kind]", "values=levels", "levels=2", "words=[bad, good]",
    )  # fmt: skip
    assert [row["prompt"][:-5] for row in found] == ["bad bad", "bad bad", "good good", "good good"]
    # equal scores have one level: that of their middle
    ties = lines([(i, "p", "r", score) for i, score in enumerate((1.0, 1.0, 1.0, 2.0))])
    found, _ = select(tmp_path, capsys, ties, "--kind", "conditional", 'template="{score}{prompt}"', "values=levels")
    assert [row["prompt"] for row in found] == ["1p"] * 3 + ["4p"]


def test_asking(tmp_path, capsys):
    prompts = [{"prompt": "a{score}", "answer": "4"}, {"prompt": "b", "answer": None}]
    found, said = select(tmp_path, capsys, prompts, "--kind", "ask", 'template="{score}|{prompt}"', "ask={score: 1.5}")
    assert found == [{"prompt": "1.5|a{score}", "answer": "4"}, {"prompt": "1.5|b", "answer": None}]
    assert "2 prompts that ask for score 1.5" in said


MISTAKES = {
    "missing score": ([{"prompt_id": 0, "prompt": "a", "response": "b"}], "in.jsonl:1: no key 'score' (found: "),
    "NaN": (lines() + lines([(9, "a", "b", float("nan"))]), "in.jsonl:9: 'score' must be a finite number, not nan"),
    "null": (lines([(9, "a", "b", None)]), "in.jsonl:1: 'score' must be a finite number, not None"),
    "infinite": (lines([(9, "a", "b", float("inf"))]), "in.jsonl:1: 'score' must be a finite number, not inf"),
    "text": (lines([(9, "a", "b", "4")]), "'score' must be a finite number, not '4'"),
    "huge": (lines([(9, "a", "b", 10**400)]), "in.jsonl:1: 'score' must be a finite number"),
    "no key": (lines([(9, "a", "b", "4")]), "1 lines are malformed; mend them"),
    "no id": ([{"prompt": "a", "response": "b", "score": 1}], "in.jsonl:1: no key 'prompt_id', which says whose"),
    "no response": ([{"prompt_id": 1, "prompt": "a", "score": 1}], "in.jsonl:1: no key 'response'"),
    "one id, two prompts": (lines([(1, "a", "b", 1), (2, "a", "b", 1), (1, "c", "d", 2)]),
                            "in.jsonl:3: prompt_id 1 has another prompt than in line 1"),
    "one response each": (lines([(1, "a", "b", 1), (2, "a", "b", 1)]),
                          "nothing is left: the best and the worst of 2 responses to 2 prompts: 0 pairs kept; dropped: "
                          "2 prompts with one response"),
    "all the same": (lines([(1, "a", "b", 1), (1, "a", "c", 1)]), "1 prompts whose responses all have the same score"),
    "empty": ([], "nothing is left"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_file(tmp_path, capsys, name):
    rows, message = MISTAKES[name]
    assert message in select(tmp_path, capsys, rows, "--kind", "pairs", status=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kind=best", "margin=true"], "margin: is for kind pairs, not for best"),
        (["kind=conditional"], "template: is missing"),
        (["kind=conditional", "template='{score}'"], "template: has no {prompt}"),
        (["kind=conditional", "template='{score}{prompt}{other}'"], "{other} is neither the prompt nor an attribute"),
        (["kind=conditional", "template='{score}{prompt}'", "values=levels", "words=[a]"], "words: must be 5"),
        (["kind=ask", "template='{score}{prompt}'"], "ask: must name one or more"),
        (["kind=ask", "template='{score}{prompt}'", "values=levels", "ask={score: 5}"], "a level from 0 to 4, not 5"),
        (["kind=worst"], "kind must be one of best, pairs, conditional, ask"),
        (["kind=best", "out=in.jsonl"], "is the file of the scored responses, which it would replace"),
        (["kind=conditional", "template='{score}{prompt}'"], "'score' is 1 in every line"),
    ],
)
def test_mistakes_of_a_configuration(tmp_path, capsys, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "response": "b", "score": 1, "prompt_id": 0}) + "\n")
    assert cli.main(["select", "input=in.jsonl", "out=out.jsonl", *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines()))
    code = (
        "import sys; from megarlhf import cli\n"
        f"assert cli.main(['select', '--input', r'{tmp_path}/in.jsonl', '--out', r'{tmp_path}/out.jsonl', '--kind', "
        "'best']) == 0\n"
        "sys.exit(' '.join({'torch', 'numpy', 'megatron', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
