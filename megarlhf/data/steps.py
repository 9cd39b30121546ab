"""Solutions in steps, with a label for each step: the data of process reward models.

Legend: N tokens of the whole data set, K rows, stored flat as in `sft.Examples`; G rows of the global batch, B rows of
this rank, R = S - 1 columns.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarlhf.algorithms.process_reward import THRESHOLD
from megarlhf.batch import LabelledSteps
from megarlhf.config import UserError
from megarlhf.data import tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import continuation
from megarlhf.data.files import Files, Reports, RowsConfig, load_files, options_of
from megarlhf.data.jsonl import Lines, Places, Records, string
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.data.shapes import is_prm800k, prm800k, prm800k_finished
from megarlhf.data.tables import Joined, Recipe, Table
from megarlhf.data.tokenizer import Tokenizer, token_id


@dataclass(frozen=True)
class StepDataConfig(RowsConfig):
    """The data of solutions in steps. Every line of a file is a JSON object:

    {"prompt": ..., "steps": ["...", ...], "labels": [true, 0.75, null, false, ...]}: a label for each step: true,
        false, or the probability that the step is right; null where it has none. A line of PRM800K is read as it is
        (`shapes.prm800k`).

    A row is BOS prompt step separator step ... step. A step's label stands at the token that completes its separator,
    without spaces at its end; that of the last step, which has none, at its last token. With a `placeholder` this token
    follows each of them, and the label stands there. Rows longer than `max_length` tokens are cut at the end, with the
    labels of steps that do not end before. A row without a label is dropped. Other keys and blank lines are ignored.
    """

    separator: str = "\n"  # between steps
    placeholder: str | None = None  # the text of a token that is put after each step
    steps_key: str = "steps"
    labels_key: str = "labels"

    def __post_init__(self):
        super().__post_init__()
        if not self.separator:
            raise ValueError("separator: is empty; give the text between two steps")


@dataclass(frozen=True, kw_only=True)
class StepExamples(Examples):
    """Tokenized rows. `mask` is True at the ends of labelled steps, at least one a row."""

    labels: np.ndarray | Joined  # (N,) float32: 0 outside the mask
    decided: np.ndarray  # (K,) bool, as in `LabelledSteps`


@dataclass(frozen=True)
class StepReport:
    """The report on a source's lines."""

    path: str
    num_lines: int  # without blank ones
    num_examples: int
    num_tokens: int
    num_labels: int
    num_wrong: int  # of the labels
    num_decided: int  # rows whose first wrong step is known, or that they have none
    max_length: int
    truncated: Places
    unlabelled: Places
    joined: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_examples} solutions, {self.num_tokens} tokens, {self.num_labels} labelled steps, "
            f"{self.num_wrong} wrong, the first error known in {self.num_decided}",
            self.truncated.said(f"cut to {self.max_length} tokens"),
            self.unlabelled.said("dropped (no labelled step)"),
            self.joined.said("with the separator within a step"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


def load_steps(
    given: Files, tokenizer: Tokenizer, config: StepDataConfig, *, cache: Cache | None = None
) -> tuple[StepExamples, StepReport | Reports]:
    """The solutions of data files (`config.train` or `config.validation`) and the report on their lines. `cache`: where
    they are kept; None: in memory.

    Raises UserError if a file cannot be read, if the tokenizer cannot represent separator or placeholder, if more than
    `max_bad_fraction` of its lines are malformed, and if nothing is left of it.
    """
    check_separator(tokenizer, config.separator, "data.separator")
    after = [] if config.placeholder is None else [token_id(tokenizer, config.placeholder, "data.placeholder")]
    recipe = Recipe("steps", options_of(config), lambda records: _read(records, tokenizer, config, after))
    return load_files(given, lambda path: _load(path, recipe, tokenizer, config, cache))


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: StepDataConfig, cache: Cache | None
) -> tuple[StepExamples, StepReport]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    report = StepReport(
        path=path,
        num_lines=found.counts["lines"],
        num_examples=len(found["lengths"]),
        num_tokens=found.table.num_tokens,
        num_labels=found.counts["labels"],
        num_wrong=found.counts["wrong"],
        num_decided=int(np.count_nonzero(found["decided"])),
        max_length=config.max_length,
        truncated=found.notes["truncated"],
        unlabelled=found.notes["unlabelled"],
        joined=found.notes["joined"],
        bad=found.notes["bad"],
    )
    if not report.num_examples:
        raise UserError(f"{report.summary()}; no solution is left: give a file with labels, or raise max_length")
    examples = StepExamples(
        tokens=found["tokens"],
        mask=found["mask"],
        offsets=found.table.offsets(),
        labels=found["labels"],
        decided=found["decided"],
    )
    return examples, report


def _read(records: Records, tokenizer: Tokenizer, config: StepDataConfig, after: list[int]) -> Table:
    tokens, mask, labels, num_wrong = array("i"), bytearray(), array("f"), 0
    lengths, decided = array("i"), bytearray()
    truncated, unlabelled, joined = [], [], []
    for line, (ids, steps, within, finished) in records.read(lambda row: _solution(row, tokenizer, config, after)):
        is_cut, ids = len(ids) > config.max_length, ids[: config.max_length]
        steps = [(end, label) for end, label in steps if end < len(ids)]
        at = {end: label for end, label in steps if label is not None}
        if not at:
            unlabelled.append(line)
            continue
        if is_cut:
            truncated.append(line)
        if within:
            joined.append(line)
        tokens.extend(ids)
        mask.extend(index in at for index in range(len(ids)))
        labels.extend(at.get(index, 0.0) for index in range(len(ids)))
        num_wrong += sum(np.float32(label) < THRESHOLD for label in at.values())
        decided.append(_decided([label for _, label in steps], finished and not is_cut))
        lengths.append(len(ids))
    columns = {
        "tokens": np.array(tokens, np.int32),
        "mask": np.array(mask, bool),
        "lengths": np.array(lengths, np.int32),
        "labels": np.array(labels, np.float32),
        "decided": np.array(decided, bool),
    }
    notes = {"truncated": truncated, "unlabelled": unlabelled, "joined": joined}
    counts = {"labels": sum(mask), "wrong": int(num_wrong)}
    return Table(columns, counts, {name: Lines.of(lines) for name, lines in notes.items()})


class StepLoader(Loader):
    """This data-parallel rank's share of every global batch of solutions, as `LabelledSteps`."""

    data: StepExamples

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> LabelledSteps:
        sequences, mine = super()._batch(rows, real), rows[self._mine(rows)]
        labels = np.zeros(sequences.mask.shape, np.float32)
        for target, row in enumerate(mine):
            of_row = self.data.labels[self.data.offsets[row] + 1 : self.data.offsets[row + 1]]
            labels[target, : len(of_row)] = of_row
        return LabelledSteps(
            **vars(sequences),
            labels=torch.from_numpy(labels) * sequences.mask,  # rows that pad a batch have none
            decided=torch.from_numpy(self.data.decided[mine]),
        )


def check_separator(tokenizer: Tokenizer, separator: str, key: str) -> None:
    """Refuse (UserError, naming the configuration's `key`) a separator that is another text after the tokenizer has
    encoded and decoded it: responses could not be split at it."""
    if separator not in tokenizer.decode(tokenizer.encode(f"a{separator}a")):
        raise UserError(
            f"{key}: {separator!r} becomes another text in the tokenizer {tokenizer.path}; give a separator that it "
            "keeps"
        )


def _solution(
    row: dict[str, Any], tokenizer: Tokenizer, config: StepDataConfig, after: list[int]
) -> tuple[list[int], list[tuple[int, float | None]], bool, bool]:
    """(ids, (index of the last token, label) of each step, whether the separator is also within a step, whether the
    labels are of the whole solution) of a line; ValueError says what is wrong with it. `after`: ids that follow each
    step."""
    finished = True
    if is_prm800k(row):
        found, finished = prm800k(row), prm800k_finished(row)
        row = {getattr(config, f"{name}_key"): value for name, value in found.items()}
    prompt = string(row, config.prompt_key)
    texts = _texts(row, config)
    given = _labels(row, config, len(texts))
    before, encoded = prompt, tokenizer.encode(prompt)  # each step is encoded behind the one before
    ids = [*([tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []), *encoded]
    steps: list[tuple[int, float | None]] = []
    mark = config.separator.rstrip(" ")  # its spaces are the next step's
    space = config.separator[len(mark) :]
    for number, (step, label) in enumerate(zip(texts, given, strict=True), start=1):
        piece = (space if number > 1 else "") + step + (mark if number < len(texts) else "")
        more = continuation(tokenizer, before, encoded, piece)
        if not more:
            raise ValueError(f"'{config.steps_key}': step {number} has no token")
        before, encoded = piece, tokenizer.encode(piece)
        ids += [*more, *after]
        if len(ids) == 1:
            raise ValueError("a step that is the row's first token has no score; give a prompt, or set add_bos")
        steps.append((len(ids) - 1, label))
    return ids, steps, config.separator.join(texts).split(config.separator) != texts, finished


def _texts(row: dict[str, Any], config: StepDataConfig) -> list[str]:
    key = config.steps_key
    if key not in row:
        raise ValueError(f"no key '{key}' (found: {', '.join(row)})")
    if not isinstance(row[key], list) or not row[key]:
        raise ValueError(f"'{key}' must be a list of texts, one for each step")
    named = {f"{key}[{index}]": step for index, step in enumerate(row[key])}
    texts = [string(named, name) for name in named]
    for index, text in enumerate(texts):
        if not text.strip():
            raise ValueError(f"'{key}[{index}]' is empty")
    return texts


def _labels(row: dict[str, Any], config: StepDataConfig, size: int) -> list[float | None]:
    key = config.labels_key
    if key not in row:
        raise ValueError(f"no key '{key}' (found: {', '.join(row)})")
    labels = row[key]
    if not isinstance(labels, list) or len(labels) != size:
        found = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"'{key}' must be a list with one label for each of {size} steps, not {found}")
    for index, label in enumerate(labels):
        if label is not None and not (isinstance(label, (bool, int, float)) and 0 <= label <= 1):
            raise ValueError(
                f"'{key}[{index}]' must be true, false, a number from 0 to 1, or null without a label, not {label!r}"
            )
    return [None if label is None else float(label) for label in labels]


def _decided(labels: list[float | None], whole: bool) -> bool:
    """Whether the first wrong one of a solution's steps is known, or that there is none. `labels`: of the steps that
    are left; `whole`: these are all."""
    for label in labels:
        if label is None or label < THRESHOLD:
            return label is not None
    return whole
