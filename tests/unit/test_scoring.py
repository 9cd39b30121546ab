"""Truncation and texts, Python functions, remote scorers (real processes), and what is refused before a run starts."""

import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip

from megarlhf import cli
from megarlhf import config as configuration
from megarlhf.batch import Batch, Scores, Signals
from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.data.prompts import PromptSet
from megarlhf.data.tokenizer import load_tokenizer, token_id
from megarlhf.experience.sampler import SamplerConfig
from megarlhf.experience.scorer import Scorer, ScoringConfig, SourceConfig, truncate
from megarlhf.experience.sources import FunctionScorer, RemoteScorer, checked_answers
from megarlhf.experience.texts import place, texts
from megarlhf.train import generate, samples, scoring
from tests.distributed.layouts import GPT2, LLAMA
from tests.scoring import bad_server, make_rollout, reward_server, train_tokenizer
from tests.unit.test_data import save_hf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("sp") / "tokenizer"))


# ------------------------------------------------------------------------------------------------ truncation (P5)


@pytest.mark.parametrize("stop", [False, True], ids=["fixed length", "stop at EOS"])
@pytest.mark.parametrize("after", [0, 3, 5, 6])
def test_truncation_equals_a_loop(stop, after):
    rollout = make_rollout(64, stop=stop, vocab=16)  # so few ids that a row has the token often, sometimes twice
    token, first = 12, rollout.prompt_len
    rollout.tokens[:, first:][~rollout.mask] = token  # padding has any id, and is none
    read, accepted = truncate(rollout, token=token, after=after)
    for row in range(len(rollout)):
        ids = rollout.tokens[row, first:].tolist()
        places = [j for j in range(after, len(ids)) if ids[j] == token and rollout.mask[row, j]]
        end = places[0] + 1 if places else len(ids)
        expected = [bool(rollout.mask[row, j]) and j < end for j in range(len(ids))]
        assert read.mask[row].tolist() == expected
        assert read.segments[row].tolist() == rollout.segments[row, :first].tolist() + [int(x) for x in expected]
        assert accepted[row].item() == bool(places)
    assert accepted.any() == (after < 6) and not accepted.all()
    assert torch.equal(read.tokens, rollout.tokens) and rollout.segments[:, first:].sum() == rollout.mask.sum()


def test_texts_are_what_is_scored(tokenizer):
    dot = token_id(tokenizer, ".", "truncate_token")
    words = tokenizer.encode("the sea is slow")
    rollout = make_rollout(2, prompt=len(words) + 2, response=len(words) + 3)
    pad, first = 9999, rollout.prompt_len
    rows = [
        [pad, tokenizer.bos_id, *words, *words, dot, tokenizer.eos_id, 12],
        [pad, pad, *words, *words, 302, dot, tokenizer.eos_id],  # 302: of a vocabulary that was rounded up
    ]
    rollout.tokens.copy_(torch.tensor(rows))
    rollout.segments.copy_(rollout.tokens != pad)
    rollout.mask.copy_(rollout.tokens[:, first:] != pad)
    prompts, responses = texts(rollout, tokenizer)
    assert prompts == ["the sea is slow"] * 2
    assert responses[0].startswith(" the sea is slow.</s>") and responses[1] == " the sea is slow."
    prompts, responses = texts(truncate(rollout, token=dot, after=0)[0], tokenizer)
    assert (prompts, responses) == (["the sea is slow"] * 2, [" the sea is slow."] * 2)


def test_generated_lines_are_the_text(tokenizer):
    """Prompt + response is the text of the tokens, also with a tokenizer that has no space of its own in front."""
    words = tokenizer.encode("the sea is slow")
    rollout = make_rollout(2, prompt=len(words) + 1, response=len(words) + 1)
    rollout.tokens.copy_(torch.tensor([[tokenizer.bos_id, *words, *words, tokenizer.eos_id]] * 2))
    rollout.segments.fill_(1)
    rollout.mask.fill_(True)
    rollout.mask[1, 2:] = False
    prompts = PromptSet([], ["the sea is slow"] * 2, [b'{"answer": 4}', b"{}"])
    for stop, end in ((True, ""), (False, "</s>")):
        config = SamplerConfig(stop_at_eos=stop)
        first, second = generate.records(rollout, prompts, tokenizer, config)
        assert [line["prompt_id"] for line in (first, second)] == [0, 1]  # equal texts are different prompts
        assert first["record"] == {"answer": 4} and "record" not in second
        assert first["prompt_tokens"] == [tokenizer.bos_id, *words]
        assert [line.get("ended") for line in (first, second)] == ([True, False] if stop else [None, None])
        assert first["prompt"] + first["response"] == "the sea is slow the sea is slow" + end
        assert first["tokens"] == [*words, tokenizer.eos_id] and second["tokens"] == words[:2]
        assert second["prompt"] + second["response"] == tokenizer.decode([*words, *words[:2]])
    ids = [np.array([tokenizer.bos_id, *words]), np.array(words), np.array(words[:2])]
    assert (
        generate.unlike_their_text(PromptSet(ids, ["the sea is slow"] * 3, [b"{}"] * 3), tokenizer) == 1
    )  # one was cut


def test_samples_show_the_records_with_long_values_cut(tokenizer):
    def records(ids: list[int]) -> list[dict]:
        values = {"answer": "72", "n": 3, "long": "é" * 100_000, "tests": [{"x": 1}, "y" * 100_000]}
        return [{"question": "q", **values, "edge": "z" * samples.LONGEST} for _ in ids]

    sources = ScoringConfig(sources=[SourceConfig(checkpoint="never loaded", name="a")])
    scorer = Scorer(sources, None, tokenizer, load_model=lambda path: None, records=records)
    rollout = make_rollout(2, vocab=16)
    zeros = torch.zeros_like(rollout.mask, dtype=torch.float32)
    batch = Batch(rollout, Scores(torch.ones(2), rollout.mask, rollout.mask[:, 0]), Signals(zeros, zeros))
    (row,) = samples.sample_rows(batch, scorer, "question", 1)
    record = row["record"]
    assert (record["answer"], record["n"], record["edge"]) == ("72", 3, "z" * samples.LONGEST)
    assert record["long"] == "é" * samples.LONGEST + "…"
    assert record["tests"].startswith('[{"x": 1}, "yyy') and record["tests"].endswith("y…")
    assert len(json.dumps(row, ensure_ascii=False)) < 10_000 and "question" not in record


def test_the_truncation_token(tokenizer, tmp_path):
    save_hf(tmp_path)
    other = load_tokenizer(tmp_path)
    pieces = tokenizer.tokens()
    assert (
        pieces[token_id(tokenizer, ".", "truncate_token")] == "."
        and pieces[token_id(tokenizer, " .", "truncate_token")] == "▁."
    )
    assert (
        token_id(tokenizer, "</s>", "truncate_token") == tokenizer.eos_id
        and pieces[token_id(tokenizer, "▁.", "truncate_token")] == "▁."
    )
    assert (
        token_id(other, ".", "truncate_token") == other.encode(".")[0]
        and token_id(other, "<|im_end|>", "truncate_token") == other.eos_id
    )
    for text in ("never ends", ""):
        with pytest.raises(UserError, match="is not one token behind a word"):
            token_id(tokenizer, text, "truncate_token")


# ------------------------------------------------------------------------------------------------ functions

FUNCTIONS = """
from __future__ import annotations
import dataclasses, functools, sys
import numpy as np, torch

@dataclasses.dataclass
class Rule:
    factor: float
    def __call__(self, prompts, responses):
        return [self.factor * len(response) - len(prompt) for prompt, response in zip(prompts, responses)]

rule = Rule(2.0)
def array(prompts, responses): return np.array(rule(prompts, responses), np.float32)
def tensor(prompts, responses): return torch.tensor(rule(prompts, responses))
def items(prompts, responses): return [torch.tensor(score) for score in rule(prompts, responses)]
def correct(prompts, responses): return [response == "abc" for response in responses]
def raises(prompts, responses): return [1 / (len(response) - 1) for response in responses]
def leaves(prompts, responses): sys.exit("no licence")
def short(prompts, responses): return [1.0]
def nan(prompts, responses): return [1.0, float("nan")]
def infinite(prompts, responses): return [float("-inf"), 1.0]
def huge(prompts, responses): return [1.0, 1e300]
def words(prompts, responses): return ["1.0", 2.0]
def none(prompts, responses): return [None, 2.0]
def nothing(prompts, responses): pass
def lazy(prompts, responses): return (1.0 for _ in responses)
number = 3

def answers(prompts, responses, records): return [record["answer"] for record in records]
def third(prompts, responses, lines): return answers(prompts, responses, lines)
def keyword(prompts, responses, *, records): return answers(prompts, responses, records)
def optional(prompts, responses, scale=2.0, records=None):
    return [scale * number for number in answers(prompts, responses, records)]
def anything(prompts, responses, **more): return answers(prompts, responses, **more)
class Judge:
    def __call__(self, prompts, responses, records): return answers(prompts, responses, records)
judge = Judge()
def maybe(prompts, responses, records=None):
    return answers(prompts, responses, records) if records else [0.0 for _ in responses]
def whatever(prompts, responses, **more): return maybe(prompts, responses, **more)
@functools.wraps(answers)
def looks_up(prompts, responses): return answers(prompts, responses, [{"answer": 7.0} for _ in responses])
@functools.wraps(answers)
def passes(*args, **kwargs): return answers(*args, **kwargs)
def without(prompts, responses, scale=2.0): return [scale for _ in responses]
def spoils(prompts, responses, records):
    for record in records: record.clear()
    return [0.0 for _ in responses]
def one(prompts): return [0.0 for _ in prompts]
def four(prompts, responses, records, more): return [0.0 for _ in prompts]
def other(prompts, responses, *, model): return [0.0 for _ in prompts]

def steps(prompts, responses): return [[(1, 0.5), (3, torch.tensor(2))], 1.5]
def no_steps(prompts, responses): return [[], ((1, -1.0),)]
def backwards(prompts, responses): return [[(2, 0.5), (1, 0.5)], 0.0]
def twice(prompts, responses): return [0.0, [(1, 0.5), (1, 0.5)]]
def beyond(prompts, responses): return [[(4, 0.5)], 0.0]
def at_zero(prompts, responses): return [[(0, 0.5)], 0.0]
def halves(prompts, responses): return [[(1.5, 0.5)], 0.0]
def unscored(prompts, responses): return [[(1, float("nan"))], 0.0]
def bare(prompts, responses): return [[0.5], 0.0]
def mapping(prompts, responses): return [[{1: 0.5, 2: 0.5}], 0.0]
def triples(prompts, responses): return [[(1, 0.5, 2)], 0.0]
def digits(prompts, responses): return [10**5000, 0.0]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rules.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("name", ["rule", "array", "tensor", "items"])
def test_functions_score_texts(functions, name):
    assert FunctionScorer(f"{functions}:{name}")(["a", "bc"], ["abc", "b"]) == [5.0, 0.0]


def test_a_function_of_a_module():
    assert FunctionScorer("tests.unit.test_scoring:lengths")(["a", "b"], ["abc", "b"]) == [3.0, 1.0]


def lengths(prompts, responses):
    return [len(response) for response in responses]


RECORDS = [{"answer": 4.0}, {"answer": 2.0}]


@pytest.mark.parametrize(
    ("name", "factor"), {"answers": 1, "third": 1, "keyword": 1, "optional": 2, "anything": 1, "judge": 1}.items()
)
def test_functions_get_records(functions, name, factor):
    scorer = FunctionScorer(f"{functions}:{name}")
    assert scorer(["a", "bc"], ["abc", "b"], RECORDS) == [4.0 * factor, 2.0 * factor]


@pytest.mark.parametrize("name", ["answers", "third", "keyword", "judge", "passes"])
def test_functions_that_need_records_are_not_called_without(functions, name):
    scorer = FunctionScorer(f"{functions}:{name}")
    assert scorer.needs_records
    with pytest.raises(UserError, match=f":{name}: takes records, but there are none"):
        scorer(["a", "bc"], ["abc", "b"])


def test_functions_that_can_do_without_records(functions):
    for name in ("maybe", "whatever"):
        scorer = FunctionScorer(f"{functions}:{name}")
        assert scorer(["a", "bc"], ["abc", "b"], RECORDS) == [4.0, 2.0]
        assert not scorer.needs_records and scorer(["a", "bc"], ["abc", "b"]) == [0.0, 0.0]


def test_parameters_are_those_of_the_wrapper(functions):
    """functools.wraps gives a wrapper the signature of what it wraps, but it is the wrapper that is called."""
    assert FunctionScorer(f"{functions}:looks_up")(["a", "bc"], ["abc", "b"], RECORDS) == [7.0, 7.0]
    assert FunctionScorer(f"{functions}:passes")(["a", "bc"], ["abc", "b"], RECORDS) == [4.0, 2.0]


@pytest.mark.parametrize(("name", "expected"), {"rule": [5.0, 0.0], "without": [2.0, 2.0]}.items())
def test_functions_without_records_are_called_as_before(functions, name, expected):
    assert FunctionScorer(f"{functions}:{name}")(["a", "bc"], ["abc", "b"], RECORDS) == expected


@pytest.mark.parametrize("name", ["one", "four", "other"])
def test_functions_with_wrong_parameters_are_refused_at_once(functions, tokenizer, name):
    config = ScoringConfig(sources=(SourceConfig(function=f"{functions}:{name}"),))
    with pytest.raises(UserError, match=rf":{name}: has the parameters \(.*\), but is called with .*change its par"):
        scoring.check_sources(config, tokenizer, ParallelConfig(), vocab_size=300, prompt_length=8, response_length=8)


def test_functions_score_steps(functions):
    assert FunctionScorer(f"{functions}:steps")(["a", "bc"], ["abc", "b"]) == [[(1, 0.5), (3, 2.0)], 1.5]
    assert FunctionScorer(f"{functions}:no_steps")(["a", "bc"], ["abc", "b"]) == [[], [(1, -1.0)]]


def test_steps_stand_at_the_token_that_completes_them(tokenizer, tmp_path):
    """Against a search from the left, for characters of several tokens, tokens of several characters, and a space that
    belongs to the token behind it."""
    save_hf(tmp_path)
    for tokens in (tokenizer, load_tokenizer(tmp_path)):
        prompt, response = tokens.encode("the sea"), tokens.encode("\U0001f600\xe9 is slow. \u6f22\u5b57 x")
        text = tokens.continuation(prompt, response)
        prefixes = [tokens.continuation(prompt, response[: j + 1]) for j in range(len(response))]
        columns = [
            next(j for j, prefix in enumerate(prefixes) if prefix.startswith(text[:end]))
            for end in range(1, len(text) + 1)
        ]
        assert len(set(columns)) < len(text) and len(set(columns)) < len(response)  # neither one to one
        found = place([(end, float(end)) for end in range(1, len(text) + 1)], prompt, response, tokens)
        assert found == [(column, float(end)) for end, column in enumerate(columns, start=1)]
        assert place([(len(text), 1.0)], prompt, response, tokens) == [(len(response) - 1, 1.0)]
        assert place([], prompt, response, tokens) == [] and place(2.0, prompt, response, tokens) == 2.0


def byte_fallback(directory):
    """A Hugging Face tokenizer as Llama 2 has it: what it has no token for is spelt in bytes. The id of byte b is
    3 + b."""
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *spelt, "\u2581", "a", "b"])}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    parts = [Replace("\u2581", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)]
    made.decoder = tokenizers.decoders.Sequence(parts)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


def test_a_run_of_bytes_is_many_steps(tmp_path, monkeypatch):
    """While the last character of a run of bytes is incomplete, the tokenizer shows none of those before it."""
    tokens = byte_fallback(tmp_path)
    prompt, four = tokens.encode("a b "), tokens.encode("\u4f60\u597d\u5417\u554a")
    assert len(four) == 12 and tokens.decode(four[:4]) == "\ufffd" * 4
    at = [(end, float(end)) for end in range(1, 5)]
    assert place(at, prompt, four, tokens) == [(3 * end - 1, score) for end, score in at]
    assert place(at, [*prompt, four[0]], four[1:], tokens) == [(end - 1, score) for end, score in at]  # no characters
    generator = random.Random(0)
    for _ in range(200):  # against the definition, for runs of all kinds between words
        text = "".join(generator.choice(" ab\xe9\u4f60\u597d\U0001f600") for _ in range(12))
        prompt, response = tokens.encode(text[:4]), tokens.encode(text[4:])
        text = tokens.continuation(prompt, response)
        expected = [
            next(j for j in range(len(response)) if tokens.continuation(prompt, response[: j + 1])[:end] == text[:end])
            for end in range(1, len(text) + 1)
        ]
        found = place([(end, 0.0) for end in range(1, len(text) + 1)], prompt, response, tokens)
        assert [column for column, _ in found] == expected, text

    decode, work = tokens.decode, []
    monkeypatch.setattr(tokens, "decode", lambda ids: work.append(len(ids)) or decode(ids))
    prompt, response = tokens.encode("ab " * 100), tokens.encode("a b\u4f60 " * 100)
    place([(end, 0.0) for end in range(1, 500)], prompt, response, tokens)
    assert sum(work) < 10 * (len(prompt) + len(response))  # the prompt is not decoded for each step


def test_right_or_wrong(functions):
    assert FunctionScorer(f"{functions}:correct")(["a", "bc"], ["abc", "b"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raises", r"failed at .*rules.py:17 \(ZeroDivisionError: .*zero\); mend it"),
        ("leaves", r"failed at .*rules.py:18 \(SystemExit: no licence\)"),
        ("short", "returned 1 scores for 2 responses"),
        ("nan", r"score 2 of 2 is 'nan', not a finite number \(response 'b'\)"),
        ("infinite", "score 1 of 2 is '-inf', not a finite number"),
        ("huge", r"score 2 of 2 is '1e\+300', not a finite number"),
        ("words", "score 1 of 2 is '1.0', not a finite number"),
        ("none", "score 1 of 2 is 'None', not a finite number"),
        ("nothing", "returned NoneType, not a list"),
        ("lazy", "returned generator, not a list"),
        ("missing", "has no function 'missing'"),
        ("number", "has no function 'number'"),
        ("backwards", r"score 1 of 2: step 2 is '\(1, 0.5\)', not \[end, score\] .* within the 3 characters"),
        ("twice", "score 2 of 2: step 2 is"),
        ("beyond", "score 1 of 2: step 1 is"),
        ("at_zero", "score 1 of 2: step 1 is"),
        ("halves", "score 1 of 2: step 1 is"),
        ("unscored", r"score 1 of 2: step 1 is '\(1, nan\)'"),
        ("bare", "score 1 of 2: step 1 is '0.5'"),
        ("mapping", "score 1 of 2: step 1 is"),
        ("triples", "score 1 of 2: step 1 is"),
        ("digits", "score 1 of 2 is 'a number of thousands of digits', not a finite number"),
    ],
)
def test_wrong_functions(functions, name, expected):
    with pytest.raises(UserError, match=expected) as error:
        FunctionScorer(f"{functions}:{name}")(["a", "bc"], ["abc", "b"])
    assert str(error.value).startswith(f"function {functions}:{name}: ") and "\n" not in str(error.value)


def test_functions_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("import math\nmath.no_such_thing\n")
    for name, expected in {
        "rule": "must have the form module:function",
        f"{tmp_path}/nowhere.py:rule": "no file .*nowhere.py",
        "no_such_module:rule": "cannot import no_such_module .*No module named 'no_such_module'",
        f"{tmp_path}/broken.py:rule": "cannot import .*broken.py .AttributeError",
        "json:rule": "json has no function 'rule'",
    }.items():
        with pytest.raises(UserError, match=expected):
            FunctionScorer(name)


# ------------------------------------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def bad():
    with bad_server() as url:
        yield url


def remote(url, *, timeout=5.0, retries=0, batch_size=64):
    return RemoteScorer(url, timeout=timeout, retries=retries, batch_size=batch_size)


PROMPTS, RESPONSES = ["p"] * 5, ["a", "bb", "ccc", "dddd", "eeeee"]


def test_batches_are_split(bad):
    assert remote(bad + "/limited/", batch_size=2)(PROMPTS, RESPONSES) == [1, 2, 3, 4, 5]
    assert remote(bad + "/limited/", batch_size=5)(PROMPTS, RESPONSES) == [1, 2, 3, 4, 5]  # refused, then halved
    with pytest.raises(UserError, match="full/score: the server refuses a request with one response .HTTP 413"):
        remote(bad + "/full", batch_size=3)(PROMPTS, RESPONSES)


def test_failures_that_pass_are_tried_again(bad):
    remote(bad + "/well").check_health()
    assert remote(bad + "/flaky", retries=2)(PROMPTS, RESPONSES) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("failing", r"HTTP 500: out of memory, also after 1 retries in \d+ s"),
        ("slow", r"no answer within 0.2 s, also after 1 retries"),
        ("hangs-up", r"\(?Remote(end)?Disconnected|ConnectionReset"),
        ("strict", r"the server refuses the request \(HTTP 400: only English here\)"),
        ("short", "returned 4 scores for 5 responses"),
        ("long", "returned 6 scores for 5 responses"),
        ("nan", r"score 5 of 5 is 'nan', not a finite number \(response 'eeeee'\)"),
        ("null", "score 5 of 5 is 'None'"),
        ("text", "score 5 of 5 is '4.2'"),
        ("nokey", r"the answer has no key 'scores' \(found: rewards\)"),
        ("list", "the answer is not a JSON object"),
        ("html", "the answer is not a JSON object .*It works.*is this a reward server"),
    ],
)
def test_bad_answers(bad, how, expected):
    retries = 1 if how in ("failing", "slow") else 0
    with pytest.raises(UserError, match=expected) as error:
        remote(f"{bad}/{how}", timeout=0.2 if how == "slow" else 5.0, retries=retries)(PROMPTS, RESPONSES)
    assert str(error.value).startswith(f"{bad}/{how}/score: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["trickle", "trickle-body"])
def test_the_whole_answer_has_a_deadline(bad, how):
    """A byte every 0.05 s is no silence; each read of it succeeds."""
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no answer within 0.5 s, also after 1 retries"):
        remote(f"{bad}/{how}", timeout=0.5, retries=1)(PROMPTS, RESPONSES)
    assert time.monotonic() - started < 20  # for ever, without


def test_the_deadline_is_of_the_look_up_too(monkeypatch):
    """A resolver that answers when the deadline is over: nobody has waited for it, and nothing is sent any more."""
    look_up, given_up, ended = socket.getaddrinfo, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        given_up.wait(20)
        ended.set()
        return look_up(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(UserError, match=r"no answer within 0.2 s, also after 0 retries"):
            remote(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2, retries=0)(PROMPTS, RESPONSES)
        assert not ended.is_set()
        given_up.set()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(20)
            assert connection.recv(1) == b""


def test_an_answer_has_a_limit_and_is_not_looked_for_elsewhere(bad, monkeypatch):
    with pytest.raises(UserError, match="endless/score: the answer has more than 1049676 bytes"):
        remote(f"{bad}/endless", timeout=60)(PROMPTS, RESPONSES)
    with pytest.raises(
        UserError, match=r"sends elsewhere \(HTTP 307.*http://127.0.0.1:9/score\), which is not followed"
    ):
        remote(f"{bad}/elsewhere")(PROMPTS, RESPONSES)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert remote(f"{bad}/well")(PROMPTS, RESPONSES) == [1, 2, 3, 4, 5]


def test_dead_and_sick_servers(bad):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match=rf"^http://127.0.0.1:{port}/health: ConnectionRefusedError"):
        remote(f"http://127.0.0.1:{port}").check_health()
    with pytest.raises(UserError, match=r"sick/health: HTTP 503"):
        remote(bad + "/sick").check_health()


def test_patience_ends_before_the_other_ranks_do(bad, monkeypatch):
    monkeypatch.setattr("megarlhf.experience.sources.PATIENCE", 1.0)
    started = time.monotonic()
    with pytest.raises(UserError, match="no answer within"):
        remote(bad + "/slow", retries=5)(PROMPTS, RESPONSES)
    assert time.monotonic() - started < 2


def bare_scorer(tokenizer, outside, records=None):
    """A scorer without the other ranks and without reward models."""
    scorer = object.__new__(Scorer)
    scorer.tokenizer, scorer.outside, scorer.records = tokenizer, dict(enumerate(outside)), records
    scorer.names = tuple(f"source-{k}" for k in scorer.outside)
    return scorer


def test_records_are_read_for_those_who_take_them(tokenizer, functions, bad):
    asked, rollout = [], make_rollout(2, vocab=16)
    records = lambda ids: asked.append(ids) or [{"answer": 1.0} for _ in ids]  # noqa: E731
    for name in ("without", "answers"):
        bare_scorer(tokenizer, [remote(bad + "/well"), FunctionScorer(f"{functions}:{name}")], records)._ask(rollout)
        assert len(asked) == (name == "answers")


def test_numbers_that_the_penalty_replaced_do_not_spoil_the_batch(tokenizer):
    numbers = torch.tensor([[1.0], [torch.nan], [4.0], [-torch.inf]])
    rows = dict(scores=torch.zeros(4), mask=torch.ones(4, 1).bool(), token_scores=torch.zeros(4, 1), by_source=numbers)
    scorer = bare_scorer(tokenizer, [None])
    found = scorer.metrics(Scores(accepted=torch.tensor([True, False, False, False]), **rows))
    assert found["scores/source-0/mean"] == (5.0, 2.0) and found["scores/source-0/var"].value == 2.25
    found = scorer.metrics(Scores(accepted=torch.tensor([True, True, True, False]), **rows))
    assert found["scores/source-0/mean"][0].isnan()  # this one counts


def test_all_servers_have_one_deadline(tokenizer):
    """What the first takes is missing to the second: other ranks wait for the whole batch."""
    deadlines = []

    class Slow(RemoteScorer):
        def __call__(self, prompts, responses, records=None, deadline=None):
            deadlines.append(deadline)
            time.sleep(0.01)
            return [0.0] * len(prompts)

    servers = [Slow("http://a", timeout=1, retries=0, batch_size=1) for _ in range(2)]
    bare_scorer(tokenizer, servers, lambda ids: [{} for _ in ids])._ask(make_rollout(2, vocab=16))
    assert deadlines[0] is not None and deadlines[0] == deadlines[1]


SERVED = """
import pathlib, time
calls = pathlib.Path(__file__).with_suffix(".calls")
def score(prompts, responses):
    with calls.open("a") as file:
        file.write(f"{len(responses)}\\n")
    if "wait" in prompts:
        time.sleep(1)
    return [0.5 * len(response) if response != "bad" else float("nan") for response in responses]
"""


def test_the_reference_server(tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text(SERVED)
    with reward_server(tmp_path, function=f"{rules}:score") as (url, process):
        remote(url).check_health()
        assert remote(url, batch_size=2)(PROMPTS, RESPONSES) == [0.5, 1, 1.5, 2, 2.5]
        assert rules.with_suffix(".calls").read_text() == "2\n2\n1\n"

        # Asked again for what it still computes, it computes once and answers the second time.
        rules.with_suffix(".calls").unlink()
        assert remote(url, timeout=0.4, retries=2)(["wait"], ["ab"]) == [1.0]
        assert rules.with_suffix(".calls").read_text() == "1\n"

        with pytest.raises(UserError, match=r"HTTP 500: function .*rules.py:score: score 2 of 2 is 'nan'"):
            remote(url)(["p", "p"], ["good", "bad"])
        assert remote(url)(["p"], ["good"]) == [2.0]  # it goes on
        for body in (
            b"{",
            b"[]",
            b'{"id": "1", "prompts": ["a"], "responses": []}',
            b'{"prompts": [], "responses": []}',
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"{url}/score", data=body, timeout=5)
            assert error.value.code == 400 and "prompts and responses" in json.load(error.value)["error"]
        with pytest.raises(UserError, match="HTTP 404: there is no /v1/health"):
            remote(url + "/v1").check_health()
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="ConnectionRefusedError"):
            remote(url)(["p"], ["good"])


JUDGE = """
def score(prompts, responses, records):
    return [[[1, 0.5], [len(r), len(record["tests"][0]["in"])]] if r == "steps" else float(record["answer"] == r)
            for r, record in zip(responses, records)]
"""


def test_the_reference_server_answers_both_protocols(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    records = [{"answer": "7", "tests": [{"in": [1, None, {"a": -1.5e3}]}]}] * 3
    answers = [1.0, 0.0, [(1, 0.5), (5, 3.0)]]
    with reward_server(tmp_path, function=f"{tmp_path}/judge.py:score", max_request_mb=1) as (url, _):
        scorer = remote(url, batch_size=2)
        with pytest.raises(UserError, match="HTTP 400: the function takes records; send them, with version 2"):
            scorer(["p"] * 3, ["7", "8", "steps"], records)  # it does not yet know the server's protocol
        scorer.check_health()
        assert scorer(["p"] * 3, ["7", "8", "steps"], records) == answers
        large = [{"text": "a" * 2**20}]
        with pytest.raises(UserError, match=r"HTTP 413: .*max_request_mb.*; raise the server's"):
            scorer(["p"], ["7"], large)
    (tmp_path / "judge.py").write_text("def score(prompts, responses): return [len(text) for text in responses]\n")
    with reward_server(tmp_path, function=f"{tmp_path}/judge.py:score") as (url, _):
        for scorer in (remote(url), remote(url)):
            assert scorer(["p"], ["abc"], [{"answer": 3}]) == [3.0]  # the old form, then the new one
            scorer.check_health()
            assert scorer.protocol == 2 and scorer(["p"], ["abc"], [{"answer": 3}]) == [3.0]


def test_servers_of_the_old_protocol_get_no_records(bad):
    scorer = remote(bad + "/keys")  # answers with the number of the request's keys
    scorer.check_health()
    assert scorer.protocol == 1 and scorer(["p"], ["r"], [{"answer": 1}]) == [3.0]
    odd = remote(bad + "/odd")
    odd.check_health()
    assert odd.protocol == 1  # "two" means something else there
    newer = remote(bad + "/newer")
    newer.check_health()
    assert newer.protocol == 2 and newer(["p"], ["r"], [{"answer": 1}]) == [5.0]


def test_the_server_refuses_what_it_cannot_serve(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"port: {listener.getsockname()[1]}\nfunction: tests.unit.test_scoring:lengths"
        for content, expected in {
            taken: "cannot listen on 127.0.0.1",
            "port: 1": "give either checkpoint or function",
            "function: no_such_module:score": "cannot import no_such_module",
            f"checkpoint: {tmp_path}/nowhere": "no such directory",
        }.items():
            path.write_text(content)
            assert cli.main(["serve-reward", "--config", str(path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert expected in line


# ------------------------------------------------------------------------------------------------ before a run starts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, "sources.0. must|exactly one of checkpoint, function, url and verify"),
        ({"checkpoint": "a", "url": "http://b"}, "exactly one of checkpoint, function, url and verify"),
        ({"verify": "exact", "function": "a:b"}, "exactly one of checkpoint, function, url and verify"),
        ({"verify": "exactly"}, "verify must be one of exact, number, regex, code"),
        ({"function": "a:b", "answer_key": "x"}, "answer_key: is for verify: exact or number or regex or code"),
        ({"verify": "code", "pattern": "x"}, "pattern: is for verify: exact or number or regex"),
        ({"verify": "regex", "pattern": "(x"}, r"pattern: '\(x' is no regular expression \(missing \)"),
        ({"verify": "regex", "pattern": "x", "answer_key": "y"}, "answer_key: is not read where pattern is the same"),
        ({"verify": "exact", "tolerance": 0.1}, "tolerance: is for verify: number; remove it"),
        ({"verify": "number", "tolerance": -0.1}, "tolerance: must not be negative"),
        ({"verify": "number", "ignore_case": True}, "ignore_case: is for verify: exact or regex"),
        ({"verify": "exact", "sandbox": {"seconds": 3}}, "sandbox: is for verify: code"),
        ({"verify": "code", "sandbox": {"seconds": 0}}, "seconds: must be positive"),
        ({"verify": "code", "sandbox": {"memory_mb": 1}}, "memory_mb: must be at least 64"),
        ({"verify": "regex", "pattern": ""}, "pattern: is empty"),
        ({"url": "localhost:8000"}, "'localhost:8000' is no address of a server; write it as http://host:port"),
        ({"url": "http://host:port"}, "is no address of a server"),
        ({"url": "http://:80"}, "is no address of a server"),
        ({"url": "ftp://host"}, "is no address of a server"),
        ({"url": "http://name:word@host"}, "is no address of a server"),
        ({"url": "http://host/a b"}, "is no address of a server"),
        ({"function": "a:b", "retries": -1}, "retries: must not be negative"),
        ({"function": "a:b", "clip": [1, -1]}, r"clip: must be \[low, high\] with low < high, not \[1.0, -1.0\]"),
        ({"function": "a:b", "clip": [1]}, r"clip: must be \[low, high\]"),
        ({"function": "a:b", "name": "a/b"}, "name: 'a/b' must be of letters"),
        ({"function": "a:b", "name": ""}, "name: '' must be of letters"),
        ({"function": "a:b", "step_token": "."}, "step_token: is for a checkpoint"),
    ],
)
def test_wrong_sources(source, expected):
    with pytest.raises(UserError, match=f"^here: sources.0.\\..*({expected})"):
        configuration.from_dict(ScoringConfig, {"sources": [source]}, "here")


def test_sources_have_names():
    def names(*sources):
        return configuration.from_dict(ScoringConfig, {"sources": list(sources)}, "here").names

    assert names(
        {"checkpoint": "runs/judge one/"}, {"function": "a/rules.py:score"}, {"function": "b:score"},
        {"url": "http://node7:80/x"}, {"url": "https://node7"}, {"function": "c:d", "name": "score-2"},
        {"url": "http://[::1]:80"},
    ) == ("judge-one", "score", "score-3", "node7", "node7-2", "score-2", "1")  # fmt: skip
    with pytest.raises(UserError, match="^here: sources: two of them have the name 'a'; give each its own"):
        names({"function": "a:b", "name": "a"}, {"function": "a:c", "name": "a"})


def reward_directory(path, architecture, tokenizer_path):
    """A checkpoint directory as far as `check` looks into it."""
    (path / "reward").mkdir(parents=True)
    architecture.save(path / "reward")
    if tokenizer_path:
        load_tokenizer(tokenizer_path).save(path / "tokenizer")
    return str(path)


def check(tokenizer, path=None, *, step_token=None, parallel=None, vocab_size=503, response_length=8, **options):
    source = SourceConfig(checkpoint=path, step_token=step_token) if path else SourceConfig(url="http://127.0.0.1:9")
    return scoring.check_sources(
        ScoringConfig(sources=(source,), **options), tokenizer, parallel or ParallelConfig(),
        vocab_size=vocab_size, prompt_length=8, response_length=response_length,
    )  # fmt: skip


def test_checks_of_reward_models(tokenizer, tmp_path):
    good = reward_directory(tmp_path / "good", LLAMA, tokenizer.path)
    assert check(tokenizer, good) == []
    assert "came without a tokenizer" in check(tokenizer, reward_directory(tmp_path / "bare", LLAMA, None))[0]
    save_hf(tmp_path / "hf")
    other = reward_directory(tmp_path / "other", LLAMA, tmp_path / "hf")
    with pytest.raises(UserError, match=r"other: token 0 is '<unk>' to the policy but is '<pad>' to the reward model"):
        check(tokenizer, other)
    assert check(tokenizer, good, step_token=" .") == []
    with pytest.raises(UserError, match="step_token: 'never ends' is not one token"):
        check(tokenizer, good, step_token="never ends")
    with pytest.raises(UserError, match="vocabulary has 503 entries, the policy's 512"):
        check(tokenizer, good, vocab_size=512)
    with pytest.raises(UserError, match="parallel.tensor: 8 does not divide"):
        check(tokenizer, good, parallel=ParallelConfig(tensor=8))
    with pytest.raises(UserError, match="nowhere: no such directory"):
        check(tokenizer, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="64 positions, but prompts and responses need 72"):
        check(tokenizer, reward_directory(tmp_path / "gpt2", GPT2, tokenizer.path), response_length=64)
    (tmp_path / "good" / "reward").rename(tmp_path / "good" / "actor")
    with pytest.raises(UserError, match="holds no 'reward' model; present: actor"):
        check(tokenizer, good)


def test_a_bigger_vocabulary_with_the_same_tokens_will_do(tokenizer, tmp_path):
    """Reward models often got a padding token more."""
    save_hf(tmp_path / "policy")
    save_hf(tmp_path / "reward", pad="<extra>")
    policy, reward = load_tokenizer(tmp_path / "policy"), load_tokenizer(tmp_path / "reward")
    assert reward.vocab_size == policy.vocab_size + 1
    assert check(policy, reward_directory(tmp_path / "model", LLAMA, tmp_path / "reward")) == []
    with pytest.raises(UserError, match="is '<extra>' to the policy but does not exist to the reward model"):
        check(reward, reward_directory(tmp_path / "smaller", LLAMA, tmp_path / "policy"))


def test_checks_of_truncation(tokenizer):
    assert check(tokenizer, truncate_token=".", truncate_after=7) == []
    with pytest.raises(UserError, match="truncate_after: 8 lies behind the last of 8 response tokens"):
        check(tokenizer, truncate_token=".", truncate_after=8)
    with pytest.raises(UserError, match="'never ends' is not one token"):
        check(tokenizer, truncate_token="never ends")


def test_scores_in_float32():
    assert checked_answers([True, 2, 3.0], ["a"] * 3, source="x") == [1.0, 2.0, 3.0]
