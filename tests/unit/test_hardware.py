"""The table of machines, and the efficiencies that bench/scale.py fits to published step times."""

from __future__ import annotations

import configparser
import dataclasses
import math

import pytest

from bench import scale, scale_tables
from bench.published import cells, others
from megarlhf import config
from megarlhf.config import UserError
from megarlhf.plan import hardware
from tests.ranks import ROOT


def test_every_entry_is_a_machine():
    names = config.load(hardware.Table, hardware.TABLE).gpus
    assert set(names) >= {"a100", "h100", "h200", "h20", "b200"}
    for name in names:
        machine = hardware.load(name)
        assert 1e14 < machine.flops < 1e16 and 5e10 < machine.memory < 5e11 and machine.near.bandwidth > 1e10
    # An H200 is an H100 with other memory.
    h100, h200 = hardware.load("h100"), hardware.load("h200")
    assert h200.flops == h100.flops and h200.memory == 141e9
    assert h200.bandwidth / h100.bandwidth == pytest.approx(4.8 / 3.35)


def test_the_table_is_in_the_package():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["options.package_data"]["megarlhf.plan"].split() == [hardware.TABLE.name]


def test_own_entries():
    path = str(ROOT / "examples" / "hardware.yaml")
    given = config.load(hardware.Table, path)
    for name in given.gpus:
        assert hardware.load(name, path).reach == given.efficiencies.matmul
    mine, h100 = hardware.load("my_h100", path), hardware.load("h100")
    assert (mine.per_node, mine.flops) == (4, h100.flops)
    assert mine.far.bandwidth == h100.far.bandwidth / 2
    assert hardware.load("h100", path).memory == h100.memory  # the built-in ones are there, too


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("gpus: {x: {like: h100}}", "h1000", "did you mean 'h100'?"),
        ("gpus: {x: {like: y}, y: {like: x}}", "x", "x -> y"),
        ("gpus: {x: {tflops: 5}}", "x", "gpus.x has no memory, bandwidth"),
        ("gpus: {x: {like: h100, memory: -1}}", "x", "memory: must be positive, not -1"),
        ("gpus: {x: {like: h100, memroy: 80}}", "x", "did you mean 'memory'?"),
        ("gpus: {x: {like: h100, memory: 80GB}}", "x", "own.yaml:1: gpus.x.memory must be a number"),
        ("efficiencies: {link: 1.5}", "h100", "link: is a share above 0 and at most 1, not 1.5"),
        ("gpus: [h100]", "h100", "own.yaml:1: gpus must be a mapping"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, name, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=".*own.yaml.*") as raised:
        hardware.load(name, str(path))
    assert message in str(raised.value)


def test_the_shipped_efficiencies_are_the_fitted_ones():
    fitted = scale.fit(cells())
    shipped = config.load(hardware.Table, hardware.TABLE).efficiencies
    for name in scale.SHARES:
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=0.05), "run python -m bench.scale"
    # Figures that no fit has seen: all but the copies of weights, which this project does not make.
    unseen = [cell.error(fitted) for cell in others() if cell.phase != "sync"]
    assert len(unseen) == 7 and max(map(abs, unseen)) < 0.2


def test_a_fit_finds_what_made_the_figures():
    """Figures that the model itself makes, with other parameters than those it starts from."""
    truth = scale.Parameters(matmul=0.45, memory=0.7, link=0.3, tokens=1300, adam=3e8, gather=0.3, phase=8, sync=5e9)
    given = [dataclasses.replace(cell, seconds=cell.predict(truth)) for cell in cells()]
    found = scale.fit(given)
    for name in scale.NAMES:
        assert math.isclose(getattr(found, name), getattr(truth, name), rel_tol=0.01), name


def test_the_page_on_scale_has_the_efficiencies_and_the_search_of_today():
    page = scale_tables.DOCUMENT.read_text()
    shipped = config.load(hardware.Table, hardware.TABLE).efficiencies
    for share, what in ((shipped.matmul, "of the GPU's FLOP/s"), (shipped.memory, "of the memory's bandwidth"),
                        (shipped.link, "of NVLink's and the network's")):  # fmt: skip
        assert f"{share} {what}" in " ".join(page.split())
    for line in scale_tables.scaling("7b", scale_tables.COUNTS["7b"][:1], hardware.load(scale_tables.GPU)):
        assert line in page, "run python -m bench.scale_tables --write"


@pytest.mark.long
def test_figures_that_are_left_out_are_predicted():
    given = cells()
    without = scale.left_out(given, scale.fit(given))
    assert scale.median([cell.error(p) for cell, p in zip(given, without, strict=True)]) < 0.2
