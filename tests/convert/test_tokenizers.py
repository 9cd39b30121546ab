"""A tokenizer that is only a SentencePiece model: megarlhf and, after the export, transformers make its very ids."""

from __future__ import annotations

import io
import json
import random
import shutil

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megarlhf.convert import convert, spm
from megarlhf.data.tokenizer import load_tokenizer
from tests.convert.models import save

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two   spaces  ", "日本語 の テキスト です", "русский текст и ещё",
    "def f(x):", "    return x + 1", "aaaa bbbb aaab baaa", "12345 67890", "tab\tand\ttab", "naïve café ½",
] * 3  # fmt: skip


def train(path, kind: str, rule: str, **options):
    out = io.BytesIO()
    options = {"vocab_size": 380, "byte_fallback": True, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, model_type=kind, normalization_rule_name=rule,
        minloglevel=3, **options,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())
    return path


def texts() -> list[str]:
    """Beside the converter's own: random ones of what is hard to get right."""
    rng = random.Random(0)
    parts = ["a", "b", "The", "fox", " ", "  ", "\n", "\t", ".", "日本", "текст", "é", "½", "🙂", "   ", "\r\n", "7"]
    return [*spm.TEXTS, *("".join(rng.choices(parts, k=rng.randrange(1, 14))) for _ in range(200))]


KINDS = {
    "bpe": ("bpe", "identity", dict(remove_extra_whitespaces=False)),  # Llama's
    "bpe, normalized": ("bpe", "nmt_nfkc", {}),  # the trainer's own defaults
    "bpe, no space in front": ("bpe", "nmt_nfkc", dict(add_dummy_prefix=False, remove_extra_whitespaces=False)),
    "unigram": ("unigram", "identity", dict(remove_extra_whitespaces=False)),
    "bpe, folded": ("bpe", "nfkc_cf", {}),
    "without bytes": ("unigram", "nmt_nfkc", dict(byte_fallback=False, vocab_size=90)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_makes_the_same_ids(kind, tmp_path):
    model = train(tmp_path / "lone" / "tokenizer.model", *KINDS[kind][:2], **KINDS[kind][2])
    exact, ours = sentencepiece.SentencePieceProcessor(model_file=str(model)), load_tokenizer(model.parent)
    files = tmp_path / "files"
    files.mkdir()
    shutil.copy(model, files)
    (files / "config.json").write_text(json.dumps({"model_type": "llama"}))  # whose own tokenizer is another
    for name, text in spm.files(model).items():
        (files / name).write_text(text)
    theirs, exported = AutoTokenizer.from_pretrained(files), load_tokenizer(files)
    assert spm.difference(model, files) is None
    for text in texts():
        want = exact.encode(text)
        for got in (theirs.encode(text), theirs(text)["input_ids"], ours.encode(text), exported.encode(text)):
            assert got == want, text
    for tokens in (theirs, exact, ours, exported):
        eos = tokens.eos_token_id if tokens is theirs else tokens.eos_id
        assert (eos() if callable(eos) else eos) == 2


def export(tmp_path, **options):
    """(tokenizer.model, exported directory) of a tiny model whose tokenizer is only that."""
    model = train(tmp_path / "ours" / "tokenizer" / "tokenizer.model", "bpe", "identity", **options)
    save("llama", tmp_path / "source")
    convert.hf2megatron(tmp_path / "source", tmp_path / "converted")
    shutil.copytree(tmp_path / "converted" / "actor", tmp_path / "ours" / "actor")
    (tmp_path / "ours" / "actor" / "hf_config.json").unlink()
    return model, convert.megatron2hf(tmp_path / "ours", tmp_path / "back")


def test_export(tmp_path):
    model, summary = export(tmp_path, remove_extra_whitespaces=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    exact = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert all(theirs.encode(text) == exact.encode(text) for text in texts())
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == model.read_bytes() and not summary.notes


def test_what_transformers_cannot_do_is_not_left_to_chance(tmp_path):
    """A symbol of the user's is no place to put a space behind, which tokenizers does."""
    model, summary = export(tmp_path, user_defined_symbols=["<sep>"], remove_extra_whitespaces=False)
    assert "cannot tokenize as this SentencePiece model" in str(summary) and "<sep>" in str(summary)
    assert (tmp_path / "back" / "sentencepiece" / "tokenizer.model").read_bytes() == model.read_bytes()
    with pytest.raises((OSError, ValueError)):
        AutoTokenizer.from_pretrained(tmp_path / "back")


@pytest.mark.shared
def test_export_of_nemo(shared, tmp_path):
    source = shared / "fixtures" / "nemo1" / "tiny_llama_mha_legacy_tp1.nemo"
    convert.COMMANDS["nemo2megatron"](source, tmp_path / "ours")
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back")
    ours, theirs = load_tokenizer(tmp_path / "ours" / "tokenizer"), AutoTokenizer.from_pretrained(tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "ours" / "tokenizer").iterdir()) == ["tokenizer.model"]
    assert [theirs.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]
