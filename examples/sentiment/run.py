"""SFT -> reward model -> PPO -> report on real sentences: SST-2's train.tsv and dev.tsv (sentence<TAB>label).

A small Llama learns from random weights to write film-review sentences. A reward model learns to distinguish positive
from negative sentences. PPO trains the Llama to write positive sentences. It runs on 2 CPU ranks, in minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pipeline
from reviews import train_tokenizer

HERE = Path(__file__).resolve().parent
STAGES = (("sft", "supervised fine-tuning"), ("reward", "reward model"), ("ppo", "PPO"))
VOCABULARY = 3000
PROMPT_WORDS = 4
TRAIN_PASSES, DEV_PASSES = 4, 3  # pairs of each sentence of the smaller class, with different partners


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/sentiment", ("train.tsv", "dev.tsv"))
    started = time.monotonic()
    write_data(args.data, args.out)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
    pipeline.report(args.out / "ppo")
    summary(args.out, time.monotonic() - started)


def write_data(source: Path, out: Path) -> None:
    """Write the tokenizer and the JSONL files of all stages."""
    train, dev = (sentences(source / f"{name}.tsv") for name in ("train", "dev"))
    texts = [text for text, _ in train]
    train_tokenizer(texts, str(out / "tokenizer"), VOCABULARY)
    for name, rows, passes in (("train", train, TRAIN_PASSES), ("validation", dev, DEV_PASSES)):
        pipeline.write(out / f"sft.{name}.jsonl", ({"text": text} for text, _ in rows))
        pipeline.write(out / f"preferences.{name}.jsonl", pairs(rows, passes))
    starts = (" ".join(text.split()[:PROMPT_WORDS]) for text in texts if len(text.split()) > 2 * PROMPT_WORDS)
    pipeline.write(out / "prompts.jsonl", ({"prompt": start} for start in starts))


def sentences(path: Path) -> list[tuple[str, str]]:
    """(sentence, label) of a TSV file; label "1" is positive."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        text, _, label = line.partition("\t")
        if not line or (number == 1 and label == "label"):
            continue  # GLUE's files have a header
        if not text.strip() or label not in ("0", "1"):
            sys.exit(f"{path}:{number}: must be sentence<TAB>label with label 0 or 1; give SST-2's own file")
        rows.append((text.strip(), label))
    return rows


def pairs(rows: list[tuple[str, str]], passes: int) -> list[dict[str, str]]:
    """Random pairs of a positive (chosen) and a negative (rejected) sentence, in `passes` passes over the smaller
    class. The expected fraction of pairs that a model orders correctly is its area under the ROC curve."""
    found = []
    for number in range(passes):
        good, bad = ([text for text, label in pipeline.shuffled(rows, number) if label == sign] for sign in "10")
        found += [{"prompt": "", "chosen": g, "rejected": b} for g, b in zip(good, bad, strict=False)]
    return found


def summary(out: Path, seconds: float) -> None:
    """Print the results, and a sample from before and after PPO."""
    perplexity = pipeline.column(out / "sft", "validation/perplexity")
    accuracy = pipeline.column(out / "reward", "validation/accuracy")
    scores, kl = (pipeline.column(out / "ppo", f"objective/{name}") for name in ("scores", "kl"))
    samples = list(pipeline.read(out / "ppo" / "samples.jsonl"))
    print(f"\n== done in {seconds / 60:.1f} minutes")
    print(f"  SFT     held-out perplexity   {perplexity[0]:8.1f} -> {perplexity[-1]:.1f}")
    print(f"  reward  held-out accuracy     {accuracy[0]:8.1%} -> {accuracy[-1]:.1%}")
    print(f"  PPO     mean score            {scores[0]:8.2f} -> {scores[-1]:.2f} (deviation of the SFT model's: 1)")
    print(f"          KL from the SFT model {kl[0]:8.2f} -> {kl[-1]:.2f} nats")
    for title, sample in (("before", samples[0]), ("after", samples[-1])):
        print(f"  {title:<7} {sample['query']} | {sample['response']}  (score {sample['score']:.2f})")
    print(f"  report  {out / 'ppo' / 'report.html'}")


if __name__ == "__main__":
    main()
