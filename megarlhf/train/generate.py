"""`megarlhf generate`: responses to the prompts of files, in any layout, in the order of the files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from megarlhf import config, console
from megarlhf.batch import Rollout
from megarlhf.cluster import backend, signals, watchdog
from megarlhf.cluster.launch import Rendezvous
from megarlhf.cluster.parallel import Topology
from megarlhf.config import PathName, UserError
from megarlhf.data.cache import Cache
from megarlhf.data.files import real_paths, weighted
from megarlhf.data.outputs import check_out, write
from megarlhf.data.prompts import PromptsConfig, PromptSet, load_prompts
from megarlhf.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from megarlhf.experience import sampler
from megarlhf.experience.sampler import Sampler, SamplerConfig
from megarlhf.models import adapters, mixture
from megarlhf.models.locate import find_model, find_tokenizer, has_q_heads
from megarlhf.models.spec import Architecture, check_layout, check_length
from megarlhf.train import memory, setup
from megarlhf.train.program import Program
from megarlhf.train.settings import RanksConfig

ROUNDS = 4  # responses a slot and call of the sampler: more waste less at its end, fewer say sooner that it goes on


@dataclass(frozen=True)
class GenerateSamplerConfig(SamplerConfig):
    """How responses are sampled, also with the Q values of an ILQL model."""

    # A person who asks for responses expects whole ones; training keeps the fixed length of detail G4.
    response_length: int = 256  # R: at most so many sampled tokens
    stop_at_eos: bool = True  # a response ends with its first EOS; false: all go on to response_length
    q_beta: float = 0.0  # of an ILQL model: tokens are drawn from softmax((logits + q_beta (Q - V)) / temperature)

    def __post_init__(self):
        super().__post_init__()
        if self.q_beta < 0:
            raise ValueError(f"q_beta: must not be negative, not {self.q_beta}")


@dataclass(frozen=True)
class GeneratePromptsConfig(PromptsConfig):
    """The data of prompts, as in training, of more tokens."""

    length: int = 512  # P: tokens of a prompt, special ones included


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RanksConfig):
    """One section for each thing it configures."""

    checkpoint: PathName  # a run, a checkpoint or a model directory
    out: PathName  # JSONL, one object a response; written once, at the end
    prompts: GeneratePromptsConfig
    tokenizer: PathName | None = None  # default: the one that came with the checkpoint
    chat_template: str | None = None  # a Jinja template, as text or as the name of a file; default: the tokenizer's
    dtype: Literal["bf16", "fp32"] = "bf16"
    sampler: GenerateSamplerConfig = field(default_factory=GenerateSamplerConfig)
    data_cache: PathName | None = None  # directory of tokenized data, made by all ranks together; default: in memory


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
    check_out(settings.out, real_paths(settings.prompts.path), "prompts")
    return find(settings, world_size)


def find(settings: GenerateConfig, world_size: int) -> Plan:
    """`check` of all but the output."""
    if weighted(settings.prompts.path):
        raise UserError("prompts.path: every prompt is answered, each as often, so a weight has no effect; remove it")
    source = find_model(settings.checkpoint)
    adapters.check(source)
    architecture = Architecture.load(source)
    if settings.sampler.q_beta and not has_q_heads(source):
        raise UserError(
            f"sampler.q_beta: {source} has no Q heads; give a checkpoint of 'megarlhf ilql', or remove the key"
        )
    tokenizer_path = settings.tokenizer or find_tokenizer(settings.checkpoint)
    if tokenizer_path is None:
        raise UserError("tokenizer: the model comes without one; give a Hugging Face directory or a .model file")
    settings.parallel.data(world_size)
    check_layout(architecture, settings.parallel)
    mixture.check_expert_ranks(architecture, settings.parallel)
    length = settings.prompts.length + settings.sampler.response_length
    check_length(architecture, length, "prompts.length + sampler.response_length")
    rows = settings.sampler.least_slots
    memory.check_sizes(
        architecture, settings.parallel, dtype=settings.dtype, length=length, rows=rows, micro_batch_tokens=1,
        sampled=rows,
    )  # fmt: skip
    tokenizer = load_tokenizer(tokenizer_path, settings.chat_template)
    check_vocabulary(tokenizer, architecture.vocab_size)
    sampler.check_sampling(
        settings.sampler,
        architecture,
        prompt_length=settings.prompts.length,
        eos_id=tokenizer.eos_id,
        pad_id=architecture.vocab_size,
    )
    cache = None if settings.data_cache is None else Cache(settings.data_cache)
    prompts, report = load_prompts(tokenizer, settings.prompts, cache=cache)
    return Plan(source, architecture, tokenizer, prompts, report.summary())


def execute(
    run: Callable[[GenerateConfig, Plan, Topology], None], settings: GenerateConfig, plan: Plan, rendezvous: Rendezvous
) -> None:
    """Start the cluster, and run. Collective."""
    topology = setup.cluster(rendezvous, settings, Path(settings.out).absolute().parent)
    signals.end_at_once()  # there is nothing to save before the end
    run(settings, plan, topology)


def generate(settings: GenerateConfig, plan: Plan, topology: Topology) -> None:
    """Load, sample, write. Collective."""
    from megarlhf.models.build import DTYPES  # megatron is imported by now

    watchdog.phase("load")
    role = "actor_q" if settings.sampler.q_beta else "actor"
    engine = adapters.built(role, plan.source, topology, micro_batch_tokens=1, dtype=settings.dtype)
    num_prompts, num_samples = len(plan.prompts), settings.sampler.samples_per_prompt
    # Collectives need the same number of prompts on every data-parallel rank; copies of the last prompt pad it.
    share = -(-num_prompts // topology.data_size)
    policy = Sampler(
        engine,
        settings.sampler,
        prompt_length=settings.prompts.length,
        seed=settings.seed,
        eos_id=plan.tokenizer.eos_id,
        q_beta=settings.sampler.q_beta,
        rows=share * num_samples,
    )
    mine = np.minimum(np.arange(topology.data_rank * share, (topology.data_rank + 1) * share), num_prompts - 1)
    per_response = topology.data_size * settings.sampler.response_length
    lines: list[dict[str, Any]] = []
    if topology.rank == 0:
        for note in (plan.note, *backend.remarks(DTYPES[settings.dtype], "dtype")):
            console.say(f"  {note}")
        if odd := unlike_their_text(plan.prompts, plan.tokenizer):
            console.say(
                f"  {odd} of {num_prompts} prompts were cut or changed by the tokenizer: there prompt + response is "
                "not the text of the tokens"
            )
    with console.Progress(share * num_samples * per_response, "tokens", enabled=topology.rank == 0) as progress:
        # The slots are refilled only within a call.
        at_once = max(1, ROUNDS * policy.num_slots // num_samples)
        for start in range(0, share, at_once):
            watchdog.phase("generate", start + 1)
            rows = mine[start : start + at_once]
            prompts = plan.prompts.rows(rows, rows, length=settings.prompts.length, pad_id=policy.pad_id)
            rollout = policy.sample(prompts, on_tokens=lambda count: progress.add(count * topology.data_size))
            lines += records(rollout, plan.prompts, plan.tokenizer, settings.sampler)
            progress.to(len(lines) * per_response)  # where all responses ended early
    if topology.tensor_rank or topology.pipeline_rank:
        return  # all ranks of a model have the same lines
    first = topology.rank == 0
    everyone = [None] * topology.data_size if first else None
    dist.gather_object(lines, everyone, group=topology.data_group, group_dst=0)
    if first:
        whole = [line for part in everyone for line in part][: num_prompts * num_samples]
        write(Path(settings.out), whole)
        console.say(
            f"{settings.out}: {len(whole)} responses\n"
            f"  next: megarlhf score --config score.yaml --input {shlex.quote(settings.out)} --out scored.jsonl"
        )


def unlike_their_text(prompts: PromptSet, tokenizer: Tokenizer) -> int:
    """The number of prompts whose tokens do not decode to their text in the file."""
    bare = (ids[int(len(ids) > 0 and ids[0] == tokenizer.bos_id) :] for ids in prompts.tokens)
    return sum(tokenizer.decode(ids) != text for ids, text in zip(bare, prompts.texts, strict=True))


def records(rollout: Rollout, prompts: PromptSet, tokenizer: Tokenizer, config: SamplerConfig) -> list[dict[str, Any]]:
    """One object a row, as docs/own-samples.md describes it, with the prompt as its file has it. prompt + response is
    the whole text (`Tokenizer.continuation`), unless the prompt is a conversation, or was cut or changed by the
    tokenizer. With `stop_at_eos` a response
    that ended has EOS among its ids, but not in its text."""
    first = rollout.prompt_len
    rows = rollout.prompt_ids.tolist()
    logprobs = rollout.logprobs.double().sum(1).tolist()
    found = []
    for tokens, segments, mask, logprob, prompt_id, record in zip(
        rollout.tokens.cpu(), rollout.segments.cpu(), rollout.mask.cpu(), logprobs, rows, prompts.records(rows),
        strict=True,
    ):  # fmt: skip
        before = tokens[:first][segments[:first] > 0].tolist()
        ids = tokens[first : first + int(mask.sum())].tolist()
        ended = config.stop_at_eos and ids[-1] == tokenizer.eos_id
        key = prompts.prompt_key if prompts.prompt_key in record else prompts.messages_key
        prompt = record[key]
        if key == "prompt":  # it stands once in a line
            del record[key]
        line = {
            "prompt_id": prompt_id,
            "prompt": prompt,
            "response": tokenizer.continuation(before, ids[:-1] if ended else ids),
            "prompt_tokens": before,
            "tokens": ids,
            "logprob": logprob,
        }
        line |= {"ended": ended} if config.stop_at_eos else {}
        found.append(line | ({"record": record} if record else {}))
    return found


PROGRAM = Program((GenerateConfig,), partial(config.load, GenerateConfig), check, generate, execute)
