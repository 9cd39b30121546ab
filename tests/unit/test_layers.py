"""The architecture, checked on the imports: strictly downward, Megatron in few places, and a light command line."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT

# From the top. A part imports from lower layers and from itself, not from its neighbours.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("train",),
    ("experience", "models"),
    ("data", "engine", "checkpoint"),
    ("optim",),
    ("algorithms", "cluster", "report"),
    ("batch", "kernels", "metrics", "log"),
    ("records",),
    ("config",),
)
HEIGHT = {part: -depth for depth, layer in enumerate(LAYERS) for part in layer}
MEGATRON = ("cluster", "models", "engine", "optim", "checkpoint")
PACKAGE = ROOT / "megarlhf"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also inside functions; `from a import b` is a.b."""
    module = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: -node.level] if node.level else ()
            parts = (*base, node.module) if node.module else base
            yield from ((node.lineno, ".".join((*parts, alias.name))) for alias in node.names)


def all_imports() -> Iterator[tuple[str, str, str]]:
    """(place for the message, importing module below megarlhf, imported name)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for line, name in imports(path):
            yield f"{path.relative_to(ROOT)}:{line} imports {name}", module, name


def test_every_part_has_a_layer():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} <= set(HEIGHT)


def test_imports_go_downward():
    wrong = []
    for place, module, name in all_imports():
        root, *rest = name.split(".")
        if root != "megarlhf" or not rest or rest[0] not in HEIGHT:  # `from megarlhf import __version__`
            continue
        above, below = module.split(".")[0], rest[0]
        if above != below and HEIGHT[above] <= HEIGHT[below]:
            wrong.append(place)
    assert not wrong, "\n".join(wrong)


def test_megatron_is_imported_in_few_places():
    wrong = []
    for place, module, name in all_imports():
        allowed = any(module == part or module.startswith(f"{part}.") for part in MEGATRON)
        if name.split(".")[0] == "megatron" and (not allowed or name.startswith("megatron.training")):
            wrong.append(place)
    assert not wrong, "\n".join(wrong)


def test_the_loops_name_no_algorithm():
    for loop in ("online", "offline"):
        path = PACKAGE / "train" / f"{loop}.py"
        named = [name for _, name in imports(path) if name.startswith("megarlhf.algorithms")]
        assert named and all(name.startswith("megarlhf.algorithms.interface.") for name in named), named
        assert len(path.read_text().splitlines()) <= 200


def test_the_package_stands_without_tools_and_tests():
    outside = ("tools", "tests", "bench", "examples")
    wrong = [place for place, _, name in all_imports() if name.split(".")[0] in outside]
    assert not wrong, "\n".join(wrong)


def test_what_the_package_imports_is_declared():
    """In setup.cfg, not only installed here by chance. apex comes with the containers of GPU nodes, triton with torch
    for CUDA, tokenizers and huggingface_hub with transformers."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = [
        settings["options"]["install_requires"],
        *(settings["options.extras_require"][x] for x in ("gpu", "mpi", "wandb")),
    ]
    declared = {re.split(r"[^\w-]", line.strip())[0].lower() for text in lists for line in text.split("\n")}
    provides = {"megatron-core": "megatron", "pyyaml": "yaml", "transformer-engine": "transformer_engine"}
    known = {provides.get(name, name.replace("-", "_")) for name in declared} | {*sys.stdlib_module_names, "megarlhf"}
    known |= {"tokenizers", "huggingface_hub", "apex", "triton"}
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        if name.split(".")[0] not in known | {"tools"}
    ]
    assert not wrong, "\n".join(wrong)


def test_help_imports_neither_torch_nor_megatron():
    code = (
        "import sys, megarlhf.cli\n"
        "try: megarlhf.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "megarlhf" in done.stdout


def test_a_cpu_rank_loads_neither_triton_nor_the_compiler():
    code = (
        "import sys, torch, megarlhf.train.rl\n"
        "from megarlhf.cluster import backend\n"
        "with backend.lean_imports(): from transformers import LlamaConfig\n"
        "backend.install()\n"
        "import megarlhf.models.build\n"
        "backend.FusedAdam([torch.nn.Parameter(torch.ones(1))]).zero_grad()\n"
        "sys.exit(' '.join({'triton', 'torch._dynamo'} & set(sys.modules)) or 0)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
