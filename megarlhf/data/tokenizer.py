"""Text <-> token ids behind one small interface, for Hugging Face directories and SentencePiece models alike.

transformers and sentencepiece are imported when a tokenizer is loaded, not before: importing them takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from megarlhf.cluster import backend
from megarlhf.config import UserError, open_file

Message = dict[str, str]  # {"role": ..., "content": ...}

_TEMPLATES = ("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
# The files of a Hugging Face tokenizer. config.json is among them because AutoTokenizer chooses the class by the model
# type in it.
_HF_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
    *_TEMPLATES,
)  # fmt: skip
HF_MARKS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_LARGEST_TEMPLATE = 2**20  # bytes
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer at `path`: a Hugging Face directory (also a model's), a SentencePiece `.model` file, or a
    directory written by `Tokenizer.save`. `chat_template`: a Jinja template in the place of its own, as a text (with {{
    or {% in it) or the name of a file; `save` writes it, too.

    Nothing is downloaded and no code from the directory is run. Raises UserError if there is no tokenizer, if it
    cannot be read, if it has no EOS token, and for a template that cannot be used.
    """
    tokenizer = _load(Path(path))
    if chat_template is not None:
        tokenizer.set_chat_template(*_template_text(chat_template))
    return tokenizer


def _load(path: Path) -> Tokenizer:
    if path.is_file():
        return _SentencePiece(path)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such tokenizer; give a Hugging Face tokenizer directory or a SentencePiece .model file "
            "(nothing is downloaded)"
        )
    if any((path / name).is_file() for name in HF_MARKS):
        return _HuggingFace(path)
    models = sorted(file for file in path.glob("*.model") if file.is_file())
    if len(models) != 1:
        found = f"{len(models)} .model files" if models else "neither tokenizer.json nor a .model file"
        raise UserError(
            f"{path}: no tokenizer in this directory ({found}); name a tokenizer's directory or .model file"
        )
    return _SentencePiece(models[0])


def _template_text(given: str) -> tuple[str, str]:
    """(the text of a chat template, its name for messages)."""
    if "{{" in given or "{%" in given:
        return given, "the given text"
    with open_file(given, "the chat template", "give a Jinja file or, as chat_template, the template itself") as file:
        content = file.read(_LARGEST_TEMPLATE + 1)
    if len(content) > _LARGEST_TEMPLATE:
        raise UserError(f"chat_template: {given} has more than {_LARGEST_TEMPLATE} bytes; give a Jinja file")
    try:
        return content.decode(), given
    except UnicodeDecodeError as error:
        raise UserError(f"chat_template: {given}: not UTF-8 (byte {error.start + 1}); give a Jinja file")


def token_id(tokenizer: Tokenizer, text: str, key: str) -> int:
    """The one token of `text` after a word (a SentencePiece tokenizer would put a space before a separate text), or the
    token with that name. Raises UserError, naming the configuration's `key`, if there is neither."""
    word = tokenizer.encode("a")
    ids = tokenizer.encode("a" + text)
    if ids[:-1] == word:
        return ids[-1]
    named = [index for index, name in tokenizer.tokens().items() if name == text]
    if not named:
        raise UserError(
            f"{key}: {text!r} is not one token behind a word to the tokenizer {tokenizer.path}; give a text that is, "
            "such as '.' or ' .', or a token's name"
        )
    return named[0]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse (UserError) a tokenizer with ids beyond a model's vocabulary. A smaller tokenizer is fine: many models
    round their vocabulary up."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{tokenizer.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary has "
            f"{vocab_size} entries; use the tokenizer the model was trained with"
        )


def check_same(tokenizer: Tokenizer, path: str, directory: Path | None, model: str) -> str | None:
    """Refuse (UserError) a model whose tokenizer, in `directory`, gives an id of the policy's `tokenizer` another
    meaning. Returns a note if something could not be checked, or may matter. `path` and `model`, such as "reward
    model", are for messages."""
    if directory is None:
        return f"{path}: came without a tokenizer, so whether it reads tokens as the policy does is not checked"
    if tokenizer.came_with(directory):
        return None
    theirs = load_tokenizer(directory)
    own = theirs.tokens()
    for token, name in sorted(tokenizer.tokens().items()):
        if own.get(token) != name:
            other = f"is {own[token]!r}" if token in own else "does not exist"
            raise UserError(
                f"{path}: token {token} is {name!r} to the policy but {other} to the {model}; use a {model} trained "
                f"with the policy's tokenizer, {tokenizer.path}"
            )
    if theirs.chat_template != tokenizer.chat_template:
        return (
            f"{path}: has another chat template than the policy; it may have learned from other forms of conversations"
        )
    return None


class Tokenizer(ABC):
    """The interface of all tokenizers. Made by `load_tokenizer`."""

    path: Path  # where it was loaded from; for messages
    bos_id: int | None
    eos_id: int
    pad_id: int | None  # a token for padding alone; None if it is also BOS, EOS or UNK
    vocab_size: int  # largest id + 1
    chat_template: str | None = None  # a Jinja template

    def __init__(self, path: Path, files: Iterable[Path], root: Path):
        self.path = path
        # Kept in memory: a run outlives the checkpoint it was resumed from, which retention deletes.
        self._files = {file.relative_to(root): file.read_bytes() for file in files}

    @property
    def identity(self) -> str:
        """A hash of the tokenizer's files: tokenizers of one identity give the same ids."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, content in sorted(self._files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS or EOS. (Hugging Face tokenizers turn the name of a special token inside
        `text` into that token, as hand-written chat prompts need; SentencePiece reads it as plain text.)"""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` (a list, an array or a 1-D tensor). Padding and ids without a token (a model's vocabulary
        may be rounded up) are left out. Other special tokens are shown."""

    def continuation(self, prompt: list[int], response: list[int]) -> str:
        """The text of `response` after that of `prompt`: decode(prompt) + continuation is decode(prompt + response).
        It keeps the space before its first word, which SentencePiece omits at the start of a text.

        The sum is not exact if a character's bytes are split between the two: then neither text has the character."""
        text, whole = self.decode(prompt), self.decode([*prompt, *response])
        return whole[len(text) :] if whole.startswith(text) else self.decode(response)

    def _readable(self, ids: Iterable[int]) -> list[int]:
        return [token for token in map(int, ids) if token != self.pad_id and token < self.vocab_size]

    @abstractmethod
    def tokens(self) -> dict[int, str]:
        """The vocabulary: the token of each id, spelt as in the tokenizer's files ("▁the", "Ġthe", "</s>")."""

    def chat(self, messages: list[Message], *, after: int = 0) -> tuple[list[int], list[bool]]:
        """A conversation in the tokenizer's chat template -> (ids, mask), the mask True on the assistant's tokens:
        its content and the token that ends its turn. A template with {% generation %} blocks marks them itself;
        otherwise the conversation is rendered up to each turn. `after`: the first messages are a prompt, in which
        nothing counts; their ids begin with `chat_prompt` of them.

        Raises UserError if there is no chat template, ValueError (without a place: the caller knows the line) if the
        template refuses `messages`, or renders the beginning of a longer conversation differently.
        """
        raise self._no_template()

    def chat_prompt(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation in the chat template up to where the assistant's next turn begins (the generation
        prompt). Raises as `chat` does."""
        raise self._no_template()

    def _no_template(self) -> UserError:
        return UserError(
            f"{self.path}: the tokenizer has no chat template; use one that has, set chat_template, or write the "
            "conversations out as prompt and response"
        )

    def set_chat_template(self, text: str, name: str) -> None:
        """Replace the chat template, also in what `save` writes. `name`: the text's, for messages. Raises UserError for
        a text that is no template."""
        raise UserError(
            f"chat_template: {self.path} is a SentencePiece model, which reads the names of special tokens as plain "
            "text; use a Hugging Face tokenizer, or write the conversations out as prompt and response"
        )

    def came_with(self, directory: Path) -> bool:
        """Whether `directory`, which `save` wrote, holds this very tokenizer: the same files, apart from config.json,
        which differs between models of one family."""
        files = {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        return all(
            files.get(name) == self._files.get(name) for name in {*files, *self._files} if name.name != "config.json"
        )

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer's files to `directory`, as they were when it was loaded; `load_tokenizer` reads them."""
        for name, content in self._files.items():
            target = Path(directory, name)
            if name.name == "config.json" and target.exists():
                continue  # a model's directory has its own
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


class _SentencePiece(Tokenizer):
    def __init__(self, path: Path):
        import sentencepiece

        super().__init__(path, [path], path.parent)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=self._files[Path(path.name)])
        except RuntimeError:
            raise UserError(
                f"{path}: not a SentencePiece model; give a .model file, or a directory with a Hugging Face tokenizer"
            )
        if self._model.eos_id() < 0:
            raise UserError(f"{path}: the tokenizer has no EOS token; train it with an eos_id")
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_id = self._model.eos_id()
        self.pad_id = self._model.pad_id() if self._model.pad_id() >= 0 else None
        self.vocab_size = self._model.vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in self._readable(ids):
            if self._model.is_control(token):  # sentencepiece would leave it out
                parts += [self._model.decode(run), self._model.id_to_piece(token)]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._model.decode(run)])

    def tokens(self) -> dict[int, str]:
        return {token: self._model.id_to_piece(token) for token in range(self.vocab_size)}


class _HuggingFace(Tokenizer):
    def __init__(self, path: Path):
        super().__init__(path, sorted(file for name in _HF_FILES for file in path.glob(name)), path)
        try:
            with backend.lean_imports():
                from transformers import AutoTokenizer

                self._model = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # bad files raise many types of errors
            raise UserError(
                f"{path}: transformers cannot load this tokenizer ({type(error).__name__}: {_first_line(error)}); "
                "check that its files are complete"
            )
        if self._model.eos_token_id is None:
            raise UserError(f"{path}: the tokenizer has no EOS token; set eos_token in its tokenizer_config.json")
        self._model.model_max_length = 2**62  # lengths are checked where they matter; it would only warn about them
        self.bos_id, self.eos_id = self._model.bos_token_id, self._model.eos_token_id
        pad = self._model.pad_token_id
        self.pad_id = pad if pad not in (self.bos_id, self.eos_id, self._model.unk_token_id) else None
        self.vocab_size = max(self._model.get_vocab().values()) + 1
        template = self._model.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template  # several, by name

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode(self._readable(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def tokens(self) -> dict[int, str]:
        return {token: name for name, token in self._model.get_vocab().items()}

    def chat(self, messages: list[Message], *, after: int = 0) -> tuple[list[int], list[bool]]:
        if self.chat_template is None:
            raise self._no_template()
        prompt = self.chat_prompt(messages[:after]) if after else []
        # Only the tokenizers of the Rust library know which character a token comes from.
        if self._model.is_fast and _GENERATION_BLOCK.search(self.chat_template):
            out = self._render(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
            self._check_prompt(prompt, ids)
            return ids, [False] * len(prompt) + mask[len(prompt) :]

        ids = self._chat_ids(messages)
        self._check_prompt(prompt, ids)
        mask = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < after:
                continue
            if index == 0:
                raise ValueError("the assistant speaks first; begin the conversation with a user or system message")
            before = self.chat_prompt(messages[:index])
            end = self._chat_ids(messages[: index + 1])
            if end[: len(before)] != before or ids[: len(end)] != end:
                raise ValueError(
                    f"message {index + 1}: its tokens cannot be told apart, because the chat template changes the "
                    "beginning of a conversation as it goes on; use a template with {% generation %} blocks, or "
                    "conversations that end with their only assistant message"
                )
            stop = len(end)
            if self.eos_id in end[len(before) :]:  # templates write a line break after it, which does not count
                stop -= end[::-1].index(self.eos_id)
            mask[len(before) : stop] = [True] * (stop - len(before))
        return ids, mask

    def chat_prompt(self, messages: list[Message]) -> list[int]:
        if self.chat_template is None:
            raise self._no_template()
        return self._chat_ids(messages, add_generation_prompt=True)

    def set_chat_template(self, text: str, name: str) -> None:
        from jinja2 import TemplateSyntaxError

        if not text.strip():
            raise UserError(f"chat_template: {name} is empty; give a Jinja template")
        try:
            self._model.apply_chat_template([{"role": "user", "content": "a"}], chat_template=text, tokenize=False)
        except TemplateSyntaxError as error:
            raise UserError(
                f"chat_template: {name}, line {error.lineno}: not a Jinja template ({error.message}); correct it"
            )
        except Exception:  # it may refuse this conversation; those of the data will tell
            pass
        self._model.chat_template = self.chat_template = text
        # tokenizer_config.json, because every version of transformers reads it there. The other files would precede it.
        config = Path("tokenizer_config.json")
        values = json.loads(self._files.get(config, b"{}")) | {"chat_template": text}
        self._files = {file: content for file, content in self._files.items() if not any(map(file.match, _TEMPLATES))}
        self._files[config] = json.dumps(values, ensure_ascii=False, indent=2).encode()

    def _check_prompt(self, prompt: list[int], ids: list[int]) -> None:
        if ids[: len(prompt)] != prompt:
            at = next((i for i, pair in enumerate(zip(prompt, ids, strict=False)) if pair[0] != pair[1]), len(ids))
            raise ValueError(
                "the chat template writes the prompt differently when an answer follows "
                f"({self.decode(prompt[at : at + 8])!r} is then {self.decode(ids[at : at + 8])!r}), so a policy would "
                "not see what is learned here; use a template that keeps the prompt and the generation prompt"
            )

    def _chat_ids(self, messages: list[Message], *, add_generation_prompt: bool = False) -> list[int]:
        text = self._render(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        try:
            text.encode()
        except UnicodeEncodeError:  # of a key beside role and content, which are checked
            raise ValueError("the chat template writes a key of a message that has half a surrogate pair")
        return self.encode(text)

    def _render(self, messages: list[Message], **options):
        try:
            return self._model.apply_chat_template(messages, **options)
        except Exception as error:  # a template can fail in any way, and has a raise_exception() of its own
            raise ValueError(f"the chat template refuses the conversation: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
