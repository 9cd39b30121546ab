"""Stand-ins for torch.cuda on a CPU rank.

megatron-core names CUDA at a few dozen places: `device="cuda"`, streams, events, RNG states, tensor type strings.
`install` replaces the torch functions behind those places and no others, so that all other operations cost nothing
extra.
"""

from __future__ import annotations

import contextlib
import functools
import time

import torch
import torch.utils._device

CPU = torch.device("cpu")

# The `device="cuda"` literals of megatron-core reach torch through these factories only.
_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint",
    "randperm", "empty_strided", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip


class _TypeName(str):
    """A tensor's `type()` that equals both 'torch.FloatTensor' and 'torch.cuda.FloatTensor': megatron's optimizer and
    gradient clipping compare it with the CUDA spelling."""

    __slots__ = ()

    def __eq__(self, other):
        if not isinstance(other, str):
            return NotImplemented
        return str.__eq__(self, other) or str.__eq__(self, other.replace("torch.cuda.", "torch.", 1))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


class _Stream:
    """torch.cuda.Stream where everything is synchronous."""

    device = CPU
    cuda_stream = stream_id = 0

    def __init__(self, *_, **__): ...
    def wait_stream(self, _): ...
    def wait_event(self, _): ...
    def synchronize(self): ...
    def query(self):
        return True

    def record_event(self, event=None):
        return event or _Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Event:
    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def wait(self, *_): ...
    def synchronize(self): ...
    def query(self):
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.time - self.time)


def install() -> None:
    """Replace the torch functions behind the places where megatron-core names CUDA."""
    cuda = torch.cuda

    # Every replaced name gets a function object of its own: torch._dynamo, which torch.optim imports, refuses one
    # object under two torch names.
    def nothing():
        return lambda *_, **__: None

    def current_device():
        return CPU

    cuda.current_device = current_device
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream"):
        setattr(cuda, name, nothing())
    stream = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *_, **__: stream
    cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = nothing(), nothing()
    torch.Tensor.record_stream = nothing()

    # One generator plays both roles: RNG trackers work, and no code of ours may draw from the global generator.
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    plain_type = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        result = plain_type(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    torch.Tensor.type = tensor_type
    # Optimizers would load the compiler to be left alone by it.
    for method in vars(torch.optim.Optimizer).values():
        if hasattr(method, "__wrapped__"):
            setattr(method.__wrapped__, "__dynamo_disable", method.__wrapped__)
    # `with torch.device("meta")` (transformers' from_pretrained) knows the factories by identity, from a list that is
    # made at its first use: made now, it holds those that ours call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory):
    @functools.wraps(factory)
    def create(*args, **kwargs):
        where = kwargs.get("device")
        kind = getattr(where, "type", where)
        if isinstance(kind, str) and kind.startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create
