"""The wheel has all that a run needs, the converter too: `megarlhf` from another directory, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.convert.models import assert_same_tensors, save, tensors
from tests.ranks import ENVIRONMENT, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory of packages that has the wheel's content."""
    root = tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "megarlhf", root / "megarlhf", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(root)], cwd=root, check=True, capture_output=True)
    (wheel,) = root.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(root / "site")
    return root / "site"


def installed(site, directory, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`megarlhf ARGUMENTS` as its entry point starts it, in `directory`."""
    code = f"import megarlhf.cli as cli, sys; assert cli.__file__.startswith({str(site)!r}), cli.__file__; cli.run()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=directory, capture_output=True, text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(site)}, timeout=120,
    )  # fmt: skip


def test_it_converts_there_and_back(site, tmp_path):
    save("llama", tmp_path / "hf")
    for arguments in (("hf2megatron", "hf", "ours"), ("verify", "hf", "ours"), ("megatron2hf", "ours", "back")):
        done = installed(site, tmp_path, "convert", *arguments)
        assert done.returncode == 0, done.stderr
        assert "tensors" in done.stdout
    assert_same_tensors(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))


def test_it_has_every_module_and_file(site):
    theirs = {str(path.relative_to(site)) for path in (site / "megarlhf").rglob("*") if path.is_file()}
    kinds = ("*.py", "*.html", "*.yaml")
    ours = {str(path.relative_to(ROOT)) for kind in kinds for path in (ROOT / "megarlhf").rglob(kind)}
    assert theirs == ours


def test_mistakes_are_one_line_and_status_2(site, tmp_path):
    done = installed(site, tmp_path, "convert", "megatron2hf", "nothing", "target")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ") and "nothing" in done.stderr
