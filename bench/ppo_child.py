"""One run of one system for `bench.ppo_step`: a few PPO steps, with the cost of each phase of each step.

    python bench/ppo_child.py SPEC.json          alone, or under torchrun

It runs in the environment of the measured system, so it imports neither system at the top. Every rank writes
SPEC["out"].RANK.json: [{phase: {"wall": s, "cpu": s, "peak": bytes, "forcing": s}, ...} for each step]. The phases are
generation, scoring (every pass without gradients), training, and other (logs and everything between two steps).
"forcing" is the CPU time of forced ends (SPEC["ends"], ends.py), which the other figures leave out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

from ends import Ends, Processor, forced  # beside this script

EOS = 1  # of the tokenizer that ppo_step.py makes


class Phases:
    """CPU seconds of all threads, wall seconds and the peak resident set of each phase of this process; on a GPU the
    peak of torch's allocator."""

    def __init__(self, ends: Ends | None, device: str = "cpu"):
        self.steps: list[dict] = []
        self.name = ""
        self.ends, self.cuda = ends, device == "cuda"
        self._mark()

    def enter(self, name: str) -> None:
        """End the previous phase. `generation` begins a step, unless the step has begun: megarlhf draws its prompts as
        a part of it."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        if self.steps:
            total = self.steps[-1].setdefault(self.name, {"wall": 0.0, "cpu": 0.0, "peak": 0, "forcing": 0.0})
            forcing = self.ends.taken() if self.ends else {"wall": 0.0, "cpu": 0.0}
            total["wall"] += time.perf_counter() - self.wall - forcing["wall"]
            total["cpu"] += time.process_time() - self.cpu - forcing["cpu"]
            total["forcing"] += forcing["cpu"]
            total["peak"] = max(total["peak"], self._peak())
        if name == "generation" and self.name in ("", "other"):
            self.steps.append({})
        self.name = name
        self._mark()

    def _mark(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def _peak(self) -> int:
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])


def megarlhf(spec: dict, phases: Phases) -> None:
    """Unmodified `megarlhf ppo` of the checkout in PYTHONPATH, with a listener on its clock."""
    from megarlhf.experience.sampler import Sampler
    from megarlhf.train import online, rl_config
    from megarlhf.train.rl import PPO

    names = {"sample": "generation", "learn": "training"}

    class Clock(online.Clock):
        def enter(self, name: str) -> None:
            super().enter(name)
            phases.enter(names.get(name, "scoring"))

        def stop(self) -> None:
            super().stop()
            if phases.name == "training":
                phases.enter("other")

    def sample(self, prompts, *args):
        rollout = plain(self, prompts, *args)
        phases.ends.check(rollout.tokens[:, rollout.prompt_len :], rollout.sequence_ids)
        return rollout

    online.Clock, plain = Clock, Sampler.sample
    if phases.ends:
        Sampler.sample = sample
    # A micro-batch of so many full rows: in older versions a number of rows, padded to full.
    rows, columns = spec["micro_batch"]
    tokens = any(field.name == "micro_batch_tokens" for field in dataclasses.fields(rl_config.OnlineTrainingConfig))
    size = f"micro_batch_tokens={rows * columns}" if tokens else f"micro_batch_size={rows}"
    with forced(phases.ends) if phases.ends else contextlib.nullcontext():
        PPO.main(spec["config"], [*spec["overrides"], f"training.{size}"])


def trl(spec: dict, phases: Phases) -> None:
    """TRL's PPOTrainer on the same models, prompts and sizes, without gradient checkpointing. On a CPU in float32; on a
    GPU policy and critic train in float32 with bfloat16 autocast, and the frozen models are bfloat16."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    class StepEnd(TrainerCallback):
        def on_step_end(self, *_, **__):
            phases.enter("other")

    def generate(model, queries, *args):
        phases.enter("generation")
        if phases.ends is None:
            result = plain_generation(model, queries, *args)
        else:
            first = (len(phases.steps) - 1) * spec["batch"] + int(os.environ.get("RANK", 0)) * rows
            ids, columns, plain = torch.arange(first, first + rows), queries.shape[1], model.generate
            model.generate = functools.partial(plain, logits_processor=[Processor(phases.ends, ids, columns)])
            result = plain_generation(model, queries, *args)
            del model.generate  # the class's again
            phases.ends.check(result[0][:, columns:], ids)
        phases.enter("scoring")
        return result

    def accumulate(*args, **kwargs):
        if phases.name == "scoring":
            phases.enter("training")
        return plain_accumulate(*args, **kwargs)

    cuda = spec.get("device") == "cuda"
    frozen, trained = {"dtype": torch.bfloat16 if cuda else torch.float32}, {"dtype": torch.float32}
    policy, reference = (AutoModelForCausalLM.from_pretrained(spec["policy"], **kind) for kind in (trained, frozen))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1, **kind)
        for kind in (frozen, trained)
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["policy"], padding_side="left")
    prompts = Dataset.from_dict({"input_ids": json.loads(Path(spec["prompts"]).read_text())})
    rows = spec["batch"] // int(os.environ.get("WORLD_SIZE", 1))
    arguments = PPOConfig(
        output_dir=spec["out"], report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=not cuda, bf16=cuda,
        gradient_checkpointing=False, num_sample_generations=0, learning_rate=1e-5, seed=1,
        per_device_train_batch_size=min(spec["micro_batch"], rows),
        gradient_accumulation_steps=max(1, rows // spec["micro_batch"]), num_mini_batches=1,
        num_ppo_epochs=spec["epochs"], response_length=spec["response"], temperature=1.0,
        local_rollout_forward_batch_size=rows, total_episodes=spec["batch"] * spec["steps"],
        stop_token="eos" if phases.ends else None,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=value, train_dataset=prompts, eval_dataset=prompts, callbacks=[StepEnd],
    )  # fmt: skip
    plain_generation, ppo_trainer.batch_generation = ppo_trainer.batch_generation, generate
    plain_accumulate, trainer.accelerator.accumulate = trainer.accelerator.accumulate, accumulate
    trainer.train()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("device") == "cuda" and spec["system"] == "megarlhf":
        from megarlhf.cluster import backend

        backend.on_cuda()  # sets the environment of the driver, which Phases starts
    phases = Phases(Ends.of(spec["ends"], spec["response"], EOS) if spec.get("ends") else None,
                    spec.get("device", "cpu"))  # fmt: skip
    {"megarlhf": megarlhf, "trl": trl}[spec["system"]](spec, phases)
    phases.enter("end")
    Path(f"{spec['out']}.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(phases.steps))


if __name__ == "__main__":
    main()
