"""One system of `bench.sampler` in a process of its own: it answers requests, one a line of JSON, until its input ends.

    python bench/sampler_child.py megarlhf|transformers DIRECTORY

DIRECTORY has the model as `hf` and `ours`; PYTHONPATH says which megarlhf is measured. Requests, by "what":
    sample   responses to `prompts` prompts of `columns` columns, of `response` tokens or up to ends between the
             fractions `ends` of them, `slots` sequences at once
             -> {"cpu", "wall", "forcing": seconds, "tokens": number, "ids": the tokens if they are greedy}
    memory   the same -> {"measured": bytes at the peak, and the parts that are known}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import one_rank
from ends import Ends, Processor, forced  # beside this script

EOS = 1


class Megarlhf:
    def __init__(self, directory: Path):
        topology = one_rank.start()
        from megarlhf import checkpoint
        from megarlhf.models.spec import Architecture

        model = directory / "ours" / "actor"
        self.engine = one_rank.build("actor", Architecture.load(model), topology, rows=16, columns=64)
        checkpoint.load(self.engine, model, weights_only=True)

    def prepare(self, request: dict, ends: Ends | None):
        """A function that samples -> (tokens (N, R), sequence ids (N,))."""
        sampler, prompts = self.sampler(request), self.prompts(request)

        def sample():
            with forced(ends) if ends else contextlib.nullcontext():
                rollout = sampler.sample(prompts)
            return rollout.tokens[:, request["columns"] :], rollout.sequence_ids

        return sample

    def memory(self, request: dict) -> dict:
        """Bytes that sampling adds to the process at its peak, and parts of it: buffers of the sampler (caches and
        messages), one float32 (B, V') of logits, and the activations of the prompts that are computed at once."""
        self.sampler(request | {"response": 2}).sample(self.prompts(request))  # one-time allocations
        prompts = self.prompts(request)
        with one_rank.peak_memory() as found:
            sampler = self.sampler(request)
            sampler.sample(prompts)
        architecture, slots = self.engine.modules[0].architecture, request["slots"]
        result = {
            "slots": slots,
            "measured": found[0],
            "weights": 4 * sum(p.numel() for p in self.engine.modules[0].parameters()),
        }
        from megarlhf.experience import sampler as module

        if not hasattr(module, "PREFILL_TOKENS"):
            return result  # an older version: its parts are others
        hidden, inner = architecture.hidden_size, architecture.ffn_hidden_size
        tokens = min(module.PREFILL_TOKENS["cpu"], int(prompts.valid[:slots].sum()) - slots)
        return result | {
            "held": sampler.num_bytes,
            "logits": 4 * slots * architecture.padded_vocab_size(1),
            "prompts": 4 * tokens * (2 * hidden + 4 * inner),  # residual, normed; [gate; up], act(gate), product
        }

    def sampler(self, request: dict):
        from megarlhf.experience.sampler import Sampler, SamplerConfig

        config = SamplerConfig(
            response_length=request["response"], micro_batch_size=request["slots"], greedy=request["greedy"],
            stop_at_eos=bool(request["ends"]),
        )  # fmt: skip
        return Sampler(self.engine, config, prompt_length=request["columns"], eos_id=EOS)

    def prompts(self, request: dict):
        import torch

        from megarlhf.batch import Prompts

        vocabulary = self.engine.modules[0].architecture.vocab_size
        tokens, valid = make_prompts(request, vocabulary)
        ids = torch.arange(len(tokens))
        return Prompts(tokens=tokens, valid=valid, sequence_ids=ids, prompt_ids=ids)


class Transformers:
    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).eval()

    def prepare(self, request: dict, ends: Ends | None):
        """As Megarlhf.prepare; `slots` sequences after `slots` sequences. Without ends it has no EOS, so it computes
        only what fixed-length sampling needs."""
        import torch

        tokens, valid = make_prompts(request, self.model.config.vocab_size)
        ids, columns, response = torch.arange(len(tokens)), request["columns"], request["response"]
        options = dict(max_new_tokens=response, do_sample=not request["greedy"], pad_token_id=0,
                       eos_token_id=EOS if ends else None)  # fmt: skip
        options |= {} if request["greedy"] else dict(temperature=1.0, top_k=0, top_p=1.0)

        @torch.inference_mode()
        def sample():
            found = []
            for part in ids.split(request["slots"]):
                processors = {"logits_processor": [Processor(ends, part, columns)]} if ends else {}
                inputs = tokens[part].masked_fill(~valid[part], 0)
                made = self.model.generate(inputs, attention_mask=valid[part].long(), **options, **processors)
                made = made[:, columns:]
                found.append(torch.nn.functional.pad(made, (0, response - made.shape[1])))
            return torch.cat(found), ids

        return sample


def make_prompts(request: dict, vocabulary: int):
    """Left-padded prompts of half of their columns to all of them: tokens and valid, (N, P)."""
    import torch

    count, columns = request["prompts"], request["columns"]
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(columns // 2, columns + 1, (count,), generator=generator)
    tokens = torch.randint(0, vocabulary, (count, columns), generator=generator)
    return tokens, torch.arange(columns) >= (columns - sizes)[:, None]


def timed(system: Megarlhf | Transformers, request: dict) -> dict:
    ends = Ends.of(request["ends"], request["response"], EOS) if request["ends"] else None
    sample = system.prepare(request, ends)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens, ids = sample()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    forcing = ends.taken() if ends else {"wall": 0.0, "cpu": 0.0}
    assert tokens.shape == (request["prompts"], request["response"]), tokens.shape
    return {
        "cpu": cpu - forcing["cpu"],
        "wall": wall - forcing["wall"],
        "forcing": forcing["cpu"],
        "tokens": ends.check(tokens, ids) if ends else tokens.numel(),
        "ids": tokens.tolist() if request["greedy"] else None,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    system = {"megarlhf": Megarlhf, "transformers": Transformers}[sys.argv[1]](Path(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = system.memory(request) if request.pop("what") == "memory" else timed(system, request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
