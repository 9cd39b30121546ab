"""What has to be right before CUDA is used, as far as a machine without it can tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarlhf.cluster import cuda
from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError
from tests.ranks import ENVIRONMENT, ROOT


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **ENVIRONMENT, **environment}
    for name in cuda.ENVIRONMENT:
        given.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=given, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, cuda.ENVIRONMENT),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {**cuda.ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native"},
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "NCCL_GRAPH_REGISTER": "0",
                "PYTORCH_ALLOC_CONF": "backend:native",
            },
        ),
    ],
    ids=["nothing set", "one set", "newer name"],
)
def test_the_driver_finds_its_environment(given, expected):
    environment, seen = dict(given), []
    assert cuda.available(environment, lambda: not seen.append(dict(environment)))
    assert seen == [expected]  # before the driver is asked
    assert environment == expected
    environment = dict(given)
    assert not cuda.available(environment, lambda: False)
    assert environment == given  # a CPU's is left alone


def test_a_cpu_rank_sets_nothing_and_needs_neither_te_nor_apex(tmp_path):
    """Also where both are installed: Transformer Engine without its torch half, and apex without its compiled one."""
    package(tmp_path, "transformer_engine", 'raise FileNotFoundError("Could not find shared object file")')
    package(tmp_path, "apex", "")
    package(tmp_path, "apex/optimizers", "class FusedAdam: ...\nclass FusedSGD: ...")
    done = python(
        "import os\n"
        "from megarlhf.cluster import backend, cuda, fused_adam\n"
        "backend.install()\n"
        "import megatron.core.optimizer as optimizer\n"
        "print(optimizer.Adam is fused_adam.FusedAdam, sorted(set(cuda.ENVIRONMENT) & set(os.environ)))",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True []\n"


def test_what_cannot_work_on_a_gpu_is_hidden_or_refused(tmp_path):
    package(tmp_path, "apex", "")
    found = (
        "import sys\n"
        "from megarlhf.cluster import cuda\n"
        "cuda.hide_unusable(on_cuda=True)\n"
        "print(sorted(name for name, module in sys.modules.items() if module is None))\n"
        "try: cuda.load_transformer_engine()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = python(found, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == "['apex']\n", done.stderr  # none of amp_C; and no Transformer Engine is no mistake

    (tmp_path / "amp_C.py").write_text("")
    package(tmp_path, "transformer_engine", "")
    package(tmp_path, "transformer_engine/pytorch", 'raise FileNotFoundError("Could not find\\n shared object file")')
    hidden, refused = python(found, PYTHONPATH=f"{tmp_path}:{ROOT}").stdout.splitlines()
    assert hidden == "[]"
    assert refused.startswith(
        "UserError Transformer Engine is installed but does not load (FileNotFoundError: Could not find shared object "
        "file); install all of it ("
    )
    assert cuda.TRANSFORMER_ENGINE in refused
    assert f"\ngpu = {cuda.TRANSFORMER_ENGINE}\n" in (ROOT / "setup.cfg").read_text()


def package(root, name: str, code: str) -> None:
    (root / name).mkdir()
    (root / name / "__init__.py").write_text(code + "\n")


@pytest.mark.parametrize(
    ("local_rank", "ranks", "visible", "expected"),
    [(3, 8, 8, 3), (1, 2, 8, 1), (0, 1, 1, 0), (3, 4, 1, 0)],
    ids=["a whole node", "a part of one", "one alone", "each its own"],
)
def test_a_device_for_each_rank(local_rank, ranks, visible, expected):
    assert cuda.device_index(place(local_rank, ranks), visible) == expected


def test_two_ranks_on_one_device_are_refused():
    for local_rank in range(8):  # all of them, also those that would have one
        with pytest.raises(UserError, match="^8 ranks on node7 would share 4 GPUs; start one rank a GPU ") as caught:
            cuda.device_index(place(local_rank, 8), 4)
        assert "\n" not in str(caught.value)


def place(local_rank: int, local_world_size: int) -> Rendezvous:
    return Rendezvous("slurm", local_rank, local_world_size, local_rank, local_world_size, "node7", "node7", 29500)
