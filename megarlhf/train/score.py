"""`megarlhf score`: the rewards of responses that exist already, from the sources of the online loop, in any layout and
in the order of the file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megarlhf import config, console
from megarlhf.cluster import backend, watchdog
from megarlhf.cluster.parallel import Topology
from megarlhf.config import PathName, UserError
from megarlhf.data.cache import Cache
from megarlhf.data.files import real_paths
from megarlhf.data.jsonl import read_all
from megarlhf.data.outputs import check_out, write
from megarlhf.data.responses import Reading, Responses, load_responses
from megarlhf.data.tokenizer import Tokenizer, load_tokenizer
from megarlhf.experience.scorer import Scorer, ScoringConfig
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture
from megarlhf.train import memory, scoring
from megarlhf.train.generate import execute
from megarlhf.train.program import Program
from megarlhf.train.settings import MICRO_BATCH_TOKENS, RanksConfig


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(RanksConfig):
    """What is scored, and with what."""

    input: PathName  # a response a line: the output of `megarlhf generate`, or {"prompt": ..., "response": ...}
    out: PathName  # JSONL, the same lines with `score`, and with `scores` of several sources; written once, at the end
    scoring: ScoringConfig
    tokenizer: PathName | None = None  # the policy's; default: the one that came with the first reward model
    dtype: Literal["bf16", "fp32"] = "bf16"
    batch_size: int = 512  # responses that are scored at once by all data-parallel ranks
    micro_batch_tokens: int = MICRO_BATCH_TOKENS  # of a reward model's forward pass
    tokens: bool = True  # read a line's ids where it has them; false: encode the texts
    add_bos: bool = True  # these two for lines without ids, as when the reward model was trained
    add_eos: bool = True
    chat: bool = False  # a prompt that is a text is a user's message, a response an assistant's, in the chat template
    prompt_key: str = "prompt"
    response_key: str = "response"
    data_cache: PathName | None = None  # directory of tokenized data, made by all ranks together; default: in memory

    def __post_init__(self):
        super().__post_init__()
        for name in ("batch_size", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if any(source.normalize for source in self.scoring.sources):
            raise ValueError(
                "scoring.sources: normalize follows the steps of a run, and a file has none; remove it (megarlhf "
                "select compares scores within a prompt, or z-scores them over the file)"
            )

    @property
    def reading(self) -> Reading:
        return Reading(self.tokens, self.add_bos, self.add_eos, self.chat, self.prompt_key, self.response_key)


@dataclass(frozen=True)
class Plan:
    """A checked configuration, and all that can be prepared without a process group."""

    tokenizer: Tokenizer
    responses: Responses
    notes: tuple[str, ...]


def check(settings: ScoreConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    check_out(settings.out, real_paths(settings.input), "responses")
    data_size = settings.parallel.data(world_size)
    if settings.batch_size % data_size:
        raise UserError(
            f"batch_size: {settings.batch_size} is not a multiple of {data_size} data-parallel ranks; change it or the "
            "ranks"
        )
    share = settings.batch_size // data_size
    scoring.check_patience(settings.scoring, share, settings.job.hang_minutes)
    models = [source.checkpoint for source in settings.scoring.sources if source.checkpoint is not None]
    path = settings.tokenizer or next(filter(None, map(find_tokenizer, models)), None)
    if path is None:
        raise UserError(
            "tokenizer: no reward model comes with one; give the policy's Hugging Face directory or .model file"
        )
    tokenizer = load_tokenizer(path)
    responses = load_responses(
        settings.input,
        tokenizer,
        settings.reading,
        keep_records=len(models) < len(settings.scoring.sources),
        check_record=scoring.RecordCheck(settings.scoring),
        cache=None if settings.data_cache is None else Cache(settings.data_cache),
    )
    longest, response = responses.longest
    notes = scoring.check_sources(
        settings.scoring, tokenizer, settings.parallel, vocab_size=tokenizer.vocab_size,
        prompt_length=longest - response, response_length=response,
    )  # fmt: skip
    for model in models:
        memory.check_sizes(
            Architecture.load(find_model(model, "reward")), settings.parallel, dtype=settings.dtype, rows=share,
            micro_batch_tokens=settings.micro_batch_tokens, length=longest,
        )  # fmt: skip
    notes.insert(0, f"{settings.input}: {len(responses)} responses, {len(responses.tokens)} tokens")
    if responses.changed:
        notes.append(f"{responses.changed} texts are changed by the tokenizer; sources read them as decoded again")
    if responses.scored:
        notes.append(f"{responses.scored} lines have a score already, which is replaced")
    return Plan(tokenizer, responses, tuple(notes))


def score(settings: ScoreConfig, plan: Plan, topology: Topology) -> None:
    """Load, score, write. Collective."""
    from megarlhf.models.build import DTYPES  # megatron is imported by now

    watchdog.phase("load")
    if topology.rank == 0:
        for note in (*plan.notes, *backend.remarks(DTYPES[settings.dtype], "dtype")):
            console.say(f"  {note}")
    scorer = scoring.build_scorer(
        settings.scoring, topology, plan.tokenizer, micro_batch_tokens=settings.micro_batch_tokens,
        dtype=settings.dtype, records=plan.responses.records,
    )  # fmt: skip
    numbers = scores_of(plan.responses, scorer, topology, settings.batch_size)
    if topology.rank == 0:
        write(Path(settings.out), scored_lines(settings.input, numbers, scorer.names))
        mean, std = numbers[:, 0].mean(), numbers[:, 0].std()
        spread = f"score {mean:.4g} on average, standard deviation {std:.4g}"
        console.say(
            f"{settings.out}: {len(numbers)} responses, {spread}\n"
            f"  next: megarlhf select --input {shlex.quote(settings.out)} --out data.jsonl --kind best"
        )


def scores_of(responses: Responses, scorer: Scorer, topology: Topology, batch_size: int) -> np.ndarray:
    """(M, 1 + K) float64: the score of each response and what each source gave it, on every rank. Collective.

    A batch is a function of the file alone, so the layout changes nothing. Raises UserError, on every rank alike, as
    `Scorer.score` does, and for a score that is not finite.
    """
    count, parts = len(responses), []
    with console.Progress(count, "responses", enabled=topology.rank == 0) as progress:
        for start in range(0, count, batch_size):
            watchdog.phase("score", start + 1)
            here = min(batch_size, count - start)
            share = -(-here // topology.data_size)
            # Collectives need as many rows on every data-parallel rank; copies of the last row fill up.
            rows = np.minimum(start + topology.data_rank * share + np.arange(share), count - 1)
            scores = scorer.score(responses.rollout(rows, pad_id=0).to(backend.device()))
            local = torch.cat([scores.total[:, None], scores.by_source], 1).double()
            ranks = [torch.empty_like(local) for _ in range(topology.data_size)]
            dist.all_gather(ranks, local, group=topology.data_group)
            found = torch.cat(ranks)[:here].cpu().numpy()
            for row in np.flatnonzero(~np.isfinite(found[:, 0]))[:1]:
                raise UserError(
                    f"{responses.places[start + row]}: the score of this response is {found[row, 0]}; look at "
                    "the reward model's checkpoint and at this line"
                )
            parts.append(found)
            progress.add(here)
    return np.concatenate(parts)


def scored_lines(path: str, numbers: np.ndarray, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The file's lines with their scores; JSON has no NaN, so a source's number that is not finite is null."""
    lines = read_all(path, lambda row: row)
    for (_, row), (total, *said) in zip(lines, numbers.tolist(), strict=True):
        row["score"] = total
        row.pop("scores", None)
        if len(names) > 1:
            found = (number if math.isfinite(number) else None for number in said)
            row["scores"] = dict(zip(names, found, strict=True))
        yield row


PROGRAM = Program((ScoreConfig,), partial(config.load, ScoreConfig), check, score, execute)
