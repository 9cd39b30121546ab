"""`megarlhf plan` and the check of memory in `megarlhf preflight`, on configurations alone."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megarlhf.cli import find, main
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.models.spec import Architecture
from megarlhf.plan import calibrate, hardware, memory, phases
from megarlhf.plan.job import micro_batches
from megarlhf.train import plan as command
from megarlhf.train import planned, preflight
from tests.ranks import ROOT

LLAMA_7B = Architecture(
    "llama", num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
    vocab_size=32000, max_position_embeddings=4096,
)  # fmt: skip
TINY = {"family": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
        "num_query_groups": 4, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip
PROGRAMS = {
    "ppo_7b": "ppo", "ppo_7b_top": "ppo", "ppo_lora_7b": "ppo", "grpo_7b": "rl", "dpo_7b": "dpo", "sft_7b": "sft",
    "reward_7b": "reward", "prm_7b": "prm", "ilql_7b": "ilql",
}  # fmt: skip


def job(name: str, *overrides: str, ranks: int = 8, device: str = "cuda"):
    settings = find(PROGRAMS[name]).load(f"{ROOT}/examples/configs/{name}.yaml", list(overrides))
    found = planned.job_of(settings, ranks, device=device, program=PROGRAMS[name], find=lambda path, role: LLAMA_7B)
    return memory.with_slots(found, 80 * 10**9)


@pytest.fixture
def config(tmp_path):
    """A configuration of sft without files: the plan reads none."""
    import yaml

    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({
        "run": str(tmp_path / "run"), "model": {"architecture": TINY, "dtype": "fp32"}, "tokenizer": "none",
        "data": {"train": "none.jsonl", "max_length": 32}, "training": {"global_batch_size": 8},
    }))  # fmt: skip
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_a_plan(name):
    plan = job(name)
    held, seconds = memory.fullest(plan), phases.phase_seconds(plan, hardware.load("h100"))
    weights = 2 * LLAMA_7B.num_parameters / plan.parallel.tensor
    assert 0.5 * weights < held.phases[held.fullest]["weights"] < 5 * weights
    assert set(seconds) == ({"sample", "score", "evaluate", "learn"} if plan.online else {"step"}) - (
        set() if any(model.role.startswith("reward ") for model in plan.models) or not plan.online else {"score"}
    )
    assert all(found.total > 0 for found in seconds.values())


def test_what_takes_memory_takes_it():
    """Each switch that saves memory saves it, of its kind and in its phase."""
    everything = (
        "reference.on_host=false", "scoring.on_host=false", "model.recompute=none", "training.micro_batch_tokens=8192",
    )  # fmt: skip
    base = memory.rank(job("ppo_7b", *everything), 0).phases
    for override, kind, phase in (
        ("optimizer.state_on_host=true", "optimizer", "sample"), ("reference.on_host=true", "weights", "learn"),
        ("scoring.on_host=true", "weights", "learn"), ("critic.on_host=true", "weights", "sample"),
        ("model.recompute=full", "activations", "learn"), ("training.micro_batch_tokens=4096", "activations", "learn"),
    ):  # fmt: skip
        less = memory.rank(job("ppo_7b", *everything, override), 0).phases
        assert less[phase].get(kind, 0) < 0.95 * base[phase][kind], override
    top = "model.trained_layers=8", "reference.kind=hydra", "reference.on_host=false"
    hydra, separate = (memory.rank(job("ppo_7b", *everything, *top[:count]), 0).phases for count in (3, 1))
    kept = 1 - 24 * 202_383_360 / LLAMA_7B.num_parameters - 32000 * 4096 / LLAMA_7B.num_parameters  # of one model
    saved = separate["sample"]["weights"] - hydra["sample"]["weights"]
    assert saved == pytest.approx((1 - kept) * 2 * LLAMA_7B.num_parameters / job("ppo_7b").parallel.tensor, rel=0.01)
    doubled = memory.rank(job("ppo_7b", *everything, ranks=16), 0).phases
    assert doubled["learn"]["optimizer"] == pytest.approx(base["learn"]["optimizer"] / 2, rel=1e-3)


def test_a_plan_on_this_machine(config, capsys):
    assert main(["plan", "--config", str(config), "--gpus-per-node", "1"]) == 0
    text = capsys.readouterr().out
    assert "'megarlhf sft' on 1 ranks of this CPU" in text and "fits: " in text
    assert float(re.search(r"a step: ([\d.e-]+) s", text)[1]) > 0


def test_what_does_not_fit_is_refused_with_its_arithmetic(config, capsys):
    huge = [f"model.architecture.{key}={value}" for key, value in (
        ("num_layers", 80), ("hidden_size", 8192), ("ffn_hidden_size", 28672), ("num_attention_heads", 64),
        ("num_query_groups", 64),
    )]  # fmt: skip
    assert main(["plan", "--config", str(config), "--gpu", "h100", *huge]) == 2
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("does not fit"))
    found = re.search(r"step needs ([\d,.]+) GB a rank \((.*)\), and h100 has 80.0", line)
    terms = [float(term.split()[0].replace(",", "")) for term in found[2].split(" + ")]
    assert sum(terms) == pytest.approx(float(found[1].replace(",", "")), abs=0.3)


def test_a_remedy_makes_it_fit():
    large = job("ppo_7b", "training.micro_batch_tokens=65536")
    assert memory.refusal(memory.fullest(large), 80 * 10**9, "x") is not None
    remedies = dict(command.remedies(large, 8))
    assert memory.refusal(memory.fullest(remedies["model.recompute=full"]), 80 * 10**9, "x") is None


def test_preflight_refuses_what_no_gpu_holds():
    sizes = "training.micro_batch_tokens=524288", "data.max_length=4096", "training.global_batch_size=2048"
    with pytest.raises(UserError, match=r"^parallel: step needs [\d,.]+ GB a rank \(.* activations .*\), and the "):
        preflight.check_memory(job("sft_7b", *sizes), None)
    assert "GB in step, predicted" in preflight.check_memory(job("sft_7b"), hardware.load("h100"))


MIXTRAL = Architecture(
    "mixtral", num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    vocab_size=32000, max_position_embeddings=32768, num_experts=8, experts_per_token=2,
)  # fmt: skip


def mixture(name: str, architecture: Architecture = MIXTRAL, *, ranks: int = 8, **sizes):
    """A job of examples/configs with experts."""
    found = job(name, ranks=ranks)
    models = tuple(dataclasses.replace(model, architecture=architecture) for model in found.models)
    return dataclasses.replace(found, models=models, parallel=ParallelConfig(**sizes))


def test_ranks_share_the_experts_out():
    """Each of 8 ranks has one of 8 experts and all else; ranks with the same weights share the optimizer's state."""
    one, eight = mixture("sft_7b"), mixture("sft_7b", expert=8)
    model, expert = one.models[0], 3 * 4096 * 14336 * 32
    assert memory.elements(one, model, 0) == MIXTRAL.num_parameters
    assert memory.elements(eight, model, 0) == MIXTRAL.num_parameters - 7 * expert
    rest = MIXTRAL.num_parameters - 8 * expert
    assert memory.shares(one, model, 0) == (rest + 8 * expert) // 8
    assert memory.shares(eight, model, 0) == rest // 8 + expert
    assert memory.buffers(eight, model, 0) == {"data": rest, "expert_data": expert}
    whole = memory.elements(mixture("sft_7b", tensor=8, sequence=True), model, 0)
    assert whole > 8 * expert  # tensor parallelism leaves them whole


def test_a_token_costs_the_experts_that_it_goes_to():
    """Twice the experts cost a router's logits more; twice the experts a token twice the experts' products."""

    def flops(**sizes):
        (run,) = phases.step(mixture("sft_7b", dataclasses.replace(MIXTRAL, **sizes)), 0)
        return run.work.flops

    tokens = 3 * mixture("sft_7b").rows_here * mixture("sft_7b").shape.length  # forward, and two gradients
    layers = MIXTRAL.num_layers - 1  # the last one computes the tokens that are counted: all but one of a row
    last = 3 * mixture("sft_7b").rows_here * mixture("sft_7b").shape.counted
    assert flops(num_experts=16) - flops() == 2 * 8 * 4096 * (layers * tokens + last)
    assert flops(experts_per_token=4) - flops() == 2 * 2 * 3 * 4096 * 14336 * (layers * tokens + last)


@pytest.mark.parametrize("more", [["--gpu", "h100"], []])
def test_a_plan_of_a_mixture_of_experts(config, capsys, more):
    keys = ["family=mixtral", "num_experts=4", "experts_per_token=2"]
    arguments = [*more, "--gpus-per-node", "2", *(f"model.architecture.{key}" for key in keys), "parallel.expert=2"]
    assert main(["plan", "--config", str(config), *arguments]) == 0
    text = capsys.readouterr().out
    assert "x data 2, experts on 2 ranks" in text and "Experts are taken to get equal numbers of tokens" in text
    assert main(["plan", "--config", str(config), *arguments, "parallel.expert=3"]) == 2
    assert "parallel.expert: the 2 ranks of a pipeline stage cannot be divided by 3" in capsys.readouterr().err


def test_preflight_counts_the_experts_of_a_rank():
    with pytest.raises(UserError, match="parallel: step needs"):
        preflight.check_memory(mixture("sft_7b"), hardware.load("h100"))
    full = dataclasses.replace(mixture("sft_7b", ranks=64, expert=8), recompute="full")
    assert "predicted" in preflight.check_memory(full, hardware.load("h100"))


def test_mistakes(config, capsys):
    for arguments, message in (
        (["--gpu", "h10"], "there is no GPU 'h10'"), (["--nodes", "0"], "--nodes: must be at least 1"),
        (["parallel.tensor=3", "--gpu", "h100"], "cannot be divided"),
        (["parallel.tensor=8", "--gpu", "h100"], "parallel.tensor: 8 does not divide"),
        (["parallel.expert=2", "--gpu", "h100"], "parallel.expert: 2 ranks cannot share the experts of a dense model"),
    ):  # fmt: skip
        assert main(["plan", "--config", str(config), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(("rows", "length", "budget"), [(8, 16, 48), (7, 10, 100), (5, 10, 3), (1, 4, 4), (64, 3, 10)])
def test_micro_batches_are_those_of_the_stream(rows, length, budget):
    import torch

    from megarlhf.batch import Sequences
    from megarlhf.stream import cut

    tokens = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.ones(rows, length - 1, dtype=torch.bool)
    sizes = sorted(len(index) for index in cut(Sequences(tokens=tokens, mask=mask), budget))
    assert sizes == sorted(size for size, times in micro_batches(rows, length, budget).items() for _ in range(times))


def test_the_cpu_is_measured_at_the_shapes_of_the_job(config):
    settings = find("sft").load(str(config), [])
    small = planned.job_of(settings, 1, device="cpu", program="sft")
    machine = calibrate.cpu(small)
    (run,) = phases.step(small, 0)
    assert set(run.work.operations) <= set(machine.measured)
    assert min(machine.rates.values()) > 1e6 and machine.flops > 1e8
    double = dataclasses.replace(small, shape=dataclasses.replace(small.shape, rows=16))
    one, two = (phases.phase_seconds(each, machine)["step"].total for each in (small, double))
    assert 1 < two / one <= 2.01
