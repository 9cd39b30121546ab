"""Scores under every layout: the same numbers, one call a model copy, and an error that reaches every rank."""

import dataclasses
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch

from megarlhf import checkpoint, metrics
from megarlhf.batch import Sequences
from megarlhf.checkpoint import CheckpointConfig, Checkpoints
from megarlhf.config import UserError
from megarlhf.data.conversations import continuation
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience.running import Moments
from megarlhf.experience.scorer import ScoringConfig, SourceConfig, truncate
from megarlhf.experience.sources import RemoteScorer
from megarlhf.experience.texts import texts
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
def steps(prompts, responses, records):
    return [
        [[end, end + float(record["answer"]["number"])] for end in range(2, len(response) + 1, 3)]
        for response, record in zip(responses, records)
    ]
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
            engine = build("reward", architecture, topology, micro_batch_tokens=1, dtype="fp32", seed=5)
            engine.modules[0].value_head.reward_gain.fill_(gain)
            engine.modules[0].value_head.reward_bias.fill_(bias)

            def write(path, architecture=architecture):
                architecture.save(path / "reward")
                tokenizer.save(path / "tokenizer")

            Checkpoints(directory / name, CheckpointConfig()).save(1, {"reward": engine}, {}, write)


def records_of(prompt_ids):
    return [{"prompt": f"prompt {row}", "answer": {"number": row}} for row in prompt_ids]


def score(directory, config, cases):
    """[(rows of a micro-batch, options of the rollout, layout)] -> [(data rank, scores, mask, accepted)]."""
    results = []
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    for micro, options, sizes in cases:
        with layout(**sizes) as topology:
            scorer = scoring.build_scorer(
                config, topology, tokenizer, micro_batch_tokens=20 * micro, dtype="fp32", records=records_of
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
                config, topology, tokenizer, micro_batch_tokens=40, dtype="fp32", records=records_of
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
        "steps": dict(function=f"{directory / 'rules.py'}:steps"),
    }
    return tuple(SourceConfig(**known[name], weight=weight) for name, weight in weights.items())


def alone(directory, name, rollout):
    """Scores of a reward model by a bare forward pass over each row alone, without its padding."""
    with layout() as topology:
        architecture = {"llama": LLAMA, "gpt2": GPT2}[name]
        engine = build("reward", architecture, topology, micro_batch_tokens=1, dtype="fp32")
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


STEPS = ("steps", "length", "llama")
ADJUSTED = {  # clip, normalize, weight
    "steps": (None, True, 0.5), "length": ((-12.0, 4.0), True, 2.0), "llama": ((-2.0, 1.0), False, -1.0)
}  # fmt: skip


def score_batches(directory, config, cases):
    """[(rows of a micro-batch, layout)] -> [(data rank, the scores of two batches, a state on the way, metrics)]. The
    second batch is scored by a Scorer that goes on from the first one's state."""
    results = []
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    for micro, sizes in cases:
        with layout(**sizes) as topology:
            options = dict(micro_batch_tokens=20 * micro, dtype="fp32", records=records_of)
            found, state = [], {}
            for batch in batches():
                scorer = scoring.build_scorer(config, topology, tokenizer, **options)
                scorer.load_state(state)
                found.append(scorer.score(share(batch, topology)))
                state = scorer.state
            said = metrics.of_loss(scorer.metrics(found[-1]))
            said = {name: metric.map(float) for name, metric in said.items()}
            said = metrics.all_reduce(said, topology.data_group, torch.device("cpu"))
            results.append((topology.data_rank, found, state, {name: metric.value for name, metric in said.items()}))
    return results


def batches():
    whole = make_rollout(16, response=10, vocab=14, stop=True)
    return whole.select(slice(0, 8)), whole.select(slice(8, 16))


def every_token_alone(directory, rollout):
    """(B, R): the Llama's score at each response token, each row alone and without its padding."""
    scores = torch.zeros(rollout.mask.shape)
    with layout() as topology:
        engine = build("reward", LLAMA, topology, micro_batch_tokens=1, dtype="fp32")
        checkpoint.load(engine, directory / "llama" / "checkpoints" / "step_00000001" / "reward", weights_only=True)
        for row in range(len(rollout)):
            real, count = rollout.segments[row] > 0, int(rollout.mask[row].sum())
            tokens = rollout.tokens[row : row + 1, real]
            everything = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
            scores[row, :count] = engine.forward(Sequences(tokens=tokens, mask=everything))["scores"][0, -count:]
    return scores


def by_a_loop(tokenizer, rollout, model_scores):
    """{source: [(row, column or None, number)]}, one response and one token after the other."""
    prompts, responses = texts(rollout, tokenizer)
    found = {name: [] for name in STEPS}
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        found["length"].append((row, None, len(prompt) - 2.0 * len(response)))
        first = rollout.prompt_len
        before = rollout.tokens[row, :first][rollout.segments[row, :first] > 0].tolist()
        ids = rollout.tokens[row, first:][rollout.mask[row]].tolist()
        for end in range(2, len(response) + 1, 3):
            column = next(
                j for j in range(len(ids)) if tokenizer.continuation(before, ids[: j + 1])[:end] == response[:end]
            )
            found["steps"].append((row, column, end + float(rollout.prompt_ids[row])))
        found["llama"] += [(row, j, model_scores[row, j].item()) for j in range(len(ids)) if ids[j] == TOKEN]
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_scores_of_steps_and_their_normalisation(ranks, directory, world_size):
    """Process scores of a model and of a function, clip, running moments over two batches, weights; any layout."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    config = ScoringConfig(sources=tuple(
        dataclasses.replace(
            sources(directory, **{name: weight})[0], name=name, clip=clip, normalize=normalize,
            step_token=tokenizer.tokens()[TOKEN] if name == "llama" else None,
        )
        for name, (clip, normalize, weight) in ADJUSTED.items()
    ))  # fmt: skip
    expected, seen = [], {name: [] for name in STEPS}
    for batch in batches():
        (model_scores,) = ranks.run(1, every_token_alone, directory, batch)
        scores, token_scores = torch.zeros(8), torch.zeros(batch.mask.shape)
        by_source = torch.zeros(8, len(STEPS))
        for k, (name, numbers) in enumerate(by_a_loop(tokenizer, batch, model_scores).items()):
            low, high = ADJUSTED[name][0] or (-torch.inf, torch.inf)
            seen[name] += [min(max(number, low), high) for _, _, number in numbers]
            mean, deviation = 0.0, 1.0
            if ADJUSTED[name][1]:
                mean, deviation = statistics.fmean(seen[name]), statistics.pstdev(seen[name])
            for row, column, number in numbers:
                by_source[row, k] += number
                worth = ADJUSTED[name][2] * (min(max(number, low), high) - mean) / deviation
                if column is None:
                    scores[row] += worth
                else:
                    token_scores[row, column] += worth
        assert all(len(set(numbers)) > 2 for numbers in seen.values())
        expected.append((scores, token_scores, by_source))
    cases = [(1 + number % 2, sizes) for number, sizes in enumerate(LAYOUTS[world_size])]
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for answers in ranks.run(world_size, score_batches, directory, config, cases, timeout=60):
        for data_rank, found, state, said in answers:
            for got, (scores, token_scores, by_source) in zip(found, expected, strict=True):
                mine = slice(data_rank * len(got), (data_rank + 1) * len(got))
                close(got.scores, scores[mine])
                close(got.token_scores, token_scores[mine])
                close(got.by_source, by_source[mine])
                close(got.total, scores[mine] + token_scores[mine].sum(1))
            parts = ("count", "mean", "squares")
            assert state.keys() == {f"{name}/{part}" for name in ("steps", "length") for part in parts}
            for name in ("steps", "length"):
                assert state[f"{name}/count"] == len(seen[name])
                assert state[f"{name}/mean"] == pytest.approx(statistics.fmean(seen[name]))
                assert state[f"{name}/squares"] == pytest.approx(
                    statistics.pvariance(seen[name]) * len(seen[name]), rel=1e-9
                )
            for k, name in enumerate(STEPS):  # of the second batch
                column = expected[1][2][:, k].double()
                assert said[f"scores/{name}/mean"] == pytest.approx(column.mean().item(), rel=1e-4, abs=1e-4)
                assert said[f"scores/{name}/var"] == pytest.approx(column.var(correction=0).item(), rel=1e-4)


def test_the_penalty_takes_the_place_of_steps(ranks, directory):
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    config = ScoringConfig(
        sources=sources(directory, steps=1.0), truncate_token=tokenizer.tokens()[TOKEN], penalty=-7.0
    )
    (((_, (scores, _), _, _),),) = ranks.run(1, score_batches, directory, config, [(2, {})])
    assert scores.accepted.any() and not scores.accepted.all()
    assert (scores.token_scores[~scores.mask] == 0).all() and (scores.token_scores[~scores.accepted] == 0).all()
    assert (scores.total[~scores.accepted] == -7).all() and (scores.by_source[~scores.accepted] != 0).any()


def moments(batches):
    """The moments after `batches`, cut among the ranks in two ways, [(count, mean, squares)]."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for even in (True, False):
        running = Moments()
        for batch in batches:
            mine = batch.chunk(size)[rank] if even else (batch if rank == size - 1 else batch[:0])
            running = running.extended(mine, dist.group.WORLD)
        found.append(tuple(vars(running).values()))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_running_moments(ranks, world_size):
    """Far from 0, where sums of squares would cancel; what is not finite is left out."""
    numbers = 1e6 + torch.arange(60, dtype=torch.float64).sin()
    batches = [numbers[:4], numbers[4:36], torch.tensor([torch.nan, torch.inf]).double(), numbers[36:], numbers[:0]]
    for found in ranks.run(world_size, moments, batches):
        for count, mean, squares in found:
            assert count == 60 and mean == pytest.approx(numbers.mean().item(), rel=1e-14)
            assert squares == pytest.approx(60 * numbers.var(correction=0).item(), rel=1e-8)


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
            str(directory / "llama"), topology=topology, micro_batch_tokens=1, dtype="fp32"
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
    settings = dict(checkpoint=str(directory / "llama"), dtype="fp32", micro_batch_tokens=20, max_length=32)
    with reward_server(tmp_path, **settings) as (url, _):
        remote = RemoteScorer(url, timeout=30, retries=0, batch_size=3)
        remote.check_health()
        assert remote(*map(list, zip(*pairs, strict=True))) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        with pytest.raises(UserError, match=r"HTTP 400: \d+ tokens, where 2 to max_length 32 can be scored"):
            remote(["the sea"], [" is slow ." * 9])
