"""The search over layouts: it finds what an exhaustive one finds, and what it prints is a configuration that fits."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from megarlhf import config
from megarlhf.cli import find, main
from megarlhf.models.spec import Architecture, check_layout
from megarlhf.plan import choice, hardware, memory, phases, sampling, search
from megarlhf.plan.job import Job
from megarlhf.train import planned
from tests.ranks import ROOT

LLAMAS = {
    "7b": Architecture("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "70b": Architecture("llama", 80, 8192, 28672, 64, 8, 32000, 4096),
}
H100 = hardware.load("h100")


def job_of(program: str, size: str, ranks: int, *overrides: str) -> Job:
    """Of examples/configs/PROGRAM_SIZE.yaml."""
    settings = find(program).load(str(ROOT / "examples" / "configs" / f"{program}_{size}.yaml"), list(overrides))
    return planned.job_of(settings, ranks, device="cuda", find=lambda path, role: LLAMAS[size])


def exhaustive(job: Job) -> tuple[float, int]:
    """(seconds of the fastest layout that fits, number of those that fit) without any short cut but one: virtual stages
    are not varied."""
    best, count = float("inf"), 0
    for parallel in search.layouts(job, H100.per_node):
        if parallel.virtual_pipeline:
            continue
        here = dataclasses.replace(job, parallel=parallel)
        for budget, recompute, away in itertools.product(search.budgets(here), search.RECOMPUTE, search.offloads(here)):
            one = memory.with_slots(search._variant(here, budget, recompute, away), H100.memory)
            if memory.fullest(one).peak <= H100.memory:
                count += 1
                best = min(best, sum(phase.total for phase in phases.phase_seconds(one, H100).values()))
    return best, count


@pytest.mark.parametrize(("program", "ranks"), [("sft", 8), pytest.param("ppo", 4, marks=pytest.mark.long)])
def test_the_winner_is_that_of_an_exhaustive_search(program, ranks, monkeypatch):
    monkeypatch.setattr(search, "MOST_CHUNKS", 1)
    monkeypatch.setattr(search, "BUDGETS", (4096,))
    job = job_of(program, "7b", ranks)
    found = search.search(job, H100, compare=False)
    seconds, count = exhaustive(job)
    assert count > 1
    assert found.fitting[0].seconds == pytest.approx(seconds, rel=1e-3)  # waiting copies may be of another stage


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_shared_critic_in_its_place_is_that_of_the_configuration(head):
    given = (f"critic.head={head}", "critic.checkpoint=null")
    separate = job_of("ppo", "7b", 8, "critic.kind=separate", *given)
    assert search.with_shared_critic(separate) == (shared := job_of("ppo", "7b", 8, "critic.kind=shared", *given))
    assert search.with_shared_critic(shared) is None


def test_what_is_found_is_legal_and_fits():
    job = job_of("ppo", "70b", 64)
    found = search.search(job, H100)
    assert found.tried > 1000 and found.fitting
    assert found.fitting == sorted(found.fitting, key=lambda layout: layout.seconds)
    for layout in found.fitting[:: len(found.fitting) // 5]:
        check_layout(LLAMAS["70b"], layout.job.parallel)
        assert H100.per_node % layout.job.parallel.tensor == 0
        assert memory.fullest(layout.job).peak == layout.memory.peak <= H100.memory
        slow = phases.phase_seconds(layout.job, H100)
        for phase, seconds in layout.phases.items():
            assert seconds.total == pytest.approx(slow[phase].total, rel=2e-3), (choice.name(layout.job), phase)


def test_the_keys_that_are_printed_make_the_layout(monkeypatch):
    monkeypatch.setattr(search, "MOST_CHUNKS", 2)
    monkeypatch.setattr(search, "BUDGETS", (4096,))
    found = search.search(job_of("ppo", "7b", 8), H100)
    for layout in found.fitting[:2]:
        overrides = [
            f"{section}.{key}={json.dumps(value)}"
            for section, keys in choice.settings(layout).items()
            for key, value in keys.items()
        ]
        again = memory.with_slots(job_of("ppo", "7b", 8, *overrides), H100.memory)
        assert again == layout.job
    text = choice.text(found, job_of("ppo", "7b", 8), H100)
    assert "tensor: " in text and "#SBATCH --nodes=1\n" in text and "critic.kind: shared" in text


@pytest.mark.long
def test_where_nothing_fits_the_remedies_do():
    job = job_of("ppo", "70b", 16, "parallel={}")
    found = search.search(job, H100)
    assert not found.fitting and found.smallest.memory.peak > H100.memory
    others = {"h200": hardware.load("h200")}
    text = choice.text(found, job, H100, others)
    assert "nothing fits" in text and "GB of 80" in text
    more, larger, *_ = choice.remedies(job, H100, others)
    assert more.startswith("32 x h100: ") and larger.startswith("16 x h200: ")
    assert search.search(dataclasses.replace(job, world_size=32), H100).fitting


def test_fewer_trained_layers_are_no_remedy_for_adapters(monkeypatch):
    """A configuration with both is refused. The same machine is short of a little memory for all layers themselves."""
    monkeypatch.setattr(choice, "MOST_TIMES", 1)
    for given, proposed in (("model.lora={}", []), ("model.trained_layers=32", ["model.trained_layers: 4"])):
        job = job_of("sft", "7b", 1, "parallel={}", given)
        least = search.search(job, dataclasses.replace(H100, memory=10**9), compare=False).smallest
        machine = dataclasses.replace(H100, memory=least.memory.peak - 10**8)
        found = [line.partition(" (")[0] for line in choice.remedies(job, machine, {})]
        assert found == proposed


@pytest.mark.long
def test_what_does_not_fit_a_gpu_goes_to_the_host():
    """2 GPUs do not hold the four models of PPO at 7B and two optimizers."""
    found = search.search(job_of("ppo", "7b", 2), H100, compare=False)
    assert found.fitting and all(model.weights_on_host for model in found.fitting[0].job.models if not model.trains)
    assert all(0 < layout.host <= H100.host_memory for layout in found.fitting)
    assert found.fitting[0].phases["learn"].copies > 0
    # A node has memory for the frozen models of 8 ranks, but not for everything; one has none at all.
    job = job_of("ppo", "7b", 8, "parallel={}")
    for host, fits in ((150 * 10**9, True), (10**9, False)):
        node = dataclasses.replace(H100, host_memory=host, memory=60 * 10**9)
        found = search.search(job, node, keep=1000, compare=False)
        assert any(layout.host for layout in found.fitting) == fits
        assert all(layout.host <= host for layout in found.fitting)


def test_no_layout_is_legal():
    """3 data-parallel ranks do not divide a batch of 512."""
    job = job_of("ppo", "7b", 6)
    found = search.search(job, dataclasses.replace(H100, per_node=3))
    assert found.smallest is None and not found.fitting
    assert "no layout is legal" in choice.text(found, job, H100)


@pytest.mark.long
def test_the_search_beats_the_example_or_the_example_is_what_it_finds():
    job = job_of("ppo", "70b", 64)
    best = search.search(job, H100).fitting[0]
    own = search.measure(job, H100)
    assert own.fits(H100)
    seconds = sum(phase.total for phase in search.Clock(H100).phases(own.job).values())
    assert best.seconds <= seconds < 1.1 * best.seconds


def test_the_command(capsys):
    path = str(ROOT / "examples" / "configs" / "sft_7b.yaml")
    whole = config.to_dict(LLAMAS["7b"])
    given = ["model.checkpoint=null", "tokenizer=none", f"model.architecture={json.dumps(whole)}"]
    assert main(["plan", "--config", path, "--gpu", "h100", "--gpus-per-node", "4", "--search", *given]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 x h100 (1 node of 4): ") and "#SBATCH --ntasks-per-node=4" in text
    # the file's own layout need not suit the ranks; a model that nothing holds ends with status 2
    large = whole | {"num_layers": 512}
    given[-1] = f"model.architecture={json.dumps(large)}"
    assert main(["plan", "--config", path, "--gpu", "h100", "--gpus-per-node", "1", "--search", *given]) == 2
    assert "nothing fits" in capsys.readouterr().out
    assert main(["plan", "--config", path, "--search", *given]) == 2
    assert "name their kind with --gpu" in capsys.readouterr().err


def test_stages_without_rows_wait():
    """4 groups of 8 slots keep half of 8 stages busy, so that sampling takes as long as with 8 groups."""
    job = job_of("ppo", "70b", 512, "parallel={}")
    seconds = {}
    for ranks in (512, 1024):  # 8 and 16 data-parallel ranks, 64 and 32 rows each
        parallel = dataclasses.replace(job.parallel, tensor=8, pipeline=8, sequence=True)
        here = dataclasses.replace(job, world_size=ranks, parallel=parallel)
        assert sampling.slots(here) == 8 and sampling.waits(here) == {512: 0, 1024: 1}[ranks]
        seconds[ranks] = phases.phase_seconds(here, H100)["sample"].total
    assert seconds[1024] == pytest.approx(seconds[512], rel=0.05)


def test_layouts_of_a_mixture_of_experts():
    """All that the program accepts, and no other: what check_layout refuses, and sizes that do not divide."""
    mixtral = Architecture("mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_experts=6, experts_per_token=2)
    job = job_of("sft", "7b", 12)
    job = dataclasses.replace(job, models=tuple(dataclasses.replace(m, architecture=mixtral) for m in job.models),
                              shape=dataclasses.replace(job.shape, rows=96))  # fmt: skip
    sizes = {(p.tensor, p.pipeline, p.expert) for p in search.layouts(job, 4)}
    assert sizes == {
        (tensor, pipeline, expert)
        for tensor, pipeline, expert in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3, 6))
        if 12 % (tensor * pipeline) == 0 and 12 // pipeline % expert == 0
    }
    assert all(p.virtual_pipeline is None and p.sequence == (p.tensor > 1) for p in search.layouts(job, 4))
    found = search.search(job, H100)
    best = found.fitting[0]
    assert best.memory.peak <= H100.memory
    assert best.seconds == pytest.approx(sum(p.total for p in phases.phase_seconds(best.job, H100).values()), rel=1e-3)
    assert choice.settings(best)["parallel"]["expert"] == best.job.parallel.expert
    assert "Experts are taken to get equal numbers" in choice.text(found, job, H100)
