"""Transformer Engine's modules are constructed, where they are: installed, or their Python files beside the
checkout with a stand-in for the compiled half (tests/gpu/compare_te.py says what that shows)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile

import pytest

from tests.conftest import SHARED
from tests.ranks import ENVIRONMENT, ROOT


def test_models_on_its_layers_are_those_on_megatrons_own(tmp_path):
    path, arguments = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])], []
    if importlib.util.find_spec("transformer_engine") is None:
        packed = SHARED / "gpu" / "te-site.tar.xz"
        if not packed.is_file():
            pytest.skip(f"neither Transformer Engine nor {packed}")
        with tarfile.open(packed) as archive:
            for member in archive:
                if member.name.startswith("site/transformer_engine") and not member.name.endswith(".so"):
                    archive.extract(member, tmp_path, filter="data")
        path, arguments = [*path, str(tmp_path / "site")], ["--stand-in"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compare_te", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("the same\n") == 28, done.stdout
