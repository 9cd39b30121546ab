"""Every configuration below examples/ is right: its sizes fit the ranks it is for, and with tiny models and files it is
built, makes a step and saves it on at most 8 ranks. A new file is found without being named here."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megarlhf import config
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cli import TRAINING, find
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.models.spec import Architecture
from megarlhf.train import preflight, rounds
from megarlhf.train.rl_config import OnlineRunConfig
from tests.distributed.layouts import layout
from tests.e2e import runs
from tests.ranks import ROOT

EXAMPLES = ROOT / "examples"
PATTERN = "a.*e"  # in some responses of a random model
SEPARATOR = ","  # of steps, which the tiny tokenizer keeps
FILES = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml"))
CHAINS = {file for file in FILES if "rounds" in config.read(EXAMPLES / file, "", "")}


def stages(path: Path, overrides: list[str]) -> list[rounds.Stage]:
    """All stages of a chain. The last one trains."""
    return rounds.stages(config.load(rounds.RoundsConfig, path, overrides), str(path))


def load(path: Path, overrides: list[str]) -> tuple[Any, Any]:
    """(the program that the file is for, its configuration); of a chain that which trains, in the first round."""
    if str(path.relative_to(EXAMPLES)) in CHAINS:
        stage = stages(path, ["rounds=1"])[-1]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(config.dump_values(stage.values))
            file.flush()
            return find(stage.program), find(stage.program).load(file.name, overrides)
    programs = {name: find(name) for name in TRAINING}
    counts = preflight.matches(str(path), programs)
    program = programs[max(counts, key=lambda name: counts[name])]
    return program, program.load(str(path), overrides)


def depth(parallel: ParallelConfig) -> int:
    """Layers of a tiny model for this layout: one a (virtual) stage."""
    return max(2, parallel.pipeline * parallel.chunks)


def tiny_files(settings: Any, directory: Path) -> list[str]:
    """Overrides that put a model, a tokenizer and data in the place of those that the file names."""
    model, program = directory / f"model{depth(settings.parallel)}", type(settings).__name__
    values: dict[str, Any] = {"run": str(directory / "run")}
    if settings.model.checkpoint is None:
        values |= {"tokenizer": str(directory / "reviews.model")}
        values["model.architecture"] = config.to_dict(Architecture.load(model / "actor"))
    else:
        values["model.checkpoint"] = str(model)
    if isinstance(settings, OnlineRunConfig):
        values["prompts.path"] = str(directory / "prompts.jsonl")
        sources = config.to_dict(settings.scoring)["sources"]
        values["scoring.sources"] = [
            source | ({"checkpoint": str(model)} if source["checkpoint"] else {}) for source in sources
        ]
        for source in values["scoring.sources"]:
            if source["verify"] is not None:  # a random model has no right answer, and without one there is no gradient
                source |= {"verify": "regex", "pattern": PATTERN}
            if source["steps"] is not None:
                source["separator"] = SEPARATOR
        if settings.evaluation is not None:
            values["evaluation.prompts.path"] = str(directory / "held_out.jsonl")
        for section in ("critic", "reference"):
            if hasattr(settings, section) and getattr(settings, section).checkpoint is not None:
                values[f"{section}.checkpoint"] = str(model)
        if settings.ptx is not None:
            values["ptx.data.train"] = str(directory / "SFTConfig.jsonl")
    else:
        values["data.train"] = values["data.validation"] = str(directory / f"{program}.jsonl")
        values["training.steps"] = max(1, settings.optimizer.warmup_steps)  # an epoch of these files is too short
        if hasattr(settings.data, "separator"):
            values["data.separator"] = SEPARATOR
        if getattr(settings, "normalization", None) is not None:
            values["normalization.prompts.path"] = str(directory / "prompts.jsonl")
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def reduced(settings: Any) -> tuple[list[str], int]:
    """(overrides, number of ranks): at most 4 stages and 2 tensor ranks, 2 data-parallel ranks where reductions
    overlap, and as many rows, tokens and steps as that needs. All else stays: virtual stages, sequence parallelism, the
    optimizer, overlaps, precision, recomputation, losses, critics, minibatches."""
    parallel = settings.parallel
    small = dataclasses.replace(parallel, tensor=min(parallel.tensor, 2), pipeline=min(parallel.pipeline, 4))
    overlaps = parallel.overlap_grad_reduce or parallel.overlap_param_gather
    data = 2 if overlaps and 2 * small.model <= 8 else 1
    values: dict[str, Any] = {"parallel.tensor": small.tensor, "parallel.pipeline": small.pipeline}
    values |= {"training.steps": 1, "optimizer.warmup_steps": min(settings.optimizer.warmup_steps, 1)}
    if isinstance(settings, OnlineRunConfig):
        samples = settings.sampler.samples_per_prompt
        values |= {
            "prompts.length": 8,
            "sampler.response_length": 8,
            "sampler.micro_batch_size": 2 * samples,
            "training.micro_batch_tokens": 16 * samples,
            "training.batch_size": data * 2 * samples * settings.training.minibatches,
        }
        if getattr(settings, settings.algorithm).shaping.overlong_buffer:
            values["reinforce.shaping.overlong_buffer"] = 4
        if settings.ptx is not None:
            values |= {"ptx.batch_size": data * 2 * samples, "ptx.data.max_length": 16}
    else:
        together = getattr(settings.data, "num_responses", 1)
        values |= {
            "data.max_length": 48,
            "training.micro_batch_tokens": 48 * together,
            "training.global_batch_size": data * 2 * together,
        }
        if getattr(settings, "normalization", None) is not None:
            values |= {f"normalization.{key}": 8 for key in ("prompts.length", "response_length", "samples")}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()], small.model * data


def ranks_of(file: str) -> int:
    """How many ranks a file is for: those of the job script of its name; without one 2, as examples/pipeline.py and
    examples/demo.py start."""
    script = EXAMPLES / "slurm" / ("rounds_stage_7b.sh" if file in CHAINS else f"{Path(file).stem}.sh")
    if not file.startswith("configs/") or not script.is_file():
        return 2
    return math.prod(
        int(number) for number in re.findall(r"^#SBATCH --n(?:odes|tasks-per-node)=(\d+)", script.read_text(), re.M)
    )


def save_models(directory: Path, depths: list[int]) -> None:
    """Random models with a tokenizer, as actor and as reward model."""
    from megarlhf.data.tokenizer import load_tokenizer
    from megarlhf.models.build import build

    for layers in depths:
        architecture = Architecture("llama", layers, hidden_size=64, ffn_hidden_size=64, num_attention_heads=8,
                                    num_query_groups=8, vocab_size=300, max_position_embeddings=8192)  # fmt: skip

        def write(path, architecture=architecture):
            for role in ("actor", "reward"):
                architecture.save(path / role)
            load_tokenizer(directory / "reviews.model").save(path / "tokenizer")

        with layout() as topology:
            models = {
                role: build(role, architecture, topology, micro_batch_tokens=1, dtype="fp32")
                for role in ("actor", "reward")
            }
            Checkpoints(directory / "saved" / str(layers), CheckpointConfig()).save(1, models, {}, write)
        (directory / "saved" / str(layers) / "checkpoints" / "step_00000001").rename(directory / f"model{layers}")


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    runs.prepare(path)
    reviews = list(runs.reviews.reviews(40, seed=5))
    pairs = [{"prompt": prompt, "chosen": better, "rejected": worse}
             for prompt, better, worse in runs.reviews.preferences(40, seed=6)]  # fmt: skip
    solutions = [{"prompt": "a", "steps": ["great film", "bad plot"], "labels": [True, 0.25]}] * 40
    rewarded = [{"prompt": review.prompt, "response": review.response, "reward": number % 3}
                for number, review in enumerate(reviews)]  # fmt: skip
    files = {
        "ProcessRewardConfig": solutions,
        "SFTConfig": [{"prompt": review.prompt, "response": review.response} for review in reviews],
        "RewardConfig": pairs,
        "DPOConfig": pairs,
        "KTOConfig": [
            {"prompt": review.prompt, "response": review.response, "label": number % 2 == 0}
            for number, review in enumerate(reviews)
        ],
        "ILQLRunConfig": rewarded,
        "prompts": [{"prompt": review.prompt} for review in reviews],
        "held_out": [{"prompt": review.prompt} for review in reviews[:4]],
    }
    for name, rows in files.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    depths = set()
    for file in FILES:
        _, settings = load(EXAMPLES / file, [])
        _, smaller = load(EXAMPLES / file, reduced(settings)[0])
        depths |= {depth(settings.parallel), depth(smaller.parallel)}
    ranks.run(1, save_models, path, sorted(depths))
    return path


def run_once(path, overrides):
    import torch.distributed as dist

    module, settings = load(path, overrides)
    plan = module.check(settings, dist.get_world_size())
    with layout(**dataclasses.asdict(settings.parallel)) as topology:
        module.run(settings, plan, topology)


@pytest.mark.parametrize("file", FILES)
def test_an_example(ranks, directory, tmp_path, file):
    _, settings = load(EXAMPLES / file, [])
    module, whole = load(EXAMPLES / file, tiny_files(settings, directory))
    module.check(whole, ranks_of(file))

    sizes, world_size = reduced(settings)
    _, smaller = load(EXAMPLES / file, sizes)
    ranks.run(world_size, run_once, EXAMPLES / file, [*sizes, *tiny_files(smaller, directory), f"run={tmp_path}"])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    norms = [record["grad_norm"] for record in records if "grad_norm" in record]
    assert len(norms) == 1 and 0 < norms[0] < math.inf
    assert (tmp_path / "checkpoints" / "step_00000001" / "state.json").is_file()


@pytest.mark.parametrize("file", sorted(CHAINS))
def test_the_other_stages_of_a_chain(directory, tmp_path, file):
    """Generation and scoring fit the ranks, with a tiny model for each that the file names."""
    model = str(directory / "model2")
    generate, score, select, _ = stages(EXAMPLES / file, [f"run={tmp_path}", "rounds=1"])
    assert select.program == "select"
    given = {
        "generate": {"checkpoint": model, "prompts.path": str(directory / "prompts.jsonl")},
        "score": {"scoring.sources": [{"checkpoint": model}]},
    }
    (tmp_path / "round_1").mkdir()
    (tmp_path / "round_1" / "samples.jsonl").write_text(json.dumps({"prompt": "we saw", "response": " it ."}) + "\n")
    for stage in (generate, score):
        (tmp_path / "stage.yaml").write_text(config.dump_values(stage.values))
        overrides = [f"{key}={json.dumps(value)}" for key, value in given[stage.program].items()]
        program = find(stage.program)
        program.check(program.load(str(tmp_path / "stage.yaml"), overrides), ranks_of(file))


def test_the_reduction_keeps_what_matters(tmp_path):
    """Of a file with everything: the layout's kind stays, and what comes out can be run."""
    path = EXAMPLES / "configs" / "ppo_70b.yaml"
    for tensor, data in ((8, 1), (1, 2)):
        more = [f"parallel.tensor={tensor}", "parallel.virtual_pipeline=2", "parallel.pipeline=8",
                "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true",
                f"parallel.sequence={json.dumps(tensor > 1)}", "sampler.samples_per_prompt=4"]  # fmt: skip
        _, settings = load(path, more)
        overrides, world_size = reduced(settings)
        _, smaller = load(path, [*more, *overrides])
        kept = dataclasses.replace(smaller.parallel, tensor=tensor, pipeline=8)
        assert kept == settings.parallel
        assert smaller.parallel.pipeline == 4 and smaller.parallel.data(world_size) == data and world_size == 8
        share = smaller.training.micro_batch_tokens // 16 * data * smaller.training.minibatches
        assert smaller.training.batch_size == 2 * share and share % 4 == 0
