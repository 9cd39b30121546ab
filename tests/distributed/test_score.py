"""`megarlhf score` under every layout: the scores of the online loop, for the ids that were sampled and for texts."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarlhf import config
from megarlhf.config import UserError
from megarlhf.data.prompts import PromptSet
from megarlhf.data.tokenizer import load_tokenizer, token_id
from megarlhf.experience.sampler import SamplerConfig
from megarlhf.train import generate, score, scoring
from tests.distributed.layouts import layout
from tests.distributed.test_scoring import save_models
from tests.scoring import make_rollout, train_tokenizer

RULES = """
def answers(prompts, responses, records):
    return [float(record["answer"]) * 0.25 - len(response) for record, response in zip(records, responses, strict=True)]
def ends(prompts, responses):
    return [[[len(text), 1.5]] if text else 0.0 for text in responses]
def broken(prompts, responses):
    return [float("inf")] * len(prompts)
"""
LAYOUTS = {1: [{}], 2: [{}, dict(tensor=2, sequence=True), dict(pipeline=2)], 4: [dict(tensor=2, pipeline=2)]}
ROWS = 11  # no multiple of batches or ranks
COLUMNS = (10, 6)  # of prompts and responses
LETTERS = ["the sea", " is slow .", "a film", " that moves. a plot that never ends", "a", "."]


def scoring_of(directory) -> dict:
    return {
        "sources": [
            {"checkpoint": str(directory / "llama"), "weight": 0.5},
            {"function": f"{directory}/rules.py:answers", "clip": [-20, 20]},
            {"function": f"{directory}/rules.py:ends", "weight": -2.0},
            {"verify": "regex", "pattern": "e.*"},
        ],
        "truncate_token": ".",
        "truncate_after": 1,
        "penalty": -7.0,
    }


def rollouts(tokenizer):
    """Sampled rows as the online loop has them; some end with EOS, some have a full stop before."""
    rollout = make_rollout(ROWS, *COLUMNS, stop=True, vocab=300)
    tokens, last = rollout.tokens.clone(), COLUMNS[0] + rollout.mask.sum(1) - 1
    tokens[torch.arange(0, ROWS, 2), last[::2]] = tokenizer.eos_id
    long = rollout.mask.sum(1) > 2
    tokens[long, COLUMNS[0] + 1] = token_id(tokenizer, ".", "")
    return dataclasses.replace(rollout, tokens=tokens)


def online(directory, settings):
    """The scores of the online loop's scorer, and the file that `megarlhf generate` would have written."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    rollout = rollouts(tokenizer)
    prompts = PromptSet(
        [],
        [f"question {row}" for row in range(ROWS)],
        [b'{"answer": "%d", "prompt_id": 4}' % row for row in range(ROWS)],
    )
    with layout() as topology:
        scorer = scoring.build_scorer(
            config.from_dict(score.ScoringConfig, settings, "test"), topology, tokenizer, micro_batch_tokens=64,
            dtype="fp32", records=prompts.records,
        )  # fmt: skip
        found = scorer.score(rollout)
    lines = generate.records(rollout, prompts, tokenizer, SamplerConfig(stop_at_eos=True))
    return found.total.tolist(), found.by_source.tolist(), lines


def run_all(directory, cases):
    """[(layout, overrides)] -> for each the lines of the output, on rank 0, or the error."""
    found = []
    for sizes, overrides in cases:
        values = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        values += [f"parallel={json.dumps(sizes)}"] if sizes else []
        try:
            settings = score.PROGRAM.load(str(directory / "score.yaml"), values)
            plan = score.check(settings, dist.get_world_size())
            with layout(**sizes) as topology:
                score.score(settings, plan, topology)
            dist.barrier()
            found.append([json.loads(line) for line in Path(settings.out).read_text().splitlines()])
        except UserError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def directory(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("score")
    train_tokenizer(path / "tokenizer")
    (path / "rules.py").write_text(RULES)
    ranks.run(1, save_models, path)
    (path / "score.yaml").write_text(json.dumps({
        "input": str(path / "in.jsonl"), "out": str(path / "out.jsonl"), "dtype": "fp32", "batch_size": 8,
        "micro_batch_tokens": 40, "scoring": scoring_of(path),
    }))  # fmt: skip
    return path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_scores_of_the_online_loop_in_every_layout(ranks, directory):
    settings = scoring_of(directory)
    ((total, by_source, lines),) = ranks.run(1, online, directory, settings)
    assert len({round(value, 3) for value in total}) > 4 and -7.0 in total  # some without the token
    lines[3]["kept"] = {"more": [1, None]}
    lines[4] |= {"score": 99.0, "scores": {"old": 1.0}}
    write(directory / "in.jsonl", lines)
    for size, layouts in LAYOUTS.items():
        for rank in ranks.run(size, run_all, directory, [(sizes, {}) for sizes in layouts]):
            for sizes, found in zip(layouts, rank, strict=True):
                assert [line.pop("score") for line in found] == pytest.approx(total, rel=1e-5, abs=1e-5), sizes
                names = ["llama", "answers", "ends", "regex"]
                for line, expected in zip(found, by_source, strict=True):
                    said = line.pop("scores")
                    assert list(said) == names and list(said.values()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
                assert found == [{k: v for k, v in line.items() if k not in ("score", "scores")} for line in lines]


def test_texts(ranks, directory):
    """Lines without ids are read as a reward model is trained: BOS prompt response EOS, and so are lines with ids that
    are those of the texts; other lines' keys are the records."""
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    texts = [{"prompt": LETTERS[k], "response": LETTERS[k + 1], "answer": k} for k in (0, 2, 4)]
    with_ids = []
    for line in texts:
        whole, before = tokenizer.encode(line["prompt"] + line["response"]), tokenizer.encode(line["prompt"])
        assert whole[: len(before)] == before
        ids = {"prompt_tokens": [tokenizer.bos_id, *before], "tokens": [*whole[len(before) :], tokenizer.eos_id]}
        with_ids.append(line | ids)
    results = []
    for lines in (texts, with_ids):
        write(directory / "in.jsonl", lines)
        ((found,),) = ranks.run(1, run_all, directory, [({}, {})])
        results.append([(line["score"], line["scores"]) for line in found])
    assert results[0] == results[1]
    # the second is cut behind its first full stop
    assert [said["answers"] for _, said in results[0]] == [-len(" is slow ."), 0.5 - len(" that moves."), 1.0 - 1]


def test_mistakes_in_files(ranks, directory):
    good = {"prompt": "the sea", "response": " is slow .", "answer": 1}
    one = {"sources": [{"checkpoint": str(directory / "llama")}]}
    cases = {
        "in.jsonl:2: no key 'response' (found: prompt)": [good, {"prompt": "a"}],
        "in.jsonl:1: 'tokens' are not those of 'response' to the tokenizer": [good | {"tokens": [50, 60]}],
        "in.jsonl:1: 'tokens' has the id 4000, which the tokenizer": [good | {"tokens": [4000]}],
        "in.jsonl:1: 'tokens' must be a list of ids": [good | {"tokens": "5"}],
        "in.jsonl:1: a number is NaN or infinite": [good | {"logprob": float("nan")}],
        "has no line; give a file with responses": [],
        "positions, but prompts and responses need": [good | {"response": " is slow ." * 40}],
    }
    for message, lines in cases.items():
        write(directory / "in.jsonl", lines)
        for (said,) in ranks.run(2, run_all, directory, [({}, {"scoring": one})]):
            assert message in said, said
    write(directory / "in.jsonl", [good])
    broken = {"sources": [{"function": f"{directory}/rules.py:broken"}]}
    more = [
        ({"scoring": broken, "tokenizer": str(directory / "tokenizer.model")}, "score 1 of 1 is 'inf', not a finite"),
        ({"scoring": broken}, "tokenizer: no reward model comes with one"),
        ({"scoring": {"sources": [{"checkpoint": "x", "normalize": True}]}}, "normalize follows the steps of a run"),
        ({"batch_size": 5}, "batch_size: 5 is not a multiple of 2 data-parallel ranks"),
        ({"out": str(directory / "in.jsonl")}, "is the file of the responses, which it would replace"),
        ({"scoring": {"sources": [{"verify": "number"}]}, "tokenizer": str(directory / "tokenizer.model")}, None),
    ]
    for rank in ranks.run(2, run_all, directory, [({}, overrides) for overrides, _ in more]):
        for said, (_, message) in zip(rank, more, strict=True):
            assert message is None or message in said, said
