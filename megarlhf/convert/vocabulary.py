"""The number of ids of a tokenizer, read from its files."""

from __future__ import annotations

from pathlib import Path

from megarlhf.config import UserError
from megarlhf.convert import huggingface
from megarlhf.convert.storage import understood


def size(files: dict[str, Path | str]) -> int | None:
    """The largest id + 1 of the tokenizer in `files` (name -> file); None if they do not show it."""
    with understood(str(next(iter(files.values()), ""))):
        return _size(files)


def _size(files: dict[str, Path | str]) -> int | None:
    if "tokenizer.json" in files:
        content = huggingface.read_json(files["tokenizer.json"])
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    elif "vocab.json" in files:
        ids = list(huggingface.read_json(files["vocab.json"]).values())
        if "added_tokens.json" in files:
            ids += huggingface.read_json(files["added_tokens.json"]).values()
    elif "tokenizer.model" in files:
        import sentencepiece

        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(files["tokenizer.model"])).vocab_size()
        except (OSError, RuntimeError):
            raise UserError(f"{files['tokenizer.model']}: not a SentencePiece model; restore the file")
    else:
        return None
    if not all(type(index) is int and index >= 0 for index in ids):
        raise ValueError("the tokenizer's ids must be whole numbers; restore the file")
    return max(ids, default=-1) + 1
