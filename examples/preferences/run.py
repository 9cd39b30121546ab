"""SFT -> DPO, and SFT -> KTO: a policy from pairs of responses, and from single ones marked good or bad.

It has the film reviews of examples/demo.py, whose true sentiment is known: a small Llama learns to write them, and then
to write positive ones, without a reward model. Responses to held-out prompts are judged by their true sentiment. It
runs on 2 CPU ranks, in minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import demo
import pipeline
import reviews

HERE = Path(__file__).resolve().parent
STAGES = (("dpo", "DPO on pairs"), ("kto", "KTO on single responses"))
PROMPTS = 256  # held out


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/preferences")
    demo.write_data(args.out, "tokenizer")
    write_data(args.out)
    print("\n== supervised fine-tuning", flush=True)
    sft = demo.CONFIGS / "demo_sft.yaml"
    paths = (
        "run=sft",
        "tokenizer=tokenizer.model",
        "data.train=sft.train.jsonl",
        "data.validation=sft.validation.jsonl",
    )
    pipeline.stage("sft", sft, args.out, *paths, f"seed={args.seed}")
    shares, seconds = {"sft": judged(args.out, "sft", args.seed)}, {}
    for program, title in STAGES:
        print(f"\n== {title}", flush=True)
        started = time.monotonic()
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
        seconds[program] = time.monotonic() - started
        shares[program] = judged(args.out, program, args.seed)
        pipeline.report(args.out / program)
    print(f"\n== positive by the true judge, {PROMPTS} held-out prompts")
    print(f"  after SFT {shares['sft']:8.1%}")
    for program, _ in STAGES:
        accuracy = pipeline.column(args.out / program, "validation/accuracy")
        print(f"  after {program.upper()} {shares[program]:8.1%}   {seconds[program] / 60:.1f} minutes", end="")
        print(f", held-out accuracy {accuracy[-1]:.1%}, report {args.out / program / 'report.html'}")


def write_data(out: Path) -> None:
    """Write the ratings, which are the responses of the pairs in a random order, and held-out prompts."""
    for number, name in enumerate(("train", "validation")):
        rows = [
            {"prompt": row["prompt"], "response": row[key], "label": key == "chosen"}
            for row in pipeline.read(out / f"preferences.{name}.jsonl")
            for key in ("chosen", "rejected")
        ]
        pipeline.write(out / f"ratings.{name}.jsonl", pipeline.shuffled(rows, number))
    pipeline.write(out / "held_out.jsonl", ({"prompt": r.prompt} for r in reviews.reviews(PROMPTS, seed=5)))


def judged(out: Path, run: str, seed: int) -> float:
    """The share of sampled responses to the held-out prompts that are positive."""
    file = out / f"{run}.responses.jsonl"
    overrides = {"checkpoint": run, "prompts.path": "held_out.jsonl", "out": file, "dtype": "fp32", "seed": seed,
                 "prompts.length": 24, "sampler.response_length": 24}  # fmt: skip
    pipeline.stage("generate", None, out, *(f"{key}={value}" for key, value in overrides.items()))
    return demo.positive(list(pipeline.read(file, "response")))


if __name__ == "__main__":
    main()
