"""What `megarlhf plan` accepts, and that what it proposes is accepted by the programs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter

import pytest

from megarlhf.cli import find, main
from megarlhf.models import adapters
from megarlhf.models.model_config import LoraConfig
from megarlhf.plan import calibrate, sampling, search
from megarlhf.train import memory as limits
from megarlhf.train import plan as command
from megarlhf.train import planned
from tests.ranks import ROOT
from tests.unit.test_plan import LLAMA_7B, config, job  # noqa: F401 (a fixture)

HUGGING_FACE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 2048,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def load(name: str, program: str, *overrides: str):
    return find(program).load(str(ROOT / "examples" / "configs" / f"{name}.yaml"), list(overrides))


def test_a_model_that_is_not_converted_yet(tmp_path, capsys):
    """A Hugging Face directory, or its config.json alone, is enough for a plan."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HUGGING_FACE))
    path = str(ROOT / "examples" / "configs" / "ppo_7b.yaml")
    for model in (tmp_path, file):
        given = [f"model.checkpoint={model}", f"scoring.sources[0].checkpoint={model}"]
        assert main(["plan", "--config", path, "--gpu", "h100", *given, "parallel.tensor=2"]) == 0
        assert "fits: " in capsys.readouterr().out
    assert main(["plan", "--config", path, "--gpu", "h100"]) == 2  # runs/sft_7b, which is not there
    assert "config.json" in (error := capsys.readouterr().err) and error.count("\n") == 1
    file.write_text(json.dumps(HUGGING_FACE | {"model_type": "mamba"}))
    assert main(["plan", "--config", path, "--gpu", "h100", *given]) == 2
    assert "'mamba' is not supported" in capsys.readouterr().err


def test_a_batch_that_the_program_refuses(config, capsys):  # noqa: F811
    for arguments, message in (
        (["training.global_batch_size=12"], "training.global_batch_size: 12 is not a multiple of 8"),
        (["--hardware", "none.yaml"], "--hardware: "),
    ):
        gpu = [] if "--hardware" in arguments else ["--gpu", "h100"]
        assert main(["plan", "--config", str(config), *gpu, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert main(["preflight", "--config", str(config), "--hardware", "none.yaml"]) == 2
    assert "--hardware: " in capsys.readouterr().err


@pytest.mark.parametrize(("name", "program", "together"), [("dpo_7b", "dpo", 2), ("reward_7b", "reward", 4)])
def test_the_search_keeps_pairs_on_one_rank(name, program, together):
    """`training.check_batch` of the programs refuses other layouts."""
    overrides = ["data.num_responses=4", "loss=log_exp"] if together == 4 else []
    settings = load(name, program, *overrides, "parallel={}", "training.global_batch_size=64")
    found = planned.job_of(settings, 64, device="cuda", program=program, find=lambda path, role: LLAMA_7B)
    layouts = list(search.layouts(found, 8))
    assert layouts and max(parallel.data(64) for parallel in layouts) == 64 // together
    for parallel in layouts:
        settings.training.check_batch(parallel, 64, together=together)


def test_the_search_keeps_blocks_of_nf4_whole():
    """1408 / 4 channels are no blocks of 64 weights."""
    odd = dataclasses.replace(LLAMA_7B, ffn_hidden_size=1408)
    settings = load("ppo_lora_7b", "ppo", "model.lora.quantization=nf4", "parallel={}")
    found = planned.job_of(settings, 8, device="cuda", program="ppo", find=lambda path, role: odd)
    assert {parallel.tensor for parallel in search.layouts(found, 8)} == {1, 2}


def test_models_that_compute_with_adapters(tmp_path):
    """A reference has adapters if the policy starts from some; a reward model, if its directory holds some."""
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "architecture.yaml").write_text("")
    sources = f'scoring.sources=[{{checkpoint: "{judge}"}}]'
    for number in range(2):
        given = ["model.lora.checkpoint=somewhere"] if number else []
        found = job("ppo_lora_7b", sources, *given)
        with_adapters = {model.role for model in found.models if model.lora is not None}
        assert with_adapters == {"actor", "critic"} | ({"reference", "reward 0"} if number else set())
        adapters.Adapters("somewhere", LoraConfig(rank=5)).save(judge)
    assert found.model("reward 0").lora.rank == 5 and found.model("reference").lora.rank == found.models[0].lora.rank


def test_remedies_are_what_can_be_written():
    def names(found, per_node=8):
        return " ".join(name for name, _ in command.remedies(found, per_node))

    assert "reference.on_host" not in names(job("sft_7b")) and "scoring" not in names(job("dpo_7b"))
    assert "reference.on_host=true" in names(job("dpo_7b", "reference.on_host=false"))
    ppo = "reference.on_host=false", "scoring.on_host=false"
    assert "reference.on_host=true and scoring.on_host=true" in names(job("ppo_7b", *ppo))
    assert "on_host=true and" not in names(job("ppo_7b", "reference.on_host=false"))
    # a reference that is the actor without adapters, and an averaged actor, stay where they are
    kept = [changed for name, changed in command.remedies(job("ppo_lora_7b", "average=0.9"), 8) if "on_host" in name]
    for changed in kept:
        assert not any(model.weights_on_host for model in changed.models if model.borrows or model.role == "average")
    assert "parallel.tensor=4" in names(job("ppo_7b")) and "parallel.tensor=4" not in names(job("ppo_7b"), per_node=2)


def test_ranks_share_the_memory_of_their_own_node(config):  # noqa: F811
    settings = find("sft").load(str(config), [])
    found = planned.job_of(settings, 4, device="cpu", program="sft")
    assert calibrate.cpu(found, per_node=2).memory == 2 * calibrate.cpu(found).memory


def test_preflight_does_not_refuse_what_this_machine_holds():
    """A CPU rank may have more memory than the largest GPU."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limits.largest() == max(physical, limits.LARGEST_DEVICE)


def test_a_run_starts_without_a_prediction(tmp_path, capsys):
    """What the prediction cannot compute does not end a run."""
    whole = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
             "num_query_groups": 4, "vocab_size": 300, "max_position_embeddings": 2048, "family": "llama"}  # fmt: skip
    model = ["model.checkpoint=null", f"model.architecture={json.dumps(whole)}", "parallel={}"]
    lost = load("ppo_7b", "ppo", *model, f"scoring.sources[0].checkpoint={tmp_path / 'none'}")
    assert planned.seconds(lost, 1, rate=1e10, slots=4) == {}
    assert "no prediction of the phases' seconds" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "samples", "slots", "pipeline"), [(13, 1, 4, 1), (24, 3, 4, 2), (40, 8, 5, 4)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_schedule_of_sampling(rows, samples, slots, pipeline, device):
    """Group by group, as the sampler takes them."""
    base = job("grpo_7b", "parallel={}", ranks=pipeline, device=device)
    shape = dataclasses.replace(
        base.shape, rows=rows, samples=samples, slots=slots, length=10, counted=4, minibatches=1
    )
    here = dataclasses.replace(
        base, shape=shape, parallel=dataclasses.replace(base.parallel, pipeline=pipeline), world_size=pipeline
    )
    prefills, steps = sampling.schedule(here)
    started, active = 0, Counter()
    for first in range(0, rows, sampling.slots(here)):
        used = min(sampling.slots(here), rows - first)
        started += sum(row % samples == 0 for row in range(first, first + used))
        active[sampling.slots(here) if device == "cuda" else used] += 1
    assert sum(len(lengths) * times for lengths, times in prefills.items()) == started
    assert steps == Counter({(n, 6 + k): times for n, times in active.items() for k in range(4)})


def test_a_long_schedule_is_counted_at_once():
    """2,048 groups of slots of 8,192 steps each: the run waits for this at its start."""
    base = job("grpo_7b", "parallel={}", "training.batch_size=8192", "sampler.response_length=8192", ranks=1)
    _, steps = sampling.schedule(dataclasses.replace(base, shape=dataclasses.replace(base.shape, slots=4)))
    assert len(steps) == 8192 and set(steps.values()) == {2048}
