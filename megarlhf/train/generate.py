"""`megarlhf generate`: responses to a file of prompts, in any layout, in the order of the file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from megarlhf import checkpoint, config
from megarlhf.batch import Rollout
from megarlhf.cluster import signals, watchdog
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.prompts import PromptsConfig, PromptSet, load_prompts
from megarlhf.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from megarlhf.experience import sampler
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models.locate import find_model, find_tokenizer
from megarlhf.models.spec import Architecture, check_layout, check_length
from megarlhf.train import memory, setup
from megarlhf.train.program import Program
from megarlhf.train.settings import RanksConfig

ROUNDS = 4  # responses a slot and call of the sampler: more waste less at its end, fewer say sooner that it goes on


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RanksConfig):
    """One section for each thing it configures."""

    checkpoint: str  # a run, a checkpoint or a model directory
    out: str  # JSONL, one object a response; written once, at the end
    prompts: PromptsConfig
    tokenizer: str | None = None  # default: the one that came with the checkpoint
    dtype: Literal["bf16", "fp32"] = "bf16"
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True)
class Plan:
    """A checked configuration, and all that can be prepared without a process group."""

    source: Path
    architecture: Architecture
    tokenizer: Tokenizer
    prompts: PromptSet
    note: str


def check(settings: GenerateConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    check_out(settings.out, settings.prompts.path)
    source = find_model(settings.checkpoint)
    architecture = Architecture.load(source)
    tokenizer_path = settings.tokenizer or find_tokenizer(settings.checkpoint)
    if tokenizer_path is None:
        raise UserError("tokenizer: the model comes without one; give a Hugging Face directory or a .model file")
    settings.parallel.data(world_size)
    check_layout(architecture, settings.parallel)
    length = settings.prompts.length + settings.sampler.response_length
    check_length(architecture, length, "prompts.length + sampler.response_length")
    rows = settings.sampler.slots
    memory.check_sizes(
        architecture, settings.parallel, dtype=settings.dtype, length=length, rows=rows, micro_batch_tokens=1,
        sampled=rows,
    )  # fmt: skip
    tokenizer = load_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer, architecture.vocab_size)
    sampler.check_sampling(
        settings.sampler,
        architecture,
        prompt_length=settings.prompts.length,
        eos_id=tokenizer.eos_id,
        pad_id=architecture.vocab_size,
    )
    prompts, report = load_prompts(tokenizer, settings.prompts, keep_records=False)
    return Plan(source, architecture, tokenizer, prompts, report.summary())


def check_out(given: str, prompts: str) -> None:
    """Refuse (UserError) a file for the responses that cannot be written, or that holds the prompts."""
    out = Path(given)
    parent = out.absolute().parent
    try:
        if not parent.is_dir():
            raise UserError(f"out: {out} must be a file in a directory that exists; create {parent}")
        if out.exists() and not out.is_file():
            raise UserError(f"out: {out} is not a file; give the name of one")
        if out.exists() and Path(prompts).exists() and out.samefile(prompts):
            raise UserError(f"out: {out} is the file of the prompts, which it would replace; give another")
        with contextlib.suppress(FileNotFoundError):
            _partial(out).stat()  # is its name too long?
        with tempfile.TemporaryFile(dir=parent):
            pass
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"out: {given[:300]} cannot be written ({getattr(error, 'strerror', None) or error}); give another"
        )


def execute(
    run: Callable[[GenerateConfig, Plan, Topology], None], settings: GenerateConfig, plan: Plan, rendezvous: Rendezvous
) -> None:
    """Start the cluster, and run. Collective."""
    topology = setup.cluster(rendezvous, settings, Path(settings.out).absolute().parent)
    signals.end_at_once()  # there is nothing to save before the end
    run(settings, plan, topology)


def generate(settings: GenerateConfig, plan: Plan, topology: Topology) -> None:
    """Load, sample, write. Collective."""
    from megarlhf.models.build import build

    watchdog.phase("load")
    engine = build(
        "actor", plan.architecture, topology, micro_batch_tokens=1, dtype=settings.dtype, awaits_checkpoint=True
    )
    checkpoint.load(engine, plan.source, weights_only=True)
    policy = Sampler(
        engine,
        settings.sampler,
        prompt_length=settings.prompts.length,
        seed=settings.seed,
        eos_id=plan.tokenizer.eos_id,
    )
    num_prompts, num_samples = len(plan.prompts), settings.sampler.samples_per_prompt
    # Collectives need the same number of prompts on every data-parallel rank; copies of the last prompt pad it.
    share = -(-num_prompts // topology.data_size)
    mine = np.minimum(np.arange(topology.data_rank * share, (topology.data_rank + 1) * share), num_prompts - 1)
    per_response = topology.data_size * settings.sampler.response_length
    lines: list[dict[str, Any]] = []
    if topology.rank == 0:
        print(f"  {plan.note}", file=sys.stderr)
        if odd := unlike_their_text(plan.prompts, plan.tokenizer):
            print(
                f"  {odd} of {num_prompts} prompts were cut or changed by the tokenizer: there prompt + response is "
                "not the text of the tokens",
                file=sys.stderr,
            )
    with tqdm(
        total=share * num_samples * per_response, unit="tokens", unit_scale=True, disable=topology.rank != 0
    ) as bar:
        # The slots are refilled only within a call.
        at_once = max(1, ROUNDS * policy.num_slots // num_samples)
        for start in range(0, share, at_once):
            watchdog.phase("generate", start + 1)
            rows = mine[start : start + at_once]
            prompts = plan.prompts.rows(rows, rows, length=settings.prompts.length, pad_id=policy.pad_id)
            rollout = policy.sample(prompts, on_tokens=lambda count: bar.update(count * topology.data_size))
            lines += records(rollout, [plan.prompts.texts[row] for row in rows], plan.tokenizer, settings.sampler)
            bar.update(len(lines) * per_response - bar.n)  # where all responses ended early
    if topology.tensor_rank or topology.pipeline_rank:
        return  # all ranks of a model have the same lines
    first = topology.rank == 0
    everyone = [None] * topology.data_size if first else None
    dist.gather_object(lines, everyone, group=topology.data_group, group_dst=0)
    if first:
        whole = [line for part in everyone for line in part][: num_prompts * num_samples]
        write(Path(settings.out), whole)
        print(f"{settings.out}: {len(whole)} responses")


def unlike_their_text(prompts: PromptSet, tokenizer: Tokenizer) -> int:
    """The number of prompts whose tokens do not decode to their text in the file."""
    bare = (ids[int(len(ids) > 0 and ids[0] == tokenizer.bos_id) :] for ids in prompts.tokens)
    return sum(tokenizer.decode(ids) != text for ids, text in zip(bare, prompts.texts, strict=True))


def records(rollout: Rollout, texts: list[str], tokenizer: Tokenizer, config: SamplerConfig) -> list[dict[str, Any]]:
    """One object a row: the prompt's text, the response's text and ids, and its log-prob, the sum over these ids.
    prompt + response is the whole text (`Tokenizer.continuation`), unless the prompt was cut or changed by the
    tokenizer. With `stop_at_eos` a response that ended has EOS among its ids, but not in its text."""
    first = rollout.prompt_len
    logprobs = rollout.logprobs.double().sum(1).tolist()
    found = []
    for row, (tokens, segments, mask, logprob) in enumerate(
        zip(rollout.tokens.cpu(), rollout.segments.cpu(), rollout.mask.cpu(), logprobs, strict=True)
    ):
        ids = tokens[first : first + int(mask.sum())].tolist()
        shown = ids[:-1] if config.stop_at_eos and ids[-1] == tokenizer.eos_id else ids
        response = tokenizer.continuation(tokens[:first][segments[:first] > 0].tolist(), shown)
        prompt = texts[row // config.samples_per_prompt]
        found.append({"prompt": prompt, "response": response, "tokens": ids, "logprob": logprob})
    return found


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the file atomically. Raises UserError."""
    partial = _partial(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"out: {path} cannot be written ({error.strerror}); make room and start again")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


PROGRAM = Program((GenerateConfig,), partial(config.load, GenerateConfig), check, generate, execute)
