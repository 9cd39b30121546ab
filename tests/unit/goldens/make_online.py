"""`python tests/unit/goldens/make_online.py inputs|trl|verl`: the golden arrays of tests/unit/test_online_oracles.py,
computed by other projects' own code. No test runs this script.

Each project has an environment of its own, made with Python 3.11:

    trl:   pip install torch==2.13.0 trl==1.12.0 transformers==5.23.0 requests
    verl:  pip install torch==2.13.0 numpy==2.4.6, then pip install --no-deps verl==0.9.1, then
           pip install "tensordict<=0.10.0" transformers==5.23.0 omegaconf ray codetiming hydra-core accelerate

`inputs` needs NumPy alone and comes first. Names of arrays are PROJECT/FUNCTION/OPTIONS/WHAT; WHAT is `loss`, `grad`
(of the loss by the new log-probs), `grad_entropy` or what the function returns. Everything is float64, except where the
project's code itself computes in float32, which is noted below.

Inputs (B = 12 rows, R = 10 columns, three groups of four adjacent rows; the second group's scores are equal):
    mask (B, R)             ragged from the right, lengths 1 to 10
    group_ids (B,)          neither sorted nor dense
    by_source (B, 2), weights (2,), scores (B,) = by_source @ weights
    old, new, ref, sampler (B, R)  log-probs
    entropy, values, rewards (B, R)
    advantages (B,), token_advantages (B, R)   of the losses; not computed from the scores
    greedy (B,)             ReMax's baselines
    limit                   16: the longest response allowed, more than R

TRL 1.12.0, trl/trainer/grpo_trainer.py and rloo_trainer.py, methods called on objects made without __init__:
    GRPOTrainer._generate_and_score_completions   advantages (num_generations=4), of sum_then_normalize with
                                                  scale_rewards group and none, and of normalize_then_sum; the ratios of
                                                  the four vllm_importance_sampling_modes
    GRPOTrainer._compute_loss                     loss types and switches; given tensors take the place of the model
    RLOOTrainer._generate_and_score_completions   advantages with and without KL in the score
    RLOOTrainer._compute_loss                     the ratio of whole sequences
verl 0.9.1:
    core_algos.compute_*_advantage, compute_gae_advantage_return     (gdpo is float32 inside)
    core_algos.compute_policy_loss_*              vanilla (always dual clip), gspo, cispo, each by loss_agg_mode
    core_algos.kl_penalty                         k1, k2, k3
    core_algos.compute_value_loss
    rollout_corr_helper.compute_rollout_correction_weights
    DAPORewardManager.__call__                    the overlong penalty (float32)
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent
ROWS, COLUMNS, GROUP, LIMIT = 12, 10, 4, 16


def make_inputs() -> dict[str, np.ndarray]:
    draw = np.random.RandomState(7)
    lengths = np.array([10, 1, 3, 6, 2, 5, 10, 4, 8, 7, 1, 9])
    by_source = draw.randn(ROWS, 2)
    by_source[GROUP : 2 * GROUP] = [0.25, 0.5]
    weights = np.array([1.0, 0.5])
    old = -np.abs(draw.randn(ROWS, COLUMNS)) - 0.2
    new = old + 0.3 * draw.randn(ROWS, COLUMNS)
    new[[0, 2, 6, 9], [1, 2, 7, 3]] += 1.6  # ratios beyond any dual clip
    sampler = old + 0.2 * draw.randn(ROWS, COLUMNS)
    # weights beyond the bounds of the correction, of tokens and of sequences
    sampler[[0, 3, 3, 8, 8], [4, 1, 4, 6, 2]] -= [1.2, 1.2, 1.2, 2.2, 1.2]
    sampler[[5, 11], [2, 8]] += 1.2
    advantages = draw.randn(ROWS)
    advantages[GROUP + 1] = 0
    token_advantages = draw.randn(ROWS, COLUMNS)
    token_advantages[[0, 2, 6, 9], [1, 2, 7, 3]] = [-1.0, 0.7, -0.4, -1.5]
    return dict(
        mask=np.arange(COLUMNS) < lengths[:, None],
        group_ids=np.repeat([70, 3, 41], GROUP),
        by_source=by_source,
        weights=weights,
        scores=by_source @ weights,
        old=old,
        new=new,
        ref=old + 0.4 * draw.randn(ROWS, COLUMNS),
        sampler=sampler,
        entropy=np.abs(draw.randn(ROWS, COLUMNS)),
        values=draw.randn(ROWS, COLUMNS),
        rewards=draw.randn(ROWS, COLUMNS),
        advantages=advantages,
        token_advantages=token_advantages,
        greedy=draw.randn(ROWS),
        limit=np.array(LIMIT),
    )


def with_gradients(loss, **leaves):
    """The arrays of a loss and of its gradients by these tensors."""
    loss.backward()
    return {"loss": loss.detach().numpy()} | {f"grad{name}": leaf.grad.numpy() for name, leaf in leaves.items()}


# -------------------------------------------------------------------------------------------------------------- TRL


def trl_arrays(given) -> dict[str, np.ndarray]:
    import torch
    from accelerate import Accelerator
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    torch.set_default_dtype(torch.float64)  # TRL makes tensors of its own from lists
    t = {name: torch.tensor(value) for name, value in given.items()}
    lengths = t["mask"].sum(1).tolist()
    arrays = {}

    def trainer(kind, **options):
        """A trainer whose model returns the given log-probs: the policy's are `old` while it scores and `new` in the
        loss."""
        made = object.__new__(kind)
        policy, reference = SimpleNamespace(training=True, is_gradient_checkpointing=False), SimpleNamespace()
        source = [torch.nn.Identity() for _ in range(2)]
        settings = dict(
            args=SimpleNamespace(
                delta=options.pop("delta", None),
                use_bias_correction_kl=False,
                steps_per_generation=1,
                gradient_accumulation_steps=1,
                per_device_train_batch_size=ROWS,
                gradient_checkpointing_kwargs=None,
            ),
            accelerator=Accelerator(cpu=True), model=policy, ref_model=reference, _pending_extra_logs={},
            _metrics=defaultdict(lambda: defaultdict(list)), _logs=defaultdict(lambda: defaultdict(list)),
            _pending_metrics={}, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0, epsilon_low=0.2,
            epsilon_high=0.2, importance_sampling_level="token", loss_type="dapo", use_vllm=False, num_iterations=1,
            vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
            max_completion_length=LIMIT, aux_loss_enabled=False, _entropy_bonus_enabled=False,
            use_adaptive_entropy=False, entropy_coef=0.0, environment_factories=None, environments=None, tools=None,
            pad_to_multiple_of=None, mask_truncated_completions=False, num_generations=GROUP, reward_clip_range=None,
            _tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=1), reward_weights=t["weights"],
            processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
            multi_objective_aggregation="sum_then_normalize", scale_rewards="group", normalize_advantages=False,
            reward_funcs=source, reward_func_names=["first", "second"], log_multimodal=False,
        )  # fmt: skip
        fields = made.__dict__
        fields.update(settings | options)
        fields["_logs"].update(prompt=[], completion=[], advantages=[])
        fields["new"], fields["entropies"] = t["new"].clone().requires_grad_(), t["entropy"].clone().requires_grad_()

        def forward(model, *_, compute_entropy=False, **__):
            if compute_entropy:
                return made.new, made.entropies, None
            return (t["ref"] if model is reference else t["old"]), None, None

        def generate(prompts):
            tokens = [list(range(5, 5 + length)) for length in lengths]
            if kind is RLOOTrainer:
                return [[2, 3]] * ROWS, tokens, [""] * ROWS
            sampled = [row[:length].tolist() for row, length in zip(t["sampler"], lengths, strict=True)]
            return [[2, 3]] * ROWS, tokens, None, [""] * ROWS, sampled if made.use_vllm else None, {}, None, None

        fields["_get_per_token_logps_and_entropies"] = forward
        fields["_generate"] = generate
        fields["_calculate_rewards"] = lambda *_: t["by_source"].clone()
        return made

    def scored(kind, **options):
        return trainer(kind, **options)._generate_and_score_completions([{"prompt": ""}] * ROWS)

    def record(function, options, values):
        for what, value in values.items():
            arrays[f"trl/{function}/{options}/{what}"] = np.asarray(value)

    def grpo_loss(name, ratio=None, **options):
        made = trainer(GRPOTrainer, **options)
        mask = t["mask"].long()
        inputs = dict(
            prompt_ids=torch.zeros(ROWS, 2, dtype=torch.long), prompt_mask=torch.ones(ROWS, 2, dtype=torch.long),
            completion_ids=torch.zeros_like(mask), completion_mask=mask, advantages=t["advantages"],
            old_per_token_logps=t["old"], ref_per_token_logps=t["ref"], num_items_in_batch=mask.sum(),
        )  # fmt: skip
        if ratio is not None:
            inputs["importance_sampling_ratio"] = ratio
        found = with_gradients(
            made._compute_loss(made.model, inputs),
            **{"": made.new, **({"_entropy": made.entropies} if options.get("_entropy_bonus_enabled") else {})},
        )
        record("GRPOTrainer._compute_loss", name, found)

    for scale in ("group", "none"):
        found = scored(GRPOTrainer, scale_rewards=scale)
        record("GRPOTrainer", f"scale_rewards={scale}", {"advantages": found["advantages"]})
    found = scored(GRPOTrainer, multi_objective_aggregation="normalize_then_sum")
    record("GRPOTrainer", "normalize_then_sum", {"advantages": found["advantages"]})
    for beta in (0.0, 0.05):
        record("RLOOTrainer", f"beta={beta}", {"advantages": scored(RLOOTrainer, beta=beta)["advantages"]})

    asymmetric = dict(epsilon_low=0.2, epsilon_high=0.28)
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        grpo_loss(f"loss_type={kind}", loss_type=kind, **asymmetric)
        grpo_loss(f"loss_type={kind},delta=3", loss_type=kind, delta=3.0, **asymmetric)
        grpo_loss(f"loss_type={kind},beta=0.04", loss_type=kind, beta=0.04, **asymmetric)
    grpo_loss("loss_type=cispo,epsilon_high=1.5", loss_type="cispo", epsilon_high=1.5)
    for kind in ("grpo", "luspo"):
        level = dict(importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08)
        grpo_loss(f"loss_type={kind},sequence", loss_type=kind, **level)
    bonus = dict(_entropy_bonus_enabled=True, entropy_coef=0.01)
    grpo_loss("loss_type=dapo,entropy_coef=0.01", loss_type="dapo", **asymmetric, **bonus)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        low, high = (None, 2.0) if mode.endswith("truncate") else (0.5, 5.0 if mode == "token_mask" else 3.0)
        options = dict(
            use_vllm=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        )  # fmt: skip
        ratio = scored(GRPOTrainer, **options)["importance_sampling_ratio"]
        name = f"{mode}={high}" if low is None else f"{mode}={low},{high}"
        record("GRPOTrainer", name, {"ratio": ratio})
        grpo_loss(f"loss_type=dapo,{name}", ratio, loss_type="dapo", **options, **asymmetric)
        grpo_loss(f"loss_type=dapo,beta=0.04,{name}", ratio, loss_type="dapo", beta=0.04, **options, **asymmetric)

    made = trainer(RLOOTrainer, epsilon_low=0.2, epsilon_high=0.28)
    mask = t["mask"].long()
    inputs = dict(
        prompt_ids=torch.zeros(ROWS, 2, dtype=torch.long), prompt_mask=torch.ones(ROWS, 2, dtype=torch.long),
        completion_ids=torch.zeros_like(mask), completion_mask=mask, advantages=t["advantages"],
        old_logps=(t["old"] * mask).sum(1),
    )  # fmt: skip
    found = with_gradients(made._compute_loss(made.model, inputs), **{"": made.new})
    record("RLOOTrainer._compute_loss", "epsilon=0.2,0.28", found)
    return arrays


# ------------------------------------------------------------------------------------------------------------- verl


def verl_arrays(given) -> dict[str, np.ndarray]:
    import torch
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as core
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig
    from verl.workers.reward_manager.dapo import DAPORewardManager

    t = {name: torch.tensor(value) for name, value in given.items()}
    mask, index = t["mask"].double(), given["group_ids"]
    last = t["mask"] & (t["mask"].flip(1).cumsum(1).flip(1) == 1)
    arrays = {}

    def record(function, options, values):
        for what, value in values.items():
            arrays[f"verl/{function}/{options}/{what}"] = np.asarray(value)

    def outcome():
        """The scores at the last tokens; a new tensor, since some functions change theirs."""
        return torch.where(last, t["scores"][:, None], 0.0)

    def advantages(name, options, function, *arguments, **more):
        found, returns = function(*arguments, **more)
        record(name, options, {"advantages": found} | ({"returns": returns} if name == "gae" else {}))

    for by_std in (True, False):
        options = dict(index=index, norm_adv_by_std_in_grpo=by_std)
        advantages("grpo", f"by_std={by_std}", core.compute_grpo_outcome_advantage, outcome(), mask, **options)
    advantages("rloo", "", core.compute_rloo_outcome_advantage, outcome(), mask, index=index)
    advantages(
        "reinforce_plus_plus_baseline", "", core.compute_reinforce_plus_plus_baseline_outcome_advantage, outcome(),
        mask, index=index,
    )  # fmt: skip
    for gamma in (1.0, 0.9):
        advantages(
            "reinforce_plus_plus", f"gamma={gamma}", core.compute_reinforce_plus_plus_outcome_advantage,
            torch.where(last, t["scores"][:, None], 0.0) - 0.05 * (t["old"] - t["ref"]) * mask, mask,
            config=AlgoConfig(gamma=gamma),
        )  # fmt: skip
    advantages("remax", "", core.compute_remax_outcome_advantage, outcome(), t["greedy"], mask)
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8)):  # its advantages are whitened
        advantages(
            "gae", f"gamma={gamma},lam={lam}", core.compute_gae_advantage_return, t["rewards"], t["values"], mask,
            gamma, lam,
        )  # fmt: skip
    advantages(
        "gdpo", "weights=1,0.5", core.compute_gdpo_outcome_advantage, outcome(), mask, index,
        config=AlgoConfig(gdpo_reward_keys=["first", "second"], gdpo_reward_weights=given["weights"].tolist()),
        non_tensor_batch={"first": given["by_source"][:, 0], "second": given["by_source"][:, 1]},
        batch={
            "prompts": torch.ones(ROWS, 2, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(ROWS, 2, dtype=torch.long), t["mask"].long()], 1),
        },
    )  # fmt: skip

    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

    def loss(kind, options, mode, weights=None, **settings):
        actor = ActorConfig(
            strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, loss_agg_mode=mode, **settings,
            global_batch_info={"loss_scale_factor": LIMIT},
        )  # fmt: skip
        new = t["new"].clone().requires_grad_()
        function = core.get_policy_loss_fn(kind)
        # The gradient of verl's gspo is the paper's where a response has one advantage
        given = t["advantages"][:, None].expand_as(mask) if kind == "gspo" else t["token_advantages"]
        found, metrics = function(t["old"], new, given, mask, mode, actor, weights)
        values = with_gradients(found, **{"": new})
        values |= {name.split("/")[1]: value for name, value in metrics.items() if "clipfrac" in name}
        record(f"policy_loss_{kind}", f"{options},{mode}", values)

    asymmetric = dict(clip_ratio_low=0.2, clip_ratio_high=0.28)
    for mode in modes:
        loss("vanilla", "clip=0.2,0.28,c=3", mode, clip_ratio_c=3.0, **asymmetric)
        loss("vanilla", "clip=0.2,0.28,c=1e9", mode, clip_ratio_c=1e9, **asymmetric)
        loss("cispo", "clip=0.2,0.28", mode, **asymmetric)
        loss("gspo", "clip=0.05,0.08", mode, clip_ratio_low=0.05, clip_ratio_high=0.08)

    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_5.0"):
            options = dict(rollout_is=level, rollout_is_threshold=threshold)
            weights, _ = compute_rollout_correction_weights((t["old"] - t["sampler"]) * mask, mask, **options)
            record("rollout_correction_weights", f"{level},{threshold}", {"weights": weights})
            loss("vanilla", f"clip=0.2,0.28,c=1e9,{level},{threshold}", "token-mean", weights, clip_ratio_c=1e9,
                 **asymmetric)  # fmt: skip

    for kind in ("k1", "k2", "k3"):
        new = t["new"].clone().requires_grad_()
        found = core.kl_penalty(new, t["ref"], kind)
        (found * mask).sum().backward()
        record("kl_penalty", kind, {"kl": found.detach(), "grad": new.grad})

    values = t["values"].clone().requires_grad_()
    found, clipfrac = core.compute_value_loss(values, t["rewards"], t["values"] - 0.3 * t["old"], mask, 0.2)
    record("value_loss", "clip=0.2", with_gradients(found, **{"": values}) | {"clipfrac": clipfrac})

    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="</s>"), num_examine=0,
        compute_score=lambda extra_info, **_: extra_info["score"], max_resp_len=COLUMNS,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=4, penalty_factor=0.7, log=False),
    )  # fmt: skip
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(ROWS, 2, dtype=torch.long),
            "responses": torch.ones(ROWS, COLUMNS, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(ROWS, 2, dtype=torch.long), t["mask"].long()], 1),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * ROWS, dtype=object),
            "data_source": np.array([""] * ROWS, dtype=object),
            "extra_info": np.array([{"score": float(s)} for s in given["scores"]], dtype=object),
        },
    )
    record("DAPORewardManager", "max_resp_len=10,len=4,penalty_factor=0.7", {"scores": manager(data).sum(1)})
    return arrays


def main() -> None:
    (project,) = sys.argv[1:]
    if project == "inputs":
        arrays = make_inputs()
    else:
        with np.load(HERE / "online_inputs.npz") as file:
            given = dict(file)
        arrays = {"trl": trl_arrays, "verl": verl_arrays}[project](given)
    path = HERE / f"online_{project}.npz"
    np.savez_compressed(path, **arrays)
    print(f"{len(arrays)} arrays, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
