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
    ("plan",),
    ("experience", "convert"),
    ("models",),
    ("data", "engine", "checkpoint"),
    ("optim", "stream"),
    ("algorithms", "cluster", "report"),
    ("batch", "kernels", "metrics", "log"),
    ("cpu", "trackers"),
    ("records", "console"),
    ("config",),
)
HEIGHT = {part: -depth for depth, layer in enumerate(LAYERS) for part in layer}
MEGATRON = ("cluster", "cpu", "models", "engine", "optim", "checkpoint")
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


def module_of(path: Path) -> str:
    """megarlhf/a/b.py is "a.b", megarlhf/a/__init__.py is "a"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def all_imports() -> Iterator[tuple[str, str, str]]:
    """(place for the message, importing module below megarlhf, imported name)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name in imports(path):
            yield f"{path.relative_to(ROOT)}:{line} imports {name}", module_of(path), name


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


def test_no_two_files_import_each_other():
    """Nor several in a circle; imports inside functions and those for annotations alone count, too."""
    modules = {module_of(path) for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for _, module, name in all_imports():
        root, _, below = name.partition(".")
        # `from a import b` is of the file a/b.py if there is one, otherwise of a name in a.py or a/__init__.py.
        found = next((candidate for candidate in (below, below.rpartition(".")[0]) if candidate in modules), None)
        if root == "megarlhf" and found:
            graph[module].add(found)
    reach = {module: set(others) for module, others in graph.items()}
    for middle in modules:
        for start in modules:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    circles = {" <-> ".join(sorted(other for other in reach[module] if module in reach[other])) for module in modules}
    assert not circles - {""}, "\n".join(sorted(circles))


def test_the_cpu_folder_is_imported_only_where_there_is_no_gpu():
    """Inside functions: a rank on a GPU imports nothing of it."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "cpu" in path.parents:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarlhf.cpu"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_megatron_is_imported_in_few_places():
    wrong = []
    for place, module, name in all_imports():
        allowed = any(module == part or module.startswith(f"{part}.") for part in MEGATRON)
        if name.split(".")[0] == "megatron" and (not allowed or name.startswith("megatron.training")):
            wrong.append(place)
    assert not wrong, "\n".join(wrong)


def test_process_groups_come_from_the_topology():
    """Megatron's global state is read in one file; all other code is given its groups, so that two layouts could
    exist side by side."""
    files = [path for folder in (PACKAGE, ROOT / "tools") for path in sorted(folder.rglob("*.py"))]
    readers = {
        str(path.relative_to(ROOT))
        for path in files
        for _, name in imports(path)
        if name.split(".")[0] == "megatron" and "parallel_state" in name.split(".")
    }
    assert readers == {"megarlhf/cluster/parallel.py"}
    named = {str(path.relative_to(ROOT)) for path in files if "parallel_state" in path.read_text()}
    assert named == readers  # nor as an attribute of a module


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
        *(settings["options.extras_require"][x] for x in ("gpu", "mpi", "wandb", "arrow", "mlflow")),
    ]
    declared = {re.split(r"[^\w-]", line.strip())[0].lower() for text in lists for line in text.split("\n")}
    provides = {"megatron-core": "megatron", "pyyaml": "yaml", "transformer-engine": "transformer_engine",
                "mlflow-skinny": "mlflow"}  # fmt: skip
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


def run_code(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter, which must end with status 0."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_neither_torch_nor_megatron():
    code = (
        "import sys, megarlhf.cli\n"
        "try: megarlhf.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    assert "megarlhf" in run_code(code)


def test_a_cpu_rank_loads_neither_triton_nor_the_compiler():
    code = (
        "import sys, torch, megarlhf.train.rl\n"
        "from megarlhf.cluster import backend, fused_adam\n"
        "with backend.lean_imports(): from transformers import LlamaConfig\n"
        "backend.install()\n"
        "import megarlhf.models.build\n"
        "fused_adam.FusedAdam([torch.nn.Parameter(torch.ones(1))]).zero_grad()\n"
        "sys.exit(' '.join({'triton', 'torch._dynamo'} & set(sys.modules)) or 0)"
    )
    run_code(code, CUDA_VISIBLE_DEVICES="")


def test_a_rank_on_a_gpu_starts_without_the_cpu_folder():
    """With an answer of yes in place of a GPU, and the folder hidden."""
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "sys.modules['megarlhf.cpu'] = None\n"
        "from megarlhf.cluster import backend\n"
        "assert backend.on_cuda()\n"
        "backend.install()\n"
        "import megarlhf.models.build, megarlhf.train.rl, megarlhf.experience.sampler, megarlhf.models.cache"
    )
    run_code(code)
