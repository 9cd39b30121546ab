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
    from megarlhf.models.model_config import LoraConfig
    from tests.distributed.layouts import FALCON, GEMMA, GEMMA2, GPT2, LLAMA, NEOX, OLMO2, layout

    change = dataclasses.replace
    architectures = {
        "llama": LLAMA,
        "gpt2": GPT2,
        "neox": NEOX,
        "falcon": FALCON,
        "gemma": GEMMA,
        "qwen2": change(LLAMA, family="qwen2", qkv_bias=True),
        "qwen3": change(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
        "gemma2": GEMMA2,
        "olmo2": OLMO2,
    }
    experts = dict(num_experts=4, experts_per_token=2)
    architectures |= {
        "mixtral": change(LLAMA, family="mixtral", **experts),
        "qwen2_moe": change(LLAMA, family="qwen2_moe", qkv_bias=True, shared_expert_size=64, **experts),
        "experts after": change(OLMO2, **experts),
    }
    cases = [(name, architecture, None) for name, architecture in architectures.items()]
    cases += [("llama lora", LLAMA, LoraConfig()), ("falcon lora", FALCON, LoraConfig())]
    wrong = 0
    for name, architecture, adapters in cases:
        for dtype in ("fp32", "bf16"):
            with layout() as topology:
                found = compare(architecture, dtype, topology, te, adapters)
            print(f"{name:6} {dtype}: {'; '.join(found) or 'the same'}", flush=True)
            wrong += bool(found)
    return 1 if wrong else 0


def compare(architecture, dtype: str, topology, te, adapters=None) -> list[str]:
    """What differs between the two kinds of layers."""
    import torch

    from megarlhf.cluster import backend
    from megarlhf.models.build import build

    engines, states = [], []
    for uses in (False, True):
        backend.uses_transformer_engine = lambda dtype, uses=uses: uses
        engine = build("actor", architecture, topology, micro_batch_tokens=1, dtype=dtype, seed=3,
                       adapters=adapters)  # fmt: skip
        engines.append(engine)
        states.append(sharded(engine))
    chunks, (own, theirs) = [engine.modules[0] for engine in engines], states
    layer = chunks[1].decoder.layers[0]
    found = []
    mlp = layer.mlp.experts if layer.is_moe_layer else layer.mlp
    kinds = te.Linear, te.LayerNormLinear, te.GroupedLinear, te.LayerNorm, te.RMSNorm
    for module in (layer.self_attention.linear_qkv, mlp.linear_fc2, chunks[1].decoder.final_layernorm):
        if not isinstance(module, kinds):
            found.append(f"{type(module).__name__} is none of Transformer Engine's")
    if describe(own) != describe(theirs):
        odd = set(describe(own).items()) ^ set(describe(theirs).items())
        return [*found, f"keys, shapes or dtypes differ: {sorted(map(str, odd))[:4]}"]
    for chunk in chunks if adapters is None else []:
        odd = {chunk.global_name(name) for name, _ in chunk.named_parameters()} ^ architecture.shapes().keys()
        found += [f"weights that the architecture lacks, or lacking ones: {sorted(odd)[:4]}"] if odd else []
    found += [f"other initial values of {key}" for key in own if not torch.equal(own[key].data, theirs[key].data)]
    if (left := marks(chunks[0])) != (right := marks(chunks[1])):
        found.append(f"parameters are marked differently: {left - right} and {right - left}")
    angles = chunks[1].rotary(torch.arange(5), 5)
    for layer in chunks[1].decoder.layers:  # the kernel that turns queries and keys reads them one after the other
        if angles is not None and not layer.self_attention._own(angles).is_contiguous():
            found.append(f"angles of layer {layer.layer_number} with gaps between the tokens")
    for engine in engines:  # an average in fp32 of a model in bf16 has layers of the other kind
        with torch.no_grad():
            for parameter in engine.modules[0].parameters():
                parameter.copy_(torch.randn_like(parameter))
    engines[0].follow(engines[1], 0.0)
    own, theirs = (sharded(engine) for engine in engines)
    found += [f"another average of {key}" for key in own if not torch.equal(own[key].data, theirs[key].data)]
    return found


def sharded(engine) -> dict:
    """{(key, offset): ShardedTensor}, whose data are the engine's own weights."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = engine.sharded_state(loading=True, weights_only=True, only=lambda name: True)
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
