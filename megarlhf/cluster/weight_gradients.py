"""Weight gradients that are added to megatron's gradient buffer as they are computed.

Megatron's linear layers call the module `fused_weight_gradient_mlp_cuda` for that, a part of apex, and refuse
`gradient_accumulation_fusion` without it. Where it is missing, this module takes its place. (Transformer Engine's
layers do the same without any of the two.)
"""

from __future__ import annotations

import importlib.util
import sys

from torch import Tensor

from megarlhf.cluster.device import on_cuda
from megarlhf.kernels.products import accumulate, operand_of

APEX = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Before or after the first import of megatron, which looks for apex's module once."""
    if APEX not in sys.modules and not (on_cuda() and importlib.util.find_spec(APEX)):
        sys.modules[APEX] = sys.modules[__name__]
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    if layers is not None and APEX in sys.modules:
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = sys.modules[APEX], True


def kind() -> str:
    """Whose products they are, for the banner."""
    return "megarlhf's products" if sys.modules.get(APEX) is sys.modules[__name__] else "apex's kernel"


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] += grad_output^T [out, N] @ total_input [N, in]. The name and the arguments are apex's."""
    accumulate(main_grad, operand_of(grad_output).t(), operand_of(total_input))
