"""What the code says of configurations: documents that are current, a file to start from, a schema that accepts what
the programs accept and refuses what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import jsonschema
import pytest
import yaml

from megarlhf import cli, config
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import PathName, UserError, describe, nodes
from megarlhf.data import files
from megarlhf.data.files import DataFile
from megarlhf.models.spec import RopeScaling
from megarlhf.optim import OptimizerConfig
from megarlhf.train.rl_config import OnlineTrainingConfig
from megarlhf.train.settings import TrainingConfig
from tests.campaigns.configurations import OVERRIDES
from tests.campaigns.table import split
from tests.ranks import ROOT
from tests.unit.test_config import SMALLEST
from tools import documents


@dataclass(frozen=True)
class Part:
    """A part. It has more sentences."""

    size: int  # of the part
    share: float = 0.5  # of the whole

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share: must be above 0 and at most 1, not {self.share}")
        if self.size > 100 * self.share:
            raise ValueError("size: must be at most 100 x share")


@dataclass(frozen=True)
class Whole:
    # what the whole
    # is called
    name: str  # in messages
    parts: tuple[Part, ...] = ()
    part: Part = field(default_factory=lambda: Part(3, 0.25))
    kind: Literal["a", "b"] = "a"
    place: PathName | None = None


def test_keys_are_what_the_code_says():
    name, parts, part, kind, place = describe.keys(Whole)
    assert (name.text, name.default) == ("what the whole is called in messages", describe.REQUIRED)
    assert parts.section is part.section is Part and part.text == "A part." and part.opens
    assert [(key.name, key.default, key.text) for key in describe.keys(Part, part.default)] == [
        ("size", 3, "of the part"),
        ("share", 0.25, "of the whole"),
    ]
    assert [describe.words(key.kind) for key in (parts, kind, place)] == ["list of section", "a, b", "path"]
    assert "name:  # text; required" in describe.template(Whole)
    assert "  size: whole number; default 3\n      of the part" in describe.reference(Whole)
    book = describe.handbook({"test": (Whole,)})
    assert "| `part` | [section](#part) | `size: 3`, `share: 0.25` | A part. |" in book
    assert "### Part\n\nA part. It has more sentences.\n\nWhere: `parts[]` (test), `part` (test)" in book
    made = describe.schema((Whole,), "test")
    part = made["definitions"][f"{Part.__module__}.Part"]
    assert part["required"] == ["size"] and part["additionalProperties"] is False
    assert part["properties"]["size"] == {"type": "integer", "description": "of the part"}  # its bound needs `share`
    share = {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "of the whole", "default": 0.5}
    assert part["properties"]["share"] == share
    assert made["required"] == ["name"] and made["properties"]["kind"]["enum"] == ["a", "b"]


def test_keys_that_need_words_have_some():
    for cls in (OptimizerConfig, ParallelConfig, TrainingConfig, OnlineTrainingConfig, RopeScaling):
        assert not [key.name for key in describe.keys(cls) if not key.text], cls
    assert "epoch" in {key.name: key.text for key in describe.keys(DataFile)}["weight"]


def test_documents_are_current():
    """`python -m tools.documents` writes them."""
    for name, text in documents.documents().items():
        assert (ROOT / name).read_text() == text, f"{name} is not current: run python -m tools.documents"


@pytest.mark.parametrize("program", cli.PROGRAMS)
def test_every_form_of_every_program(program, capsys):
    """A file to start from has the required keys alone, and the words for the terminal name every key."""
    assert cli.main(["init", program]) == 0
    written = capsys.readouterr().out
    assert cli.main([program, "--help-config"]) == 0
    said = capsys.readouterr().out
    for cls in cli.find(program).configurations:
        for key in dataclasses.fields(cls):
            assert f"{key.name}: " in said and f"{key.name}:" in written
    if len(cli.find(program).configurations) == 1:
        (cls,) = cli.find(program).configurations
        required = {key.name for key in describe.keys(cls) if key.default is describe.REQUIRED}
        assert set(yaml.safe_load(written) or {}) == required


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    return {name: json.loads(cli.described("schema", name)) for name in cli.PROGRAMS}


def errors(schema: dict[str, Any], tree: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(tree)]


def test_schemas_accept_what_programs_accept(schemas):
    for name, (cls, tree) in SMALLEST.items():
        program = next(program for program in cli.PROGRAMS if cls in cli.find(program).configurations)
        assert not errors(schemas[program], tree), name
    for path in sorted((ROOT / "examples" / "configs").glob("*.yaml")):
        first, text = path.read_text().partition("\n")[::2]
        program = first.removeprefix("# yaml-language-server: $schema=../schema/").removesuffix(".json")
        assert program in cli.PROGRAMS, f"{path}: its first line names no schema"
        assert not errors(schemas[program], yaml.safe_load(text)), path


# Mistakes of one key alone, which an editor can show.
SHOWN = (
    "seed=-1", "seed=1.5", "seed=true", "seed=", "optimizer.lrr=1", "optimizer.lr=0", "optimizer.eps=0",
    "optimizer.schedule=cosin", "training.global_batch_size=0", "data.train=null", "data.train=[]", "data.train=[3]",
    "data.max_length=1", "data.max_bad_fraction=1.5", "data.packing=2", "checkpoint.every=0", "job.hang_minutes=0",
    "model.recompute=all",
)  # fmt: skip


def test_schemas_refuse_what_programs_refuse(schemas):
    """All of SHOWN, and at least 70% of the campaign's mistakes in configurations of sft, files and paths included."""
    refused = []
    for override in OVERRIDES["sft"]:
        tree = nodes.wrap(SMALLEST["sft"][1], "test")
        try:
            for part in split(override):
                nodes.apply(tree, part)
        except UserError:
            refused.append(override)
            continue
        if errors(schemas["sft"], nodes.unwrap(tree)):
            refused.append(override)
    assert set(SHOWN) <= set(refused), set(SHOWN) - set(refused)
    assert len(refused) >= 0.7 * len(OVERRIDES["sft"])


def test_items_of_lists_are_overridden(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("name: a\nparts: [{size: 1}, {size: 2}]\n")
    found = config.load(Whole, file, ["parts[1].share=0.75", "parts[0]={size: 9}"])
    assert found.parts == (Part(9), Part(2, 0.75))
    mistakes = {
        "parts[2].size=1": "override 'parts[2].size=1': there is no item 2; the file's list has 2, counted from 0",
        "name[0]=1": "override 'name[0]=1': the file has no list there; give the whole list",
        "other[0].a=1": "override 'other[0].a=1': the file has no list there; give the whole list",
        "parts[0][1]=1": "override 'parts[0][1]=1': the file has no list there; give the whole list",
        "parts[x]=1": "override 'parts[x]=1': unknown key 'parts[x]'; did you mean 'parts'?",
    }
    for override, line in mistakes.items():
        with pytest.raises(UserError) as error:
            config.load(Whole, file, [override])
        assert str(error.value) == line


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    given = {"~/a": "/home/me/a", "$SCRATCH/b": "/scratch/b", "${SCRATCH}b/$1": "/scratchb/$1", "a~b": "a~b"}
    for text, path in given.items():
        assert config.load(Whole, None, ["name=a", f"place={text}"]).place == path
    assert config.load(Whole, None, ["name=$SCRATCH"]).name == "$SCRATCH"  # no path
    own = ["run=$SCRATCH/run", "model.checkpoint=~/sft", "data.validation=$SCRATCH/v", "data.train=[~/a, {path: ~/b}]"]
    sft = cli.find("sft").load(None, own)
    assert (sft.run, sft.model.checkpoint, sft.data.validation) == ("/scratch/run", "/home/me/sft", "/scratch/v")
    assert files.paths(sft.data.train) == ("/home/me/a", "/home/me/b")
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(
        UserError, match=r"place: '\$SCRATCH' names the environment variable SCRATCH, which is not set;"
    ):
        config.load(Whole, None, ["name=a", "place=$SCRATCH"])


def test_descriptions_need_no_configuration():
    """From a shell, as a user asks for them."""
    for arguments in (["init", "sft"], ["schema", "rl"], ["kto", "--help-config"]):
        done = subprocess.run(
            [sys.executable, "-m", "megarlhf", *arguments], capture_output=True, text=True, cwd=ROOT, env=os.environ
        )
        assert done.returncode == 0 and done.stdout and not done.stderr
