"""The preconditions of CUDA: the environment, the device of each rank, and complete libraries.

`cluster/backend.py` calls these functions; none of them uses a device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, MutableMapping

from megarlhf.cluster.launch import Rendezvous
from megarlhf.config import UserError

# Variables that the driver, torch's allocator and NCCL read when they start; values that a user has set are kept.
ENVIRONMENT = {
    # One queue: the gathers and scatters of sequence parallelism begin before the products that they overlap with.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Gradients are allocated and freed at every step; one small tensor would keep a segment of fixed size.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # NCCL in a CUDA graph would register memory that such segments move: an illegal access.
    "NCCL_GRAPH_REGISTER": "0",
}
TRANSFORMER_ENGINE = "transformer-engine[pytorch]>=2.9,<2.12"  # as in setup.cfg: megatron-core 0.16 works with these


def available(environment: MutableMapping[str, str], is_available: Callable[[], bool]) -> bool:
    """The result of `is_available`. It may start the driver and is therefore called with ENVIRONMENT set. The variables
    that were added stay in `environment` if the result is True."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in environment}
    if "PYTORCH_ALLOC_CONF" in environment:  # the same variable under its newer name
        added.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    environment.update(added)
    found = is_available()
    if not found:
        for name in added:
            del environment[name]
    return found


def device_index(rendezvous: Rendezvous, visible: int) -> int:
    """The index of this rank's device among the `visible` ones: that of its local rank; or the only one, where the
    scheduler shows every task its own. Raises UserError where ranks would share a device."""
    if 1 < visible < rendezvous.local_world_size:
        raise UserError(
            f"{rendezvous.local_world_size} ranks on {rendezvous.node} would share {visible} GPUs; start one rank a "
            f"GPU ({visible} on this node), or show each rank its own alone (srun --gpus-per-task=1)"
        )
    return rendezvous.local_rank % visible


def hide_unusable(on_cuda: bool) -> None:
    """Make importing Transformer Engine and apex an ImportError where they cannot work: both on a CPU, and apex without
    its compiled half. Megatron uses them wherever they import."""
    unusable = [] if on_cuda else ["transformer_engine", "apex"]
    if importlib.util.find_spec("amp_C") is None:
        unusable.append("apex")
    for name in unusable:
        sys.modules.setdefault(name, None)


def load_transformer_engine() -> None:
    """Import Transformer Engine, if it is installed, before megatron does. Megatron takes any ImportError for "not
    installed", and ends with a traceback on another error. Raises UserError if it is installed but does not load."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # FileNotFoundError without its torch half; RuntimeError, AssertionError, OSError
        reason = " ".join(str(error).split())
        raise UserError(
            f"Transformer Engine is installed but does not load ({type(error).__name__}: {reason[:300]}); install all "
            f"of it (pip install --no-build-isolation '{TRANSFORMER_ENGINE}'), or uninstall it to use megatron's own "
            "layers"
        )
