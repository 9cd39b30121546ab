"""Responses with rewards.

Legend: K rows, stored flat as in `sft.Examples`.
"""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarlhf.batch import Rewarded
from megarlhf.config import UserError
from megarlhf.data import tables
from megarlhf.data.cache import Cache
from megarlhf.data.conversations import encode, turns
from megarlhf.data.files import Files, Reports, RowsConfig, load_files, options_of
from megarlhf.data.jsonl import Lines, Places, Records
from megarlhf.data.loader import Loader
from megarlhf.data.sft import Examples
from megarlhf.data.tables import Recipe, Table
from megarlhf.data.tokenizer import Tokenizer

LARGEST = 1e6  # a reward's size


@dataclass(frozen=True)
class RewardedDataConfig(RowsConfig):
    """The data of responses with rewards. Every line of a file is a JSON object:

    {"prompt": ..., "response": ..., "reward": 0.5}: it becomes BOS prompt response EOS, and the last token has the
        reward.

    Prompt and response may be messages, as in `PreferenceDataConfig`; the response is one message of the assistant.
    Other keys and blank lines are ignored. A row longer than `max_length` tokens is dropped: a part of a response has
    not earned its reward.
    """

    normalize: bool = False  # rewards to mean 0 and deviation 1 over `train`; `validation` by the same two numbers
    add_eos: bool = True  # false: responses of a fixed length, which the policy will not end with EOS
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    response_key: str = "response"
    reward_key: str = "reward"


@dataclass(frozen=True, kw_only=True)
class RewardedExamples(Examples):
    """Tokenized rows with the rewards of their responses."""

    rewards: np.ndarray  # (K,) float64

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and (biased) standard deviation of the rewards."""
        return float(self.rewards.mean()), float(self.rewards.std())

    def normalized(self, mean: float, std: float) -> RewardedExamples:
        """With the rewards (reward - mean) / std."""
        return dataclasses.replace(self, rewards=(self.rewards - mean) / std)


@dataclass(frozen=True)
class RewardedReport:
    """The report on a source's lines."""

    path: str
    num_examples: int
    num_tokens: int
    max_length: int
    rewards: str  # in words
    dropped: Places
    bad: Places

    def summary(self) -> str:
        """One line for the log: the counts, and the first few places of each kind of problem."""
        parts = [
            f"{self.path}: {self.num_examples} responses, {self.num_tokens} tokens{self.rewards}",
            self.dropped.said(f"dropped (more than {self.max_length} tokens)"),
            self.bad.said("malformed and skipped"),
        ]
        return "; ".join(part for part in parts if part)


def load_rewarded(
    given: Files, tokenizer: Tokenizer, config: RewardedDataConfig, *, cache: Cache | None = None
) -> tuple[RewardedExamples, RewardedReport | Reports]:
    """The responses of data files (`config.train` or `config.validation`), their rewards as the files have them, and
    the report on their lines. `cache`: where they are kept; None: in memory.

    Raises UserError if a file cannot be read, if more than `max_bad_fraction` of its lines are malformed, and if
    nothing is left of it.
    """
    recipe = Recipe("rewarded", options_of(config), lambda records: _read(records, tokenizer, config))
    return load_files(given, lambda path: _load(path, recipe, tokenizer, config, cache))


def _load(
    path: str, recipe: Recipe, tokenizer: Tokenizer, config: RewardedDataConfig, cache: Cache | None
) -> tuple[RewardedExamples, RewardedReport]:
    found = tables.load(path, recipe, tokenizer, cache, config.max_bad_fraction)
    numbers = found["rewards"]
    moments = f", rewards {numbers.min():.4g} to {numbers.max():.4g}, mean {numbers.mean():.4g}" if len(numbers) else ""
    report = RewardedReport(
        path=path,
        num_examples=len(numbers),
        num_tokens=found.table.num_tokens,
        max_length=config.max_length,
        rewards=moments,
        dropped=found.notes["dropped"],
        bad=found.notes["bad"],
    )
    if not len(numbers):
        raise UserError(f"{report.summary()}; no response is left: give a file that has some, or raise max_length")
    examples = RewardedExamples(
        tokens=found["tokens"], mask=found["mask"], offsets=found.table.offsets(), rewards=numbers
    )
    return examples, report


def _read(records: Records, tokenizer: Tokenizer, config: RewardedDataConfig) -> Table:
    tokens, mask, lengths, rewards, dropped = array("i"), bytearray(), array("i"), array("d"), []
    for line, (ids, counts, reward) in records.read(lambda row: _response(row, tokenizer, config)):
        if len(ids) > config.max_length:
            dropped.append(line)
            continue
        tokens.extend(ids)
        mask.extend(counts)
        lengths.append(len(ids))
        rewards.append(reward)
    columns = {
        "tokens": np.array(tokens, np.int32),
        "mask": np.array(mask, bool),
        "lengths": np.array(lengths, np.int32),
        "rewards": np.array(rewards, np.float64),
    }
    return Table(columns, {}, {"dropped": Lines.of(dropped)})


class RewardedLoader(Loader):
    """This data-parallel rank's share of every global batch, as `Rewarded`: like `Loader`, and a row's last token has
    its reward."""

    data: RewardedExamples

    def _batch(self, rows: np.ndarray, real: np.ndarray) -> Rewarded:
        sequences, mine = super()._batch(rows, real), rows[self._mine(rows)]
        rewards = np.zeros(sequences.mask.shape, np.float32)
        rewards[np.arange(len(mine)), self.data.lengths_of(mine) - 2] = self.data.rewards[mine]
        return Rewarded(**vars(sequences), rewards=torch.from_numpy(rewards) * sequences.mask)


def _response(
    row: dict[str, Any], tokenizer: Tokenizer, config: RewardedDataConfig
) -> tuple[list[int], list[bool], float]:
    """(ids, mask, reward) of a line; ValueError says what is wrong with it."""
    prompt, response = turns(row, config.prompt_key), turns(row, config.response_key)
    if config.reward_key not in row:
        raise ValueError(f"no key '{config.reward_key}' (found: {', '.join(row)})")
    reward = row[config.reward_key]
    if type(reward) not in (int, float) or not -LARGEST <= reward <= LARGEST:  # so is nan
        raise ValueError(f"'{config.reward_key}' must be a number from -1e6 to 1e6, not {reward!r}")
    options = dict(add_bos=config.add_bos, add_eos=config.add_eos, chat=config.chat, key=config.prompt_key)
    (found,) = encode(tokenizer, prompt, {config.response_key: response}, **options)
    if not all(found.counts):
        raise ValueError(f"'{config.response_key}' must be one message of the assistant, whose every token counts")
    counts = found.mask
    counts[0] = False  # nothing precedes it
    if not any(counts):
        raise ValueError("a single token, which nothing precedes; give a prompt, or set add_bos or add_eos")
    return found.ids, counts, float(reward)
