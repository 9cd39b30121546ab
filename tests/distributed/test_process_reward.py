"""Process reward models over ranks: TRL's loss of a whole model, one gradient for all layouts and cuts, and the scores
of steps at the right tokens under every layout."""

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf import checkpoint
from megarlhf.algorithms.process_reward import step_loss
from megarlhf.batch import LabelledSteps, Sequences
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.scorer import Scorer, ScoringConfig, SourceConfig, truncate
from megarlhf.experience.texts import step_ends
from megarlhf.models.build import build
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig
from megarlhf.train import scoring
from tests.distributed.layouts import LLAMA, examples, layout, share
from tests.scoring import make_rollout, train_tokenizer
from tests.unit.goldens.make_steps import CONFIG

GOLDENS = Path(__file__).parent.parent / "unit" / "goldens"
# No moment of Adam hides the gradient: each weight moves by about lr * gradient.
PLAIN = OptimizerConfig(name="adam", lr=1e-2, eps=1.0, schedule="constant")


def labelled(batch: Sequences) -> LabelledSteps:
    """`batch` with hard and soft labels at its counted tokens; one row has none, another's first error is not known."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.rand(batch.mask.shape, generator=generator)
    labels = torch.where(torch.rand(batch.mask.shape, generator=generator) < 0.5, labels.round(), labels)
    batch.mask[5] = False
    return LabelledSteps(**vars(batch), labels=labels * batch.mask, decided=torch.arange(len(batch)) != 2)


def gradients(cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> the metrics of an update, those of an evaluation after it,
    and the scores of the global batch after the update."""
    results = []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            engine = build("reward", LLAMA, topology, micro_batch_tokens=24 * micro, dtype="fp32", optimizer=PLAIN,
                           total_steps=1, seed=7)  # fmt: skip
            batch = labelled(examples())
            metrics = engine.step(share(batch, topology), step_loss)
            later = engine.evaluate(share(batch, topology), step_loss)
            after = engine.forward(batch)["scores"]
            values = [{name: metric.value for name, metric in found.items()} for found in (metrics, later)]
            results.append((*values, after))
    return results


CUTS = {
    1: [(1, {}), (3, {})],
    2: [(2, {}), (4, dict(tensor=2, sequence=True)), (2, dict(pipeline=2))],
    4: [(1, {}), (2, dict(tensor=2)), (2, dict(pipeline=2))],
}


def test_the_gradient_does_not_depend_on_the_cut(ranks):
    (((first, later, scores),),) = ranks.run(1, gradients, [(8, {})])
    assert later["loss"] < first["loss"] and first["grad_norm"] > 1e-3
    assert 0 < first["solutions/wrong"] + first["solutions/right"] < 1
    for world_size, cases in CUTS.items():
        for answer in ranks.run(world_size, gradients, cases):
            for case, (got, got_later, after) in zip(cases, answer, strict=True):
                assert got == pytest.approx(first, rel=1e-5, abs=1e-6), (world_size, case)
                assert got_later == pytest.approx(later, rel=1e-5, abs=1e-6), (world_size, case)
                torch.testing.assert_close(after, scores, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- TRL


def golden_step(directory, cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> (scores, metrics of an update) of the golden model."""
    with np.load(GOLDENS / "steps_trl.npz") as file:
        golden = {name: torch.tensor(file[name]) for name in file.files}
    real, labels = golden["attention_mask"].bool(), golden["labels"]
    mask = (labels >= 0)[:, 1:]
    rows = LabelledSteps(
        tokens=golden["input_ids"], mask=mask, segments=real.long(), labels=labels[:, 1:].clamp(min=0).float(),
        decided=torch.ones(len(labels), dtype=torch.bool),
    )  # fmt: skip
    results = []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            architecture = Architecture.load(directory)
            engine = build("reward", architecture, topology, micro_batch_tokens=18 * micro, dtype="fp32",
                           optimizer=PLAIN)  # fmt: skip
            checkpoint.load(engine, directory, weights_only=True)
            for module in engine.modules:
                if hasattr(module, "value_head"):
                    bias = golden["weight/score.bias"]
                    module.value_head.bias.data.copy_(bias[1] - bias[0])
            engine.optimizer.reload_model_params()
            scores = engine.forward(rows)["scores"]
            metrics = engine.step(rows, step_loss)
            results.append((scores, {name: metric.value for name, metric in metrics.items()}))
    return results


def test_loss_and_gradient_are_those_of_trl(ranks, tmp_path):
    """The same model with one number for two logits. Its gradients are TRL's; of the head, which has one row in the
    place of TRL's two with opposite gradients, that of the row of right steps."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from megarlhf.convert import convert
    from tests.convert.models import save

    with np.load(GOLDENS / "steps_trl.npz") as file:
        golden = {name: torch.tensor(file[name]) for name in file.files}
    save("llama", tmp_path / "hf")  # for its tokenizer
    weights = {name.removeprefix("weight/"): value for name, value in golden.items() if name.startswith("weight/")}
    head, _ = weights.pop("score.weight"), weights.pop("score.bias")
    for file in (tmp_path / "hf").glob("*.safetensors"):
        file.unlink()
    save_file(weights | {"score.weight": head[1:] - head[:1]}, tmp_path / "hf" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    LlamaConfig(
        **CONFIG, num_labels=1, architectures=["LlamaForSequenceClassification"], dtype="float32"
    ).save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "ours")
    (directory,) = [path.parent for path in (tmp_path / "ours").rglob("architecture.yaml")]
    mask = golden["labels"][:, 1:] >= 0
    expected = torch.where(mask, golden["logits"][:, 1:, 1] - golden["logits"][:, 1:, 0], 0)
    squares = sum(float(value) for name, value in golden.items()
                  if name.startswith("squares/") and "score" not in name)  # fmt: skip
    squares += sum(float(golden[f"grad/score.{part}"][1].double().square().sum()) for part in ("weight", "bias"))
    (one,) = ranks.run(1, golden_step, directory, [(5, {}), (1, {})])
    two, _ = ranks.run(2, golden_step, directory, [(5, dict(tensor=2)), (2, dict(pipeline=2))])
    for scores, metrics in (*one, *two):
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        assert metrics["loss"] == pytest.approx(float(golden["loss"]), rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)


# ------------------------------------------------------------------------------------------------- online scores

SEPARATOR, TOKEN, PLACEHOLDER = " ", 12, 5
LAYOUTS = {
    1: [{}],
    2: [{}, dict(tensor=2, sequence=True), dict(pipeline=2)],
    4: [dict(tensor=2, pipeline=2)],
}
KINDS = {"each": 2.0, "min": 3.0, "product": 5.0, "last": 7.0}  # weights


def save_model(directory):
    with layout() as topology:
        tokenizer = load_tokenizer(directory / "tokenizer.model")
        engine = build("reward", LLAMA, topology, micro_batch_tokens=1, dtype="fp32", seed=5)

        def write(path):
            LLAMA.save(path / "reward")
            tokenizer.save(path / "tokenizer")
            (path / "run.yaml").write_text("data: {separator: ' ', placeholder: null}")

        Checkpoints(directory / "prm", CheckpointConfig()).save(1, {"reward": engine}, {}, write)


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prm")
    train_tokenizer(path / "tokenizer")
    ranks.run(1, save_model, path)
    return path


def rollout(tokenizer):
    """Responses of 1 to 14 tokens, of which some are or begin with a space, and some are TOKEN."""
    plain = make_rollout(8, response=14, vocab=300, stop=True)
    generator = torch.Generator().manual_seed(3)
    spaced = torch.tensor([token for token, name in tokenizer.tokens().items() if "▁" in name])
    chosen = spaced[torch.randint(len(spaced), plain.tokens.shape, generator=generator)]
    chance = torch.rand(plain.tokens.shape, generator=generator)
    tokens = torch.where(chance < 0.3, chosen, torch.where(chance > 0.9, TOKEN, plain.tokens))
    tokens[:, : plain.prompt_len] = plain.tokens[:, : plain.prompt_len]
    return dataclasses.replace(plain, tokens=torch.where(plain.segments > 0, tokens, 9999))


def score(directory, configs, cases):
    """[(rows of a micro-batch, ParallelConfig fields)] -> for each the data rank and the Scores of each config."""
    tokenizer, results = load_tokenizer(directory / "tokenizer.model"), []
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            engine = scoring.load_reward_model(
                str(directory / "prm"), topology=topology, micro_batch_tokens=24 * micro, dtype="fp32"
            )
            options = dict(load_model=lambda path, engine=engine: engine, records=lambda ids: [])
            scorers = [Scorer(config, topology, tokenizer, **options) for config in configs]
            mine = share(rollout(tokenizer), topology)
            results.append((topology.data_rank, [scorer.score(mine) for scorer in scorers]))
    return results


def one_by_one(directory, read, ends, placeholder):
    """(B, R) probabilities of steps, each by a forward pass over the text up to its end alone."""
    found = torch.zeros(ends.shape)
    with layout() as topology:
        engine = build("reward", LLAMA, topology, micro_batch_tokens=1, dtype="fp32")
        checkpoint.load(engine, directory / "prm" / "checkpoints" / "step_00000001" / "reward", weights_only=True)
        for row, column in ends.nonzero().tolist():
            before = read.segments[row, : read.prompt_len] > 0
            ids = read.tokens[row, : read.prompt_len][before].tolist()
            for place in range(column + 1):
                ids.append(int(read.tokens[row, read.prompt_len + place]))
                if ends[row, place] and placeholder is not None:
                    ids.append(placeholder)
            mask = torch.zeros(1, len(ids) - 1, dtype=torch.bool)
            mask[0, -1] = True
            found[row, column] = engine.forward(Sequences(torch.tensor([ids]), mask))["scores"][0, -1].sigmoid()
    return found


def test_scores_of_steps_under_every_layout(ranks, directory):
    """Each step's probability at its last token, or their least, product or last; with placeholders and with
    truncation, too. Against one forward pass for each step's text."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    names = tokenizer.tokens()
    plain = rollout(tokenizer)
    configs, expected = [], []
    for placeholder, cut in ((None, False), (PLACEHOLDER, False), (None, True)):
        read, accepted = truncate(plain, token=TOKEN, after=2) if cut else (plain, torch.ones(8, dtype=torch.bool))
        ends = step_ends(read, tokenizer, SEPARATOR)
        counts = ends.sum(1)
        assert counts.min() == 1 < counts.max() and (not cut or 0 < accepted.sum() < 8)
        (chances,) = ranks.run(1, one_by_one, directory, read, ends, placeholder)
        rows = [chances[row][ends[row]] for row in range(8)]
        by_source = torch.stack([torch.stack([row.sum(), row.min(), row.prod(), row[-1]]) for row in rows])
        scores = torch.where(accepted, (by_source * torch.tensor([0, 3.0, 5.0, 7.0])).sum(1), -1)
        expected.append((scores, 2 * chances * accepted[:, None], by_source))
        configs.append(ScoringConfig(
            sources=tuple(
                SourceConfig(checkpoint=str(directory / "prm"), steps=how, separator=SEPARATOR, weight=weight, name=how,
                             placeholder=names[PLACEHOLDER] if placeholder else None)
                for how, weight in KINDS.items()
            ),
            truncate_token=names[TOKEN] if cut else None, truncate_after=2,
        ))  # fmt: skip
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for world_size, layouts in LAYOUTS.items():
        cases = [(1 + number % 2, sizes) for number, sizes in enumerate(layouts)]
        for answers in ranks.run(world_size, score, directory, configs, cases):
            for data_rank, found in answers:
                for got, (scores, token_scores, by_source) in zip(found, expected, strict=True):
                    mine = slice(data_rank * len(got), (data_rank + 1) * len(got))
                    close(got.scores, scores[mine])
                    close(got.token_scores, token_scores[mine])
                    close(got.by_source, by_source[mine])
                    assert not got.token_scores[~got.mask].any()


def test_checks_of_the_source(directory, monkeypatch):
    tokenizer = load_tokenizer(directory / "tokenizer.model")

    def check(response_length=20, **options):
        source = SourceConfig(checkpoint=str(directory / "prm"), steps="min", **options)
        return scoring.check_sources(
            ScoringConfig(sources=(source,)), tokenizer, ParallelConfig(), vocab_size=503, prompt_length=10,
            response_length=response_length,
        )  # fmt: skip

    assert check(separator=" ") == []
    (note,) = check(separator=".")
    assert note == f"{directory / 'prm'}: separator is '.', but it was trained with ' '"
    with pytest.raises(UserError, match=r"separator: '\\n' becomes another text in the tokenizer"):
        check()
    with pytest.raises(UserError, match="placeholder: 'never ends' is not one token"):
        check(separator=" ", placeholder="never ends")
    with pytest.raises(UserError, match="has 64 positions, but prompts and responses need 70"):
        check(separator=" ", placeholder=".", response_length=30)
    assert check(separator=" ", response_length=30) == []
    monkeypatch.setattr(scoring, "RUN_FILE", "missing.yaml")
    (note,) = check(separator=" ")
    assert note.endswith("came without missing.yaml, so its separator and placeholder are not checked")
