"""What algorithms/interface.py offers, with an algorithm of the tests' own: several rounds in a step, groups of
samples, a hook behind every batch that was learned from, and a reference of an offline algorithm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from megarlhf import cli
from megarlhf.algorithms import reinforce
from megarlhf.algorithms.interface import OfflineAlgorithm, OnlineAlgorithm
from megarlhf.batch import Sequences, concatenated
from megarlhf.config import UserError
from megarlhf.convert import torch_dist
from megarlhf.metrics import Min
from megarlhf.train.rl_config import ALGORITHMS, Entry
from tests.e2e.runs import prepare
from tests.e2e.test_rl import run_rl, timeless
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import reviews

STEPS = 4


@dataclass(frozen=True)
class BetterHalfConfig(reinforce.ReinforceConfig):
    learned: str = ""  # a file that gets a line for every batch that was learned from


def better_half(config: BetterHalfConfig) -> OnlineAlgorithm:
    """REINFORCE on the better of two prompts' groups of responses. The averaged model is the actor after each batch."""
    plain = reinforce.algorithm(config)

    def collect(act):
        rollouts = [act.sample(act.prompts()) for _ in range(2)]
        scores = [act.score(rollout) for rollout in rollouts]
        rollout, score = concatenated(rollouts), concatenated(scores)
        groups = rollout.group_ids.view(-1, 2)
        assert (groups[:, 0] == groups[:, 1]).all() and len(groups[:, 0].unique()) == len(groups)
        of_group = score.total.view(2, -1, 2).sum(-1)  # [round, group]
        rows = torch.arange(len(rollout)).view(2, -1, 2)
        second = (of_group[1] > of_group[0])[:, None]
        kept, dropped = (torch.where(choice, rows[1], rows[0]).flatten() for choice in (second, ~second))
        return act.evaluate(rollout.select(kept), score.select(kept), dropped=score.total[dropped])

    def objective(batch, state):
        kept, dropped = batch.scores.total, batch.extra["dropped"]
        lead = (kept - dropped).view(-1, 2).sum(1)
        return plain.objective(batch, state) | {
            "objective/lead": (lead.sum(), torch.ones_like(lead).sum()),
            "objective/least_lead": Min(lead.min()),
        }

    def after_batch(act):
        act.average(0.0)
        if dist.get_rank(act.group) == 0:
            with Path(config.learned).open("a") as file:
                file.write(f"{act.step}\n")

    return dataclasses.replace(plain, collect=collect, objective=objective, after_batch=after_batch, group_size=2)


@contextlib.contextmanager
def registered():
    """The line that a new algorithm adds to ALGORITHMS."""
    ALGORITHMS["better_half"] = Entry(BetterHalfConfig, better_half)
    try:
        yield
    finally:
        del ALGORITHMS["better_half"]


def run_better_half(path, cases):
    with registered():
        run_rl(path, cases)


@pytest.fixture(scope="module")
def path(straight, tmp_path_factory) -> Path:
    """A configuration of `better_half` over the session's SFT run."""
    directory = tmp_path_factory.mktemp("interface")
    prompts = [json.dumps({"prompt": review.prompt}) for review in reviews.reviews(64, seed=5)]
    (directory / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    tree = {
        "run": str(directory / "unused"),
        "model": {"checkpoint": str(straight[0]), "dtype": "fp32"},
        "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 8, "micro_batch_size": 8, "samples_per_prompt": 2},
        "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/judge.py:score"}]},
        "better_half": {},
        "average": 0.999,
        "training": {"steps": STEPS, "batch_size": 16, "minibatches": 2, "epochs": 1, "micro_batch_tokens": 96},
        "optimizer": {"lr": 1e-3, "eps": 1e-4, "schedule": "constant"},
        "checkpoint": {"every": 2},
    }
    file = directory / "rl.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def better_half_runs(ranks, world_size, path, directory, cases):
    """Runs of one case after the other, {run: overrides}; (metrics, steps learned from) of each run."""
    given = [
        [f"run={directory / name}", f"better_half.learned={directory / name}.learned", *more] for name, more in cases
    ]
    ranks.run(world_size, run_better_half, path, given)
    return {
        name: (timeless(lines(directory / name)), [int(line) for line in (directory / f"{name}.learned").open()])
        for name, _ in cases
    }


def test_two_rounds_a_step_in_any_layout_and_resumed(ranks, path, tmp_path):
    cases = [("one", []), ("half", ["training.steps=2"]), ("half", [])]
    found = better_half_runs(ranks, 1, path, tmp_path, cases)
    found |= better_half_runs(ranks, 2, path, tmp_path, [("dp2", [])])
    one, learned = found["one"]
    assert len(one) == STEPS and learned == list(range(STEPS))
    assert found["half"] == found["one"]
    assert all(record["objective/least_lead"] >= 0 for record in one) and one[0]["objective/lead"] > 0.1
    got, learned = found["dp2"]
    assert learned == list(range(STEPS))
    for expected, record in zip(one, got, strict=True):
        for key in expected.keys() - {"step", "sampler/gap"}:
            scale = max(abs(record[key]) for record in one)
            assert abs(record[key] - expected[key]) <= 3e-5 * scale, (record["step"], key)
    saved = tmp_path / "one" / "checkpoints" / f"step_{STEPS:08d}"
    assert json.loads((saved / "state.json").read_text())["progress"]["drawn"] == 2 * STEPS
    same_weights(saved)


def test_nothing_follows_a_refused_batch(ranks, path, tmp_path):
    strict = ["guard.max_kl=1e-9", "guard.patience=99"]
    records, learned = better_half_runs(ranks, 1, path, tmp_path, [("strict", strict)])["strict"]
    assert learned == [record["step"] - 1 for record in records if "reinforce/loss/policy" in record]
    assert 0 < len(learned) < STEPS == len(records)


def same_weights(saved):
    """The averaged model, which follows whole batches here, is the actor after the last one."""
    actor, average = (torch_dist.Reader(saved / role, 300) for role in ("actor", "average"))
    assert average.specs.keys() == actor.specs.keys() and len(actor.specs) > 5
    for name in average.specs:
        assert torch.equal(average.read(name), actor.read(name)), name


def test_an_algorithm_that_compares_samples_needs_several_a_prompt(path):
    program = cli.find("rl")
    with registered(), pytest.raises(UserError) as refused:
        program.check(program.load(str(path), ["sampler.samples_per_prompt=1"]), 1)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("sampler.samples_per_prompt: better_half compares the responses to a prompt")
    assert line.endswith("at least 2, not 1")


# ------------------------------------------------------------------------------------------- offline


@dataclass(frozen=True, kw_only=True)
class Referenced(Sequences):
    ref_logprobs: torch.Tensor  # (B, R)


def with_reference(rows, models, group):
    return Referenced(**vars(rows), ref_logprobs=models["reference"](rows)["logprobs"])


def squared_distance(outputs, rows):
    """sum mask * (log p - log reference)^2."""
    count = rows.mask.sum()
    total = ((outputs["logprobs"] - rows.ref_logprobs).square() * rows.mask).sum()
    return total, count, {"loss": (total, count)}


def run_distilled(path, cases):
    """`megarlhf sft` with another algorithm and a second model, [(overrides, seed of the reference)]."""
    from functools import partial

    from megatron.core import parallel_state

    from megarlhf.cluster import parallel
    from megarlhf.data.loader import Loader
    from megarlhf.models.build import build
    from megarlhf.train import data_set, setup
    from megarlhf.train.program import training

    def prepared(settings, plan, topology, seed):
        def built(role, trains, **more):
            options = setup.model_options(settings, trains=trains, total_steps=plan.total_steps)
            return build(role, plan.start.architecture, topology, **(options | more))

        models = {"actor": built("actor", True), "reference": built("reference", False, seed=seed)}
        algorithm = OfflineAlgorithm(squared_distance, prepare=with_reference)
        return data_set.prepared(settings, plan, topology, algorithm, models, Loader)

    sft = cli.find("sft")
    for overrides, seed in cases:
        settings = sft.load(path, overrides)
        plan = sft.check(settings, dist.get_world_size())
        training(partial(prepared, seed=seed))(settings, plan, parallel.start(settings.parallel))
        parallel_state.destroy_model_parallel()


def losses(run, name):
    return [record[name] for record in lines(run) if name in record]


def lines(run):
    """metrics.jsonl, with names that are this file's own."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_offline_loss_reads_a_reference(ranks, tmp_path):
    """A model stays at a reference that it equals, row by row, and comes nearer to another one; in any layout."""
    path = prepare(tmp_path, seed=3)
    runs = {
        1: {"same": ([], 3), "one": ([], 4), "micro": (["training.micro_batch_tokens=1"], 4)},
        2: {"tp2": (["parallel.tensor=2"], 4), "dp2": ([], 4)},
    }
    for world_size, cases in runs.items():
        given = [([f"run={tmp_path / name}", *more], seed) for name, (more, seed) in cases.items()]
        ranks.run(world_size, run_distilled, path, given)
    for name in ("loss", "validation/loss"):
        assert max(losses(tmp_path / "same", name)) < 1e-10
        one = losses(tmp_path / "one", name)
        assert one[-1] < 0.7 * one[0], one
        for other in ("micro", "tp2", "dp2"):
            assert losses(tmp_path / other, name) == pytest.approx(one, rel=1e-4), (other, name)
