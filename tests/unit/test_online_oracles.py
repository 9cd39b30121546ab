"""The advantages, losses and switches of online algorithms against TRL's and verl's own code, on ragged responses.

tests/unit/goldens/make_online.py made the arrays and describes them. Where another project differs by design, the test
transforms and says how. What stands outside the mask is NaN here, and six more columns are padding.
"""

from __future__ import annotations

import pytest
import torch

from megarlhf.algorithms import ppo, reinforce
from megarlhf.algorithms.advantages import gae, group_advantages
from megarlhf.algorithms.kl import KLConfig, kl_estimate, loss_estimate
from megarlhf.algorithms.masked import masked_mean, masked_var
from megarlhf.algorithms.policy_loss import ImportanceConfig, PolicyLossConfig
from megarlhf.algorithms.ppo import PPOConfig
from megarlhf.algorithms.reinforce import ReinforceConfig
from megarlhf.algorithms.shaping import ShapingConfig, shaped
from megarlhf.batch import CriticExperience, Experience, Scores
from tests.online_cases import ASYMMETRIC, COLUMNS, GIVEN, MASK, NO_KL, ROWS, SEQUENCES, batch_of, load, loss_of, wide

GOLDEN = load("trl") | load("verl")
TOKENS = int(MASK.sum())
BESSEL = (TOKENS - 1) / TOKENS  # TRL and verl divide variances by n - 1, we by n


def same(found, golden, tolerance=1e-6):
    """Equal to a golden array within its columns, and 0 after them."""
    golden = (GOLDEN[golden] if isinstance(golden, str) else golden).double()
    if found.dim() == 2:
        assert not found[:, COLUMNS:].any()
        found = found[:, :COLUMNS]
    torch.testing.assert_close(found.double(), golden, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ advantages


def experience_of(config, **extra):
    algorithm = reinforce.algorithm(config)
    return algorithm.make_experience(batch_of(**extra), algorithm.state, None)


def advantages_of(name, *, coef=0.0, extra=None, **options):
    return experience_of(ReinforceConfig(advantage=name, kl=KLConfig(coef=coef), **options), **(extra or {})).advantages


def of_rows(golden):
    """(B,) advantages, the same for all tokens."""
    return wide(GOLDEN[golden], 0.0)[:, :COLUMNS]


def test_grpo():
    same(advantages_of("grpo", eps=1e-4), of_rows("trl/GRPOTrainer/scale_rewards=group/advantages"))
    same(advantages_of("grpo", eps=1e-6), "verl/grpo/by_std=True/advantages")
    same(advantages_of("dr_grpo"), of_rows("trl/GRPOTrainer/scale_rewards=none/advantages"))
    same(advantages_of("dr_grpo"), "verl/grpo/by_std=False/advantages")


def test_rloo():
    same(advantages_of("rloo"), "verl/rloo//advantages")
    for beta in (0.0, 0.05):  # the KL of the whole response is in the score before the baseline
        same(advantages_of("rloo", coef=beta), of_rows(f"trl/RLOOTrainer/beta={beta}/advantages"))


def test_gdpo():
    """TRL's last z-score is over responses, with 1e-4 added to the deviation; verl's and ours over tokens."""
    rows = advantages_of("gdpo", eps=1e-4)[:, 0]
    same((rows - rows.mean()) / (rows.std() + 1e-4), "trl/GRPOTrainer/normalize_then_sum/advantages")
    ours = advantages_of("gdpo", eps=1e-6, whiten_advantages=True)
    same(ours * BESSEL**0.5, "verl/gdpo/weights=1,0.5/advantages", 1e-5)  # float32


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma):
    ours = advantages_of("reinforce", baseline="none", gamma=gamma, coef=0.05, whiten_advantages=True)
    same(ours * BESSEL**0.5, f"verl/reinforce_plus_plus/gamma={gamma}/advantages")


def test_reinforce_plus_plus_baseline():
    ours = advantages_of("dr_grpo", whiten_advantages=True)
    same(ours * BESSEL**0.5, "verl/reinforce_plus_plus_baseline//advantages")


def test_remax():
    same(advantages_of("remax", extra={"greedy": GIVEN["greedy"]}), "verl/remax//advantages")


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_gae(gamma, lam):
    """verl whitens the advantages; its returns outside the mask are not 0."""
    name = f"verl/gae/gamma={gamma},lam={lam}"
    advantages, returns = gae(wide(GIVEN["rewards"]), wide(GIVEN["values"]), MASK, gamma=gamma, lam=lam)
    same(returns[:, :COLUMNS][GIVEN["mask"]], GOLDEN[f"{name}/returns"][GIVEN["mask"]])
    whitened = (advantages - masked_mean(advantages, MASK)) / (masked_var(advantages, MASK) / BESSEL).sqrt()
    same(whitened[:, :COLUMNS][GIVEN["mask"]], GOLDEN[f"{name}/advantages"][GIVEN["mask"]])


def test_groups_are_found_by_their_ids():
    """Rows in another order have the same advantages."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"leave_one_out": True}, {"deviation": True, "eps": 1e-6}):
        found, _ = group_advantages(GIVEN["scores"], GIVEN["group_ids"], **options)
        shuffled, _ = group_advantages(GIVEN["scores"][order], GIVEN["group_ids"][order], **options)
        torch.testing.assert_close(shuffled, found[order], rtol=0, atol=1e-14)
        assert not found[4:8].any()  # equal scores
        wrong = group_advantages(GIVEN["scores"], GIVEN["group_ids"][order], **options)[0]
        assert (wrong - found).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------ losses


def agrees(name, config, *, advantages=GIVEN["advantages"], weights=None, kl=NO_KL):
    loss, gradient, entropy, metrics = loss_of(config, advantages=advantages, weights=weights, kl=kl)
    same(loss, f"{name}/loss")
    same(gradient, f"{name}/grad")
    if config.entropy_coef:
        same(entropy, f"{name}/grad_entropy")
    return {key: value[0] / value[1] for key, value in metrics.items() if isinstance(value, tuple)}


# `bnpo` and `dapo` differ only over several micro-batches; `luspo` is the sum over a response
TRL = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant", "luspo": "sequence_sum"}
VERL = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}


@pytest.mark.parametrize("kind", TRL)
def test_trl_normalisations(kind):
    name, config = f"trl/GRPOTrainer._compute_loss/loss_type={kind}", dict(normalization=TRL[kind], **ASYMMETRIC)
    agrees(name, PolicyLossConfig(**config))
    agrees(f"{name},delta=3", PolicyLossConfig(dual_clip=3.0, **config))
    agrees(f"{name},beta=0.04", PolicyLossConfig(**config), kl=KLConfig(0.04, place="loss", estimator="k3"))


def test_trl_cispo():
    """TRL's bound is that of the ratio itself, and there is no lower one."""
    config = PolicyLossConfig(surrogate="cispo", clip_range=1.0, clip_range_high=0.5)
    agrees("trl/GRPOTrainer._compute_loss/loss_type=cispo,epsilon_high=1.5", config)


@pytest.mark.parametrize("kind", ["grpo", "luspo"])
def test_trl_gspo(kind):
    config = PolicyLossConfig(ratio="sequence_mean", clip_range=0.05, clip_range_high=0.08, normalization=TRL[kind])
    agrees(f"trl/GRPOTrainer._compute_loss/loss_type={kind},sequence", config)


def test_trl_entropy():
    config = PolicyLossConfig(entropy_coef=0.01, **ASYMMETRIC)
    agrees("trl/GRPOTrainer._compute_loss/loss_type=dapo,entropy_coef=0.01", config)


def test_trl_rloo():
    """TRL's mean over responses of their one clipped ratio is our mean over responses of their tokens' equal losses."""
    config = PolicyLossConfig(ratio="sequence", normalization="sequence", **ASYMMETRIC)
    agrees("trl/RLOOTrainer._compute_loss/epsilon=0.2,0.28", config)


@pytest.mark.parametrize("mode", VERL)
def test_verl_losses(mode):
    advantages, options = GIVEN["token_advantages"], dict(normalization=VERL[mode], **ASYMMETRIC)
    for c, dual_clip in (("3", 3.0), ("1e9", None)):
        name = f"verl/policy_loss_vanilla/clip=0.2,0.28,c={c},{mode}"
        metrics = agrees(name, PolicyLossConfig(dual_clip=dual_clip, **options), advantages=advantages)
        same(metrics["x/policy/clipfrac"], f"{name}/pg_clipfrac")
        if dual_clip:
            same(metrics["x/policy/dualfrac"], f"{name}/pg_clipfrac_lower")
    name = f"verl/policy_loss_cispo/clip=0.2,0.28,{mode}"
    metrics = agrees(name, PolicyLossConfig(surrogate="cispo", **options), advantages=advantages)
    same(metrics["x/policy/clipfrac"], f"{name}/pg_clipfrac")
    name = f"verl/policy_loss_gspo/clip=0.05,0.08,{mode}"
    options |= dict(clip_range=0.05, clip_range_high=0.08, ratio="sequence_mean")
    metrics = agrees(name, PolicyLossConfig(**options))
    same(metrics["x/policy/clipfrac"], f"{name}/pg_clipfrac")


def test_kl_penalties():
    new, ref = wide(GIVEN["new"]).requires_grad_(), wide(GIVEN["ref"])
    rows = Experience(**SEQUENCES, logprobs=new, advantages=new, ref_logprobs=ref)
    for kind in ("k1", "k2", "k3"):
        if kind == "k1":
            found = torch.where(MASK, kl_estimate(new, ref), 0)
        else:
            found = loss_estimate({"logprobs": new}, rows, KLConfig(place="loss", estimator=kind))
        same(found, torch.where(GIVEN["mask"], GOLDEN[f"verl/kl_penalty/{kind}/kl"], 0))
        same(torch.autograd.grad(found.sum(), new)[0], f"verl/kl_penalty/{kind}/grad")


def test_value_loss():
    values = wide(GIVEN["values"]).requires_grad_()
    empty = wide(GIVEN["values"], 0.0)
    rows = CriticExperience(
        **SEQUENCES, logprobs=empty, advantages=empty, rewards=empty, correction=empty, returns=wide(GIVEN["rewards"]),
        values=wide(GIVEN["values"] - 0.3 * GIVEN["old"]),
    )  # fmt: skip
    total, count, metrics = ppo.value_loss({"values": values}, rows, config=PPOConfig(vf_coef=1.0))
    same((total / count).detach(), "verl/value_loss/clip=0.2/loss")
    same(torch.autograd.grad(total / count, values)[0], "verl/value_loss/clip=0.2/grad")
    clipped, tokens = metrics["ppo/val/clipfrac"]
    same(clipped / tokens, "verl/value_loss/clip=0.2/clipfrac")


# ------------------------------------------------------------------------------------------------ importance weights


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights(level, mode):
    """Only the surrogate is weighted, not the KL. TRL's weights of a sequence are one number."""
    kl = KLConfig(0.04, place="loss", estimator="k3")
    for project in ("trl", "verl"):
        low, high = (0.0, 2.0) if mode == "truncate" else (0.5, 3.0 if (project, level) == ("trl", "sequence") else 5.0)
        config = ImportanceConfig(level=level, mode=mode, low=low, high=high)
        found = experience_of(ReinforceConfig(kl=NO_KL, baseline="none", importance=config)).weights
        inside = torch.where(MASK, found, 0)
        if project == "trl":
            options = f"{level}_{mode}={high}" if mode == "truncate" else f"{level}_{mode}={low},{high}"
            same(inside, (GOLDEN[f"trl/GRPOTrainer/{options}/ratio"] * GIVEN["mask"]))
            name = "trl/GRPOTrainer._compute_loss/loss_type=dapo"
            agrees(f"{name},{options}", PolicyLossConfig(**ASYMMETRIC), weights=found)
            agrees(f"{name},beta=0.04,{options}", PolicyLossConfig(**ASYMMETRIC), weights=found, kl=kl)
        else:
            options = f"{level},{high}" if mode == "truncate" else f"{level},{low}_{high}"
            same(inside, f"verl/rollout_correction_weights/{options}/weights")
            agrees(
                f"verl/policy_loss_vanilla/clip=0.2,0.28,c=1e9,{options},token-mean", PolicyLossConfig(**ASYMMETRIC),
                weights=found, advantages=GIVEN["token_advantages"],
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------ shaping


def test_overlong():
    """verl's penalty is of the reward manager of DAPO; its limit is ours, the width of the responses."""
    config = ShapingConfig(overlong_buffer=4, overlong_penalty=0.7)
    scores = Scores(GIVEN["scores"], GIVEN["mask"], GIVEN["mask"][:, 0])
    found = shaped(scores, GIVEN["mask"], config).scores
    same(found, "verl/DAPORewardManager/max_resp_len=10,len=4,penalty_factor=0.7/scores")
