"""What has to be right before CUDA is used, as far as a machine without it can tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megarlhf.cluster import cuda, device, operations, weight_gradients
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


def test_weight_gradients_are_fused_with_and_without_apex(tmp_path):
    """On a GPU; a CPU has no use for apex's kernel."""
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("wgrad_gemm_accum_fp32 = 'apex'\n")
    chosen = (
        "import sys, torch\n"
        "from megarlhf.cluster import backend, weight_gradients\n"
        "backend.install()\n"  # as on a CPU: megatron's layers find what was installed
        "from megatron.core.tensor_parallel import layers\n"
        "assert layers._grad_accum_fusion_available\n"
        "print(layers.fused_weight_gradient_mlp_cuda.__name__)\n"
        "del sys.modules[weight_gradients.APEX]\n"
        "weight_gradients.on_cuda = lambda: True\n"
        "weight_gradients.install()\n"
        "import fused_weight_gradient_mlp_cuda as found\n"
        "print(found.__name__, weight_gradients.kind())"
    )
    ours = weight_gradients.__name__
    for path, on_gpu in ((f"{tmp_path}:{ROOT}", f"{weight_gradients.APEX} apex's kernel"),
                         (str(ROOT), f"{ours} megarlhf's products")):  # fmt: skip
        done = python(chosen, PYTHONPATH=path)
        assert done.stdout.splitlines() == [ours, on_gpu], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_weight_gradient_is_added(dtype):
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(96, size, generator=generator).to(dtype) for size in (24, 40))
    total = torch.randn(40, 24, generator=generator)
    expected = total.double() + d.double().t() @ x.double()
    weight_gradients.wgrad_gemm_accum_fp32(x, d, total)
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)


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


@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "groups"])
def test_attention_with_a_mask_avoids_cudnn_and_scores_in_memory(monkeypatch, groups):
    """The arguments that torch gets on a GPU: with a mask no cuDNN and no groups; without one, both."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, groups, groups))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    expected = operations.attend(query, key, value, mask)
    seen, plain = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*inputs, enable_gqa, **options):
        seen.append((inputs[1].shape[1], enable_gqa, torch.backends.cuda.cudnn_sdp_enabled()))
        return plain(*inputs, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(operations, "on_cuda", lambda: True)
    monkeypatch.setattr(operations.F, "scaled_dot_product_attention", watched)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for given in (mask, torch.zeros(1, 1, 6, 6).masked_fill(~mask, -torch.inf), None):
            torch.testing.assert_close(operations.attend(query, key, value, given), expected)
        half = [x.bfloat16() for x in (query, key, value)]
        operations.attend(*half, None)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    # in 32 bits no fused kernel knows groups
    assert seen == [(4, False, False), (4, False, False), (4, False, True), (groups, groups < 4, True)]


def test_float32_has_megatrons_layers(monkeypatch):
    """Transformer Engine would multiply in TF32."""
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    assert not device.uses_transformer_engine(torch.float32)


def test_weight_gradients_are_ours_also_if_megatron_came_first():
    code = (
        "import megatron.core.tensor_parallel.layers as layers\n"
        "from megarlhf.cluster import backend\n"
        "backend.install()\n"
        "print(layers._grad_accum_fusion_available, layers.fused_weight_gradient_mlp_cuda.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "megarlhf.cluster.weight_gradients"], done.stderr
