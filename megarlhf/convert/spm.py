"""A SentencePiece model for transformers.

From a `tokenizer.model` without a `tokenizer.json`, transformers makes other tokens than SentencePiece: it reads
neither the model's normalization nor its rule for a leading space. So this module writes the model as a
`tokenizer.json`, and compares the tokens of transformers with those of SentencePiece before the conversion ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from megarlhf.config import UserError

FILES = ("tokenizer.json", "tokenizer_config.json")
SPACE = "\u2581"
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type
TEXTS = (
    "", " ", "  ", "\n", "\t", "a", " a", "a ", "  a", "a  ", "   a   b   ", "a\n\nb", "\n a", "a \n",
    "\ta\t\tb", "a\r\nb", "Hello, world!", " The quick  brown fox.", "12 + 7 = 19",
    "def f(x):\n    return  x ** 2\n", "http://a.b/c?d=e&f#g", "naïve café e\u0301 ﬁne ½ Ⅷ ① ﷺ",
    "日本語のテキスト、です。", "中文 字符", "한국어 문장", "русский текст", "العربية نص", "עברית",
    "हिन्दी पाठ", "ไทย", "🙂👩\u200d👩\u200d👧 🇩🇪", "\u00a0\u200b\u3000x\ufeff", "\u2581\u2581x \u2581",
    "\x00\x01\x7f", "a" * 40, " " * 17 + "x" + " " * 9, "aAbB" * 9, "\ud7ff\ue000\U0010ffff", "…—“”",
    "xyzzy\u2028plugh",
)  # fmt: skip


def files(model: Path) -> dict[str, str]:
    """The text of FILES for the SentencePiece `model`, by name."""
    proto = _proto(model)
    pieces = {index: piece.piece for index, piece in enumerate(proto.pieces)}
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    special = {f"{name}_token": pieces[index] for name, index in ids.items() if index in pieces}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **special,
    }
    exact = sentencepiece.SentencePieceProcessor(model_file=str(model))
    blank_lines = exact.normalize("a\r\nb") == exact.normalize("a\n\nb")
    try:
        text = _build(proto, blank_lines).to_str()
    except Exception:  # the Rust library's; what it cannot say `difference` will find
        text = "{}"
    return dict(zip(FILES, (text, json.dumps(config, indent=2) + "\n"), strict=True))


def difference(model: Path, directory: Path) -> str | None:
    """The difference between the tokens of transformers with the files in `directory` and those of SentencePiece with
    `model`, on TEXTS and on texts with the model's own symbols; None if there is none."""
    from transformers import AutoTokenizer

    exact = sentencepiece.SentencePieceProcessor(model_file=str(model))
    try:
        theirs = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the files make it raise
        return f"transformers cannot load it ({type(error).__name__})"
    symbols = [piece.piece for piece in _proto(model).pieces if piece.type == USER]
    for text in [*TEXTS, *(f"a {symbol}b{symbol} {symbol}" for symbol in symbols[:50])]:
        want, got = exact.encode(text), theirs.encode(text, add_special_tokens=False)
        if got != want:
            return f"of {text!r} transformers makes {got[:8]}, SentencePiece {want[:8]}"
        # SentencePiece shows an unknown token as a sign of its own, and takes its own sign of a space for one
        whole = exact.unk_id() not in want and SPACE not in text
        if whole and theirs.decode(got, clean_up_tokenization_spaces=False) != exact.decode(want):
            return f"transformers decodes {want[:8]} to another text than SentencePiece"
    return None


def keep_if_equal(directory: Path) -> tuple[str, ...]:
    """Move a SentencePiece model without an equal in transformers to a directory where transformers does not look: no
    tokenizer is better than wrong tokens. Returns a note for the user."""
    (model,) = directory.glob("*.model")
    other = difference(model, directory)
    if other is None:
        return ()
    (directory / "sentencepiece").mkdir()
    model.rename(directory / "sentencepiece" / model.name)
    for name in FILES:
        (directory / name).unlink()
    return (f"transformers cannot tokenize as this SentencePiece model ({other}); it is in sentencepiece/, where "
            "AutoTokenizer does not find it: encode with the package sentencepiece",)  # fmt: skip


def _proto(model: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    try:
        return sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    except Exception as error:  # protobuf's, whose class depends on its version
        raise UserError(f"{model}: not a SentencePiece model ({type(error).__name__}); restore the file")


def _build(proto: Any, blank_lines: bool) -> tokenizers.Tokenizer:
    """`blank_lines`: whether carriage returns count as line breaks."""
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    vocabulary = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    unknown = next((piece.piece for piece in proto.pieces if piece.type == UNKNOWN), None)
    if trainer.model_type == BPE:
        model: Any = models.BPE(
            vocabulary, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
    else:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        model = models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    out = tokenizers.Tokenizer(model)
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        if blank_lines:  # tokenizers looks "\r\n" up as one character
            steps.append(normalizers.Replace("\r\n", "\n\n"))
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{SPACE}+\\z"), ""))
    out.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        undo.append(decoders.Strip(" ", left=1, right=0))
    out.decoder = decoders.Sequence(undo)
    for piece in proto.pieces:
        if piece.type in (CONTROL, UNKNOWN, USER):
            token = AddedToken(piece.piece, normalized=False, special=piece.type != USER)
            (out.add_tokens if piece.type == USER else out.add_special_tokens)([token])
    return out


def _merges(proto: Any) -> list[tuple[str, str]]:
    """SentencePiece joins the pair that makes the piece of the highest score; tokenizers joins the first in a list."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (NORMAL, UNUSED)}
    merges = [
        (-score, len(text[:cut]), text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]
