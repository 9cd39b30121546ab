"""Adam for megatron where neither Transformer Engine nor apex has one that works here."""

from __future__ import annotations

import torch


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


def install() -> None:
    """Give megatron this FusedAdam if it has found no other."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distributed.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True
