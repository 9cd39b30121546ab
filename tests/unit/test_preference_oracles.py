"""The losses of pairs and ratings beside what TRL 1.12.0 computes on a small Llama (goldens/make_preference.py), and
beside loops in float64 where TRL has another loss, or none."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf.algorithms.kto import KTOConfig, derangement, kto
from megarlhf.algorithms.preference import FORMS, PreferenceConfig, preference
from megarlhf.batch import Comparisons, Ratings

with np.load(Path(__file__).parent / "goldens" / "preference_trl.npz") as file:
    GIVEN = {name: torch.from_numpy(file[name]) for name in file}
MASK = GIVEN["mask"]
ROWS, COLUMNS = MASK.shape
TRL = {
    "DPOTrainer/sigmoid,beta=0.1": {},
    "DPOTrainer/sigmoid,beta=0.7": dict(beta=0.7),
    "DPOTrainer/sigmoid_norm,beta=0.7": dict(beta=0.7, logprobs="mean"),
    "DPOTrainer/hinge,beta=0.3": dict(loss="hinge", beta=0.3),
    "DPOTrainer/ipo,beta=0.3": dict(loss="ipo", beta=0.3, logprobs="mean"),
    "DPOTrainer/robust,beta=0.3,label_smoothing=0.1": dict(loss="robust", beta=0.3, label_smoothing=0.1),
    "DPOTrainer/sppo_hard,beta=0.3": dict(loss="sppo", beta=0.3),
    "DPOTrainer/apo_zero,beta=0.3": dict(loss="apo_zero", beta=0.3),
    "DPOTrainer/apo_down,beta=0.3": dict(loss="apo_down", beta=0.3),
    "DPOTrainer/sigmoid+0.4sft,beta=0.3": dict(beta=0.3, nll_coef=0.4),
    "CPOTrainer/sigmoid,beta=0.3": dict(loss="cpo", beta=0.3, nll_coef=0.0),
    "CPOTrainer/simpo,beta=2,gamma=0.5": dict(loss="simpo", beta=2.0, gamma=0.5),
    "ORPOTrainer/beta=0.3": dict(loss="orpo", beta=0.3, nll_coef=0.0),
}
KTO = {
    "KTOTrainer/kto,beta=0.1": {},
    "KTOTrainer/kto,beta=0.7,weights=1.33,0.8": dict(beta=0.7, desirable_weight=1.33, undesirable_weight=0.8),
    "KTOTrainer/apo_zero_unpaired,beta=0.3": dict(loss="apo_zero_unpaired", beta=0.3),
}


def pairs(mask=MASK, margins=None):
    """Comparisons as PreferenceLoader gives them. Their tokens are not read."""
    margins = torch.zeros(len(mask)) if margins is None else margins
    real = mask.any(1)[0::2]
    return Comparisons(
        torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.int64), mask, together=2,
        ranks=torch.tensor([0, 1]).repeat(len(mask) // 2), margins=margins,
        nll_scale=(real.sum() / mask[0::2].sum()).item(),
    )  # fmt: skip


def ratings(mask=MASK, kl_mask=GIVEN["kl_mask"], labels=GIVEN["labels"]):
    tokens, others = (torch.zeros(len(x), x.shape[1] + 1, dtype=torch.int64) for x in (mask, kl_mask))
    return Ratings(
        tokens, mask, labels=labels, mismatched_tokens=others, mismatched_mask=kl_mask,
        mismatched_segments=torch.ones_like(others),
    )  # fmt: skip


def outside(values, mask):
    """NaN outside the mask, where no loss may read."""
    return torch.where(mask, values, math.nan)


def computed(algorithm, rows, models):
    """(loss, its gradient by the policy's log-probs, metrics)."""
    rows = algorithm.prepare(rows, {name: lambda _, m=model: {"logprobs": m} for name, model in models.items()}, None)
    leaf = models["actor"].clone().requires_grad_()
    total, count, metrics = algorithm.loss({"logprobs": leaf}, rows)
    (gradient,) = torch.autograd.grad(total / count, leaf)
    exact = metrics["loss"][0] / metrics["loss"][1]  # in float64
    assert total.item() == pytest.approx(metrics["loss"][0].item(), rel=1e-6)
    return exact.item(), gradient, {name: (s / c).item() for name, (s, c) in metrics.items()}


def on_pairs(options, rows=None, policy=None, reference=None):
    rows = pairs() if rows is None else rows
    models = {"actor": outside(GIVEN["policy"] if policy is None else policy, rows.mask)}
    if PreferenceConfig(**options).form.reference:
        models["reference"] = outside(GIVEN["reference"] if reference is None else reference, rows.mask)
    return computed(preference(PreferenceConfig(**options)), rows, models)


@pytest.mark.parametrize("name", TRL)
def test_pairs_as_trl(name):
    loss, gradient, _ = on_pairs(TRL[name])
    assert loss == pytest.approx(GIVEN[f"{name}/loss"].item(), rel=1e-6)
    torch.testing.assert_close(gradient, GIVEN[f"{name}/grad"], rtol=1e-6, atol=1e-8)
    assert not gradient[~MASK].any()


def test_every_loss_has_an_oracle():
    assert {PreferenceConfig(**options).loss for options in TRL.values()} | {"cdpo"} == set(FORMS)


@pytest.mark.parametrize("name", KTO)
def test_ratings_as_trl(name):
    """The z0 of TRL's one device is ours of one rank, if the pairs are the same."""
    rows, kl_mask = ratings(), GIVEN["kl_mask"]
    wanted = {"actor": ("policy", "kl_policy"), "reference": ("reference", "kl_reference")}

    def model(plain, mixed):
        """Which log-probs it gives is known by the rows it is given."""
        return lambda given: {
            "logprobs": outside(GIVEN[plain], MASK) if given is rows else outside(GIVEN[mixed], kl_mask)
        }

    algorithm = kto(KTOConfig(**KTO[name]))
    found = algorithm.prepare(rows, {role: model(*names) for role, names in wanted.items()}, None)
    leaf = outside(GIVEN["policy"], MASK).requires_grad_()
    total, count, metrics = algorithm.loss({"logprobs": leaf}, found)
    (gradient,) = torch.autograd.grad(total / count, leaf)
    expected = GIVEN[f"{name}/loss"].item()
    assert (metrics["loss"][0] / count).item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, GIVEN[f"{name}/grad"], rtol=1e-6, atol=1e-8)
    if "apo" not in name:
        ratios = torch.where(kl_mask, GIVEN["kl_policy"] - GIVEN["kl_reference"], 0).sum(1)
        assert found.baseline == pytest.approx(max(0, ratios.mean().item())) and found.baseline > 0.1


# ------------------------------------------------------------------------------------------------ loops


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def slow(loss, beta, c, r, eps=0.1, gamma=0.5):
    """The loss of a pair, written once more, from the formulas of docs/preferences.md."""
    h = c - r
    if loss in ("dpo", "cpo"):
        return -log_sigmoid(beta * h)
    if loss == "cdpo":
        return -(1 - eps) * log_sigmoid(beta * h) - eps * log_sigmoid(-beta * h)
    if loss == "robust":
        return (-(1 - eps) * log_sigmoid(beta * h) + eps * log_sigmoid(-beta * h)) / (1 - 2 * eps)
    if loss == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return max(0, 1 - beta * h)
    if loss == "apo_zero":
        return 1 - sigmoid(beta * c) + sigmoid(beta * r)
    if loss == "apo_down":
        return sigmoid(beta * c) + 1 - sigmoid(beta * h)
    if loss == "sppo":
        return (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2
    if loss == "simpo":
        return -log_sigmoid(beta * h - gamma)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
    return -beta * math.log(sigmoid(math.log(odds[0] / odds[1])))


CASES = [
    (loss, how) for loss, form in FORMS.items() for how in ("sum", "mean") if how == "mean" or how == form.logprobs
]


@pytest.mark.parametrize("nll", [None, "token", "sequence"])
@pytest.mark.parametrize(("loss", "how"), CASES)
def test_pairs_as_a_loop(loss, how, nll):
    options = dict(loss=loss, beta=0.4, logprobs=how, nll_coef=0.0 if nll is None else 0.7)
    options |= {"label_smoothing": 0.1} if loss in ("cdpo", "robust") else {}
    options |= {"gamma": 0.5} if loss == "simpo" else {}
    options |= {} if nll is None else {"nll_normalization": nll}
    rows = pairs(torch.cat([MASK, torch.zeros_like(MASK[:2])]))  # the last pair pads the batch
    policy, reference = (torch.cat([GIVEN[x], torch.zeros(2, COLUMNS)]).double() for x in ("policy", "reference"))
    total, losses, chosen_nll, kinds = 0.0, [], [], {"logprobs": [], "logratios": []}
    for first in range(0, ROWS, 2):
        sums = [policy[i][MASK[i]].sum().item() for i in (first, first + 1)]
        base = [reference[i][MASK[i]].sum().item() for i in (first, first + 1)]
        sizes = [int(MASK[i].sum()) for i in (first, first + 1)]
        values = [s - b for s, b in zip(sums, base, strict=True)] if FORMS[loss].reference else sums
        if how == "mean":
            values = [value / size for value, size in zip(values, sizes, strict=True)]
        kinds["logratios"].append(values)
        kinds["logprobs"].append([s / n for s, n in zip(sums, sizes, strict=True)] if how == "mean" else sums)
        losses.append(slow(loss, 0.4, *values))
        chosen_nll.append((-sums[0], sizes[0]))
    total = sum(losses) / len(losses)
    if nll == "token":
        total += 0.7 * sum(x for x, _ in chosen_nll) / sum(n for _, n in chosen_nll)
    if nll == "sequence":
        total += 0.7 * sum(x / n for x, n in chosen_nll) / len(chosen_nll)
    found, gradient, metrics = on_pairs(options, rows, policy, reference)
    assert found == pytest.approx(total, rel=1e-12)
    assert not gradient[~rows.mask].any() and torch.isfinite(gradient).all()
    if nll is not None:
        assert metrics["loss/preference"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        # before its coefficient
        assert metrics[f"loss/nll_{nll}"] == pytest.approx((total - sum(losses) / len(losses)) / 0.7, rel=1e-9)
    leads = [c - r for c, r in kinds["logratios"]]
    assert metrics["margins"] == pytest.approx(0.4 * sum(leads) / len(leads), rel=1e-9)
    assert metrics["accuracy"] == pytest.approx(sum(lead > 0 for lead in leads) / len(leads))
    for kind in ("logprobs", "logratios") if FORMS[loss].reference else ("logprobs",):
        for place, name in enumerate(("chosen", "rejected")):
            mean = sum(values[place] for values in kinds[kind]) / len(leads)
            assert metrics[f"{kind}_{how}/{name}"] == pytest.approx(mean, rel=1e-9)
    assert (f"logratios_{how}/chosen" in metrics) == FORMS[loss].reference and f"logprobs_{how}/chosen" in metrics


def test_margins_of_the_data():
    """-log sigmoid(b h - margin), by hand."""
    margins = torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0])
    found, _, metrics = on_pairs(dict(beta=0.4), pairs(margins=margins))
    h = torch.where(MASK, GIVEN["policy"] - GIVEN["reference"], 0).sum(1)
    h = h[0::2] - h[1::2]
    assert found == pytest.approx(-torch.nn.functional.logsigmoid(0.4 * h - margins[0::2]).mean().item(), rel=1e-12)
    assert metrics["margins"] == pytest.approx(0.4 * h.mean().item()), "they are of the policy alone"


@pytest.mark.parametrize("loss", FORMS)
def test_extremes_are_finite(loss):
    """Log-ratios beyond any exp, and a policy that is certain of its response."""
    options = dict(loss=loss) | ({"label_smoothing": 0.1} if loss in ("cdpo", "robust") else {})
    for scale in (-1e4, 0.0, -1e-12):
        _, gradient, metrics = on_pairs(options, policy=torch.where(MASK, scale, 0.0).double())
        assert torch.isfinite(gradient).all() and all(map(math.isfinite, metrics.values())), scale


def test_at_the_start():
    """ln 2, no margins, and half of the order right."""
    loss, _, metrics = on_pairs({}, policy=GIVEN["reference"])
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    assert metrics["margins"] == 0 == metrics["logratios_sum/chosen"] and metrics["accuracy"] == 0.5
    for loss in ("kto", "apo_zero_unpaired"):
        found, _, metrics = computed(kto(KTOConfig(loss=loss)), ratings(kl_mask=MASK),
                                     {role: GIVEN["reference"] for role in ("actor", "reference")})  # fmt: skip
        assert found == 0.5 and metrics["baseline"] == 0 and metrics["accuracy"] == 0.5


def test_a_minibatch_without_one_class():
    """Its other means are of nothing, not NaN, and the loss is finite."""
    algorithm = kto(KTOConfig())
    for labels in (torch.ones(ROWS, dtype=torch.bool), torch.zeros(ROWS, dtype=torch.bool)):
        _, gradient, metrics = computed_without_nan(algorithm, ratings(kl_mask=MASK, labels=labels))
        assert torch.isfinite(gradient).all()
        absent = "rejected" if labels[0] else "chosen"
        assert metrics[f"logratios_sum/{absent}"] == (0, 0)


def computed_without_nan(algorithm, rows):
    models = {"actor": GIVEN["policy"], "reference": GIVEN["reference"]}
    rows = algorithm.prepare(rows, {name: lambda _, m=model: {"logprobs": m} for name, model in models.items()}, None)
    leaf = models["actor"].clone().requires_grad_()
    total, count, metrics = algorithm.loss({"logprobs": leaf}, rows)
    (gradient,) = torch.autograd.grad(total / count, leaf)
    return (total / count).detach(), gradient, {name: (s.item(), c.item()) for name, (s, c) in metrics.items()}


# ------------------------------------------------------------------------------------------------ the derangement


def meetings(prompts, partner):
    return sum(prompts[i] == prompts[other] for i, other in enumerate(partner))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_the_derangement_is_the_best(size):
    """Of all orders of up to 6 rows with up to 3 prompts: a permutation without fixed points, with as few meetings of
    equal prompts as any has."""
    for prompts in itertools.product(range(min(3, size)), repeat=size):
        found = derangement(prompts).tolist()
        assert sorted(found) == list(range(size)) and all(i != other for i, other in enumerate(found))
        least = max(0, 2 * max(map(prompts.count, prompts)) - size)
        assert meetings(prompts, found) == least, prompts
    assert derangement([7]) is None


def test_the_derangement_by_force():
    """The bound of the test above is the least of all permutations without fixed points."""
    for prompts in itertools.product(range(2), repeat=5):
        best = min(
            meetings(prompts, order)
            for order in itertools.permutations(range(5))
            if all(i != other for i, other in enumerate(order))
        )
        assert best == max(0, 2 * max(map(prompts.count, prompts)) - 5)


# ------------------------------------------------------------------------------------------------ settings

REFUSED = {
    "beta": (dict(beta=0.0), "beta: must be positive, not 0.0"),
    "nan": (dict(beta=math.nan), "beta: must be positive, not nan"),
    "simpo's sum": (dict(loss="simpo", logprobs="sum"), "logprobs: simpo is defined on mean log-probs"),
    "orpo's sum": (dict(loss="orpo", logprobs="sum"), "logprobs: orpo is defined on mean log-probs"),
    "gamma": (dict(gamma=1.0), "gamma: is simpo's, and the loss is dpo"),
    "smoothing of dpo": (dict(label_smoothing=0.1), "label_smoothing: is for cdpo and robust, which differ in it"),
    "cdpo without": (dict(loss="cdpo"), "label_smoothing: of cdpo must be between 0 and 0.5, not 0"),
    "robust at a half": (dict(loss="robust", label_smoothing=0.5), "label_smoothing: of robust must be between"),
    "nll": (dict(nll_coef=-1.0), "nll_coef: must not be negative, not -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused(name):
    options, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected.replace("(", r"\(")):
        PreferenceConfig(**options)


def test_settings_of_kto_are_refused():
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        with pytest.raises(ValueError, match=f"{name}: must be positive, not 0.0"):
            KTOConfig(**{name: 0.0})
