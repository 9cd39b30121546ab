"""Behaviour cloning against ILQL on one data set: film reviews that a small grammar makes (../reviews.py).

The data has reviews of all kinds, each with its reward: the share of its adjectives that are positive. SFT learns to
write reviews as they are. ILQL starts from it, reads the same reviews with their rewards, and samples nothing in
training. The grammar judges what both write after prompts that are in neither data set. It runs on 2 CPU ranks, in
minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pipeline
import reviews

HERE = Path(__file__).resolve().parent
STAGES = (("sft", "behaviour cloning"), ("ilql", "ILQL"))
BETAS = (0.0, 1.0, 4.0, 8.0)  # sampler.q_beta
PROMPTS = 400


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/ilql")
    started = time.monotonic()
    write_data(args.out)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
    pipeline.report(args.out / "ilql")
    results = {"behaviour cloning": respond(args.out, "sft", 0.0, args.seed)}
    for beta in BETAS:
        results[f"ILQL, q_beta {beta:g}"] = respond(args.out, "ilql", beta, args.seed)
    summary(args.out, results, time.monotonic() - started)


def write_data(out: Path) -> None:
    """Write the tokenizer, the reviews with and without rewards, and the prompts."""
    texts = list(reviews.reviews(6000, seed=1))
    reviews.train_tokenizer([text.prompt + text.response for text in texts[:2000]], str(out / "tokenizer"))
    pipeline.write(out / "sft.jsonl", ({"prompt": text.prompt, "response": text.response} for text in texts))
    pipeline.write(out / "rewarded.jsonl", rewarded(texts))
    pipeline.write(out / "validation.jsonl", rewarded(reviews.reviews(300, seed=2)))
    pipeline.write(out / "prompts.jsonl", ({"prompt": text.prompt} for text in reviews.reviews(PROMPTS, seed=3)))


def rewarded(texts) -> Iterator[dict]:
    for text in texts:
        yield {"prompt": text.prompt, "response": text.response, "reward": reviews.judge(text.response)}


def respond(out: Path, run: str, beta: float, seed: int) -> list[dict]:
    """Sampled responses of a run's model to the prompts."""
    name = f"{run}.{beta:g}.jsonl"
    pipeline.stage(
        "generate", None, out, f"checkpoint={run}", "prompts.path=prompts.jsonl", f"out={name}", "dtype=fp32",
        "prompts.length=24", "sampler.response_length=40", "sampler.stop_at_eos=true",
        "sampler.micro_batch_size=64", f"sampler.q_beta={beta}", f"seed={seed}",
    )  # fmt: skip
    return list(pipeline.read(out / name))


def summary(out: Path, results: dict[str, list[dict]], seconds: float) -> None:
    """Print what the true judge says, and how many responses are whole: three clauses and an end."""
    rewards = [row["reward"] for row in pipeline.read(out / "rewarded.jsonl")]
    print(f"\n== done in {seconds / 60:.1f} minutes; mean share of positive adjectives:")
    print(f"  {'data':<20} {sum(rewards) / len(rewards):6.1%}")
    for name, lines in results.items():
        texts = [line["response"] for line in lines]
        scores = [reviews.judge(text) for text in texts]
        whole = sum(text.endswith(".") and len(reviews.adjectives(text)) == 3 for text in texts)
        print(f"  {name:<20} {sum(scores) / len(scores):6.1%}, whole {whole / len(texts):6.1%}: {texts[0]}")
    print(f"  report  {out / 'ilql' / 'report.html'}")


if __name__ == "__main__":
    main()
