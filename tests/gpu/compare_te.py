"""Models on Transformer Engine's layers beside those on megatron's own, on a CPU: the same checkpoint, the same initial
values, and the same marks for tensor parallelism.

    python -m tests.gpu.compare_te              with Transformer Engine installed
    python -m tests.gpu.compare_te --stand-in   with its Python files alone: names stand in for its compiled half

Constructing calls nothing of the compiled half; forward and backward passes need it, and a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import sys
import types
import warnings


class Name(type):
    """A class with whatever attribute it is asked for: another such class."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {"__init__": lambda self, *_, **__: None})

    def __iter__(cls):
        return iter(())


class Names(types.ModuleType):
    """A module with whatever name it is asked for."""

    __path__ = ()

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.__file__ = "none"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {"__init__": lambda self, *_, **__: None})


def stand_in() -> None:
    """Import transformer_engine.pytorch without its libraries, and without what it needs to export to ONNX."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it loads no library when it is imported
    os.environ["NVTE_FRAMEWORK"] = "none"
    for name in ("transformer_engine_torch", "onnxscript", "onnxscript.opset18", "onnx", "onnx.defs", "einops"):
        if name.split(".")[0] in sys.modules or importlib.util.find_spec(name) is None:
            sys.modules[name] = Names(name)
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None


def main() -> int:
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    if "--stand-in" in sys.argv:
        stand_in()
    import transformer_engine.pytorch as te

    from megarlhf.cluster import backend

    backend.install()
    assert not backend.on_cuda(), "this comparison is for a CPU; hide the GPUs (CUDA_VISIBLE_DEVICES=)"
    torch.cuda.is_available = lambda: True  # Transformer Engine's modules ask before they let themselves be constructed

    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from tests.distributed.layouts import FALCON, GEMMA, GPT2, LLAMA, NEOX, layout

    change = dataclasses.replace
    architectures = {
        "llama": LLAMA,
        "gpt2": GPT2,
        "neox": NEOX,
        "falcon": FALCON,
        "gemma": GEMMA,
        "qwen2": change(LLAMA, family="qwen2", qkv_bias=True),
        "qwen3": change(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
    }
    wrong = 0
    for name, architecture in architectures.items():
        for dtype in ("fp32", "bf16"):
            with layout() as topology:
                found = compare(architecture, dtype, topology, te)
            print(f"{name:6} {dtype}: {'; '.join(found) or 'the same'}", flush=True)
            wrong += bool(found)
    return 1 if wrong else 0


def compare(architecture, dtype: str, topology, te) -> list[str]:
    """What differs between the two kinds of layers."""
    import torch

    from megarlhf.cluster import backend
    from megarlhf.models.build import build

    chunks, states = [], []
    for uses in (False, True):
        backend.uses_transformer_engine = lambda dtype, uses=uses: uses
        engine = build("actor", architecture, topology, micro_batch_tokens=1, dtype=dtype, seed=3)
        chunks.append(engine.modules[0])
        states.append(sharded(engine))
    layer, (own, theirs) = chunks[1].decoder.layers[0], states
    found = []
    for module in (layer.self_attention.linear_qkv, layer.mlp.linear_fc2, chunks[1].decoder.final_layernorm):
        if not isinstance(module, (te.Linear, te.LayerNormLinear, te.LayerNorm, te.RMSNorm)):
            found.append(f"{type(module).__name__} is none of Transformer Engine's")
    if describe(own) != describe(theirs):
        odd = set(describe(own).items()) ^ set(describe(theirs).items())
        return [*found, f"keys, shapes or dtypes differ: {sorted(map(str, odd))[:4]}"]
    found += [f"other initial values of {key}" for key in own if not torch.equal(own[key].data, theirs[key].data)]
    if (left := marks(chunks[0])) != (right := marks(chunks[1])):
        found.append(f"parameters are marked differently: {left - right} and {right - left}")
    return found


def sharded(engine) -> dict:
    """{(key, offset): ShardedTensor}, whose data are the engine's own weights."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = engine.sharded_state(loading=True, weights_only=True)
    apply_factories(state)
    return {(v.key, v.global_offset): v for v in nested_values(state) if isinstance(v, ShardedTensor)}


def describe(state: dict) -> dict:
    return {key: (value.global_shape, value.local_shape, value.dtype) for key, value in state.items()}


def marks(chunk) -> collections.Counter:
    """How many parameters of each shape are split how."""
    return collections.Counter(
        (
            tuple(parameter.shape),
            parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
            bool(getattr(parameter, "sequence_parallel", False)),
        )
        for parameter in chunk.parameters()
    )


if __name__ == "__main__":
    sys.exit(main())
