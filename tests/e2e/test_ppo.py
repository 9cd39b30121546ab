"""`megarlhf reward` and `megarlhf ppo`: the same numbers under every layout, exact resume, gate and guard that act."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from statistics import fmean, pvariance

import pytest
import torch
import yaml

from megarlhf import cli
from megarlhf.config import UserError
from megarlhf.convert import torch_dist
from tests.e2e.runs import CLI, finish, recorded, start, write_prompts
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import reviews

RECORDED = {  # beside what both have
    "separate": {"ppo/val/grad_norm", "ppo/val/lr", "ppo/val/skipped"},
    "shared": {"ppo/loss/total", "ppo/loss/ptx", "objective/kl_exact"},
}
# Clocks; differences that are rounding alone; shares of tokens, each of which is beyond the bound or not.
NOT_COMPARED = (
    "step", "time", "tokens_per_second", "cost/", "gate/", "sampler/gap", "ppo/policy/clipfrac", "ppo/val/clipfrac",
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(straight, tmp_path_factory) -> Path:
    """A PPO configuration over the session's SFT run, with a reward model trained from it."""
    sft, _ = straight
    directory = tmp_path_factory.mktemp("ppo")
    write_prompts(directory, prompts=64, pairs=64)
    reward = {
        "run": str(directory / "reward"),
        "model": {"checkpoint": str(sft), "dtype": "fp32"},
        "data": {"train": str(directory / "pairs.jsonl"), "validation": str(directory / "pairs.jsonl"),
                 "max_length": 64},
        "normalization": {"prompts": {"path": str(directory / "prompts.jsonl"), "length": 16}, "samples": 64,
                          "response_length": 16},
        "optimizer": {"lr": 3e-3},
        "training": {"global_batch_size": 32, "micro_batch_tokens": 1024, "steps": 6, "evaluate_every": 6},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    (directory / "reward.yaml").write_text(yaml.safe_dump(reward))
    done = finish(sys.executable, *CLI, "reward", "--config", str(directory / "reward.yaml"))
    assert done.returncode == 0, done.stderr
    ppo = {
        "run": str(directory / "unused"),
        "model": {"checkpoint": str(sft), "dtype": "fp32"},
        "prompts": {"path": str(directory / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 12, "micro_batch_size": 4, "stop_at_eos": True, "temperature": 0.8},
        "scoring": {"sources": [{"checkpoint": str(directory / "reward")},
                                {"function": f"{ROOT}/tests/e2e/judge.py:score", "weight": 0.5}]},
        "ppo": {"kl": {"controller": "adaptive", "horizon": 200}, "whiten_rewards": True},
        "training": {"steps": 5, "batch_size": 16, "minibatches": 2, "epochs": 2, "micro_batch_tokens": 112},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "checkpoint": {"every": 2},
        "log": {"samples": 2, "samples_every": 2},
    }  # fmt: skip
    path = directory / "ppo.yaml"
    path.write_text(yaml.safe_dump(ppo))
    return path


def records(run: Path) -> list[dict]:
    return recorded(run)


def run_ppo(path, cases):
    """Several runs of the program on these ranks, one a case of overrides."""
    import torch.distributed as dist

    from megarlhf.cluster import parallel
    from megarlhf.train.rl import PPO

    for overrides in cases:
        settings = PPO.load(path, overrides)
        PPO.run(settings, PPO.check(settings, dist.get_world_size()), parallel.start(settings.parallel))
        parallel.stop()


LAYOUTS = {
    1: {"one": [], "micro": ["training.micro_batch_tokens=1", "sampler.micro_batch_size=2"]},
    2: {
        "tp2": ["parallel.tensor=2", "parallel.sequence=true"],
        "pp2": ["parallel.pipeline=2", "training.micro_batch_tokens=56"],
        "dp2": [],
    },
    4: {"tp2pp2": ["parallel.tensor=2", "parallel.pipeline=2"]},
}


def extras(settings):
    """Everything that is optional, at once."""
    text = {"train": str(settings.parent / "text.jsonl"), "max_length": 40}
    rows = [json.dumps({"text": review.prompt + review.response}) for review in reviews.reviews(40, seed=7)]
    Path(text["train"]).write_text("\n".join(rows) + "\n")
    return [
        f"ptx={json.dumps({'data': text, 'coef': 0.5, 'batch_size': 8})}",
        "average=0.5",
        "reference.on_host=true",
        "ppo.kl.estimator=exact",
    ]


@pytest.mark.long
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_layout_does_not_matter(ranks, settings, tmp_path, critic):
    more = [f"critic.kind={critic}", *(extras(settings) if critic == "shared" else [])]
    curves = {}
    for world_size, layouts in LAYOUTS.items():
        cases = [[*overrides, *more, f"run={tmp_path / name}"] for name, overrides in layouts.items()]
        ranks.run(world_size, run_ppo, settings, cases)
        curves |= {name: records(tmp_path / name) for name in layouts}
    one = curves["one"]
    scales = {key: max(abs(record[key]) for record in one) for key in one[-1] if not key.startswith(NOT_COMPARED)}
    assert RECORDED[critic] <= scales.keys() and len(scales) > 25
    for name, curve in curves.items():
        assert len(curve) == 5
        for expected, got in zip(one, curve, strict=True):
            assert got.keys() == expected.keys(), name
            for key, scale in scales.items():
                assert abs(got[key] - expected[key]) <= 3e-5 * scale, (name, got["step"], key, got[key], expected[key])
    texts = {name: (tmp_path / name / "samples.jsonl").read_text() for name in ("one", "tp2", "pp2", "tp2pp2")}
    first = {name: [json.loads(line)["response"] for line in text.splitlines()] for name, text in texts.items()}
    assert all(responses == first["one"] for responses in first.values())
    for name, curve in curves.items():  # scores.jsonl has the scores of the global batch, on which the means rest
        found = [json.loads(line) for line in (tmp_path / name / "scores.jsonl").read_text().splitlines()]
        means = {record["step"]: (record["objective/scores"], record["objective/scores_var"]) for record in curve}
        found = [row for row in found if row["name"] == "samples/score"]
        assert [row["step"] for row in found] == [1, 3, 5]
        for row in found:
            assert len(row["values"]) == 16, name
            assert (fmean(row["values"]), pvariance(row["values"])) == pytest.approx(means[row["step"]], abs=1e-4)


def test_kill_9_and_resume_is_bit_identical(settings, tmp_path):
    command = (sys.executable, *CLI, "ppo", "--config", str(settings), *extras(settings))
    straight = finish(*command, f"run={tmp_path / 'straight'}")
    assert straight.returncode == 0, straight.stderr
    assert "audit" in straight.stderr and "* differs" in straight.stderr
    process = start(*command, f"run={tmp_path / 'run'}")
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "step_00000002").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = finish(*command, f"run={tmp_path / 'run'}")
    assert resumed.returncode == 0, resumed.stderr

    def numbers(run):
        timed = ("time", "tokens_per_second", "cost/", "gate/")
        return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in records(run)]

    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")
    averages = [tmp_path / run / "checkpoints" / "step_00000005" / "average" for run in ("run", "straight")]
    weights = [torch_dist.Reader(directory, 300) for directory in averages]
    for name in weights[0].specs:
        assert torch.equal(weights[0].read(name), weights[1].read(name)), name
    assert len({record["objective/kl_coef"] for record in records(tmp_path / "run")}) > 1


def test_the_score_rises(settings, tmp_path, ranks):
    """Against the true judge alone, in a few steps."""
    overrides = [
        f"run={tmp_path / 'run'}", "training.steps=12", "training.batch_size=64", "training.micro_batch_tokens=896",
        "sampler.micro_batch_size=32", "optimizer.lr=3e-3", "ppo.whiten_rewards=false",
        f"scoring.sources=[{{function: '{ROOT}/tests/e2e/judge.py:score'}}]",
    ]  # fmt: skip
    ranks.run(1, run_ppo, settings, [overrides])
    curve = [record["objective/scores"] for record in records(tmp_path / "run")]
    assert sum(curve[-3:]) / 3 > curve[0] + 0.2, curve
    gates = [key for key in records(tmp_path / "run")[0] if key.startswith("gate/")]
    assert sorted(gates) == ["gate/micro_batch", "gate/ratio", "gate/reference", "gate/sampler"]


def run_refused(path, overrides, break_it):
    """The error of one run in which something is wrong."""
    import megarlhf.models.attention as attention
    from megarlhf.cluster import parallel

    plain = attention.over_spans

    def causal(query, key, value, spans, **more):  # what a kernel would do that knows nothing of rows
        total = spans.num_real
        return plain(query, key, value, attention.Spans((total,), torch.tensor([0, total])), **more)

    if break_it == "bounds":
        attention.over_spans = causal
    try:
        run_ppo(path, [overrides])
    except UserError as error:
        return str(error)
    finally:
        attention.over_spans = plain
        parallel.stop()
    return None


def test_gate_and_guard(ranks, settings, straight, tmp_path):
    sft, _ = straight
    (message,) = ranks.run(1, run_refused, settings, [f"run={tmp_path / 'a'}"], "bounds")
    assert message.startswith("step-0 gate: ") and "tolerance" in message
    other = f"reference.checkpoint={sft / 'checkpoints' / 'step_00000006'}"
    (message,) = ranks.run(1, run_refused, settings, [f"run={tmp_path / 'b'}", other], None)
    assert message is None  # another reference is asked for, so the policy need not start at it
    strict = ["guard.max_kl=1e-9", "guard.patience=2", "training.steps=4", other]
    (message,) = ranks.run(1, run_refused, settings, [f"run={tmp_path / 'c'}", *strict], None)
    assert "2 batches in a row could not be learned from" in message and "objective/kl" in message
    kept = list((tmp_path / "c" / "refused").iterdir())
    assert len(kept) == 2
    replay = torch.load(kept[0], weights_only=True)
    assert replay["rollout"]["tokens"].shape == (16, 28) and math.isfinite(replay["experience"]["rewards"].sum())
    nan = f"scoring.sources=[{{function: '{ROOT}/tests/e2e/judge.py:nan'}}]"
    (message,) = ranks.run(1, run_refused, settings, [f"run={tmp_path / 'd'}", nan], None)
    assert "judge.py:nan" in message
    huge = f"scoring.sources=[{{function: '{ROOT}/tests/e2e/judge.py:huge'}}]"  # the square is beyond float32
    for message in ranks.run(2, run_refused, settings, [f"run={tmp_path / 'e'}", huge], None):
        assert message.startswith("critic: 3 updates in a row, up to update 3, were skipped, because their gradients")


BAD = {
    "batch": (["training.batch_size=17"], "training.batch_size: 17 is not a multiple of minibatches 2 x 1 data"),
    "dropout": (["model.dropout=0.1"], "model.dropout: must be 0"),
    "position": (["ppo.score_position=last"], "ppo.score_position: 'last' is the last token of the fixed length"),
    "preset": (["preset=openai_2020"], "there is no preset 'openai_2020'; did you mean 'openai_2019'?"),
    "reward": (["scoring.sources=[{checkpoint: /no/such}]"], "/no/such: no such directory"),
    "patience": (
        ["scoring.sources=[{url: 'http://localhost:1'}]", "job.hang_minutes=20"],
        "job.hang_minutes: 20 would end the run while a reward server",
    ),
    "function": (["scoring.sources=[{function: 'no_such_module:f'}]"], "no_such_module"),
    "both": (["scoring.sources=[{}]"], "give exactly one of checkpoint, function, url and verify"),
    "shared": (["critic.kind=shared", "critic.checkpoint=x"], "a shared critic has neither a checkpoint"),
    "virtual": (["parallel.virtual_pipeline=2"], "virtual_pipeline: the interleaved schedule needs pipeline > 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(settings, capsys, name):
    overrides, expected = BAD[name]
    assert cli.main(["ppo", "--config", str(settings), *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


# A change of each row that the audit compares.
CHANGES = {
    "query length, cut at; padding is never a sampled id": "prompts.truncate=start",
    "response length": "sampler.response_length=23",
    "sampling goes on past EOS": "sampler.stop_at_eos=true",
    "temperature, top_k, top_p": "sampler.top_p=0.9",
    "learning rate schedule": "optimizer.schedule=constant",
    "reward model normalised before and after its training": "scoring.sources=[{url: 'http://localhost:1'}]",
    "value head's start": "critic={kind: separate, checkpoint: runs/reward}",
    "critic": "critic.kind=separate",
    "value head": "critic.head=mlp",
    "queries start and end with": "prompts.end_text=x",
    "dropout": "model.dropout=0.1",
    "truncation token, from position": "scoring.truncate_after=3",
    "score without that token": "scoring.penalty=-2",
    "gamma, lambda": "ppo.lam=1",
    "batch, minibatches, epochs": "training.epochs=1",
    "KL penalty per token, estimator": "ppo.kl.estimator=exact",
    "score goes to": "ppo.score_position=last_valid",
    "rewards whitened, mean kept": "ppo.whiten_rewards=false",
    "advantages whitened": "ppo.whiten_advantages=false",
    "ratio clip, value clip, value coefficient": "ppo.vf_coef=0.2",
    "KL coefficient: controller, start": "ppo.kl.controller=fixed",
    "KL coefficient: target, horizon": "ppo.kl.horizon=1",
    "Adam, epsilon": "optimizer.name=adam",
}


def test_openai_preset_and_audit(settings):
    """The preset differs from the original in nothing that the audit compares, and every row of it can differ."""
    from megarlhf.train import audit
    from megarlhf.train.rl import PPO

    plain = ["preset=openai_2019", "sampler={}", "ppo={}", "training={}", "optimizer={}", "critic={}",
             f"prompts={{path: {settings.parent / 'prompts.jsonl'}}}"]  # fmt: skip

    def differing(*overrides):
        loaded = PPO.load(settings, [*plain, *overrides])
        return [what for _, what, value, original in audit.details(loaded) if value != original]

    reward = str(settings.parent / "reward")
    assert differing(f"scoring.sources=[{{checkpoint: {reward}}}]") == differing() == []
    loaded = PPO.load(settings, plain)
    assert CHANGES.keys() == {what for _, what, _, _ in audit.details(loaded)}
    for what, change in CHANGES.items():
        assert what in differing(change), what
    shown = "\n".join(audit.table(audit.details(loaded), loaded))
    assert all(f"{number:<4} {what}\n" in shown + "\n" for number, what in audit.BUILT_IN)
