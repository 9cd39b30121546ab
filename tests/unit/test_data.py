"""Tokenizers, supervised examples and the loader. The tokenizers are trained here, on a few sentences."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from megarlhf import config as configuration
from megarlhf.config import UserError
from megarlhf.data.loader import Loader, permutation
from megarlhf.data.packing import first_fit
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.data.tokenizer import check_vocabulary, load_tokenizer
from megarlhf.stream import num_tokens
from tests.ranks import ROOT

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.", "A film that moves, slowly, and never arrives.",
    "Question: what is two plus two? Answer: it is four.", "Naïve café prices: 3.50, 4.75 and 12.00!",
    "She sells sea shells by the sea shore; the shells she sells are sea shells.",
]  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models do: an answer is written differently once it is not the last one.
FORGETFUL_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% if loop.last %}<think>{% endif %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>{% endif %}{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}" + CHATML
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And the sea?"},
    {"role": "assistant", "content": "The sea is slow."},
]


def save_hf(directory, template=None, eos="<|im_end|>", pad="<pad>"):
    """A byte-level BPE tokenizer in the Hugging Face format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token=eos, pad_token=pad)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sp_path(tmp_path_factory):
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sp") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(prefix), model_type="bpe", vocab_size=340,
        byte_fallback=True, pad_id=3, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("hf"), CHATML)


@pytest.fixture(scope="module")
def sp(sp_path):
    return load_tokenizer(sp_path)


@pytest.fixture(scope="module")
def hf(hf_path):
    return load_tokenizer(hf_path)


@pytest.fixture(params=["sp", "hf"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(path, tokenizer, **options):
    return load_sft(path, tokenizer, SFTDataConfig(train=path, **options))


@pytest.fixture
def text_rows(tmp_path):
    """37 examples of very different lengths: no multiple of any batch in these tests."""
    return write(tmp_path / "text.jsonl", [{"text": f"{i} " + "sea " * (i * 7 % 11)} for i in range(37)])


# -------------------------------------------------------------------------------------------------- tokenizers


def test_text_survives_the_tokenizer(tokenizer):
    for text in SENTENCES:
        ids = tokenizer.encode(text)
        assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(torch.tensor([tokenizer.pad_id, *ids, tokenizer.pad_id])) == text
        assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([]) == ""


def test_prompt_and_continuation_are_the_text(sp, hf):
    """Of a whole text cut at every token; a byte of a character may be alone only where the bytes are tokens."""
    exact = 0
    for tokenizer in (sp, hf):
        for text in SENTENCES:
            ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
            for cut in range(1, len(ids)):
                prompt = tokenizer.decode(ids[:cut])
                joined = prompt + tokenizer.continuation(ids[:cut], ids[cut:])
                assert joined == tokenizer.decode(ids) or "\ufffd" in prompt, (text, cut)
                exact += joined == tokenizer.decode(ids)
    assert exact > 100
    prompt, response = sp.encode("The quick brown"), sp.encode("fox")
    assert sp.decode(response) == "fox" and sp.continuation(prompt, response) == " fox"
    assert hf.continuation([hf.vocab_size + 5], hf.encode(" fox")) == " fox"  # an id that is no token


def test_special_ids(sp, hf):
    assert (sp.bos_id, sp.eos_id, sp.pad_id, sp.vocab_size) == (1, 2, 3, 340)
    assert (hf.bos_id, hf.eos_id, hf.pad_id, hf.vocab_size) == (1, 3, 0, 320)
    assert sp.decode([1, *sp.encode("A film"), 2]) == "<s>A film</s>"
    assert hf.decode([1, *hf.encode("A film"), 3]) == "<s>A film<|im_end|>"


def test_pad_that_is_eos_is_no_pad(tmp_path):
    assert load_tokenizer(save_hf(tmp_path, pad="<|im_end|>")).pad_id is None


def test_saved_tokenizer_outlives_its_source(sp_path, hf_path, tmp_path):
    for number, path in enumerate([sp_path, hf_path]):
        source = tmp_path / f"source{number}"
        shutil.copytree(path if path.is_dir() else path.parent, source)
        (source / "model.safetensors").write_bytes(b"weights")
        tokenizer = load_tokenizer(source if path.is_dir() else source / path.name)
        shutil.rmtree(source)
        for generation in range(2):
            target = tmp_path / f"saved{number}{generation}"
            tokenizer.save(target)
            assert not (target / "model.safetensors").exists()
            original = path if path.is_dir() else path.parent
            assert all(file.read_bytes() == (original / file.name).read_bytes() for file in target.iterdir())
            again = load_tokenizer(target)
            assert [again.encode(text) for text in SENTENCES] == [tokenizer.encode(text) for text in SENTENCES]
            assert vars_of(again) == vars_of(tokenizer)
            tokenizer = again


def vars_of(tokenizer):
    return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size


def test_save_leaves_a_models_config_alone(hf_path, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(hf_path, source)
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(source)
    tokenizer.save(target)
    assert (target / "config.json").read_text() == '{"model_type": "gpt2"}'
    (target / "config.json").write_text('{"model_type": "llama"}')
    tokenizer.save(target)
    assert (target / "config.json").read_text() == '{"model_type": "llama"}'


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hf/tiny_gpt2", (0, 0, None, 503)),
        ("hf/tiny_llama", (1, 2, None, 500)),
        ("hf/tiny_llama_mha", (1, 2, None, 500)),
        ("hf/tiny_llama/tokenizer.model", (1, 2, None, 500)),
        ("nemo2/tiny_llama/context/nemo_tokenizer", (1, 2, None, 500)),
    ],
)
def test_tokenizers_of_other_projects(shared, tmp_path, path, expected):
    tokenizer = load_tokenizer(shared / "fixtures" / path)
    assert vars_of(tokenizer) == expected
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert vars_of(again) == expected
    for text in SENTENCES[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert again.encode(text) == tokenizer.encode(text)


def broken_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    return tmp_path


def without_eos(tmp_path):
    return save_hf(tmp_path, eos=None)


def garbage_model(tmp_path):
    (tmp_path / "x.model").write_bytes(b"\x00garbage")
    return tmp_path / "x.model"


def two_models(tmp_path):
    (tmp_path / "a.model").touch()
    (tmp_path / "b.model").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp_path: tmp_path / "missing", "no such tokenizer; give"),
        (lambda tmp_path: tmp_path, "no tokenizer in this directory (neither"),
        (two_models, "(2 .model files); name"),
        (garbage_model, "not a SentencePiece model; give"),
        (broken_json, "cannot load this tokenizer"),
        (without_eos, "has no EOS token; set"),
    ],
)
def test_unusable_tokenizers(tmp_path, make, message):
    path = make(tmp_path)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert message in str(caught.value) and str(caught.value).startswith(f"{path}: ")


def test_vocabulary_must_fit_the_model(hf):
    check_vocabulary(hf, 320)
    with pytest.raises(UserError, match="ids up to 319, but the model's vocabulary has 319 entries; use"):
        check_vocabulary(hf, 319)


# -------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("template", [CHATML, FORGETFUL_GENERATION])
def test_chat_marks_what_the_assistant_says(tmp_path, template):
    tokenizer = load_tokenizer(save_hf(tmp_path, template))
    ids, mask = tokenizer.chat(CONVERSATION)
    assert len(ids) == len(mask)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    said = tokenizer.decode(token for token, counts in zip(ids, mask, strict=True) if counts)
    assert said == "It is four.<|im_end|>The sea is slow.<|im_end|>"


def test_chat_refuses_what_it_cannot_tell_apart(tmp_path, sp):
    forgetful = load_tokenizer(save_hf(tmp_path / "forgetful", FORGETFUL))
    with pytest.raises(ValueError, match="message 3: its tokens cannot be told apart") as caught:
        forgetful.chat(CONVERSATION)
    assert not isinstance(caught.value, UserError)
    strict = load_tokenizer(save_hf(tmp_path / "strict", STRICT))
    with pytest.raises(ValueError, match="template refuses the conversation: the user speaks first"):
        strict.chat(CONVERSATION)
    with pytest.raises(ValueError, match="the assistant speaks first; begin"):
        load_tokenizer(save_hf(tmp_path / "chatml", CHATML)).chat(CONVERSATION[2:])
    for tokenizer in [sp, load_tokenizer(save_hf(tmp_path / "plain"))]:
        with pytest.raises(UserError, match="no chat template; use one"):
            tokenizer.chat(CONVERSATION)


# -------------------------------------------------------------------------------------------------- examples


def test_three_kinds_of_lines(hf, tmp_path):
    rows = [
        {"prompt": "What is two plus two?", "response": " It is four.", "id": 7},
        {"messages": CONVERSATION},
        {"text": "The quick brown fox"},
    ]
    examples, report = load(write(tmp_path / "x.jsonl", [rows[0], "", *rows[1:]]), hf)
    seen = []
    for k in range(3):
        tokens, mask, segments = examples.row(k)
        assert segments is None and not mask[0]
        seen.append((hf.decode(tokens), hf.decode(tokens[mask])))
    assert seen[0] == ("<s>What is two plus two? It is four.<|im_end|>", " It is four.<|im_end|>")
    assert seen[1][1] == "It is four.<|im_end|>The sea is slow.<|im_end|>"
    assert seen[2] == ("<s>The quick brown fox<|im_end|>", "The quick brown fox<|im_end|>")
    assert (report.num_lines, report.num_examples, report.num_tokens) == (3, 3, len(examples.tokens))
    assert report.num_loss_tokens == examples.mask.sum()


def test_prompt_tokens_are_those_of_the_prompt_alone(tokenizer, tmp_path):
    pairs = [("The sea", " shells"), ("The sea", "shells"), ("sea sh", "ore"), ("", "A film"), ("Answer: ", "four")]
    path = write(tmp_path / "x.jsonl", [{"prompt": p, "response": r} for p, r in pairs])
    examples, _ = load(path, tokenizer)
    for k, (prompt, response) in enumerate(pairs):
        tokens, mask, _ = examples.row(k)
        before = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        assert tokens[: len(before)].tolist() == before and tokens[-1] == tokenizer.eos_id
        assert tokenizer.decode(tokens[len(before) : -1]).strip() == response.strip()
        assert mask.tolist() == [False] * len(before) + [True] * (len(tokens) - len(before))


def test_text_is_joined_as_written(tokenizer, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"prompt": "3", "response": ".50!"}])
    examples, _ = load(path, tokenizer, add_bos=False)
    assert tokenizer.decode(examples.row(0)[0][:-1]) == "3.50!"  # no space that SentencePiece would put before ".50!"


def test_options(hf, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"q": "What is two?", "a": " Four."}])
    keys = {"prompt_key": "q", "response_key": "a"}
    plain = load(path, hf, **keys)[0]
    no_bos = load(path, hf, add_bos=False, **keys)[0]
    everything = load(path, hf, loss_on="all", **keys)[0]
    assert no_bos.tokens.tolist() == plain.tokens[1:].tolist()
    assert everything.mask.tolist() == [False] + [True] * (len(plain.tokens) - 1)


def test_long_examples_are_cut_or_dropped_and_reported(hf, tmp_path):
    rows = [{"prompt": "The", "response": " sea"}, {"prompt": "The", "response": " sea" * 50}]
    rows += [{"prompt": "sea " * 50, "response": "ends"}, {"prompt": "The", "response": " sea"}]
    path = write(tmp_path / "x.jsonl", rows)
    examples, report = load(path, hf, max_length=12)
    short = examples.lengths[0]
    assert (
        examples.lengths.tolist() == [short, 12, short]
        and report.truncated.first == (f"{path}:2",)
        and report.dropped.first == (f"{path}:3",)
    )
    assert examples.row(2)[0].tolist() == examples.row(0)[0].tolist()
    assert examples.row(2)[1].tolist() == examples.row(0)[1].tolist()
    assert examples.row(0)[0][-1] == hf.eos_id and hf.eos_id not in examples.row(1)[0]
    assert f"1 cut to 12 tokens ({path}:2); 1 dropped (the prompt leaves no room) ({path}:3)" in report.summary()
    with pytest.raises(UserError, match=r"^.*y.jsonl: 0 examples.* 1 dropped .*y.jsonl:1.; no example is left: give"):
        load(write(tmp_path / "y.jsonl", rows[2:3]), hf, max_length=12)


BAD = {
    '{"prompt": "a", "response"': "not JSON (Expecting ':' delimiter at column 27)",
    '["prompt", "response"]': "must be a JSON object, not list",
    '{"prompt": "a"}': "no key 'response' (found: prompt)",
    '{"response": "a"}': "no key 'prompt' (found: response)",
    '{"question": "a", "answer": "b"}': "none of the keys 'messages', 'response' or 'text' (found: question, answer)",
    '{"prompt": "a", "response": 4}': "'response' must be a string, not int",
    '{"prompt": "a", "response": " \\n"}': "'response' is empty",
    '{"text": ""}': "'text' is empty",
    '{"text": "\\ud800"}': "'text' has half a surrogate pair",
    '{"messages": []}': "'messages' must be a list of messages",
    '{"messages": ["hi"]}': "'messages': message 1 must have a role and a content",
    '{"messages": [{"role": "user"}]}': "'messages': message 1: no key 'content' (found: role)",
    '{"messages": [{"role": "user", "content": "a"}]}': "no assistant message to learn from",
    '{"messages": [{"role": "assistant", "content": "a"}]}': "the assistant speaks first",
    '{"messages": [{"role": "assistant", "content": ""}]}': "message 1: the assistant's content is empty",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_malformed_lines(hf, tmp_path, line):
    path = write(tmp_path / "x.jsonl", [{"text": "fine"}, "", line, {"text": "fine"}])
    with pytest.raises(UserError) as caught:
        load(path, hf)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and BAD[line] in message and "\n" not in message
    assert "1 of 3 lines are malformed, more than max_bad_fraction 0.01 allows; mend them or raise it" in message
    examples, report = load(path, hf, max_bad_fraction=0.5)
    assert len(examples) == 2 and report.bad.count == 1
    assert f"1 malformed and skipped ({path}:3: " in report.summary() and "\n" not in report.summary()


def test_bytes_that_are_not_text(hf, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n{"text": "caf\xc3\xa9"}\n')
    examples, report = load(str(tmp_path / "x.jsonl"), hf, max_bad_fraction=1.0)
    assert report.bad.first[0].endswith(":2: not UTF-8 (byte 14)") and hf.decode(examples.row(1)[0][1:-1]) == "café"


def test_files_that_cannot_be_read(hf, sp, tmp_path):
    for path, message in [
        (tmp_path / "none.jsonl", "cannot read the examples (No such file"),
        (tmp_path, "directory); give"),
    ]:
        with pytest.raises(UserError) as caught:
            load(str(path), hf)
        assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    with pytest.raises(UserError, match="empty.jsonl: 0 examples.*no example is left"):
        load(write(tmp_path / "empty.jsonl", []), hf, packing=True)
    path = write(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}] * 3)
    with pytest.raises(UserError) as caught:  # once, and not as so many malformed lines
        load(path, sp, max_bad_fraction=1.0)
    assert str(caught.value).startswith(f"{path}:1: {sp.path}: the tokenizer has no chat template")


@pytest.mark.parametrize(
    ("values", "message"), [({"max_length": 1}, "max_length"), ({"max_bad_fraction": 2}, "max_bad")]
)
def test_config_section(values, message):
    section = configuration.from_dict(SFTDataConfig, {"train": "a.jsonl", "packing": True}, "run.yaml")
    assert configuration.from_dict(SFTDataConfig, configuration.to_dict(section), "run.yaml") == section
    with pytest.raises(UserError, match=f"run.yaml: {message}"):
        configuration.from_dict(SFTDataConfig, {"train": "a.jsonl", **values}, "run.yaml")


# -------------------------------------------------------------------------------------------------- packing


def test_packing_keeps_every_example_whole(tokenizer, text_rows):
    plain, _ = load(text_rows, tokenizer)
    packed, report = load(text_rows, tokenizer, packing=True, max_length=64)
    again, _ = load(text_rows, tokenizer, packing=True, max_length=64)
    assert (packed.tokens == again.tokens).all() and (packed.offsets == again.offsets).all()
    assert len(packed) == report.num_rows < len(plain) == report.num_examples
    assert packed.lengths.max() <= 64

    found = []
    for k in range(len(packed)):
        tokens, mask, segments = packed.row(k)
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}  # whole, numbered 1, 2, ... in order
        for number in range(1, segments[-1] + 1):
            part = segments == number
            assert not mask[part][0]
            found.append((tokens[part].tolist(), mask[part].tolist()))
    expected = [(tokens.tolist(), mask.tolist()) for tokens, mask, _ in map(plain.row, range(len(plain)))]
    assert sorted(found) == sorted(expected)


def test_packing_is_first_fit(sp, text_rows):
    plain, _ = load(text_rows, sp)
    order, counts = first_fit(plain.lengths, 50)
    ends = np.cumsum(counts)
    packed = [plain.lengths[order[end - count : end]].tolist() for end, count in zip(ends, counts, strict=True)]
    rows: list[list[int]] = []  # lengths, by the definition
    for length in plain.lengths.tolist():
        fitting = [row for row in rows if sum(row) + length <= 50]
        if fitting:
            fitting[0].append(length)
        else:
            rows.append([length])
    assert packed == rows


# -------------------------------------------------------------------------------------------------- loader


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dp_size", [2, 3, 6])
def test_ranks_together_are_one_rank(hf, text_rows, packing, dp_size):
    data, _ = load(text_rows, hf, packing=packing, max_length=64)
    options = dict(global_batch=6, seed=3, pad_id=hf.pad_id)
    one = Loader(data, **options)
    many = [Loader(data, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    together = list(zip(*[loader.epoch_batches() for loader in many], strict=True))
    pairs = [(one.batch(step), [loader.batch(step) for loader in many]) for step in range(20)]
    for whole, parts in pairs + list(zip(one.epoch_batches(), together, strict=True)):
        assert [len(part) for part in parts] == [6 // dp_size] * dp_size
        assert sorted(row for part in parts for row in bare_rows(part)) == sorted(bare_rows(whole))
        sizes = [int(num_tokens(part).sum()) for part in parts]
        assert max(sizes) - min(sizes) <= num_tokens(whole).max()
        assert all(part.tokens.dtype == torch.int64 and part.prompt_len == 1 for part in (whole, *parts))


def bare_rows(batch):
    """(tokens, mask, segments) of every row, without padding."""
    real = batch.segments > 0
    counted = torch.nn.functional.pad(batch.mask, (1, 0))
    return [tuple(tuple(x[k][real[k]].tolist()) for x in (batch.tokens, counted, batch.segments))
            for k in range(len(batch))]  # fmt: skip


def test_a_batch_depends_on_its_step_alone(hf, text_rows):
    data, _ = load(text_rows, hf)
    straight = [Loader(data, global_batch=5, seed=1).batch(step).tokens for step in range(20)]
    again = Loader(load(text_rows, hf)[0], global_batch=5, seed=1)
    for step in [13, 2, 19, 13, 0]:  # a resumed run starts anywhere
        assert torch.equal(again.batch(step).tokens, straight[step])
    other = Loader(data, global_batch=5, seed=2).batch(0).tokens
    assert other.shape != straight[0].shape or not torch.equal(other, straight[0])


def test_shuffle_never_changes():
    """Saved runs depend on it."""
    assert permutation(7, 0, 8).tolist() == [7, 4, 6, 1, 5, 0, 2, 3]
    assert permutation(7, 1, 8).tolist() == [7, 4, 3, 0, 1, 5, 2, 6]


@pytest.mark.parametrize("global_batch", [1, 6, 37, 50, 100])
def test_every_epoch_has_every_example_once(hf, text_rows, global_batch):
    data, _ = load(text_rows, hf)
    names = [tuple(data.row(k)[0]) for k in range(len(data))]
    assert len(set(names)) == len(data) == 37
    loader = Loader(data, global_batch=global_batch, pad_id=hf.pad_id)
    seen = []
    for step in range(-(-3 * 37 // global_batch)):
        tokens = loader.batch(step).tokens
        assert tokens.shape[0] == global_batch
        seen += [tuple(row[row != hf.pad_id].tolist()) for row in tokens]
    epochs = [seen[start : start + 37] for start in (0, 37, 74)]
    assert all(sorted(epoch) == sorted(names) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != names


@pytest.mark.parametrize("packing", [False, True])
def test_padding_never_counts_and_nothing_is_lost(sp, text_rows, packing):
    data, _ = load(text_rows, sp, packing=packing, max_length=64)
    loader = Loader(data, global_batch=6)  # pads with 0
    batches = list(loader.epoch_batches())
    assert len(batches) == len(loader) == -(-len(data) // 6)
    assert sum(int(batch.mask.sum()) for batch in batches) == data.mask.sum()
    row = 0
    for batch in batches:
        assert len(batch) == 6
        assert batch.tokens.shape[1] == data.lengths[row : row + 6].max()
        for k in range(6):
            if row == len(data):
                assert not batch.mask[k].any()
                continue
            tokens, mask, segments = data.row(row)
            assert (
                batch.tokens[k, : len(tokens)].tolist() == tokens.tolist() and not batch.tokens[k, len(tokens) :].any()
            )
            assert batch.mask[k, : len(tokens) - 1].tolist() == mask[1:].tolist()
            assert not batch.mask[k, len(tokens) - 1 :].any()
            expected = [1] * len(tokens) if segments is None else segments.tolist()
            assert batch.segments[k, : len(tokens)].tolist() == expected
            assert not batch.segments[k, len(tokens) :].any()
            if packing:
                crossing = batch.segments[k, 1:] != batch.segments[k, :-1]
                assert not (batch.mask[k] & crossing).any()  # no token is predicted from the example before it
            row += 1


def test_batches_must_divide(hf, text_rows):
    data, _ = load(text_rows, hf)
    with pytest.raises(
        UserError, match="global batch of 6 rows cannot be shared evenly by 4 data-parallel ranks; make"
    ):
        Loader(data, global_batch=6, dp_size=4)


# -------------------------------------------------------------------------------------------------- the script


@pytest.mark.shared
def test_prepared_public_data(shared, tmp_path):
    tokenizer = load_tokenizer(shared / "fixtures/hf/tiny_llama/tokenizer.model")
    for kind, source, count in [("sst2", "sst2/dev.tsv", 872), ("gsm8k", "gsm8k/test.jsonl", 1319)]:
        target = tmp_path / f"{kind}.jsonl"
        command = [sys.executable, ROOT / "examples/prepare_sft.py", kind, shared / "data" / source, target]
        subprocess.run(command, check=True)
        examples, report = load(str(target), tokenizer, max_length=2048)
        assert len(examples) == count and not report.bad.count and not report.truncated.count
    tokens, mask, _ = examples.row(0)
    assert tokenizer.decode(tokens[mask]).endswith("#### 18</s>")
