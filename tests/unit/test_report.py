"""Reports of small runs made up here, read back with an HTML parser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, report
from megarlhf.report import charts, drawing
from megarlhf.report.run import read
from tests.ranks import ROOT

CONFIG = {
    "run": "runs/small",
    "model": {"checkpoint": "runs/sft", "dtype": "fp32"},
    "scoring": {},
    "ppo": {"kl": {"controller": "adaptive", "target": 6.0}},
    "training": {"steps": 6},
    "parallel": {"tensor": 2, "pipeline": 1},
    "seed": 0,
}
SCRIPT = "<script>alert('x')</script>"


class Page(HTMLParser):
    """The elements of a page as (tag, attributes) and its text by the tag around it; closes what it opens."""

    VOID = ("meta", "br")

    def __init__(self, html: str):
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1], data))

    def text(self, tag: str | None = None) -> str:
        return " ".join(data for around, data in self.texts if tag in (None, around))

    def texts_of(self, tag: str) -> list[str]:
        return [data for around, data in self.texts if around == tag]

    def paths(self, kind: str) -> list[dict[str, str]]:
        return [a for tag, a in self.elements if tag == "path" and kind in a["class"].split()]

    def points(self) -> dict[str, int]:
        """{label: points drawn}; every label once."""
        return {path["data-label"]: len(re.findall("[ML]", path["d"])) for path in self.paths("curve")}


def record(step: int, **values) -> dict:
    return {"step": step, "time": 1000.0 + step, **values}


def ppo_records(count: int) -> list[dict]:
    return [
        record(
            step,
            **{"objective/scores": 0.1 * step, "objective/kl": 0.5 * step, "ppo/loss/policy": -0.1, "grad_norm": 1.0},
            **{"time/sample": 1.0, "time/learn": 3.0, "time/step": 4.0, "gate/ratio": 2e-7},
        )
        for step in range(1, count + 1)
    ]


def sample(step: int, query: str, response: str, **values) -> dict:
    return {"step": step, "query": query, "response": response, "score": 1.0, "kl": 2.0, **values}


def make(path: Path, records: list[dict], samples: list[dict] | None = None, config: dict = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.yaml").write_text(yaml.safe_dump(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    if samples is not None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
        (path / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    return path


def render(*args, **kwargs) -> Page:
    return Page(report.render([make(*args, **kwargs)]))


@pytest.mark.parametrize("program", ["dpo", "kto"])
def test_pairs_have_a_section(tmp_path, program):
    """With log-ratios of chosen and rejected, margins and accuracies, each of them once."""
    names = ("accuracy", "margins", "logratios_sum/chosen", "logratios_sum/rejected", "logprobs_sum/chosen")
    names += ("baseline",) if program == "kto" else ("loss/preference", "loss/nll_token", "logprobs_sum/rejected")
    records = [record(step, loss=1.0, **{name: 0.1 * step for name in names}) for step in (1, 2)]
    records.append(record(2, **{f"validation/{name}": 0.2 for name in names if "loss" not in name}))
    config = {key: value for key, value in CONFIG.items() if key not in ("ppo", "scoring")} | {program: {}, "data": {}}
    run = make(tmp_path / "run", records, config=config)
    page, grids = render(tmp_path / "run", records, config=config), charts.groups(read(run))["Preferences"]
    text = page.text()
    assert f"megarlhf {program}" in text and "Preferences" in text and "Log-ratios to the reference" in text
    assert ("Validation" in text, "Other" in text, text.count("Accuracy ")) == (False, False, 1), text
    drawn = sum(len(chart.curves.keys() & {*names}) for chart in grids)
    assert drawn == len(names)


def test_curves_have_a_point_for_each_record(tmp_path):
    records = [record(0, **{"validation/loss": 5.0})]
    records += [record(step, loss=4.0 / step, grad_norm=1.0) for step in range(1, 31)]
    records += [record(30, **{"validation/loss": 1.0})]
    page = render(tmp_path, records)
    assert page.points() == {"training": 30, "held-out": 2, "model": 30}
    loss = next(path for path in page.paths("curve") if path["data-label"] == "training")
    assert loss["data-x"].split() == [str(step) for step in range(1, 31)]
    assert [float(y) for y in loss["data-y"].split()] == pytest.approx([4.0 / s for s in range(1, 31)], rel=1e-4)
    assert len(page.paths("smooth")) == 2  # the long ones


def test_what_is_not_finite_is_a_marked_gap(tmp_path):
    records = [record(step, loss=math.inf if step == 1 else None if step == 3 else 1.0 + step) for step in range(6)]
    page = render(tmp_path, records)
    (curve,) = page.paths("curve")
    assert page.points() == {"training": 4}
    assert curve["d"].count("M") == 3
    assert len(page.paths("bad")) == 2


def test_header_says_what_improved(tmp_path):
    page = render(tmp_path, ppo_records(6))
    assert ("b", {"class": "good"}) in page.elements
    for text in (
        "megarlhf ppo",
        "6 of 6",
        "runs/sft, fp32",
        "tensor 2 × pipeline 1",
        "difference 2e-07 nats",
        "step 1 → 6",
    ):
        assert text in page.text(), text
    worse = render(tmp_path, [record(step, loss=float(step)) for step in (1, 2)])
    assert ("b", {"class": "bad"}) in worse.elements


def test_batches_that_were_not_learned_from_are_counted(tmp_path):
    label = "batches not learned from"
    assert label not in render(tmp_path, ppo_records(3)).text()
    refused = ppo_records(4)
    del refused[2]["ppo/loss/policy"], refused[2]["grad_norm"]  # which are of updates
    assert f"{label} 1" in render(tmp_path, refused).text()
    warmup = ppo_records(3)
    del warmup[0]["grad_norm"]  # the critic learned alone
    warmup[0]["ppo/val/grad_norm"] = 1.0
    assert label not in render(tmp_path, warmup).text()


def test_the_target_is_drawn_where_the_controller_has_one(tmp_path):
    def levels(config: dict) -> list:
        page = render(tmp_path, ppo_records(3), config=config)
        return [tag for tag, attributes in page.elements if tag == "line" and attributes["class"] == "level"]

    assert levels(CONFIG) == ["line"]
    assert levels({**CONFIG, "ppo": {"kl": {"controller": "fixed", "target": 6.0}}}) == []


def test_reinforce_has_the_charts_of_ppo(tmp_path):
    """Where it has the same numbers, and with the target of its own section."""
    changed = ("ppo/loss/policy", "ppo/policy/approxkl", "ppo/policy/entropy", "ppo/policy/ratio_max")
    figures = []
    for name in ("ppo", "reinforce"):
        config = {key: value for key, value in CONFIG.items() if key != "ppo"} | {name: CONFIG["ppo"]}
        records = [row | dict.fromkeys(changed, 1.5) for row in ppo_records(3)]
        records = [{key.replace("ppo/", f"{name}/"): value for key, value in row.items()} for row in records]
        page = render(tmp_path, records, config=config)
        assert "Other" not in page.text("h2") and "target" in page.text("span")
        figures.append(re.findall("<figure>.*?</figure>", page.html, re.S))
    assert figures[0] == figures[1]
    assert "megarlhf rl" in page.text("dd")


def test_a_number_that_no_group_knows_is_shown(tmp_path):
    assert render(tmp_path, [record(1, **{"new/thing": 1.0})]).points() == {"new/thing": 1}


def test_phases(tmp_path):
    page = render(tmp_path, ppo_records(5))
    bars = [attributes for tag, attributes in page.elements if tag == "rect"]
    heights = [sum(float(bar["height"]) for bar in bars if bar["class"] == f"c{index}") for index in (0, 1)]
    assert len(bars) == 10
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.02)
    for text in ("1 s", "3 s", "4 s", "25.0%", "75.0%"):
        assert text in page.text("td"), text


def test_every_curve_and_phase_has_a_colour(tmp_path):
    """However many: the page's style has six, which come again."""
    many = {f"scores/{n}/mean": 1.0 for n in range(13)} | {f"time/{n}": 1.0 for n in range(13)}
    page = render(tmp_path, [row | many for row in ppo_records(2)])
    styled = set(re.findall(r"\.(c\d+) \{", page.html))
    classes = {name for _, attributes in page.elements for name in (attributes.get("class") or "").split()}
    assert {name for name in classes if re.fullmatch(r"c\d+", name)} == styled


def test_phases_against_the_matmul_rate(tmp_path):
    work = {"matmul": 50e9, "phases": {"learn": {"flops": 60e9, "bytes": 2e9}}}
    make(tmp_path, ppo_records(5))
    (tmp_path / "work.json").write_text(json.dumps(work))
    page = Page(report.render([tmp_path]))
    for text in ("60", "2", "40.0%"):  # 60 GFLOP in 3 s of 50 GFLOP/s
        assert text in page.text("td"), text
    assert "50 GFLOP/s" in page.text("th") and "predicted" not in page.text("th")
    (tmp_path / "work.json").write_text(json.dumps(work | {"predicted": {"learn": 2.5}}))
    page = Page(report.render([tmp_path]))
    assert "2.5 s" in page.text("td") and "predicted" in page.text("th")


def test_samples_of_both_ends_stand_side_by_side(tmp_path):
    samples = [sample(1, "q1", "a"), sample(1, "q2", "b"), sample(3, "other", "?"), sample(5, "q2", "c")]
    page = render(tmp_path, ppo_records(5), samples)
    cells = [text for around, text in page.texts if around in ("p", "span") and text.strip()]
    shown = " ".join(cells).split()
    assert shown[-6:] == ["q2", "b", "q2", "c", "q1", "a"]  # the same query first
    assert "other" not in shown
    assert "2 responses" in page.text()


def test_samples_that_a_resumed_run_wrote_again_count_once(tmp_path):
    twice = [sample(1, "q", "a\u2028b"), sample(3, "q", "c"), sample(3, "q", "c", score=math.nan)]
    page = render(tmp_path, ppo_records(3), [*twice, *twice])
    assert "1 responses" in page.text() and "2 responses" in page.text()
    assert "a\u2028b" in page.text()
    assert "not finite" in page.text("b")


def test_scores_of_each_source(tmp_path):
    """Curves, the means over samples and each sample's own; rows of older runs have none."""
    records = [
        row | {f"scores/{name}/{part}": 1.0 for name in "ab" for part in ("mean", "var")} for row in ppo_records(3)
    ]
    samples = [
        sample(1, "q", "r", scores={"a": 2.0, "b": None}, record={"answer": "72", "tests": ["x" * 500]}),
        sample(1, "q2", "r", scores={"a": 4.0, "b": 0.5}, record={}),
        sample(3, "q", "r"),
    ]
    page = render(tmp_path, records, samples)
    assert page.points().items() >= {"a": 3, "b": 3}.items()
    assert {path["data-label"] for path in page.paths("curve")} & {"scores/a/mean", "scores/b/var"} == set()
    numbers = page.text("small")
    assert "mean score of a  , mean score of b" in numbers
    assert '{"answer": "72", "tests": ["xxx' in numbers and "x" * 300 not in numbers
    assert [text for around, text in page.texts if around == "b"].count("not finite") == 1
    odd = [sample(1, "q", "r", scores=value, record=value) for value in (None, 3, [1], {SCRIPT: SCRIPT}, {"a": {}})]
    assert SCRIPT not in render(tmp_path, records, odd).html


def test_evaluations_have_a_section(tmp_path):
    """Curves of every k, first and last responses, no bar among the phases of steps, and the end by patience."""
    names = ("greedy", "score", "response_length", "pass@1", "pass@8")
    records = ppo_records(4)
    for step, best in ((0, 0), (2, 2), (4, 2)):
        values = {f"evaluation/{name}": 0.1 * step for name in names} | {"evaluation/best_step": best}
        records.insert(step, record(step, **values, **{"time/evaluation": 90.0}))
    rows = [{"step": step, "query": "q", "response": f"after {step}", "score": 1.0} for step in (0, 2, 4)]
    make(tmp_path, records)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(report.render([tmp_path]))
    assert page.points().items() >= dict.fromkeys(("greedy", "held-out", "length", "pass@1", "pass@8"), 3).items()
    assert "after 0" in page.text("p") and "after 4" in page.text("p") and "after 2" not in page.text("p")
    assert "Evaluation" in page.text("h2") and "KL" not in page.text("small")
    assert "evaluation" not in page.text("td") and "100.0%" not in page.text("td") and "4 s" in page.text("td")
    assert "4 of 6, not finished" in page.text("dd")
    make(tmp_path, records, config=CONFIG | {"evaluation": {"patience": 1}})
    assert "4 of 6, stopped by evaluation.patience" in Page(report.render([tmp_path])).text("dd")
    make(tmp_path, ppo_records(4), config=CONFIG | {"evaluation": {"patience": 1}})  # none yet
    assert "not finished" in Page(report.render([tmp_path])).text("dd")


def test_sources_replace_no_column_of_the_report(tmp_path):
    samples = [sample(1, "q", "r", score=0.25, kl=0.5, scores={"score": 7.0, "KL": 9.0})]
    page = render(tmp_path, ppo_records(1), samples)
    shown = [text for around, text in page.texts if around == "b"]
    assert shown[-4:] == ["0.25", "0.5", "7", "9"]
    assert "score of score" in page.text("small") and "score of KL" in page.text("small")


def test_nothing_of_the_run_becomes_markup(tmp_path):
    quoted = f'"{SCRIPT}'
    rows = [row | {quoted: 1.0, f"time/{quoted}": 1.0} for row in ppo_records(2)]
    config = {**CONFIG, "run": SCRIPT, "seed": SCRIPT, "model": {"checkpoint": SCRIPT, "dtype": SCRIPT}}
    run = make(tmp_path / '"<script>', rows, [sample(1, SCRIPT, f"</td></table>{SCRIPT}")], config)
    (run / "audit.json").write_text(json.dumps([dict.fromkeys(("detail", "what", "value", "original"), SCRIPT)]))
    page = Page(report.render([run]))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert SCRIPT not in page.html
    for tag, around in (("h1", '"<script>'), ("dd", SCRIPT), ("p", SCRIPT), ("pre", SCRIPT), ("td", SCRIPT)):
        assert around in page.text(tag), tag
    assert quoted in page.points()


def test_the_page_needs_nothing_else_and_runs_its_own_script_only(tmp_path):
    page = render(tmp_path, ppo_records(30), [sample(1, "q", "r"), sample(30, "q", "r")])
    assert "http:" not in page.html and "https:" not in page.html and "url(" not in page.html
    assert {"src", "srcset", "data", "action"}.isdisjoint(
        name for _, attributes in page.elements for name in attributes
    )
    targets = [attributes["href"] for _, attributes in page.elements if "href" in attributes]
    assert sorted(targets) == sorted(f"#{a['id']}" for tag, a in page.elements if tag == "section")
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.text("script").encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_run_that_is_not_finished(tmp_path, count):
    run = make(tmp_path, ppo_records(count), [sample(1, "q", "first")] if count else None)
    for name, cut in (
        ("metrics.jsonl", b'{"step": 5, "objective/sco'),
        ("samples.jsonl", b'{"step": 5, "query": "\xe2'),
    ):
        with (run / name).open("ab") as file:
            file.write(cut)
    page = Page(report.render([run]))
    assert set(page.points().values()) == ({count} if count else set())
    assert f"{count} of 6, not finished" in page.text("dd")
    assert ("No step is recorded yet." in page.text()) == (count == 0)
    assert ("first" in page.text("p")) == (count > 0)
    assert "controller: adaptive" in page.text("pre")


def test_a_long_run_keeps_its_extremes(tmp_path):
    values = {7_001: 90.0, 12_345: -50.0}
    page = render(tmp_path, [record(step, **{"ppo/loss/policy": values.get(step, 1.0)}) for step in range(20_000)])
    (curve,) = page.paths("curve")
    assert 500 <= page.points()["loss"] <= drawing.MAX_POINTS
    assert {"7001", "12345"} <= set(curve["data-x"].split())
    assert len(page.html) < 100_000


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1e-7, 3e-2), (0.003, 412.0), (2.71e-7, 2.9e-7), (98_000.0, 99_000.0)])
def test_ticks_are_few_and_on_the_axis(low, high, log):
    if log and high / low < 10:
        return  # such an axis is never logarithmic
    axis = drawing.Axis(low, high, 0.0, 100.0, log)
    assert (axis(low), axis(high)) == (0.0, 100.0)
    ticks = axis.ticks(4)
    assert 2 <= len(ticks) <= 9
    assert all(0 <= axis(tick) <= 100 for tick in ticks)
    assert len({drawing.number(tick, 6) for tick in ticks}) == len(ticks)


def test_the_audit_that_a_run_wrote_is_shown(tmp_path):
    from megarlhf import config
    from megarlhf.train import audit
    from megarlhf.train.rl_config import run_config

    values = {
        "run": "r",
        "model": {"checkpoint": "m"},
        "prompts": {"path": "p"},
        "scoring": {"sources": [{"url": "http://host:1"}]},
    }
    settings = config.from_dict(run_config("ppo"), values, "test")
    run = make(tmp_path, ppo_records(1))
    details = audit.details(settings)
    audit.save(details, run / "audit.json", audit.BUILT_IN)
    page = Page(report.render([run]))
    assert [a.get("class") for tag, a in page.elements if tag == "tr"].count("differs") == sum(
        value != original for _, _, value, original in details
    )
    for what in [row[1] for row in (*details, *audit.BUILT_IN)]:
        assert what in page.text("td"), what


def test_the_command_writes_the_page(tmp_path, capsys):
    run = make(tmp_path / "run", ppo_records(2), [sample(1, "q", "r")])
    with (run / "samples.jsonl").open("a") as file:  # half of a surrogate pair cannot be written as UTF-8
        file.write(json.dumps(sample(2, "q", "\ud800")) + "\n")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert Page((run / "report.html").read_text(encoding="utf-8")).points()
    assert cli.main(["report", str(run), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (run / "report.html").read_bytes()
    assert cli.main(["report", str(run), "--output", str(tmp_path / "none" / "x.html")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    def refusal(directory: Path) -> str:
        assert cli.main(["report", str(directory)]) == 2
        return capsys.readouterr().err

    for directory in (tmp_path / "nowhere", tmp_path):
        assert f"error: {directory}: not a run directory, run.yaml is missing; give the one" in refusal(directory)
    (tmp_path / "run.yaml").write_text("run: x\n")
    assert "metrics.jsonl is missing" in refusal(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    for text, expected in {
        "a: [": "run.yaml:1: not valid YAML",
        "": "run.yaml: is empty; put that of the run there again",
        "- 1": "run.yaml:1: the file must be a mapping of sections",
    }.items():
        (tmp_path / "run.yaml").write_text(text)
        assert expected in refusal(tmp_path)


AUDIT_ROW = dict.fromkeys(("detail", "what", "value", "original"), "x")
DAMAGES = {
    "run.yaml": (b"\xff\xfe", b"a: [", b"- 1", b"a: !!int x", b"a: &a [*a]", b"a: 2024-99-99"),
    "metrics.jsonl": (
        b"\xff\n{}\n",
        b"[1]\n{}\n",
        b'{"step": true}\n',
        b'{"step": -1}\n',
        b"[" * 100_000 + b"\n",
        b'{"a": 1}\n',
    ),
    "audit.json": (b"{", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000, json.dumps([AUDIT_ROW | {"value": 3}]).encode()),
    "work.json": (
        b"",
        b"[]",
        b'{"matmul": 1}',
        b'{"matmul": "x", "phases": {}}',
        b'{"matmul": 0, "phases": {}}',
        b'{"matmul": 1, "phases": {"learn": 1}}',
        b'{"matmul": 1, "phases": {"learn": {"flops": null, "bytes": 1}}}',
        b'{"matmul": 1, "phases": {}, "predicted": {"learn": "x"}}',
        b'{"matmul": 1, "phases": {}, "predicted": [1]}',
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_named(tmp_path, capsys, name):
    make(tmp_path, ppo_records(5))
    for content in DAMAGES[name]:
        (tmp_path / name).write_bytes(content)
        assert cli.main(["report", str(tmp_path)]) == 2, content
        (line,) = capsys.readouterr().err.splitlines()
        assert str(tmp_path / name) in line, content


def test_odd_values_do_not_end_a_report(tmp_path):
    """Numbers of another type, or beyond what can be drawn, in files that are otherwise whole."""
    odd = ["text", [1], {"a": 1}, True, 10**400, 1e308, -1e308, None, -5]
    for name in ("objective/scores", "time/learn", "time", "gate/ratio", "other"):
        for value in odd:
            records = [*ppo_records(3), ppo_records(4)[3] | {name: value}]
            render(tmp_path, records)
    for values in ([0.0, 4e-323], [1e-323, 2e-323], [5e-324, 9e299], [9e299, -9e299], [1.0, 1.0000000000000002]):
        rows = [record(step, loss=value, **{"time/learn": abs(value)}) for step, value in enumerate(values)]
        assert render(tmp_path, rows).points() == {"training": 2}
    for config in (
        {"training": {"steps": "many"}},
        {"ppo": {"kl": {"controller": "adaptive", "target": "high"}}},
        {"ppo": 3},
    ):
        render(tmp_path, ppo_records(3), config=CONFIG | config)


def test_the_command_is_instant():
    code = (
        "import sys, megarlhf.cli\n"
        "assert megarlhf.cli.main(['report', 'nowhere']) == 2\n"
        "sys.exit(' '.join({'torch', 'megatron', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def scores_of(run: Path, *rows: tuple[int, str, list[float]]) -> None:
    lines = (json.dumps({"step": step, "name": name, "values": values}) + "\n" for step, name, values in rows)
    (run / "scores.jsonl").write_text("".join(lines))


def bars(page: Page, title: str) -> dict[str, float]:
    """{what a bar of the distribution says: its height}"""
    (figure,) = [part for part in re.findall("<figure>.*?</figure>", page.html, re.S) if f"<h3>{title}</h3>" in part]
    found = re.findall(r'height="([\d.]+)"><title>(.*?)</title>', figure)
    assert len({text for _, text in found}) == len(found)
    return {text: float(height) for height, text in found}


def test_scores_of_both_ends_are_a_distribution(tmp_path):
    make(tmp_path, ppo_records(4))
    scores_of(
        tmp_path, (1, "samples/score", [0, 0, 0, 1]), (2, "samples/score", [9]), (4, "samples/score", [0, 1, 1, 2])
    )
    found = bars(Page(report.render([tmp_path])), "Sampled score")
    shares = {"step 1: 75% 0": 3, "step 1: 25% 1": 1, "step 4: 25% 0": 1, "step 4: 50% 1": 2, "step 4: 25% 2": 1}
    assert {text.replace(".0%", "%") for text in found} == {*shares}
    heights = [height / shares[text.replace(".0%", "%")] for text, height in found.items()]
    assert max(heights) - min(heights) < 0.2  # of 190: the drawing has one decimal


def test_many_values_share_bins_of_equal_width(tmp_path):
    make(tmp_path, ppo_records(1))
    scores_of(tmp_path, (1, "held_out/score", [i / 10 for i in range(1000)]))
    found = bars(Page(report.render([tmp_path])), "Held-out score")
    assert len(found) == drawing.BINS and all(text.startswith("step 1: 5.0% ") for text in found)


def test_each_of_as_many_values_as_bins_is_in_a_bin_of_equal_width(tmp_path):
    """Such bins are no single values, although they are as many."""
    make(tmp_path, ppo_records(1))
    values = [0.0, 1.0, *(2.0 + i / 100 for i in range(17)), 20.0]
    scores_of(tmp_path, (1, "samples/score", values))
    assert len(values) == drawing.BINS
    found = bars(Page(report.render([tmp_path])), "Sampled score")
    assert [*found] == ["step 1: 5.0% 0 to 1", "step 1: 5.0% 1 to 2", "step 1: 85.0% 2 to 3", "step 1: 5.0% 19 to 20"]


def test_odd_distributions_do_not_end_a_report(tmp_path):
    """Of any values, alone and beside a run without. What is not finite, or no list of numbers, is passed over."""
    other = make(tmp_path / "other", ppo_records(1))
    odd = [[1.0], [2.0] * 9, [9e299, -9e299], [10**299, 3], [5e-324 * i for i in range(15)]]
    odd += [[1 + 2.3e-16 * i for i in range(15)], [0.001 * i for i in range(200_000)]]
    for values in odd:
        run = make(tmp_path / "run", ppo_records(1))
        scores_of(run, (1, "samples/score", values))
        for runs in ([run], [run, other]):
            assert "Sampled score" in Page(report.render(runs)).text("h3")
    for values in ([], [math.nan], [None], ["1"], [True], [10**400], "12", 1.0, None, {"1": 1}):
        scores_of(run, (1, "samples/score", values))
        assert "Scores" not in Page(report.render([run, other])).text("h2")


@pytest.mark.parametrize("key", ["reward_tokens", "normalization", "dpo", "kto", "ilql", "scoring", "ppo"])
def test_the_program_is_named(tmp_path, key):
    programs = {"reward_tokens": "prm", "normalization": "reward", "scoring": "rl"}
    config = {name: value for name, value in CONFIG.items() if name not in ("ppo", "scoring")}
    config |= {key: None} | ({"scoring": {}} if key == "ppo" else {})
    assert f"megarlhf {programs.get(key, key)}" in render(tmp_path, [], config=config).texts_of("dd")


def two_runs(tmp_path: Path) -> list[Path]:
    """One with KL 0.05 and six steps, one without and three."""
    one = make(
        tmp_path / "one", ppo_records(6), [sample(1, "q", "before"), sample(6, "q", "after"), sample(6, "r", "x")]
    )
    config = CONFIG | {"run": "runs/other", "ppo": {"kl": {"controller": "fixed", "coef": 0.0}}, "seed": 1}
    rows = [row | {"objective/scores": 0.9, "own/number": 3.0} for row in ppo_records(3)]
    other = make(tmp_path / "other", rows, [sample(3, "q", "otherwise")], config)
    return [one, other]


def rows_of(page: Page, title: str) -> dict[str, list[str]]:
    """{first cell: the others} of the tables of a section."""
    section = page.html.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in re.findall("<tr>.*?</tr>", section, re.S)]
    return {row[0]: row[1:] for row in rows if row}


def test_several_runs_share_axes(tmp_path):
    page = Page(report.render(two_runs(tmp_path)))
    figures = re.findall(r"<figure>.*?<h3>(.*?)</h3>.*?</figure>", page.html, re.S)
    assert len(set(figures)) == len(figures)
    curves = [
        (path["data-label"], path["class"].split()[-1], len(path["data-x"].split())) for path in page.paths("curve")
    ]
    assert {*curves} == {("one", "c0", 6), ("other", "c1", 3)}  # with the same colours also where one is missing
    assert len(curves) == 2 * len(figures) - 1  # own/number
    assert "own/number" in figures


def test_several_runs_final_numbers_and_differences(tmp_path):
    page = Page(report.render(two_runs(tmp_path)))
    final = rows_of(page, "Final numbers")
    assert final["Score"] == ["0.6 at step 6", "0.9 at step 3"]
    assert "<td class=good>0.9 at step 3</td>" in page.html
    assert final["Seconds a step, median"] == ["4", "4"]
    assert final["own/number"] == ["", "3"]
    assert rows_of(page, "Configurations") == {
        "ppo.kl.controller": ["adaptive", "fixed"],
        "ppo.kl.target": ["6.0", "–"],
        "ppo.kl.coef": ["–", "0.0"],
        "seed": ["0", "1"],
    }
    assert rows_of(page, "Phases")["learn"] == ["3 s", "3 s"]


def test_several_runs_answers_to_the_same_prompts(tmp_path):
    answers = rows_of(Page(report.render(two_runs(tmp_path))), "Responses")
    assert [*answers] == ["<p>q</p>"]  # r was answered by one run alone
    one, other = answers["<p>q</p>"]
    assert "before" in one and "after" in one and "otherwise" in other


def test_several_runs_that_cannot_be_told_apart_are_refused(tmp_path, capsys):
    one, other = two_runs(tmp_path)
    assert cli.main(["report", str(one), str(one.parent / "other" / ".." / "one")]) == 2
    assert f"{one}: is given twice" in capsys.readouterr().err
    assert cli.main(["report", *map(str, [one, other] * 4)]) == 2
    assert "give at most 6 runs" in capsys.readouterr().err
    same = [make(tmp_path / name / "rl", ppo_records(1)) for name in ("a", "b")]
    assert {"a/rl", "b/rl"} <= Page(report.render(same)).points().keys()


def test_several_runs_are_written_where_the_command_runs(tmp_path, capsys, monkeypatch):
    runs = two_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    page = Page((tmp_path / "comparison.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.elements].count("script") == 1


def test_nothing_of_several_runs_becomes_markup(tmp_path):
    config = {**CONFIG, SCRIPT: SCRIPT, "seed": SCRIPT}
    one = make(
        tmp_path / '"<script>', [row | {SCRIPT: 1.0} for row in ppo_records(2)], [sample(1, SCRIPT, SCRIPT)], config
    )
    scores_of(one, (1, SCRIPT, [1.0]))
    other = make(tmp_path / "other", ppo_records(2), [sample(1, SCRIPT, SCRIPT)])
    page = Page(report.render([one, other]))
    assert [tag for tag, _ in page.elements].count("script") == 1 and SCRIPT not in page.html


def program(name: str, **values) -> dict:
    """The configuration of a run of an offline program."""
    return {key: value for key, value in CONFIG.items() if key not in ("ppo", "scoring")} | {name: {}} | values


def test_runs_of_different_programs(tmp_path):
    """Each number is on one chart, whichever program recorded it, and losses of different kinds are not ranked."""
    records = [record(step, loss=2.6, accuracy=0.5, step_seconds=3.0) for step in (1, 2)]
    reward = make(tmp_path / "reward", records, config=program("normalization", loss="pairwise"))
    dpo = make(tmp_path / "dpo", [row | {"loss": 0.6, "margins": 0.1} for row in records], config=program("dpo"))
    page = Page(report.render([reward, dpo]))
    assert [text for text in page.texts_of("h3") if text.startswith("Accuracy")] == ["Accuracy: training"]
    assert ("td", {"class": "good"}) not in page.elements
    ppo = make(tmp_path / "ppo", ppo_records(2))
    html = report.render([dpo, ppo])
    assert rows_of(Page(html), "Final numbers")["Seconds a step, median"] == ["3", "4"]
    assert html.count("<td>Seconds a step, median</td>") == 1
    assert "td class=good>3<" in html


def test_sources_of_several_runs_are_told_apart(tmp_path):
    """Also where each run has one, and where one run has those of another and more."""

    def made(*names: str) -> Path:
        rows = [row | {f"scores/{name}/mean": 1.0 for name in names} for row in ppo_records(2)]
        return make(tmp_path / "-".join(names), rows)

    for runs in ((made("a"), made("b")), (made("a"), made("a", "b"))):
        page = Page(report.render([*runs]))
        titles = [text for text in page.texts_of("h3") if text.startswith("Scores of each source")]
        assert titles == ["Scores of each source: a", "Scores of each source: b"]


def test_a_level_that_runs_share_is_drawn(tmp_path):
    def levels(*targets: float) -> list:
        configs = [CONFIG | {"ppo": {"kl": {"controller": "adaptive", "target": target}}} for target in targets]
        runs = [make(tmp_path / str(place), ppo_records(3), config=c) for place, c in enumerate(configs)]
        page = Page(report.render(runs))
        return [tag for tag, attributes in page.elements if tag == "line" and attributes["class"] == "level"]

    assert levels(6.0, 6.0) == ["line"]
    assert levels(6.0, 3.0) == []


def test_odd_rows_of_samples_do_not_end_a_comparison(tmp_path):
    odd = [sample(6, query, response) for query, response in ((["q"], "r"), ({}, "r"), (None, "r"), ("q", ["r"]))]
    runs = [make(run, ppo_records(6), [*odd, sample(6, "q", "good")]) for run in (tmp_path / "a", tmp_path / "b")]
    assert [*rows_of(Page(report.render(runs)), "Responses")] == ["<p>q</p>"]
    assert "good" in report.render(runs[:1])


def test_several_runs_without_steps(tmp_path):
    page = Page(report.render([make(tmp_path / name, []) for name in "ab"]))
    assert "No step is recorded yet." in page.text("p")
    assert page.texts_of("h2") == ["Configurations"]


def test_sections_have_addresses(tmp_path):
    """An id has no space."""
    runs = two_runs(tmp_path)
    scores_of(runs[0], (1, "samples/score", [1.0]))
    page = Page(report.render(runs))
    names = [a["id"] for tag, a in page.elements if tag == "section"]
    assert [a["href"] for tag, a in page.elements if tag == "a"] == [f"#{name}" for name in names]
    assert "final-numbers" in names and not any(" " in name for name in names)
    assert names.index("scores") == names.index("other") - 1


def test_long_runs_say_their_steps_whole(tmp_path):
    rows = [record(step, **{"objective/scores": score}) for step, score in ((1_234_567, 2.0), (1_234_568, 1.0))]
    page = Page(report.render([make(tmp_path / name, rows) for name in "ab"]))
    assert rows_of(page, "Final numbers")["Score"] == ["1 at step 1234568; best 2 at 1234567"] * 2


def test_differences_are_written_as_overrides_are(tmp_path):
    values = [{"none": None, "yes": True, "names": ["a"]}, {"none": 1e-6, "yes": False, "names": ["b", "c"]}]
    runs = [make(tmp_path / name, [], config=CONFIG | {"own": v}) for name, v in zip("ab", values, strict=True)]
    found = rows_of(Page(report.render(runs)), "Configurations")
    assert found["own.none"] == ["null", "1e-06"] and found["own.yes"] == ["true", "false"]
    assert found["own.names"] == ["[&#34;a&#34;]", "[&#34;b&#34;, &#34;c&#34;]"]
