"""Scores under every layout: the same numbers, one call a model copy, and an error that reaches every rank."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megarlhf import checkpoint
from megarlhf.batch import Sequences
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from megarlhf.data.sft import continuation
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.scorer import ScoringConfig, SourceConfig, texts, truncate
from megarlhf.experience.sources import RemoteScorer
from megarlhf.models.build import build
from megarlhf.train import scoring
from tests.distributed.layouts import GPT2, LLAMA, layout, share
from tests.scoring import make_rollout, reward_server, train_tokenizer

FUNCTIONS = """
import pathlib, uuid
calls = pathlib.Path(__file__).with_name("calls")
def length(prompts, responses):
    (calls / uuid.uuid4().hex).touch()
    return [len(prompt) - 2.0 * len(response) for prompt, response in zip(prompts, responses)]
def picky(prompts, responses):
    refused = calls.with_name("refused").read_text()
    return [1 / (prompt != refused) for prompt in prompts]
"""
LAYOUTS = {  # number of ranks: layouts
    1: [{}],
    2: [{}, dict(tensor=2, sequence=True), dict(pipeline=2), dict(pipeline=2, virtual_pipeline=2)],
    4: [dict(tensor=2, pipeline=2)],
}
TOKEN = 12


def save_models(directory):
    """A Llama and a GPT-2 as reward models with gain and bias (R3), each beside the tokenizer."""
    with layout() as topology:
        tokenizer = load_tokenizer(directory / "tokenizer.model")
        for name, architecture, gain, bias in (("llama", LLAMA, 2.0, -1.0), ("gpt2", GPT2, 0.5, 3.0)):
            engine = build("reward", architecture, topology, micro_batch_size=1, dtype="fp32", seed=5)
            engine.modules[0].value_head.reward_gain.fill_(gain)
            engine.modules[0].value_head.reward_bias.fill_(bias)

            def write(path, architecture=architecture):
                architecture.save(path / "reward")
                tokenizer.save(path / "tokenizer")

            Checkpoints(directory / name, CheckpointConfig()).save(1, {"reward": engine}, {}, write)


def records_of(prompt_ids):
    return [{"prompt": f"prompt {row}", "answer": {"number": row}} for row in prompt_ids]


def score(directory, config, cases):
    """[(micro-batch size, options of the rollout, layout)] -> [(data rank, scores, mask, accepted)]."""
    results = []
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    for micro, options, sizes in cases:
        with layout(**sizes) as topology:
            scorer = scoring.build_scorer(
                config, topology, tokenizer, micro_batch_size=micro, dtype="fp32", records=records_of
            )
            rollout = share(make_rollout(vocab=20, **options), topology)
            before = dataclasses.replace(rollout, segments=rollout.segments.clone(), mask=rollout.mask.clone())
            scores = scorer.score(rollout)
            assert torch.equal(rollout.segments, before.segments) and torch.equal(rollout.mask, before.mask)
            results.append((topology.data_rank, scores.scores, scores.mask, scores.accepted))
    return results


def failure(directory, config, sizes):
    """The error of building a scorer and scoring with it."""
    with layout(**sizes) as topology:
        tokenizer = load_tokenizer(directory / "tokenizer.model")
        try:
            scorer = scoring.build_scorer(
                config, topology, tokenizer, micro_batch_size=2, dtype="fp32", records=records_of
            )
            scorer.score(share(make_rollout(), topology))
        except UserError as error:
            return str(error)


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scoring")
    train_tokenizer(path / "tokenizer")
    (path / "calls").mkdir()
    (path / "rules.py").write_text(FUNCTIONS)
    ranks.run(1, save_models, path)
    return path


def sources(directory, **weights):
    known = {
        "llama": dict(checkpoint=str(directory / "llama")),
        "gpt2": dict(checkpoint=str(directory / "gpt2" / "checkpoints" / "step_00000001" / "reward")),
        "length": dict(function=f"{directory / 'rules.py'}:length"),
    }
    return tuple(SourceConfig(**known[name], weight=weight) for name, weight in weights.items())


def alone(directory, name, rollout):
    """Scores of a reward model by a bare forward pass over each row alone, without its padding."""
    with layout() as topology:
        architecture = {"llama": LLAMA, "gpt2": GPT2}[name]
        engine = build("reward", architecture, topology, micro_batch_size=1, dtype="fp32")
        checkpoint.load(engine, directory / name / "checkpoints" / "step_00000001" / "reward", weights_only=True)
        scores = []
        for row in range(len(rollout)):
            one = rollout.select(slice(row, row + 1))
            real = one.segments[0] > 0
            bare = dataclasses.replace(
                one, tokens=one.tokens[:, real], mask=torch.ones(1, int(real.sum()) - 1, dtype=torch.bool),
                segments=None, prompt_len=1, logprobs=None,
            )  # fmt: skip
            scores.append(engine.forward(bare)["scores"][0, -1])  # a prompt of one token at least
        return torch.stack(scores)


@pytest.fixture(scope="module")
def truth(ranks, directory):
    """What {"length": 1, "llama": 0.5, "gpt2": -2} must give for the truncated rows, the penalty apart."""
    rollout, accepted = truncate(make_rollout(vocab=20, stop=True), token=TOKEN, after=1)
    assert accepted.any() and not accepted.all()
    (llama,), (gpt2,) = (ranks.run(1, alone, directory, name, rollout) for name in ("llama", "gpt2"))
    prompts, responses = texts(rollout, load_tokenizer(directory / "tokenizer.model"))
    length = torch.tensor([len(p) - 2.0 * len(r) for p, r in zip(prompts, responses, strict=True)])
    return torch.where(accepted, length + 0.5 * llama - 2 * gpt2, -7.0), rollout.mask, accepted


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_scores_do_not_depend_on_the_layout(ranks, directory, truth, world_size):
    name = load_tokenizer(directory / "tokenizer.model").tokens()[TOKEN]
    config = ScoringConfig(
        sources=sources(directory, length=1.0, llama=0.5, gpt2=-2.0),
        truncate_token=name, truncate_after=1, penalty=-7.0,
    )  # fmt: skip
    cases = [  # other micro-batches and more padding in each
        (1 + number % 2, dict(stop=True, pad=4 * number), sizes) for number, sizes in enumerate(LAYOUTS[world_size])
    ]
    for call in (directory / "calls").iterdir():
        call.unlink()
    answers = ranks.run(world_size, score, directory, config, cases, timeout=60)
    for number in range(len(cases)):
        for data_rank, *found in (answer[number] for answer in answers):  # every rank
            for value, expected in zip(found, truth, strict=True):
                mine = expected[data_rank * len(value) : (data_rank + 1) * len(value)]
                torch.testing.assert_close(value, mine, rtol=1e-5, atol=1e-5)
    copies = sum(world_size // (sizes.get("tensor", 1) * sizes.get("pipeline", 1)) for sizes in LAYOUTS[world_size])
    assert len(list((directory / "calls").iterdir())) == copies  # one rank of each model copy


def test_without_truncation_the_last_token_is_scored(ranks, directory):
    """R1, for responses of fixed length and for those that end with EOS; nothing is given the penalty."""
    config = ScoringConfig(sources=sources(directory, llama=1.0))
    ((fixed, ended),) = ranks.run(1, score, directory, config, [(4, dict(stop=stop), {}) for stop in (False, True)])
    for (_, scores, mask, accepted), stop in ((fixed, False), (ended, True)):
        rollout = make_rollout(vocab=20, stop=stop)
        (expected,) = ranks.run(1, alone, directory, "llama", rollout)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        assert accepted.all() and torch.equal(mask, rollout.mask)


@pytest.mark.parametrize("sizes", [{}, dict(tensor=2), dict(pipeline=2)], ids=["dp2", "tp2", "pp2"])
def test_an_error_reaches_every_rank(ranks, directory, sizes):
    """Also that of one model copy: the function refuses the last prompt, which under dp2 is rank 1's."""
    (*_, prompt), _ = texts(make_rollout(), load_tokenizer(directory / "tokenizer.model"))
    (directory / "refused").write_text(prompt)
    picky = SourceConfig(function=f"{directory / 'rules.py'}:picky")
    config = ScoringConfig(sources=(*sources(directory, length=1.0), picky))
    first, second = ranks.run(2, failure, directory, config, sizes, timeout=30)
    assert first == second and first.startswith(f"function {picky.function}: failed at ") and "\n" not in first


def test_a_dead_server_is_found_on_every_rank_before_anything_is_loaded(ranks, directory):
    config = ScoringConfig(
        sources=(SourceConfig(checkpoint="/no/such/model"), SourceConfig(url="http://127.0.0.1:9", retries=0))
    )
    first, second = ranks.run(2, failure, directory, config, {})
    assert first == second and first.startswith("http://127.0.0.1:9/health: ConnectionRefusedError")


def score_texts(directory, pairs):
    """The Llama's scores of BOS prompt response EOS."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    with layout() as topology:
        engine = scoring.load_reward_model(
            str(directory / "llama"), topology=topology, micro_batch_size=1, dtype="fp32"
        )
        scores = []
        for prompt, response in pairs:
            before = tokenizer.encode(prompt)
            response = continuation(tokenizer, prompt, before, response)
            tokens = torch.tensor([[tokenizer.bos_id, *before, *response, tokenizer.eos_id]])
            outputs = engine.forward(Sequences(tokens=tokens, mask=torch.ones_like(tokens[:, 1:], dtype=torch.bool)))
            scores.append(outputs["scores"][0, -1].item())
        return scores


def test_a_served_reward_model(ranks, directory, tmp_path):
    """`serve-reward` with a checkpoint gives the scores of the model, for texts of any lengths."""
    pairs = [("the sea", " is slow ."), ("a film", " that moves. a plot that never ends"), ("a", "."), ("the", " film")]
    pairs.append(("", "the sea is slow"))
    (expected,) = ranks.run(1, score_texts, directory, pairs)
    assert max(expected) - min(expected) > 0.1
    settings = dict(checkpoint=str(directory / "llama"), dtype="fp32", micro_batch_size=2, max_length=32)
    with reward_server(tmp_path, **settings) as (url, _):
        remote = RemoteScorer(url, timeout=30, retries=0, batch_size=3)
        remote.check_health()
        assert remote(*map(list, zip(*pairs, strict=True))) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        with pytest.raises(UserError, match=r"HTTP 400: \d+ tokens, where 2 to max_length 32 can be scored"):
            remote(["the sea"], [" is slow ." * 9])
