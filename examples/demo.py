"""make demo: the whole pipeline on 2 CPU ranks with tensor parallelism, from random weights, in minutes.

SFT -> reward model -> PPO on film reviews that a small grammar makes (reviews.py). The grammar gives each review's true
sentiment, so the result of PPO is measured independently of its reward model. All files are in runs/demo/.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pipeline
import reviews

OUT = pipeline.ROOT / "runs" / "demo"
CONFIGS = pipeline.ROOT / "examples" / "configs"
STAGES = (("sft", "supervised fine-tuning"), ("reward", "reward model"), ("ppo", "PPO"))
# Of --lora. SFT starts from random weights, so it trains all. Adapters need larger steps than all weights, and
# here more of them.
RANK = ("model.lora.rank=8", "model.lora.alpha=16")
LORA = {
    "reward": (*RANK, "optimizer.lr=5e-3"),
    "ppo": (*RANK, "optimizer.lr=1e-3", "training.steps=90", "checkpoint.every=90", "log.samples_every=89"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of every stage's data order, new heads and sampling")
    parser.add_argument("--lora", action="store_true", help="adapters in the reward model, policy and critic")
    options = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    write_data(OUT)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        adapters = LORA.get(program, ()) if options.lora else ()
        pipeline.stage(program, CONFIGS / f"demo_{program}.yaml", pipeline.ROOT, f"seed={options.seed}", *adapters)
    pipeline.report(OUT / "ppo")
    summary(time.monotonic() - started)


def write_data(out: Path, tokenizer: str = "reviews") -> None:
    """Write the data of all stages and the tokenizer."""
    for name, count, seed in (("train", 6000, 1), ("validation", 500, 2)):
        pipeline.write(
            out / f"sft.{name}.jsonl",
            ({"prompt": r.prompt, "response": r.response} for r in reviews.reviews(count, seed)),
        )
        triples = reviews.preferences(count // 2, seed + 10)
        pipeline.write(
            out / f"preferences.{name}.jsonl", ({"prompt": p, "chosen": c, "rejected": r} for p, c, r in triples)
        )
    pipeline.write(out / "prompts.jsonl", ({"prompt": r.prompt} for r in reviews.reviews(4000, seed=3)))
    reviews.train_tokenizer([r.prompt + r.response for r in reviews.reviews(2000, seed=4)], str(out / tokenizer))


def summary(seconds: float) -> None:
    """Print the improvement, by the reward model and by the true judge."""
    perplexity = pipeline.column(OUT / "sft", "validation/perplexity")
    accuracy = pipeline.column(OUT / "reward", "validation/accuracy")
    scores, kl = (pipeline.column(OUT / "ppo", f"objective/{name}") for name in ("scores", "kl"))
    samples = list(pipeline.read(OUT / "ppo" / "samples.jsonl"))
    first, last = ([s for s in samples if s["step"] == step] for step in (samples[0]["step"], samples[-1]["step"]))
    print(f"\n== done in {seconds / 60:.1f} minutes")
    print(f"  SFT     held-out perplexity      {perplexity[0]:8.2f} -> {perplexity[-1]:.2f}")
    print(f"  reward  held-out accuracy        {accuracy[0]:8.1%} -> {accuracy[-1]:.1%}")
    print(f"  PPO     reward model's score     {scores[0]:8.2f} -> {scores[-1]:.2f}")
    print(f"          true judge: positive     {positive(first):8.1%} -> {positive(last):.1%}")
    print(f"          KL from the SFT model    {kl[0]:8.2f} -> {kl[-1]:.2f} nats")
    print(f"  before  {first[0]['query']} | {first[0]['response']}")
    print(f"  after   {last[0]['query']} | {last[0]['response']}")
    print("  report  runs/demo/ppo/report.html")


def positive(samples: list[dict]) -> float:
    """The share of responses that are positive by the true judge; undecided responses count half."""
    votes = [reviews.judge(sample["response"]) for sample in samples]
    return sum(1.0 if vote > 0.5 else 0.5 if vote == 0.5 else 0.0 for vote in votes) / len(votes)


if __name__ == "__main__":
    main()
