"""One run of one system for `bench.ppo_step`: a few PPO steps, with the cost of each phase of each step.

    python bench/ppo_child.py SPEC.json          alone, or under torchrun

It runs in the environment of the measured system, so it imports neither system at the top. Every rank writes
SPEC["out"].RANK.json: [{phase: {"wall": s, "cpu": s, "peak": bytes}, ...} for each step]. The phases are generation,
scoring (every pass without gradients), training, and other (logs and everything between two steps).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


class Phases:
    """CPU seconds of all threads, wall seconds and the peak resident set of each phase of this process."""

    def __init__(self):
        self.steps: list[dict] = []
        self.name = ""
        self._mark()

    def enter(self, name: str) -> None:
        """End the previous phase; `generation` begins a step."""
        if self.steps:
            total = self.steps[-1].setdefault(self.name, {"wall": 0.0, "cpu": 0.0, "peak": 0})
            total["wall"] += time.perf_counter() - self.wall
            total["cpu"] += time.process_time() - self.cpu
            total["peak"] = max(total["peak"], self._peak())
        if name == "generation":
            self.steps.append({})
        self.name = name
        self._mark()

    def _mark(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    @staticmethod
    def _peak() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])


def megarlhf(spec: dict, phases: Phases) -> None:
    """Unmodified `megarlhf ppo`, with a listener on its clock."""
    from megarlhf.train import online
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

    online.Clock = Clock
    PPO.main(spec["config"], spec["overrides"])


def trl(spec: dict, phases: Phases) -> None:
    """TRL's PPOTrainer on the same models, prompts and sizes, in float32 and without gradient checkpointing."""
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

    def generate(*args):
        phases.enter("generation")
        result = plain_generation(*args)
        phases.enter("scoring")
        return result

    def accumulate(*args, **kwargs):
        if phases.name == "scoring":
            phases.enter("training")
        return plain_accumulate(*args, **kwargs)

    policy, reference = (AutoModelForCausalLM.from_pretrained(spec["policy"]) for _ in range(2))
    reward, value = (AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(spec["policy"], padding_side="left")
    prompts = Dataset.from_dict({"input_ids": json.loads(Path(spec["prompts"]).read_text())})
    rows = spec["batch"] // int(os.environ.get("WORLD_SIZE", 1))
    arguments = PPOConfig(
        output_dir=spec["out"], report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
        gradient_checkpointing=False, num_sample_generations=0, learning_rate=1e-5, seed=1,
        per_device_train_batch_size=min(spec["micro_batch"], rows),
        gradient_accumulation_steps=max(1, rows // spec["micro_batch"]), num_mini_batches=1,
        num_ppo_epochs=spec["epochs"], response_length=spec["response"], temperature=1.0,
        local_rollout_forward_batch_size=rows, total_episodes=spec["batch"] * spec["steps"],
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
    phases = Phases()
    {"megarlhf": megarlhf, "trl": trl}[spec["system"]](spec, phases)
    phases.enter("end")
    Path(f"{spec['out']}.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(phases.steps))


if __name__ == "__main__":
    main()
