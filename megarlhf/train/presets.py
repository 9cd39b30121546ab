"""Presets of online programs: the published values of an algorithm, without files, layouts and lengths."""

from __future__ import annotations

from typing import Any

from megarlhf import config
from megarlhf.algorithms import ppo

Preset = dict[str, dict[str, Any]]

PPO: dict[str, Preset] = {
    # The 2019 original (lm-human-preferences, launch.py's sentiment task)
    "openai_2019": {
        "prompts": {"length": 64, "truncate": "end", "start_text": ".", "end_text": "."},
        "sampler": {"response_length": 24, "temperature": 0.7, "stop_at_eos": False},
        "scoring": {"truncate_token": ".", "truncate_after": 16, "penalty": -1.0},
        "ppo": config.to_dict(ppo.OPENAI_2019),
        "critic": {"kind": "shared"},
        "training": {"batch_size": 512, "minibatches": 1, "epochs": 4},
        "optimizer": {"name": "tf_adam", "lr": 1e-5, "schedule": "linear", "betas": [0.9, 0.999], "eps": 1e-5,
                      "clip_grad": 0.0},
    },
}  # fmt: skip

_NO_KL = {"coef": 0.0}
_CLIPPED = {"surrogate": "clip", "clip_range": 0.2}


_SMALL_RATE = {"lr": 1e-6, "schedule": "constant"}


def _sampled(samples: int) -> dict[str, Any]:
    return {"samples_per_prompt": samples, "temperature": 1.0, "stop_at_eos": True}


REINFORCE: dict[str, Preset] = {
    # Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.2; its clip range is not given
    "grpo": {
        "reinforce": {"advantage": "grpo", **_CLIPPED, "normalization": "sequence",
                      "kl": {"place": "loss", "estimator": "k3", "coef": 0.04}},
        "sampler": _sampled(64),
        "training": {"batch_size": 1024, "minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # Liu et al. 2025, arXiv:2503.20783, section 3.2
    "dr_grpo": {
        "reinforce": {"advantage": "dr_grpo", **_CLIPPED, "normalization": "constant", "kl": _NO_KL},
        "sampler": _sampled(8),
        "training": {"batch_size": 1024, "minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # Yu et al. 2025, arXiv:2503.14476, section 4.1, for responses of 20480 tokens. The warm-up, there of 20 steps (320
    # updates), is the configuration's.
    "dapo": {
        "reinforce": {"advantage": "grpo", **_CLIPPED, "clip_range_high": 0.28, "normalization": "token", "kl": _NO_KL,
                      "dynamic_rounds": 10, "shaping": {"overlong_buffer": 4096, "overlong_penalty": 1.0}},
        "sampler": _sampled(16),
        "training": {"batch_size": 8192, "minibatches": 16, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # Ahmadian et al. 2024, arXiv:2402.14740, section 4: one action a response, no clipping
    "rloo": {
        "reinforce": {"advantage": "rloo", "surrogate": "none", "normalization": "sequence_sum",
                      "kl": {"place": "reward", "estimator": "k1", "coef": 0.03}},
        "sampler": _sampled(4),
        "training": {"minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # Hu et al. 2025, arXiv:2501.03262; batch sizes and rates of this and the following are ours
    "reinforce++": {
        "reinforce": {"advantage": "reinforce", "baseline": "none", "whiten_advantages": True, **_CLIPPED,
                      "normalization": "token", "kl": {"place": "reward", "estimator": "k1", "coef": 0.01}},
        "sampler": _sampled(1),
        "training": {"minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    "reinforce++_baseline": {
        "reinforce": {"advantage": "dr_grpo", "whiten_advantages": True, **_CLIPPED, "normalization": "token",
                      "kl": {"place": "loss", "estimator": "k2", "coef": 0.01}},
        "sampler": _sampled(8),
        "training": {"minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # Zheng et al. 2025, arXiv:2507.18071, section 5.1
    "gspo": {
        "reinforce": {"advantage": "grpo", "surrogate": "clip", "ratio": "sequence_mean", "clip_range": 3e-4,
                      "clip_range_high": 4e-4, "normalization": "sequence", "kl": _NO_KL},
        "sampler": _sampled(16),
        "training": {"minibatches": 4, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
    # MiniMax 2025, arXiv:2506.13585, section 3.1: no lower bound. The paper does not give the upper one; 5 is usual.
    "cispo": {
        "reinforce": {"advantage": "grpo", "surrogate": "cispo", "clip_range": 1.0, "clip_range_high": 4.0,
                      "normalization": "token", "kl": _NO_KL},
        "sampler": _sampled(16),
        "training": {"minibatches": 1, "epochs": 1},
        "optimizer": _SMALL_RATE,
    },
}  # fmt: skip
