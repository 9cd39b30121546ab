"""Which curves a report shows, in groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.report.run import Run, finite

SOURCE = {part: re.compile(rf"scores/(.+)/{part}") for part in ("mean", "var")}
PASS = re.compile(r"evaluation/pass@\d+")


@dataclass(frozen=True)
class Chart:
    """Curves on common axes: {name in metrics.jsonl: label}."""

    title: str
    unit: str
    curves: dict[str, str]
    level: tuple[str, float | str] | None = None  # (label, a value to compare with or its key, see Run.setting)
    level_if: tuple[str, str] | None = None  # (key, value) of the config that the level needs to mean something
    exact: bool = False  # set, not measured: not smoothed, on a linear axis


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Objective": (
        Chart("Score", "reward", {"objective/scores": "score", "objective/scores_total": "score − KL penalty"}),
        Chart("KL to the reference", "nats a response", {"objective/kl": "KL", "objective/kl_exact": "exact"},
              ("target", "*.kl.target"), ("*.kl.controller", "adaptive")),
        Chart("Entropy", "nats a response", {"objective/entropy": "entropy"}),
        Chart("KL coefficient", "reward a nat", {"objective/kl_coef": "coefficient"}),
        Chart("KL penalty", "reward", {"objective/non_score_reward": "penalty"}),
        Chart("Spread of the scores", "variance", {"objective/scores_var": "variance"}),
        Chart("Response length", "tokens", {"objective/response_length": "length"}),
        Chart("Accepted responses", "share", {"objective/accepted": "accepted"}),
    ),
    "Policy": (
        Chart("KL of an update", "nats a token", {"ppo/policy/approxkl": "approxkl",
                                                  "reinforce/policy/approxkl": "approxkl"}),
        Chart("Clipped ratios", "share of tokens", {"ppo/policy/clipfrac": "clipfrac"}),
        Chart("Probability ratio", "new / old", {"ppo/policy/ratio_mean": "mean", "ppo/policy/ratio_min": "min",
                                                 "ppo/policy/ratio_max": "max", "reinforce/policy/ratio_max": "max"}),
        Chart("Variance of the ratio", "", {"ppo/policy/ratio_var": "variance"}),
        Chart("Entropy of the softmax", "nats a token", {"ppo/policy/entropy": "entropy",
                                                         "reinforce/policy/entropy": "entropy"}),
    ),
    "Value": (
        Chart("Values and returns", "mean over tokens", {"ppo/val/vpred": "predicted", "ppo/val/mean": "at sampling",
                                                         "ppo/returns/mean": "returns"}),
        Chart("Spread of values and returns", "variance", {"ppo/val/vpred_var": "predicted",
                                                           "ppo/val/var": "at sampling", "ppo/returns/var": "returns"}),
        Chart("Value error", "squared", {"ppo/val/error": "error"}),
        Chart("Clipped values", "share of tokens", {"ppo/val/clipfrac": "clipfrac"}),
    ),
    "Losses": (
        Chart("Loss", "", {"loss": "training", "validation/loss": "held-out"}),
        Chart("Policy loss", "", {"ppo/loss/policy": "loss", "reinforce/loss/policy": "loss"}),
        Chart("Value loss", "", {"ppo/loss/value": "loss"}),
        Chart("Loss of both heads", "policy + value", {"ppo/loss/total": "loss"}),
        Chart("Gradient norm", "before clipping", {"grad_norm": "model", "ppo/val/grad_norm": "critic"}),
        Chart("Skipped updates", "share", {"skipped": "model", "ppo/val/skipped": "critic"}, exact=True),
        Chart("Learning rate", "", {"lr": "model", "ppo/val/lr": "critic"}, exact=True),
    ),
    "Validation": (
        Chart("Perplexity", "held-out", {"validation/perplexity": "perplexity"}),
        Chart("Accuracy", "share", {"accuracy": "training", "validation/accuracy": "held-out"},
              ("chance", 0.5), ("loss", "pairwise")),
        Chart("Scores of pairs", "training", {"scores/chosen": "chosen", "scores/rejected": "rejected"}),
        Chart("Scores of pairs", "held-out", {"validation/scores/chosen": "chosen",
                                              "validation/scores/rejected": "rejected"}),
    ),
    "Throughput": (
        Chart("Tokens a second", "", {"tokens_per_second": "tokens / s"}),
        Chart("Time of a step", "seconds", {"step_seconds": "step", "time/step": "step"}),
        Chart("Sampler − trainer", "nats a token", {"sampler/gap": "gap"}),
    ),
}  # fmt: skip


def distribution_title(name: str) -> str:
    """Of a distribution in scores.jsonl."""
    of, _, what = name.partition("/")
    start = {"held_out": "Held-out", "samples": "Sampled"}.get(of, of)
    return f"{start} score" + (f" of {what.removeprefix('scores/')}" if what != "score" else "")


def groups(*runs: Run) -> dict[str, tuple[Chart, ...]]:
    """The charts of runs by group; the runs have no numbers for some. Each number that one of them recorded is in one
    of the charts."""
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    own = {"Evaluation": _evaluation(names), "Preferences": (pairs := _preferences(runs))}
    shown = {name for chart in pairs for name in chart.curves}
    common = {
        group: tuple(chart for chart in charts if not shown >= chart.curves.keys()) for group, charts in GROUPS.items()
    }
    sources = _sources(names)
    known = [chart for charts in (*own.values(), *GROUPS.values(), sources) for chart in charts]
    return {**own, **common, "Sources": sources, "Other": _others(names, known)}


def level(chart: Chart, run: Run) -> float | None:
    """What the chart's numbers are compared with in a run; None without."""
    if chart.level is None or (chart.level_if and run.setting(chart.level_if[0]) != chart.level_if[1]):
        return None
    value = run.setting(chart.level[1]) if isinstance(chart.level[1], str) else chart.level[1]
    return value if finite(value) else None


def _evaluation(names: list[str]) -> tuple[Chart, ...]:
    """The evaluations on held-out prompts, with a curve for each k of pass@k."""
    right = [name for name in names if PASS.fullmatch(name) or name == "evaluation/greedy"]
    return (
        Chart("Right responses", "share", {name: name.removeprefix("evaluation/") for name in right}),
        Chart("Score of greedy responses", "", {"evaluation/score": "held-out"}),
        Chart("Length of greedy responses", "tokens", {"evaluation/response_length": "length"}),
        Chart("Time of an evaluation", "seconds", {"time/evaluation": "evaluation"}),
        Chart("Best step so far", "", {"evaluation/best_step": "step"}, exact=True),
    )


def _preferences(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """How far a policy tells chosen responses from rejected ones; of megarlhf dpo and kto."""
    if not any(run.config.keys() & {"dpo", "kto"} for run in runs):
        return ()
    charts = [
        Chart("Accuracy", "share", {"accuracy": "training", "validation/accuracy": "held-out"}, ("chance", 0.5)),
        Chart("Margins", "beta × (chosen − rejected)", {"margins": "training", "validation/margins": "held-out"}),
        Chart("Baseline z0", "nats a response", {"baseline": "training", "validation/baseline": "held-out"}),
    ]
    for what, title in (("logratios", "Log-ratios to the reference"), ("logprobs", "Log-probs")):
        for how, unit in (("sum", "nats a response"), ("mean", "nats a token")):
            for prefix, data in (("", "training"), ("validation/", "held-out")):
                curves = {f"{prefix}{what}_{how}/{kind}": kind for kind in ("chosen", "rejected")}
                charts.append(Chart(title, f"{unit}, {data}", curves))
    terms = {f"loss/{name}": text for name, text in (("preference", "preference"), ("nll_token", "NLL a token"),
                                                     ("nll_sequence", "NLL a token, mean of responses"))}  # fmt: skip
    return (*charts, Chart("Terms of the loss", "training", terms))


def _sources(names: list[str]) -> tuple[Chart, ...]:
    """The scores of each source apart."""
    return tuple(
        Chart(title, unit, {name: match[1] for name in names if (match := SOURCE[part].fullmatch(name))})
        for part, title, unit in (
            ("mean", "Scores of each source", "as it gave them"),
            ("var", "Spread of the scores of each source", "variance"),
        )
    )


def _others(names: list[str], charts: list[Chart]) -> tuple[Chart, ...]:
    """A chart for each number that is in none of `charts`: nothing recorded is left out."""
    known = {"step", "time"} | {name for chart in charts for name in chart.curves}
    rest = [name for name in names if name not in known and not name.startswith(("time/", "gate/"))]
    return tuple(Chart(name, "", {name: name}) for name in rest)
