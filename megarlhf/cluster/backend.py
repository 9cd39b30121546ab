"""The one place where CPU and CUDA differ.

On CUDA: NCCL, Transformer Engine layers (bfloat16) and TE/apex fused Adam where they import; cluster/cuda.py has what
must be right before that. On CPU: *unmodified* megatron-core over gloo. Megatron names CUDA at a few dozen places
(`device="cuda"`, streams, RNG states, tensor type strings); `install` replaces just the torch entry points behind
those, so ordinary operations cost nothing extra; and, as TE and apex do on a GPU, kernels/cpu.py takes the place of
chains of small operations (rotary embedding, SwiGLU) and of apex's weight gradients, and cluster/collectives.py that of
collectives which gloo makes slow. Everything else in this project asks this module and never asks for a device type
itself.

`install()` is called once by a program, before megatron is first imported; it is never called at import.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import functools
import importlib.util
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.compiler
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._device

from megarlhf.cluster import collectives, cuda, launch
from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError
from megarlhf.kernels import cpu

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_CPU = torch.device("cpu")
STORE_SECONDS = 60.0  # from rank 0's port being open to its store's answer


@functools.cache
def on_cuda() -> bool:
    """Whether this rank computes on a GPU. The first call may start CUDA's driver, whose environment it sets before;
    it makes no context."""
    return cuda.available(os.environ, torch.cuda.is_available)


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else _CPU


def install() -> None:
    """Make megatron-core importable and runnable here. Idempotent; must precede the first import of megatron."""
    cuda.hide_unusable(on_cuda())
    if on_cuda():
        # NVIDIA's images turn TF32 on, whose products of float32 have 10 bits: sampler and trainer would not agree.
        torch.set_float32_matmul_precision("highest")
        cuda.load_transformer_engine()
        import megatron.core  # noqa: F401
    elif not hasattr(torch.cuda.current_device, "megarlhf"):
        # TE and apex are absent, which the banner says once; torch's new names for collectives are megatron's affair.
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        warnings.filterwarnings("ignore", r"Please use DTensor instead", FutureWarning)
        warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
        _replace_torch_entry_points()
        _import_megatron_on_cpu()
    _rotate_in_float32()
    _ensure_fused_adam()


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Around imports of libraries that prepare for GPUs and compilers: on a CPU without Triton and torch's compiler,
    which cost every rank 110 MiB and seconds, and torch.compile a C++ compiler at the first call."""
    if on_cuda():
        yield
        return
    compilers = {(torch, "compile"): torch.compile, (torch.compiler, "disable"): torch.compiler.disable}
    hides_triton = "triton" not in sys.modules
    for module, name in compilers:
        setattr(module, name, lambda model=None, **_: model if model is not None else (lambda function: function))
    if hides_triton:
        sys.modules["triton"] = None  # an ImportError for whoever asks
    try:
        yield
    finally:
        for (module, name), function in compilers.items():
            setattr(module, name, function)
        if hides_triton:
            del sys.modules["triton"]


def describe(dtype: torch.dtype) -> dict[str, str]:
    """What was chosen for models of `dtype`, for the start-up banner."""
    import megatron.core

    environment = {}
    if on_cuda():
        environment = {"environment": ", ".join(f"{x}={os.environ[x]}" for x in cuda.ENVIRONMENT if x in os.environ)}
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"cpu, {torch.get_num_threads()} thread(s) a rank"
    return {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "device": hardware,
        "collectives": "nccl" if on_cuda() else "gloo; shared memory on one machine",
        "layers": "transformer-engine" if _uses_transformer_engine(dtype) else "megatron local",
        "attention": "scaled_dot_product_attention",
        "adam": _adam_name(),
        "gradient accumulation": "fused" if not on_cuda() or _has_apex_wgrad() else "autograd",
        **environment,
    }


def open_store(rendezvous: Rendezvous, timeout_minutes: float = 10) -> dist.Store:
    """The key-value store through which ranks find each other. Rank 0 serves it, under torchrun its agent. Does not
    wait for other ranks than rank 0."""
    if rendezvous.world_size == 1:
        return dist.HashStore()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent:
        launch.await_rank0(rendezvous, timeout=60 * timeout_minutes)
    store = launch.within(
        STORE_SECONDS,
        lambda: dist.TCPStore(
            rendezvous.master_addr,
            rendezvous.master_port,
            is_master=rendezvous.rank == 0 and not agent,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            wait_for_workers=False,
        ),
    )
    if not isinstance(store, dist.Store):
        raise UserError(
            f"rank {rendezvous.rank} on {rendezvous.node}: what listens at {rendezvous.master_addr}:"
            f"{rendezvous.master_port} is not rank 0's store ({store}); see rank 0's own message, or set MASTER_PORT "
            "to a free port"
        )
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def join(rendezvous: Rendezvous, store: dist.Store, timeout_minutes: float = 10) -> None:
    """Start the default process group: gloo on CPU, NCCL on CUDA with one device a rank. Raises UserError where ranks
    would share a device."""
    if on_cuda():
        torch.cuda.set_device(cuda.device_index(rendezvous, torch.cuda.device_count()))
    os.environ.update(rendezvous.environment())
    dist.init_process_group(
        "nccl" if on_cuda() else "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


def timeout() -> datetime.timedelta:
    """How long a collective of the default process group may take; other groups are to have the same time."""
    return dist.group.WORLD._get_backend(device()).options._timeout


def transformer_overrides(swiglu: bool, dtype: torch.dtype) -> dict:
    """Fields of TransformerConfig that depend on the backend."""
    engine = _uses_transformer_engine(dtype)
    return dict(
        use_cpu_initialization=not on_cuda(),
        bias_activation_fusion=swiglu,
        bias_dropout_fusion=on_cuda(),
        masked_softmax_fusion=False,
        apply_rope_fusion=engine,
        persist_layer_norm=engine,
        gradient_accumulation_fusion=not on_cuda() or _has_apex_wgrad(),
    )


def block_spec(
    config: TransformerConfig,
    core_attention: type,
    vp_stage: int | None,
    *,
    layer_type: type | None = None,
    shared_norm: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage: TE's linears and norms on CUDA where TE imports, for bfloat16; megatron's local
    ones otherwise; always with our `core_attention`. (TE's causal attention ignores a mask tensor: left-padded batches
    would be silently wrong.) `layer_type` stands for megatron's TransformerLayer; with `shared_norm` its attention and
    MLP have one norm between them."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if _uses_transformer_engine(config.params_dtype):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        norm = TENorm
        layer = copy.deepcopy(
            gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        )
        if shared_norm:  # not fused with one of the two linear layers that read it
            layer.submodules.input_layernorm = norm
            layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            layer.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
            layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    else:
        norm = Norm
        layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization))
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
        if shared_norm:
            layer.submodules.pre_mlp_layernorm = IdentityOp
    layer.submodules.self_attention.submodules.core_attention = core_attention
    layer.module = layer_type or layer.module
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm for layer specs without TE. Megatron's own refuses sequence parallelism; this one marks its
    parameters so that `finalize_model_grads` sums their gradients over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device()))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, self.config)


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, [..., H] with weight [H], as `config` says. A zero-centred weight
    scales by 1 + weight, in fp32: bf16 would round the sum."""
    if config.layernorm_zero_centered_gamma:
        plain = F.rms_norm if config.normalization == "RMSNorm" else F.layer_norm
        x, kind = plain(x.float(), weight.shape, eps=config.layernorm_epsilon) * (1 + weight.float()), x.dtype
        return (x if bias is None else x + bias.float()).to(kind)
    if config.normalization == "RMSNorm":
        if not on_cuda():
            return cpu.rms_norm(x, weight, config.layernorm_epsilon)
        return F.rms_norm(x, weight.shape, weight, config.layernorm_epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, config.layernorm_epsilon)


def embed(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of weight [V, H]. On CPU a gradient goes straight to `weight.main_grad`; on a GPU the order in which rows
    are added there would not be the same every time."""
    if not on_cuda() and weight.requires_grad and torch.is_grad_enabled():
        return cpu.embed(weight, ids)
    return F.embedding(ids, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear where no gradient is needed. On AMD's processors through oneDNN: torch takes MKL for float32, which
    keeps to AVX2 there and is half as fast. On Intel's MKL is the faster, by a tenth or two with few rows. In bfloat16
    torch itself knows whether oneDNN can use the processor."""
    if on_cuda() or x.dtype != torch.float32 or _is_intel() or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options
) -> torch.Tensor:
    """torch's scaled_dot_product_attention of query [B, heads, Q, D] over key and value [B, groups, S, D], with `mask`
    (True: is seen) or, without one, causal. `options` go to it.

    A mask on a GPU (torch <= 2.13): cuDNN's kernel, the default on Hopper, gives NaN gradients for some lengths and low
    scores; and no fused kernel knows mask and groups together, so that keys and values are repeated."""
    repeats = query.shape[1] // key.shape[1]
    if on_cuda():
        torch.backends.cuda.enable_cudnn_sdp(mask is None)
        if mask is not None and repeats > 1:
            key, value, repeats = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=repeats > 1, **options
    )


@functools.cache
def _is_intel() -> bool:
    with contextlib.suppress(OSError):  # Linux only
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return False


def captures() -> bool:
    """Whether `captured` records: then the tensors of its step must stay where they are."""
    return on_cuda()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """`step`, which works on tensors that stay where they are, as a CUDA graph: the first two calls run it as it is,
    since libraries tune and allocate then; the third records it. On CPU, `step` itself."""
    return _Captured(step) if captures() else step


class _Captured:
    def __init__(self, step: Callable[[], None]):
        self.step = step
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 2:  # not on the default stream, which cannot be recorded
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.calls == 3:
            # thread_local: NCCL's watchdog thread queries events meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()
        self.graph.replay()


def memory() -> tuple[int, int]:
    """(free, total) bytes of the device; (0, 0) on CPU, whose memory is not ours alone."""
    return torch.cuda.mem_get_info() if on_cuda() else (0, 0)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around building and loading models: the memory that this leaves free goes back to the device, on CPU to the
    system."""
    if not on_cuda():
        _large_blocks_apart(True)
    try:
        yield
    finally:
        if on_cuda():
            torch.cuda.empty_cache()
        else:
            trim()
            _large_blocks_apart(False)


def trim() -> None:
    """On CPU, give the system what malloc holds of free memory, in pieces that the next phase could not use."""
    if not on_cuda():
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)


def _large_blocks_apart(apart: bool) -> None:
    """Whether malloc maps large blocks one by one. Then their memory goes back to the system when they are freed, which
    is good while models are loaded; but each costs page faults, which the temporaries of a step should not."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**18 if apart else 2**24)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**18 if apart else 2**28)  # M_TRIM_THRESHOLD: free memory that is kept


def synchronize() -> None:
    """Wait for the device (for timers)."""
    if on_cuda():
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------------- what imports


def _uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether layers of `dtype` are TE's. It multiplies float32 in TF32, which differs by 1e-3 from the sampler."""
    if not on_cuda() or dtype == torch.float32:
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


@functools.cache
def _has_apex_wgrad() -> bool:
    return on_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _adam_name() -> str:
    import megatron.core.optimizer as optimizer

    return f"{optimizer.Adam.__module__.partition('.')[0]} FusedAdam"


# --------------------------------------------------------------------------------------------------- Adam


class FusedAdam(torch.optim.Optimizer):
    """Adam(W) with the interface and state layout of apex's and TE's FusedAdam, over torch's fused kernels.

    Megatron's distributed optimizer checkpoints expect the step count in the parameter group, where apex and TE keep
    it; torch.optim.AdamW keeps one per parameter, and such a checkpoint can neither be taken before the first step nor
    loaded into a fresh optimizer. With this class checkpoints look alike with and without TE and apex.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_,
    ):
        assert bias_correction
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            step = torch.tensor(float(group["step"]), device=params[0].device)
            update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def _ensure_fused_adam() -> None:
    """Where neither TE nor apex gave megatron a FusedAdam that works here, give it ours."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distributed.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True


# --------------------------------------------------------------------------------------------------- megatron on CPU

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

    device = _CPU
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


def _replace_torch_entry_points() -> None:
    cuda = torch.cuda

    # Every replaced name gets a function object of its own: torch._dynamo, which torch.optim imports, refuses one
    # object under two torch names.
    def nothing():
        return lambda *_, **__: None

    def current_device():
        return _CPU

    current_device.megarlhf = True
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
        if where is not None and where is not _CPU and str(where).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _rotary(plain):
    """Megatron's rotary embedding, in float32 as TE's: sines rounded to bfloat16 are off by up to 1/512. On CPU in
    fewer passes where it is the usual one."""

    @functools.wraps(plain)
    def apply(t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0):
        if on_cuda() or rotary_interleaved or multi_latent_attention:
            return plain(t.float(), freqs, rotary_interleaved, multi_latent_attention, mscale).to(t.dtype)
        return cpu.rotate(t.float(), freqs, mscale).to(t.dtype)

    return apply


def _rotate_in_float32() -> None:
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    if not hasattr(rope_utils._apply_rotary_pos_emb_bshd, "__wrapped__"):
        rope_utils._apply_rotary_pos_emb_bshd = _rotary(rope_utils._apply_rotary_pos_emb_bshd)


def _import_megatron_on_cpu() -> None:
    dist.all_gather_into_tensor = collectives.all_gather_into_tensor  # megatron binds them when it is imported
    dist.reduce_scatter_tensor = collectives.reduce_scatter_tensor
    dist.all_reduce = collectives.all_reduce
    sys.modules["fused_weight_gradient_mlp_cuda"] = cpu  # apex's place
    with lean_imports():  # megatron decorates functions with torch.compile while it is imported
        import megatron.core.jit
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
    megatron.core.jit.disable_jit_fuser()  # for what megatron imports later

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.mlp as mlp

    mlp.bias_swiglu_impl = lambda x, bias, *_: cpu.swiglu(x if bias is None else x + bias)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns that the CPU generator moves inside a fork of the GPU's; here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
