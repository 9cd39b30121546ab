"""What a configuration says of a mixture of experts, and what cannot work with one. Needs no torch; the modules are in
models/experts.py. Architectures are those of models/spec.py, model sections those of models/model_config.py; both
import this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarlhf.config import UserError

if TYPE_CHECKING:
    from megarlhf.cluster.parallel import ParallelConfig


ROUTER = ".mlp.router."  # in the names of a router's weights


def is_expert(name: str) -> bool:
    """Whether a weight with this name belongs to one of the experts that share the tokens."""
    return ".mlp.experts." in name


@dataclass(frozen=True)
class ExpertsConfig:
    """How the routers of a mixture of experts learn. No token is dropped, so there is no capacity."""

    train_router: bool | None = None  # default: not in RL, where it would move what the sampler chose; otherwise yes
    balance_loss: float = 0.0  # coefficient of the load-balancing loss of each sequence and layer (docs/experts.md)
    z_loss: float = 0.0  # coefficient of the mean squared log of the router's normaliser

    def __post_init__(self):
        for name in ("balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name}: must be at least 0, not {getattr(self, name)}")
            if getattr(self, name) and self.train_router is False:
                raise ValueError(f"{name}: is a loss of the router, which does not train; remove one of the two")


def check_layout(architecture: Any, parallel: ParallelConfig) -> None:
    """Refuse (UserError) a mixture of experts that this layout cannot hold. A dense model beside one, such as a reward
    model, may have `parallel.expert` > 1: it is data-parallel there."""
    if not architecture.num_experts:
        return
    if architecture.num_experts % parallel.expert:
        raise UserError(
            f"parallel.expert: {parallel.expert} does not divide the model's {architecture.num_experts} experts; use a "
            "size that divides them"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise UserError(
            "parallel.sequence: experts with tensor parallelism need sequence parallelism, or every rank would send "
            "every token to them; set it to true, or parallel.tensor to 1"
        )
    for name, given, reason in (
        ("parallel.virtual_pipeline", parallel.virtual_pipeline, "an interleaved schedule"),
        ("linear_bias", architecture.linear_bias, "biases in all linear layers"),
        ("parallel_residual", architecture.parallel_residual, "a parallel residual"),
    ):
        if given:
            raise UserError(f"{name}: a mixture of experts with {reason} is not supported; remove it")


def check_expert_ranks(architecture: Any, parallel: ParallelConfig) -> None:
    """Refuse (UserError) expert parallelism of a program whose model is dense."""
    if parallel.expert > 1 and not architecture.num_experts:
        raise UserError(
            f"parallel.expert: {parallel.expert} ranks cannot share the experts of a dense model "
            f"({architecture.family}); set it to 1"
        )


def check_model(architecture: Any, model: Any, parallel: ParallelConfig, *, rl: bool) -> None:
    """Refuse (UserError) keys of the model's section that do not fit together with its experts, or their absence.
    `rl`: the model samples."""
    own = model.experts
    check_expert_ranks(architecture, parallel)
    if not architecture.num_experts:
        if own != ExpertsConfig():
            raise UserError(f"model.experts: the model is dense ({architecture.family}); remove the section")
        return
    for name, given in (("model.lora", model.lora), ("model.trained_layers", model.trained_layers)):
        if given is not None:
            raise UserError(f"{name}: is not supported with a mixture of experts; remove it, and train all layers")
    if rl and not trains_router(own, rl=True):
        for name in ("balance_loss", "z_loss"):
            if getattr(own, name):
                raise UserError(
                    f"model.experts.{name}: is a loss of the router, which does not train in RL by default; remove it, "
                    "or set model.experts.train_router: true"
                )


def trains_router(config: ExpertsConfig, *, rl: bool) -> bool:
    return not rl if config.train_router is None else config.train_router
