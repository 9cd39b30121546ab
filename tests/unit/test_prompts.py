"""Prompts: tokenized, cut as detail G2 says, padded at the left, shared out."""

import json

import numpy as np
import pytest
import torch

from megarlhf.config import UserError
from megarlhf.data.prompts import PromptLoader, PromptsConfig, load_prompts
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.train.serve_reward import ServeRewardConfig, _request
from tests.unit.test_data import CHATML, CONVERSATION, save_hf

TEXTS = ["One two. Three four. Five", "The quick brown fox.", "no period here", "End. "]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_hf(tmp_path_factory.mktemp("hf")))


@pytest.fixture
def load(tmp_path, tokenizer):
    """Prompts of the texts, or of lines as they are, under some configuration."""

    def run(texts=TEXTS, lines=None, keep=True, **fields):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines or [json.dumps({"prompt": text}) for text in texts]) + "\n")
        return load_prompts(tokenizer, PromptsConfig(str(path), **fields), keep_records=keep)

    return run


def shown(tokenizer, prompts):
    return [tokenizer.decode(ids) for ids in prompts.tokens]


def test_prompts_keep_their_beginning(load, tokenizer):
    prompts, report = load(length=8, truncate="end")
    whole = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in TEXTS]
    assert [ids.tolist() for ids in prompts.tokens] == [ids[:8] for ids in whole]
    long = [line for line, ids in enumerate(whole, start=1) if len(ids) > 8]
    assert long and report.truncated.count == len(long) and report.truncated.first[0].endswith(f":{long[0]}")
    assert f"{len(long)} cut at the end to 8 tokens ({report.path}:{long[0]}" in report.summary()
    assert list(prompts.texts) == TEXTS


def test_prompts_may_keep_their_end(load, tokenizer):
    prompts, report = load(length=8)  # the default
    assert [ids.tolist() for ids in prompts.tokens] == [
        [tokenizer.bos_id, *tokenizer.encode(text)[-7:]] for text in TEXTS
    ]
    assert "cut at the start to 8 tokens" in report.summary()
    prompts, report = load(length=64, add_bos=False)
    assert shown(tokenizer, prompts) == TEXTS and not report.truncated.count


def test_long_prompts_may_be_dropped(load, tokenizer):
    prompts, report = load(length=8, truncate="drop")
    whole = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in TEXTS]
    assert [ids.tolist() for ids in prompts.tokens] == [ids for ids in whole if len(ids) <= 8]
    long = tuple(line for line, ids in enumerate(whole, start=1) if len(ids) > 8)
    assert long and (report.long.count, report.truncated.count) == (len(long), 0)
    assert f"{len(long)} dropped (more than 8 tokens) ({report.path}:{long[0]}" in report.summary()


def test_between_periods(load, tokenizer):
    """Detail P3: behind the first period, up to the last one that fits."""
    prompts, report = load(length=64, start_text=".", end_text=".", add_bos=False)
    assert shown(tokenizer, prompts) == [" Three four."]
    assert report.dropped.count == 3 and "3 dropped (no start_text or end_text)" in report.summary()


def test_left_padding_and_shares(load, tokenizer):
    prompts, _ = load(length=8)
    whole = PromptLoader(prompts, length=8, global_batch=6, pad_id=999, seed=3)
    batches = [whole.batch(step) for step in range(2)]
    for step, batch in enumerate(batches):
        assert torch.equal(batch.sequence_ids, torch.arange(6 * step, 6 * step + 6))
        assert ((batch.tokens == 999) == ~batch.valid).all() and batch.valid[:, -1].all()
        assert (batch.valid[:, 1:] >= batch.valid[:, :-1]).all()  # padding at the left alone
        for rank in range(2):
            loader = PromptLoader(prompts, length=8, global_batch=6, pad_id=999, seed=3, dp_rank=rank, dp_size=2)
            part, want = loader.batch(step), batch.select(slice(3 * rank, 3 * rank + 3))
            assert torch.equal(part.tokens, want.tokens) and torch.equal(part.sequence_ids, want.sequence_ids)
    seen = [tuple(row[row != 999].tolist()) for batch in batches for row in batch.tokens]
    assert all(seen.count(tuple(ids.tolist())) == 3 for ids in prompts.tokens)  # 12 rows: three epochs of 4
    with pytest.raises(UserError, match="6 prompts cannot be shared evenly by 4"):
        PromptLoader(prompts, length=8, global_batch=6, pad_id=999, dp_size=4)
    one = prompts.rows(np.array([2]), np.array([7]), length=8, pad_id=999)
    assert one.sequence_ids.tolist() == [7] and tokenizer.decode(one.tokens[0][one.valid[0]])


LINES = [
    {"q": "dropped", "answer": "no period"},
    {"answer": "#### 72", "q": "One two. Three.", "tests": [{"in": [1, -2.5, 1e300], "out": None}], "ok": True},
    {"q": "Four. Five.", "deep": {"a": {"b": [[], {}]}}, "text": "\u6f22 \ud800", "big": 2**70},
    {"q": "Six. Seven.", "prompt": "of another key"},
]


def test_records_are_the_lines(load):
    """Every key and every JSON value; of the prompt that was kept, whatever was dropped before it."""
    prompts, _ = load(lines=list(map(json.dumps, LINES)), prompt_key="q", length=64, start_text=".", end_text=".")
    assert prompts.records(range(3)) == LINES[1:]
    assert prompts.records([2, 0, 0]) == [LINES[3], LINES[1], LINES[1]]
    first, again = prompts.records([0, 0])
    first["tests"][0]["in"].clear()
    first["answer"] = "another"
    assert again == LINES[1] and prompts.records([0]) == [LINES[1]]  # nobody changes the data set


def test_batches_carry_the_ids_of_their_prompts(load):
    prompts, _ = load(length=64)
    loader = PromptLoader(prompts, length=64, global_batch=6, pad_id=999, seed=3, dp_rank=1, dp_size=2)
    for batch in map(loader.batch, range(5)):
        for tokens, valid, row in zip(batch.tokens, batch.valid, batch.prompt_ids.tolist(), strict=True):
            assert tokens[valid].tolist() == prompts.tokens[row].tolist()
            assert prompts.records([row]) == [{"prompt": prompts.texts[row]}]


TALK = CONVERSATION[:4]  # ends with the user's turn


def test_conversations_are_rendered_with_the_generation_prompt(tmp_path):
    """As transformers renders them, under either key; beside texts, which are read as ever."""
    from transformers import AutoTokenizer

    directory = save_hf(tmp_path / "hf", "{{ bos_token }}" + CHATML)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    rows = [
        {"messages": TALK, "answer": "slow"}, {"prompt": "The sea", "messages": TALK}, {"prompt": TALK, "n": [1, None]},
    ]  # fmt: skip
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, report = load_prompts(ours, PromptsConfig(str(tmp_path / "x.jsonl"), length=128))
    want = theirs.apply_chat_template(TALK, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompts.tokens[0].tolist() == want == prompts.tokens[2].tolist() and want[0] == ours.bos_id != want[1]
    assert prompts.tokens[1].tolist() == [ours.bos_id, *ours.encode("The sea")]
    assert prompts.records(range(3)) == rows and not report.bad.count
    rendered = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert list(prompts.texts) == [rendered.removeprefix("<s>"), "The sea", rendered.removeprefix("<s>")]
    size = len(want)
    exact, _ = load_prompts(ours, PromptsConfig(str(tmp_path / "x.jsonl"), length=size))
    assert len(exact) == 3
    short, report = load_prompts(ours, PromptsConfig(str(tmp_path / "x.jsonl"), length=size - 1))
    assert (
        [place[-2:] for place in report.long.first] == [":1", ":3"]
        and len(short) == 1
        and short.records([0]) == rows[1:2]
    )
    assert f"2 dropped (more than {size - 1} tokens) ({report.path}:1, " in report.summary()
    bare, _ = load_prompts(ours, PromptsConfig(str(tmp_path / "x.jsonl"), length=128), keep_records=False)
    assert bare.records([0]) == [{"prompt": prompts.texts[0]}]


@pytest.mark.parametrize("marks", [False, True])
def test_half_a_surrogate_pair_beside_the_content_is_of_its_line(tmp_path, marks):
    """Where the template writes it: no tokenizer can encode it. Elsewhere it reaches the record."""
    template = CHATML.replace("m['content']", "m['content'] + (m['name'] or '')")
    if marks:
        template += "{% generation %}{% endgeneration %}"
    row = {"messages": [{"role": "user", "content": "hi", "name": "\ud800"}], "other": "\ud800"}
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n' + json.dumps(row) + "\n")
    config = PromptsConfig(str(tmp_path / "x.jsonl"))
    with pytest.raises(UserError, match="x.jsonl:2: the chat template writes a key of a message that has half a surr"):
        load_prompts(load_tokenizer(save_hf(tmp_path / "names", template)), config)
    prompts, _ = load_prompts(load_tokenizer(save_hf(tmp_path / "plain", CHATML)), config)
    assert prompts.records([1]) == [row]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CONVERSATION}, "'messages' ends with the assistant's message, where the assistant is to answer"),
        ({"prompt": CONVERSATION}, "'prompt' ends with the assistant's message"),
        ({"prompt": [{"role": "user", "content": ""}]}, "'prompt': message 1: the content is empty"),
        ({"messages": [{"role": "human", "content": "a"}]}, "'messages': message 1: unknown role 'human'; known: "),
        ({"messages": "text"}, "'messages' must be a list of messages"),
        ({"messages": TALK, "x": "y" * 2**21}, "the keys of the line take "),
        ({"messages": TALK}, r"[^ ]*: the tokenizer has no chat template; use one"),
    ],
)
def test_bad_conversations(load, row, message):
    with pytest.raises(UserError, match=f"prompts.jsonl:2: {message}") as caught:
        load(lines=['{"prompt": "a"}', json.dumps(row)])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="prompts.jsonl:1: end_text cuts texts, and this prompt is a conversation"):
        load(lines=[json.dumps({"messages": TALK})], end_text=".")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": "  "}'], "prompts.jsonl:2: 'prompt' is empty"),
        (['{"prompt": "a"}', "", '{"text": "a"}'], r"prompts.jsonl:3: no key 'prompt' \(found: text\)"),
        (['{"prompt": 1}'], "prompts.jsonl:1: 'prompt' must be a string, not int"),
        (["{"], "prompts.jsonl:1: not JSON"),
        (['{"prompt": "a", "x": [{"y": NaN}]}'], "prompts.jsonl:1: a number is NaN or infinite"),
        (['{"prompt": "a", "x": 1e999}'], "prompts.jsonl:1: a number is NaN or infinite"),
        ([json.dumps({"prompt": "a", "x": "y" * 2**21})], "prompts.jsonl:1: the keys beside 'prompt' take 2097161 by"),
        ([json.dumps({"prompt": "a", "x": [1] * 2**17})], "prompts.jsonl:1: the keys beside 'prompt' have 131075 val"),
        (['{"prompt": "a", "x": ' + "[" * 15 + "]" * 15 + "}"], "prompts.jsonl:1: the line has more than 15 lists and"),
        (["", " "], "no prompt is left"),
    ],
)
def test_bad_lines_stop(load, lines, message):
    with pytest.raises(UserError, match=message) as caught:
        load(lines=lines)
    assert "\n" not in str(caught.value)


def test_the_largest_record_fits_in_a_request(load):
    """What is read is not refused by the reference server in the middle of a run: bytes, values, depth."""
    deep = {"x": None}
    for _ in range(14):
        deep = {"x": deep}
    for other in ({"x": "\xe9" * (2**20 - 10)}, {"x": [1] * (2**17 - 12)}, deep):
        prompts, _ = load(lines=[json.dumps({"prompt": "a"} | other)])
        request = {"version": 2, "id": "1", "prompts": ["a"], "responses": ["b"], "records": prompts.records([0])}
        body = json.dumps(request).encode()
        assert len(body) < ServeRewardConfig(function="a:b").max_request_mb * 2**20
        assert _request(body)[-1] == [{"prompt": "a"} | other]


def test_programs_without_records_do_not_look_at_them(load):
    prompts, report = load(
        lines=['{"prompt": "a", "x": [NaN]}', json.dumps({"prompt": "b", "x": "y" * 2**24})], keep=False
    )
    assert prompts.records([0, 1]) == [{"prompt": "a"}, {"prompt": "b"}] and not report.bad.count


def test_some_bad_lines_may_pass(load):
    prompts, report = load(lines=['{"prompt": "a"}', '{"prompt": ""}'], max_bad_fraction=0.5)
    assert len(prompts) == 1 and report.bad.first[0].endswith(":2: 'prompt' is empty")


@pytest.mark.parametrize("fields", [dict(length=1), dict(max_bad_fraction=2.0)])
def test_bad_settings(fields):
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: "):
        PromptsConfig("x", **fields)
